"""The arguments that ops on the rows of a step share: their checks, and in numpy the rows that sample."""

from dataclasses import dataclass
from typing import Generic, NamedTuple

import numpy as np

from openinfer.kernels.authoring import T, expect, expect_each
from openinfer.sampler.gpu.ops import Array
from openinfer.sampler.reference import without
from openinfer.tensor import Tensor, float32, int32

STEP = ("slots", "q_starts", "seq_lens", "alive", "emits")
"""The arguments that say which rows of a step sample, and where in their sequences."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepArgs(Generic[T]):
    """The rows of a step, and what they get: see `sample`."""

    tokens: T
    logprobs: T
    slots: T
    q_starts: T
    seq_lens: T
    alive: T
    emits: T


@dataclass(frozen=True, kw_only=True, slots=True)
class ChoiceArgs(StepArgs[T], Generic[T]):
    """With their logits, and the stop ids that may come too early."""

    logits: T
    min_lens: T
    stop_ids: T


def expect_step(a: StepArgs[Tensor]) -> tuple[int, int]:
    """Raise ContractError unless a step's tensors fit each other. Returns R and S."""
    rows, size = a.slots.shape[0], a.seq_lens.shape[0]
    expect_each(a, (rows,), int32, "tokens", "slots", "emits")
    expect("logprobs", a.logprobs, (rows,), float32)
    expect("q_starts", a.q_starts, (rows + 1,), int32)
    expect_each(a, (size,), int32, "seq_lens", "alive")
    return rows, size


class Candidates(NamedTuple):
    """The rows that sample, N of them: their numbers, slots and positions [N], their logits as given, and their logits
    without the stop ids that it is too early for, [N, V]. Without such ids the two are one array."""

    rows: Array
    slots: Array
    positions: Array
    raw: Array
    allowed: Array


def sampling_rows(a: ChoiceArgs[Array]) -> Candidates:
    """The rows of a step that sample."""
    rows = np.flatnonzero((a.emits != 0) & (a.alive[a.slots] != 0))
    slot = a.slots[rows]
    positions = a.seq_lens[slot] + np.diff(a.q_starts)[rows]
    early = (positions < a.min_lens[slot])[:, None] & (a.stop_ids[slot] < a.logits.shape[1])
    forbidden = np.where(early, a.stop_ids[slot], -1)
    raw = a.logits if len(rows) == len(a.logits) else a.logits[rows]
    allowed = without(raw, forbidden) if (forbidden >= 0).any() else raw
    return Candidates(rows, slot, positions, raw, allowed)
