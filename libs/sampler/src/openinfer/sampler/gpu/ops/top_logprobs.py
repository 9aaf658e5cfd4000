"""top_logprobs: the most likely tokens of the rows that ask for them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from openinfer.kernels.authoring import (
    Aligned,
    Command,
    Cost,
    Op,
    Scratch,
    Target,
    Workload,
    expect,
    launch,
    require,
)
from openinfer.sampler.gpu.ops.rows import NO_TOKEN, Array
from openinfer.sampler.gpu.ops.tiles import Tiles, power_of_two
from openinfer.sampler.params import MAX_LOGPROBS
from openinfer.sampler.reference import log_sum_exp, most_likely
from openinfer.tensor import Tensor, float32, int32

_MODULE = "openinfer.sampler.gpu.device.top_logprobs"


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
    equals; values are log_softmax of the raw logits float32 [R, V]. An element that the
    row did not ask for gets id -1 and value 0. So do elements for which K or V has no room, and all elements of a row
    whose largest logit is not finite. slots, emits int32 [R];
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
            best = most_likely(row, n)
            best = best[row[best] > -np.inf]
            ids[r, : len(best)] = best
            values[r, : len(best)] = row[best] - log_sum_exp(row)


def _launches(
    target: Target,
    *,
    ids: Tensor,
    values: Tensor,
    logits: Tensor,
    slots: Tensor,
    alive: Tensor,
    emits: Tensor,
    num_logprobs: Tensor,
) -> Iterator[Command]:
    rows, width, tiles = logits.shape[0], ids.shape[1], Tiles.of(logits.shape[1])
    found: dict[str, Scratch] = {
        "tops": Scratch((rows, tiles.parts), float32),
        "sums": Scratch((rows, tiles.parts), float32),
        "maxima": Scratch((rows, tiles.groups), float32),
    }
    step: dict[str, Tensor | Aligned | int] = {
        "logits": logits,
        "slots": slots,
        "alive": alive,
        "emits": emits,
        "num_logprobs": num_logprobs,
        "vocabulary": tiles.row_length,
        "groups": tiles.groups,
    }
    constants = {"K": width, "GROUP": tiles.group}
    grid = (rows, tiles.parts)
    yield launch(_MODULE, "summarise", grid, {**found, **step}, {**constants, "CHUNK": tiles.chunk})
    yield launch(
        _MODULE,
        "pick",
        (rows,),
        {"ids": ids, "values": values, **found, **step, "parts": tiles.parts},
        {
            **constants,
            "COLUMNS": power_of_two(width),
            "PARTS": tiles.parts_padded,
            "GROUPS": tiles.groups_padded,
        },
    )


def _cost(workload: Workload, *, ids: Tensor, **_: Tensor) -> Cost:
    # Rows that ask are rare and the workload does not count them: a step in which none does writes the columns only.
    return Cost(workload.rows * ids.shape[1] * 8, 0)


top_logprobs = Op("top_logprobs", _contract, reference=_reference, launches=_launches, cost=_cost)
