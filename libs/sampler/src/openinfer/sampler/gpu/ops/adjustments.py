"""Adjustments of logits as state by slot: the values of a joining sequence, and the reference that reads them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple

import numpy as np

from openinfer.kernels.authoring import T
from openinfer.sampler.adjust import mask_of, penalise
from openinfer.sampler.gpu.ops import Adjustment, Array
from openinfer.sampler.gpu.ops.step import ChoiceArgs
from openinfer.sampler.params import MAX_BAD_WORD_LENGTH, MAX_BAD_WORDS, MAX_LOGIT_BIASES, SamplingParams
from openinfer.tensor import float32, int32


@dataclass(frozen=True, kw_only=True, slots=True)
class AdjustArgs(ChoiceArgs[T], Generic[T]):
    """What a choice is made from, with the state of adjustments by slot: see `sample`."""

    adjusts: T
    prompt_lens: T
    penalties: T
    prompt_masks: T
    output_counts: T
    recent_tokens: T
    allowed_masks: T
    bias_ids: T
    biases: T
    bad_words: T


def mask_words(vocabulary: int) -> int:
    """Words of a mask with a bit a token."""
    return -(-vocabulary // 32)


def count_words(vocabulary: int) -> int:
    """Words of 16-bit counts, one a token."""
    return -(-vocabulary // 2)


class SlotField(NamedTuple):
    """State by slot: an array of `shape` and `dtype` for each slot. `device_written`: by the ops too."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    device_written: bool = False


def adjustment_fields(vocabulary: int) -> list[SlotField]:
    """The state of adjustments, by the names of the arguments of `sample` and `advance`. It has room for the most that
    SamplingParams allows. Most of it is output_counts, with two bytes a token of the vocabulary."""
    return [
        SlotField("adjusts", (), int32),
        SlotField("prompt_lens", (), int32),
        SlotField("penalties", (3,), float32),
        SlotField("prompt_masks", (mask_words(vocabulary),), int32),
        SlotField("output_counts", (count_words(vocabulary),), int32, device_written=True),
        SlotField("recent_tokens", (MAX_BAD_WORD_LENGTH,), int32, device_written=True),
        SlotField("allowed_masks", (mask_words(vocabulary),), int32),
        SlotField("bias_ids", (MAX_LOGIT_BIASES,), int32),
        SlotField("biases", (MAX_LOGIT_BIASES,), float32),
        SlotField("bad_words", (MAX_BAD_WORDS, MAX_BAD_WORD_LENGTH), int32),
    ]


def adjustment_values(
    params: SamplingParams, prompt: Sequence[int], output: Sequence[int], vocabulary: int
) -> dict[str, float | Array]:
    """The values to write at the slot of a sequence that joins, by field of `adjustment_fields`.

    A value is a number for a field of no axis, else an array. prompt: ids of the prompt. output: ids generated before a
    preemption. Ids must be below `vocabulary`. A field that is not named may keep its old value in the slot.
    """
    flags = Adjustment(0)
    values: dict[str, float | Array] = {"prompt_lens": len(prompt)}
    if params.allowed_token_ids:
        flags |= Adjustment.ALLOWED
        values["allowed_masks"] = mask_of(params.allowed_token_ids, vocabulary)
    if params.bad_words_token_ids:
        flags |= Adjustment.BAD_WORDS
        words = np.full((MAX_BAD_WORDS, MAX_BAD_WORD_LENGTH), -1, np.int32)
        values["bad_words"] = words
        for row, word in zip(words, params.bad_words_token_ids, strict=False):
            row[-len(word) :] = word
        if output:
            recent = np.zeros(MAX_BAD_WORD_LENGTH, np.int32)
            values["recent_tokens"] = recent
            last = np.array(output[-MAX_BAD_WORD_LENGTH:], np.int32)
            end = len(prompt) + len(output)
            recent[np.arange(end - len(last), end) % MAX_BAD_WORD_LENGTH] = last
    if params.logit_bias:
        flags |= Adjustment.BIAS
        ids, biases = np.full(MAX_LOGIT_BIASES, -1, np.int32), np.zeros(MAX_LOGIT_BIASES, np.float32)
        count = len(params.logit_bias)
        ids[:count], biases[:count] = zip(*params.logit_bias, strict=True)
        values |= {"bias_ids": ids, "biases": biases}
    if params.has_penalties:
        flags |= Adjustment.PENALTIES
        values["penalties"] = np.array(
            [params.repetition_penalty, params.frequency_penalty, params.presence_penalty], np.float32
        )
        values["prompt_masks"] = mask_of(prompt, vocabulary)
        if output:
            counts = np.bincount(np.array(output), minlength=2 * count_words(vocabulary))
            values["output_counts"] = np.minimum(counts, 0xFFFF).astype(np.uint16).view(np.int32)
    values["adjusts"] = int(flags)
    return values


def adjust_row(row: Array, flags: Adjustment, position: int, a: AdjustArgs[Array], slot: int) -> None:
    """Adjust the logits of a row in place, from the state of its slot; clears its counts at the first token."""
    vocabulary = len(row)
    if flags & Adjustment.ALLOWED:
        row[~_bits(a.allowed_masks[slot], vocabulary)] = -np.inf
    if flags & Adjustment.BAD_WORDS:
        words, recent_tokens = a.bad_words[slot], a.recent_tokens[slot]
        length = words.shape[1]
        at = position - np.arange(length - 1, 0, -1)
        recent = np.where(at >= a.prompt_lens[slot], recent_tokens[at % length], -2)
        matched = ((words[:, :-1] == -1) | (words[:, :-1] == recent)).all(axis=1)
        last = words[matched, -1]
        row[last[last >= 0]] = -np.inf
    if flags & Adjustment.BIAS:
        ids = a.bias_ids[slot]
        row[ids[ids >= 0]] += a.biases[slot, ids >= 0]
    if flags & Adjustment.PENALTIES:
        if position == a.prompt_lens[slot]:
            a.output_counts[slot] = 0
        counts = a.output_counts[slot].view(np.uint16)[:vocabulary]
        seen = (counts > 0) | _bits(a.prompt_masks[slot], vocabulary)
        penalise(row, seen, counts, *a.penalties[slot])


def _bits(mask: Array, vocabulary: int) -> Array:
    return np.unpackbits(mask.view(np.uint8), count=vocabulary, bitorder="little").view(np.bool_)
