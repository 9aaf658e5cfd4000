"""score: how likely given tokens are under the logits before them, as prompts ask."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic

import numpy as np

from openinfer.kernels.authoring import (
    Command,
    Cost,
    Op,
    Scratch,
    T,
    Target,
    Workload,
    expect,
    expect_each,
    launch,
    tensors,
)
from openinfer.sampler.gpu.ops import Array, Tiles
from openinfer.sampler.reference import log_sum_exp
from openinfer.tensor import Tensor, float32, int32

_MODULE = "openinfer.sampler.gpu.device.top_logprobs"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Args(Generic[T]):
    """The log-probability and the rank of a given token in each row.

    logits float32 [R, V]; targets int32 [R], -1 = none. logprobs float32 [R] are log_softmax of the row at its target;
    ranks int32 [R] are 1 and the number of larger logits. A row without a target gets 0 and 0; one whose largest logit
    is not finite gets NaN and 0.
    """

    logprobs: T
    ranks: T
    logits: T
    targets: T


def _check(a: _Args[Tensor]) -> None:
    expect("logits", a.logits, (-1, -1), float32)
    rows = a.logits.shape[0]
    expect("logprobs", a.logprobs, (rows,), float32)
    expect_each(a, (rows,), int32, "ranks", "targets")


def _reference(a: _Args[Array]) -> None:
    a.logprobs[:], a.ranks[:] = 0, 0
    for r in np.flatnonzero(a.targets >= 0):
        row = a.logits[r]
        a.logprobs[r] = np.nan
        if np.isfinite(row.max()):
            a.logprobs[r] = row[a.targets[r]] - log_sum_exp(row)
            a.ranks[r] = 1 + np.count_nonzero(row > row[a.targets[r]])


def _launches(target: Target, a: _Args[Tensor]) -> Iterator[Command]:
    rows, tiles = a.logits.shape[0], Tiles.of(a.logits.shape[1])
    found = {
        "tops": Scratch((rows, tiles.parts), float32),
        "sums": Scratch((rows, tiles.parts), float32),
        "larger": Scratch((rows, tiles.parts), int32),
    }
    given = {**tensors(a, "logits", "targets"), "vocabulary": tiles.row_length, "parts": tiles.parts}
    yield launch(_MODULE, "weigh", (rows, tiles.parts), {**found, **given}, {"CHUNK": tiles.chunk})
    yield launch(
        _MODULE,
        "score",
        (rows,),
        {"logprobs": a.logprobs, "ranks": a.ranks, **found, **given},
        {"PARTS": tiles.parts_padded},
    )


def _cost(workload: Workload, a: _Args[Tensor]) -> Cost:
    # Rows that are asked about are rare and the workload does not count them.
    return Cost(a.targets.shape[0] * 12, 0)


score = Op("score", _Args[Tensor], _check, _reference, _launches, _cost)
