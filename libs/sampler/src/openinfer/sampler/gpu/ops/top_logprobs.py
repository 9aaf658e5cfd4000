"""top_logprobs: the most likely tokens of the rows that ask for them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from openinfer.kernels import Command, Cost, Op, Target, Workload
from openinfer.kernels.contract import expect, require
from openinfer.sampler.gpu.ops.rows import NO_TOKEN, Array
from openinfer.sampler.params import MAX_LOGPROBS
from openinfer.sampler.reference import log_sum_exp, most_likely
from openinfer.tensor import Tensor, float32, int32


def _contract(
    *,
    ids: Tensor,
    values: Tensor,
    logits: Tensor,
    slots: Tensor,
    alive: Tensor,
    emits: Tensor,
    num_logprobs: Tensor,
) -> None:
    """Write the num_logprobs[slots[r]] most likely tokens of each row r that samples, and their logprobs.

    ids int32 [R, K] and values float32 [R, K], K in 1..20: most likely first, the lowest id first among
    equals; values are log_softmax of the raw logits float32 [R, V]. What was not asked for, what K or V has
    no room for, and rows whose largest logit is not finite get id -1 and value 0. slots, emits int32 [R];
    alive, num_logprobs int32 [S]; a row samples if emits[r] and alive[slots[r]] are not 0, and asks if
    num_logprobs is above 0.
    """
    rows, size = slots.shape[0], alive.shape[0]
    expect("logits", logits, (rows, -1), float32)
    expect("ids", ids, (rows, -1), int32)
    width = ids.shape[1]
    require(1 <= width <= MAX_LOGPROBS, f"ids has {width} columns; it must have 1 to {MAX_LOGPROBS}")
    expect("values", values, (rows, width), float32)
    expect("slots", slots, (rows,), int32)
    expect("emits", emits, (rows,), int32)
    expect("alive", alive, (size,), int32)
    expect("num_logprobs", num_logprobs, (size,), int32)


def _reference(
    *,
    ids: Array,
    values: Array,
    logits: Array,
    slots: Array,
    alive: Array,
    emits: Array,
    num_logprobs: Array,
) -> None:
    ids[:], values[:] = NO_TOKEN, 0
    counts = np.minimum(num_logprobs[slots], min(ids.shape[1], logits.shape[1]))
    for r in np.flatnonzero((emits != 0) & (alive[slots] != 0) & (counts > 0)):
        row, n = logits[r], counts[r]
        if np.isfinite(row.max()):
            ids[r, :n] = best = most_likely(row, n)
            values[r, :n] = row[best] - log_sum_exp(row)


def _launches(target: Target, **args: Tensor) -> Iterator[Command]:
    yield from ()


def _cost(workload: Workload, *, ids: Tensor, **_: Tensor) -> Cost:
    # Rows that ask are rare and the workload does not count them: a step in which none does writes the columns only.
    return Cost(workload.rows * ids.shape[1] * 8, 0)


top_logprobs = Op("top_logprobs", _contract, reference=_reference, launches=_launches, cost=_cost)
