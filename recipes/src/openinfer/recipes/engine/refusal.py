"""The requests that an engine refuses in any state, and those whose settings leave no token on the way."""

from array import array
from collections.abc import Sequence

import numpy as np

from openinfer.frontend.contract import EngineInfo, Rejected, Request
from openinfer.graph.runner import Sampling
from openinfer.sampler import MAX_LOGPROBS, SamplingParams
from openinfer.sampler.adjust import adjusted
from openinfer.sampler.constraint import Constraint
from openinfer.sampler.gpu import MAX_STOP_IDS
from openinfer.scheduler import Seq


def request_refusal(request: Request, info: EngineInfo) -> Rejected | None:
    """The refusal of a request that this engine cannot run at all; None for any other."""
    vocab, params = info.vocab_size, request.sampling
    if request.priority != 0 and "priority" not in info.features:
        unused = "this engine's scheduling policy does not use it (--scheduling-policy priority does)"
        return Rejected(request.id, f"priority is {request.priority}; {unused}", "unsupported")
    if request.adapter and not info.max_adapters:
        return Rejected(request.id, "this engine has no adapters; start it with --enable-lora", "unsupported")
    if not _in_vocabulary(request.prompt_token_ids, vocab):
        return Rejected(request.id, f"prompt token ids must be in [0, {vocab})")
    if params.max_token_id >= vocab:
        named = f"the sampling parameters name token {params.max_token_id}"
        return Rejected(request.id, f"{named}; ids must be in [0, {vocab})")
    most = MAX_STOP_IDS - len(info.eos_token_ids)
    if len(params.stop_token_ids) > most:
        return Rejected(request.id, f"at most {most} stop_token_ids are possible")
    stops = params.forbidden_ids(0, info.eos_token_ids)
    banned = {*stops, *(word[0] for word in params.bad_words_token_ids if len(word) == 1)}
    if params.allowed_token_ids and banned.issuperset(params.allowed_token_ids):
        return Rejected(request.id, _none_left(_forbidding(params, below=bool(stops)), 0))
    asked = request.prompt_logprobs
    if asked is not None and not 0 <= asked <= MAX_LOGPROBS:
        return Rejected(request.id, f"prompt_logprobs is {asked}; 0 to {MAX_LOGPROBS} are possible")
    return None


def _in_vocabulary(ids: Sequence[int], vocab_size: int) -> bool:
    """Whether all token ids are below vocab_size. The engine's thread asks, so numpy compares."""
    try:
        words = array("I", ids)
    except OverflowError:
        return False
    return bool((np.frombuffer(words, np.uint32) < vocab_size).all())


def no_token_left(seq: Seq[Sampling], vocab_size: int, eos_token_ids: Sequence[int]) -> str:
    """The reason why the settings of a sequence forbid every next token; "" where they leave one."""
    sampling, output = seq.owner, seq.tokens[seq.prompt_len :]
    params, constraint = sampling.params, sampling.constraint
    row, complete = adjusted(np.zeros(vocab_size, np.float32), params, seq.tokens, output), False
    if isinstance(constraint, Constraint):
        mask = np.zeros(-(-vocab_size // 32), np.int32)
        complete = constraint.fill(mask)
        row[~np.unpackbits(mask.view(np.uint8), bitorder="little")[:vocab_size].astype(bool)] = -np.inf
    stops = () if complete else params.forbidden_ids(len(output), eos_token_ids)
    row[list(stops)] = -np.inf
    if np.isfinite(row).any():
        return ""
    names = _forbidding(params, below=bool(stops))
    return _none_left([*names, "the grammar"] if constraint is not None else names, len(output))


def _forbidding(params: SamplingParams, *, below: bool) -> list[str]:
    """The settings that forbid tokens. below: fewer tokens than min_tokens were drawn."""
    names = ["allowed_token_ids"] * bool(params.allowed_token_ids)
    names += ["bad_words"] * bool(params.bad_words_token_ids)
    return names + ["min_tokens, below which no token may end the text"] * below


def _none_left(names: Sequence[str], drawn: int) -> str:
    return f"after {drawn} tokens the request's own settings forbid every token: {'; '.join(names)}"
