"""start_block, markov: a block of drafts, from the token that was sampled last to the logits of each draft."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic

import numpy as np

from openinfer.kernels import authoring as op
from openinfer.kernels.authoring import Arg, Array, Command, Cost, Op, T, Target, Workload
from openinfer.tensor import Tensor, float32, int32

_DEVICE = "openinfer.recipes.deepseek_v4.device.blocks"


@dataclass(frozen=True, kw_only=True, slots=True)
class _StartArgs(Generic[T]):
    """Write token_ids, positions and token_slots int32 [B R] of a block of B tokens a row: token i of row r is number
    i R + r.

    Row r is the sequence in slot slots[r] (slots, emits int32 [R]). It has a block if emits[r] and alive[slot] are not
    0: last_tokens[slot], at position seq_lens[slot], and B - 1 times `noise` behind it. Any other row has id, position
    and slot 0. last_tokens, seq_lens, alive int32 [S].
    """

    token_ids: T
    positions: T
    token_slots: T
    slots: T
    emits: T
    alive: T
    last_tokens: T
    seq_lens: T
    noise: int


def _start_check(a: _StartArgs[Tensor]) -> None:
    rows, size, tokens = a.slots.shape[0], a.alive.shape[0], a.token_ids.shape[0]
    shapes = {"slots": rows, "emits": rows, "token_ids": tokens, "positions": tokens, "token_slots": tokens}
    for name, tensor in op.tensors(a).items():
        op.expect(name, tensor, (shapes.get(name, size),), int32)
    op.require(tokens % rows == 0, f"{tokens} tokens cannot be divided among {rows} rows")


def _start_reference(a: _StartArgs[Array]) -> None:
    rows = len(a.slots)
    live = (a.emits != 0) & (a.alive[a.slots] != 0)
    for first in range(0, len(a.token_ids), rows):
        part = slice(first, first + rows)
        a.token_ids[part] = np.where(live, a.noise if first else a.last_tokens[a.slots], 0)
        a.positions[part] = np.where(live, a.seq_lens[a.slots] + first // rows, 0)
        a.token_slots[part] = np.where(live, a.slots, 0)


def _start_launches(target: Target, a: _StartArgs[Tensor]) -> Iterator[Command]:
    tokens, block = a.token_ids.shape[0], 128
    sizes = {"tokens": tokens, "rows": a.slots.shape[0], "noise": a.noise}
    yield op.launch(
        _DEVICE, "start_block", (-(-tokens // block),), {**op.tensors(a), **sizes}, {"BLOCK": block}
    )


def _start_cost(workload: Workload, a: _StartArgs[Tensor]) -> Cost:
    return Cost(12 * a.token_ids.shape[0] + 24 * workload.rows, 0)


start_block = Op(
    "start_block", _StartArgs[Tensor], _start_check, _start_reference, _start_launches, _start_cost
)


@dataclass(frozen=True, kw_only=True, slots=True)
class _MarkovArgs(Generic[T]):
    """Add to each row's logits what the token before it says, and multiply its survival by the confidence in the draft
    that will be drawn from them.

    With e = before[token_ids[r]]:
        logits[r] += e @ after^T                                                   float32
        survival[r] = (1 if place == 1 else survival[r]) * sigmoid([hidden[r], e] . confidence)

    logits float32 [R, V]; before, after [V, K] and hidden [R, D] of one float dtype; token_ids int32 [R]; confidence
    float32 [1, D + K]; survival float32 [R]. place: the number of the draft, 1, 2, ...
    """

    logits: T
    hidden: T
    token_ids: T
    before: T
    after: T
    confidence: T
    survival: T
    place: int


def _markov_check(a: _MarkovArgs[Tensor]) -> None:
    op.expect("hidden", a.hidden, (-1, -1), *op.FLOATS)
    (rows, width), (vocabulary, rank) = a.hidden.shape, a.before.shape
    op.expect("logits", a.logits, (rows, vocabulary), float32)
    op.expect("token_ids", a.token_ids, (rows,), int32)
    op.expect("before", a.before, (vocabulary, rank), a.hidden.dtype)
    op.expect("after", a.after, (vocabulary, rank), a.hidden.dtype)
    op.expect("confidence", a.confidence, (1, width + rank), float32)
    op.expect("survival", a.survival, (rows,), float32)
    op.require(a.place >= 1, f"place is {a.place}; it must be 1 or more")


def _markov_reference(a: _MarkovArgs[Array]) -> None:
    e = a.before[a.token_ids]
    a.logits[:] += op.matmul_nt(e, a.after)
    score = (np.concatenate([op.f32(a.hidden), op.f32(e)], axis=1) * a.confidence).sum(axis=1)
    sure = np.float32(0.5) * (np.float32(1) + np.tanh(score * np.float32(0.5)))
    a.survival[:] = sure if a.place == 1 else a.survival * sure


def _markov_launches(target: Target, a: _MarkovArgs[Tensor]) -> Iterator[Command]:
    op.expect_bf16(a.hidden)
    (rows, width), (vocabulary, rank) = a.hidden.shape, a.before.shape
    sizes = {"rows": rows, "vocabulary": vocabulary, "rank": op.aligned(rank)}
    depth = max(16, op.power_of_two(rank))
    args: dict[str, Arg] = {**op.tensors(a, "logits", "token_ids", "before", "after"), **sizes}
    grid = (-(-vocabulary // 64), -(-rows // 16))
    yield op.launch(_DEVICE, "markov_logits", grid, args, {"BV": 64, "RANK": depth})
    args = {**op.tensors(a, "survival", "hidden", "token_ids", "before", "confidence")}
    args |= {"width": width, "rank": rank}
    constants = {"FIRST": a.place == 1, "BLOCK": op.power_of_two(width), "RANK": depth}
    yield op.launch(_DEVICE, "markov_survival", (rows,), args, constants)


def _markov_cost(workload: Workload, a: _MarkovArgs[Tensor]) -> Cost:
    (vocabulary, rank), rows = a.after.shape, a.hidden.shape[0]
    moved = a.after.nbytes + rows * (8 * vocabulary + rank * a.after.itemsize) + a.hidden.nbytes
    return Cost(moved, 2 * rows * vocabulary * rank)


markov = Op("markov", _MarkovArgs[Tensor], _markov_check, _markov_reference, _markov_launches, _markov_cost)
