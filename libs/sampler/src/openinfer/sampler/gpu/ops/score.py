"""score: how likely given tokens are under the logits before them, as prompts ask."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from openinfer.kernels.authoring import Command, Cost, Op, Scratch, Target, Workload, expect, launch
from openinfer.sampler.gpu.ops.rows import Array
from openinfer.sampler.gpu.ops.tiles import Tiles
from openinfer.sampler.reference import log_sum_exp
from openinfer.tensor import Tensor, float32, int32

_MODULE = "openinfer.sampler.gpu.device.score"


def _contract(*, logprobs: Tensor, ranks: Tensor, logits: Tensor, targets: Tensor) -> None:
    """The log-probability and the rank of a given token in each row.

    logits float32 [R, V]; targets int32 [R], -1 = none. logprobs float32 [R] are log_softmax of the row at its target;
    ranks int32 [R] are 1 and the number of larger logits. A row without a target gets 0 and 0; one whose largest logit
    is not finite gets NaN and 0.
    """
    expect("logits", logits, (-1, -1), float32)
    rows = logits.shape[0]
    expect("logprobs", logprobs, (rows,), float32)
    expect("ranks", ranks, (rows,), int32)
    expect("targets", targets, (rows,), int32)


def _reference(*, logprobs: Array, ranks: Array, logits: Array, targets: Array) -> None:
    logprobs[:], ranks[:] = 0, 0
    for r in np.flatnonzero(targets >= 0):
        row = logits[r]
        logprobs[r] = np.nan
        if np.isfinite(row.max()):
            logprobs[r] = row[targets[r]] - log_sum_exp(row)
            ranks[r] = 1 + np.count_nonzero(row > row[targets[r]])


def _launches(
    target: Target, *, logprobs: Tensor, ranks: Tensor, logits: Tensor, targets: Tensor
) -> Iterator[Command]:
    rows, tiles = logits.shape[0], Tiles.of(logits.shape[1])
    found = {
        "tops": Scratch((rows, tiles.parts), float32),
        "sums": Scratch((rows, tiles.parts), float32),
        "larger": Scratch((rows, tiles.parts), int32),
    }
    given = {
        "logits": logits,
        "targets": targets,
        "vocabulary": tiles.row_length,
        "parts": tiles.parts,
    }
    yield launch(_MODULE, "weigh", (rows, tiles.parts), {**found, **given}, {"CHUNK": tiles.chunk})
    yield launch(
        _MODULE,
        "score",
        (rows,),
        {"logprobs": logprobs, "ranks": ranks, **found, **given},
        {"PARTS": tiles.parts_padded},
    )


def _cost(workload: Workload, *, targets: Tensor, **_: Tensor) -> Cost:
    # Rows that are asked about are rare and the workload does not count them.
    return Cost(targets.shape[0] * 12, 0)


score = Op("score", _contract, reference=_reference, launches=_launches, cost=_cost)
