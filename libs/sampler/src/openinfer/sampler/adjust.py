"""The changes that a request makes to its logits before a token is chosen: the definition that a device must reproduce.

For a row of fp32 logits, in vLLM's order:

 1. With allowed_token_ids, all other ids become -inf.
 2. The last id of each of bad_words_token_ids becomes -inf where the output ends in the ids before it; a word of
    one id always.
 3. (min_tokens: ids that would end the sequence become -inf. They come as ``forbid`` or stop_ids.)
 4. logit_bias is added.
 5. Of a token that is in the prompt or the output, ``x / repetition_penalty`` where x > 0, else
    ``x * repetition_penalty``.
 6. ``x - frequency_penalty * (times in the output)``, and then ``- presence_penalty`` if that is not 0 times.

All values are fp32. A logit of -inf stays -inf.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from openinfer.sampler.params import SamplingParams

F32 = NDArray[np.float32]


def adjusted(
    row: F32, params: SamplingParams, prompt: Sequence[int] | None, output: Sequence[int] | None
) -> F32:
    """A copy of the logits f32[V], adjusted by the parameters and the tokens so far.

    Raises ValueError where an id is not below V, or tokens that the parameters ask for are missing.
    """
    vocabulary = len(row)
    if params.max_token_id >= vocabulary:
        raise ValueError(f"the parameters name token {params.max_token_id}: ids must be below {vocabulary}")
    if output is None and (params.has_penalties or params.bad_words_token_ids):
        raise ValueError("penalties and bad words need the tokens generated so far: pass outputs=")
    if prompt is None and params.repetition_penalty != 1:
        raise ValueError("repetition_penalty needs the tokens of the prompt: pass prompts=")
    changed = row.copy()
    if params.allowed_token_ids:
        changed[:] = -np.inf
        allowed = list(params.allowed_token_ids)
        changed[allowed] = row[allowed]
    changed[banned_tokens(params.bad_words_token_ids, output or ())] = -np.inf
    for token, bias in params.logit_bias:
        changed[token] += np.float32(bias)
    if params.has_penalties:
        counts = np.bincount(np.asarray(output, np.int64), minlength=vocabulary)
        seen = counts > 0
        seen[list(prompt or ())] = True
        penalise(
            changed, seen, counts,
            params.repetition_penalty, params.frequency_penalty, params.presence_penalty,
        )  # fmt: skip
    return changed


def mask_of(ids: Sequence[int], vocabulary: int) -> NDArray[np.int32]:
    """A mask with a bit a token, lowest first, that is set for these ids: i32[(V + 31) // 32]."""
    bits = np.zeros(-(-vocabulary // 32) * 32, np.bool_)
    bits[np.array(ids, np.int64)] = True
    return np.packbits(bits, bitorder="little").view(np.int32)


def banned_tokens(words: Sequence[Sequence[int]], output: Sequence[int]) -> list[int]:
    """The ids that would complete one of the words."""
    return [
        word[-1]
        for word in words
        if len(word) <= len(output) + 1 and list(output[len(output) + 1 - len(word) :]) == list(word[:-1])
    ]


def penalise(
    row: F32,
    seen: NDArray[np.bool_],
    counts: NDArray[Any],
    repetition: float,
    frequency: float,
    presence: float,
) -> None:
    """Apply the penalties to f32[V] in place; seen: in prompt or output; counts: times in the output."""
    factor, found = np.float32(repetition), row[seen]
    row[seen] = np.where(found > 0, found / factor, found * factor)
    row -= np.float32(frequency) * counts.astype(np.float32)
    row -= np.float32(presence) * (counts > 0)
