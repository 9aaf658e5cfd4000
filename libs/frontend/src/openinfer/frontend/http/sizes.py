"""Bounds of a whole request: the tokens and log-probabilities of all of its sequences."""

from collections.abc import Sequence

from openinfer.frontend.contract import EngineInfo
from openinfer.frontend.errors import APIError
from openinfer.frontend.http.kv_params import check_single
from openinfer.frontend.http.params import Plan

__all__ = ["check_size"]

MAX_LOGPROB_ENTRIES = 8 << 20
"""The most log-probabilities of an answer: alternatives asked for, times tokens of all sequences."""
MAX_POOLS = 16
"""Tokens of one HTTP request's sequences, prompts and outputs at their longest, in units of the KV capacity."""


def check_size(prompts: Sequence[list[int]], limits: Sequence[int], plan: Plan, info: EngineInfo) -> None:
    """Check that the request's sequences together are within bounds. Raises APIError (400).

    limits: the most tokens to generate for each prompt.
    """
    check_single(plan.kv_transfer, len(prompts))
    total = plan.n * (sum(map(len, prompts)) + sum(limits))
    most = MAX_POOLS * max(info.kv_capacity_tokens, info.max_model_len)
    if total > most:
        raise APIError(
            f"{len(limits) * plan.n} sequences of this length come to {total} tokens, one request may have {most}: "
            "lower n or max_tokens",
            param="n" if plan.n > 1 else None,
            code="request_too_large",
        )
    entries = plan.n * sum(limits) * (1 + (plan.sampling.logprobs or 0))
    if plan.sampling.logprobs and entries > MAX_LOGPROB_ENTRIES:
        raise APIError(
            f"log-probabilities come to {entries} entries, one request may have {MAX_LOGPROB_ENTRIES}: lower n, "
            "max_tokens or the number of alternatives",
            param="logprobs",
            code="request_too_large",
        )
    entries = plan.n * sum(map(len, prompts)) * (1 + (plan.wanted_of_prompt or 0))
    if plan.wanted_of_prompt is not None and entries > MAX_LOGPROB_ENTRIES:
        raise APIError(
            f"log-probabilities of prompts come to {entries} entries, one request may have {MAX_LOGPROB_ENTRIES}: "
            "shorten the prompts, lower n or the number of alternatives",
            param="echo" if plan.prompt_logprobs is None else "prompt_logprobs",
            code="request_too_large",
        )
