"""The requests that an engine refuses in any state."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from openinfer.frontend.contract import EngineInfo, Rejected, Request
from openinfer.sampler import MAX_LOGPROBS
from openinfer.sampler.gpu import MAX_STOP_IDS


def refusal(request: Request, info: EngineInfo) -> Rejected | None:
    """The refusal of a request that this engine cannot run at all; None for any other."""
    vocab, params = info.vocab_size, request.sampling
    if request.priority != 0 and "priority" not in info.features:
        return Rejected(
            request.id,
            f"priority is {request.priority}; this engine's scheduling policy does not use it "
            "(--scheduling-policy priority does)",
            "unsupported",
        )
    if request.adapter and not info.max_adapters:
        return Rejected(request.id, "this engine has no adapters; start it with --enable-lora", "unsupported")
    if not _in_vocabulary(request.prompt_token_ids, vocab):
        return Rejected(request.id, f"prompt token ids must be in [0, {vocab})")
    if params.max_token_id >= vocab:
        return Rejected(
            request.id,
            f"the sampling parameters name token {params.max_token_id}; ids must be in [0, {vocab})",
        )
    if len(params.stop_token_ids) + len(info.eos_token_ids) > MAX_STOP_IDS:
        return Rejected(
            request.id,
            f"at most {MAX_STOP_IDS - len(info.eos_token_ids)} stop_token_ids are possible",
        )
    if request.prompt_logprobs is not None and not 0 <= request.prompt_logprobs <= MAX_LOGPROBS:
        return Rejected(
            request.id, f"prompt_logprobs is {request.prompt_logprobs}; 0 to {MAX_LOGPROBS} are possible"
        )
    return None


def _in_vocabulary(ids: Sequence[int], vocab_size: int) -> bool:
    """Whether all token ids are below vocab_size. The engine's thread asks, so numpy compares."""
    try:
        words = array("I", ids)
    except OverflowError:
        return False
    return bool((np.frombuffer(words, np.uint32) < vocab_size).all())
