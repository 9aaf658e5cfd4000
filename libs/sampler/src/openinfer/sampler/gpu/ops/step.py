"""The arguments that ops on the rows of a step share: their checks, and in numpy the rows that sample."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from openinfer.kernels.authoring import expect
from openinfer.sampler.gpu.ops.rows import Array
from openinfer.sampler.reference import without
from openinfer.tensor import Tensor, float32, int32

STEP = ("slots", "q_starts", "seq_lens", "alive", "emits")
"""The arguments that say which rows of a step sample, and where in their sequences."""


def expect_step(
    *,
    tokens: Tensor,
    logprobs: Tensor,
    slots: Tensor,
    q_starts: Tensor,
    emits: Tensor,
    **by_slot: Tensor,
) -> tuple[int, int]:
    """Raise ContractError unless a step's tensors fit each other. by_slot: int32 [S]. Returns R and S."""
    rows, size = slots.shape[0], by_slot["seq_lens"].shape[0]
    expect("tokens", tokens, (rows,), int32)
    expect("logprobs", logprobs, (rows,), float32)
    expect("slots", slots, (rows,), int32)
    expect("q_starts", q_starts, (rows + 1,), int32)
    expect("emits", emits, (rows,), int32)
    for name, tensor in by_slot.items():
        expect(name, tensor, (size,), int32)
    return rows, size


class Candidates(NamedTuple):
    """The rows that sample, N of them: their numbers, slots and positions [N], their logits as given, and their logits
    without the stop ids that it is too early for, [N, V]. Without such ids the two are one array."""

    rows: Array
    slots: Array
    positions: Array
    raw: Array
    allowed: Array


def candidates(
    logits: Array,
    *,
    slots: Array,
    q_starts: Array,
    seq_lens: Array,
    alive: Array,
    emits: Array,
    min_lens: Array,
    stop_ids: Array,
) -> Candidates:
    """The rows of a step that sample. logits and STEP are the arguments of `sample`."""
    rows = np.flatnonzero((emits != 0) & (alive[slots] != 0))
    slot = slots[rows]
    positions = seq_lens[slot] + np.diff(q_starts)[rows]
    early = (positions < min_lens[slot])[:, None] & (stop_ids[slot] < logits.shape[1])
    forbidden = np.where(early, stop_ids[slot], -1)
    raw = logits if len(rows) == len(logits) else logits[rows]
    allowed = without(raw, forbidden) if (forbidden >= 0).any() else raw
    return Candidates(rows, slot, positions, raw, allowed)
