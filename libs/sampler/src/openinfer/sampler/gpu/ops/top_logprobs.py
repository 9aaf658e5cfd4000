"""top_logprobs: the most likely tokens of rows that ask. score: how likely given tokens are, as prompts ask."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic

import numpy as np

from openinfer.kernels import authoring as op
from openinfer.kernels.authoring import Command, Cost, Op, Scratch, T, Target, Workload
from openinfer.sampler.gpu.ops import NO_TOKEN, Array, Tiles
from openinfer.sampler.params import MAX_LOGPROBS
from openinfer.sampler.reference import log_sum_exp, most_likely
from openinfer.tensor import Tensor, float32, int32

_MODULE = "openinfer.sampler.gpu.device.top_logprobs"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Args(Generic[T]):
    """Write the num_logprobs[slots[r]] most likely tokens of each row r that samples, and their logprobs.

    ids int32 [R, K] and values float32 [R, K], K in 1..20: most likely first, the lowest id first among
    equals; values are log_softmax of the raw logits float32 [R, V]. An element that the
    row did not ask for gets id -1 and value 0. So do elements for which K or V has no room, and all elements of a row
    whose largest logit is not finite. slots, emits int32 [R];
    alive, num_logprobs int32 [S]; a row samples if emits[r] and alive[slots[r]] are not 0, and asks if
    num_logprobs is above 0.
    """

    ids: T
    values: T
    logits: T
    slots: T
    alive: T
    emits: T
    num_logprobs: T


def _check(a: _Args[Tensor]) -> None:
    rows, size = a.slots.shape[0], a.alive.shape[0]
    op.expect("logits", a.logits, (rows, -1), float32)
    op.expect("ids", a.ids, (rows, -1), int32)
    width = a.ids.shape[1]
    op.require(1 <= width <= MAX_LOGPROBS, f"ids has {width} columns; it must have 1 to {MAX_LOGPROBS}")
    op.expect("values", a.values, (rows, width), float32)
    op.expect_each(a, (rows,), int32, "slots", "emits")
    op.expect_each(a, (size,), int32, "alive", "num_logprobs")


def _reference(a: _Args[Array]) -> None:
    a.ids[:], a.values[:] = NO_TOKEN, 0
    counts = np.minimum(a.num_logprobs[a.slots], min(a.ids.shape[1], a.logits.shape[1]))
    for r in np.flatnonzero((a.emits != 0) & (a.alive[a.slots] != 0) & (counts > 0)):
        row, n = a.logits[r], counts[r]
        if np.isfinite(row.max()):
            best = most_likely(row, n)
            best = best[row[best] > -np.inf]
            a.ids[r, : len(best)] = best
            a.values[r, : len(best)] = row[best] - log_sum_exp(row)


def _launches(target: Target, a: _Args[Tensor]) -> Iterator[Command]:
    rows, width, tiles = a.logits.shape[0], a.ids.shape[1], Tiles.of(a.logits.shape[1])
    found = tiles.found(rows, float32, "tops", "sums")
    found["maxima"] = Scratch((rows, tiles.groups), float32)
    step: dict[str, op.Arg] = {**op.tensors(a, "logits", "slots", "alive", "emits", "num_logprobs")}
    step |= {"vocabulary": op.aligned(tiles.vocabulary), "groups": tiles.groups}
    constants = {"K": width, "GROUP": tiles.group}
    grid = (rows, tiles.parts)
    yield op.launch(_MODULE, "summarise", grid, {**found, **step}, {**constants, "CHUNK": tiles.chunk})
    args = {**op.tensors(a, "ids", "values"), **found, **step, "parts": tiles.parts}
    constants |= {"COLUMNS": op.power_of_two(width), "PARTS": op.power_of_two(tiles.parts)}
    constants["GROUPS"] = op.power_of_two(tiles.groups)
    yield op.launch(_MODULE, "pick", (rows,), args, constants)


def _cost(workload: Workload, a: _Args[Tensor]) -> Cost:
    # Rows that ask are rare and the workload does not count them: a step in which none does writes the columns only.
    return Cost(workload.rows * a.ids.shape[1] * 8, 0)


top_logprobs = Op("top_logprobs", _Args[Tensor], _check, _reference, _launches, _cost)


@dataclass(frozen=True, kw_only=True, slots=True)
class _ScoreArgs(Generic[T]):
    """The log-probability and the rank of a given token in each row.

    logits float32 [R, V]; targets int32 [R], -1 = none. logprobs float32 [R] are log_softmax of the row at its target;
    ranks int32 [R] are 1 and the number of larger logits. A row without a target gets 0 and 0; one whose largest logit
    is not finite gets NaN and 0.
    """

    logprobs: T
    ranks: T
    logits: T
    targets: T


def _score_check(a: _ScoreArgs[Tensor]) -> None:
    op.expect("logits", a.logits, (-1, -1), float32)
    rows = a.logits.shape[0]
    op.expect("logprobs", a.logprobs, (rows,), float32)
    op.expect_each(a, (rows,), int32, "ranks", "targets")


def _score_reference(a: _ScoreArgs[Array]) -> None:
    a.logprobs[:], a.ranks[:] = 0, 0
    for r in np.flatnonzero(a.targets >= 0):
        row = a.logits[r]
        a.logprobs[r] = np.nan
        if np.isfinite(row.max()):
            a.logprobs[r] = row[a.targets[r]] - log_sum_exp(row)
            a.ranks[r] = 1 + np.count_nonzero(row > row[a.targets[r]])


def _score_launches(target: Target, a: _ScoreArgs[Tensor]) -> Iterator[Command]:
    rows, tiles = a.logits.shape[0], Tiles.of(a.logits.shape[1])
    found = tiles.found(rows, float32, "tops", "sums") | tiles.found(rows, int32, "larger")
    given: dict[str, op.Arg] = {**found, **op.tensors(a, "logits", "targets")}
    given |= {"vocabulary": op.aligned(tiles.vocabulary), "parts": tiles.parts}
    yield op.launch(_MODULE, "weigh", (rows, tiles.parts), given, {"CHUNK": tiles.chunk})
    args, constants = {**op.tensors(a, "logprobs", "ranks"), **given}, {"PARTS": op.power_of_two(tiles.parts)}
    yield op.launch(_MODULE, "score", (rows,), args, constants)


def _score_cost(workload: Workload, a: _ScoreArgs[Tensor]) -> Cost:
    # Rows that are asked about are rare and the workload does not count them.
    return Cost(a.targets.shape[0] * 12, 0)


score = Op("score", _ScoreArgs[Tensor], _score_check, _score_reference, _score_launches, _score_cost)
