"""follow, propose: the ids that layers which draft read after a step has sampled, and the places of their proposals."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic

import numpy as np

from openinfer.kernels import authoring as op
from openinfer.kernels.authoring import Command, Cost, Op, T, Target, Workload
from openinfer.sampler.gpu.ops import Array
from openinfer.tensor import Tensor, float32, int32

_MODULE = "openinfer.sampler.gpu.device.propose"


@dataclass(frozen=True, kw_only=True, slots=True)
class _FollowArgs(Generic[T]):
    """Find the token that follows each token of a step that has sampled and advanced.

    The step's rows are slots, emits, num_drafts int32 [R] and q_starts int32 [R + 1]; its tokens had token_ids and
    positions int32 [T]. By slot, int32 [S]: accepted (`accept`) and last_tokens. following int32 [R]: the prompt's next
    token, for a row that does not emit.

    A row's last counting token is its last accepted draft, or its last certain token. next_ids int32 [T] gets the id
    of the next token of the row; after the last counting one the token just sampled, or `following`; after later ones
    0. ends int32 [R + 1]: 0, and 1 + the index of the last counting token of each row. lens int32 [S]: the row's tokens
    before the step, where it has tokens. spans int32 [R + 1] gets 0, 1, 2, ...
    """

    next_ids: T
    lens: T
    ends: T
    spans: T
    token_ids: T
    positions: T
    slots: T
    q_starts: T
    emits: T
    num_drafts: T
    accepted: T
    last_tokens: T
    following: T


def _follow_check(a: _FollowArgs[Tensor]) -> None:
    rows, tokens, size = a.slots.shape[0], a.token_ids.shape[0], a.accepted.shape[0]
    shapes = {"next_ids": tokens, "token_ids": tokens, "positions": tokens, "lens": size, "accepted": size}
    shapes |= {"last_tokens": size, "ends": rows + 1, "spans": rows + 1, "q_starts": rows + 1}
    for name, tensor in op.tensors(a).items():
        op.expect(name, tensor, (shapes.get(name, rows),), int32)


def _follow_reference(a: _FollowArgs[Array]) -> None:
    slots, q_starts = a.slots, a.q_starts
    a.spans[:] = np.arange(len(a.spans))
    a.ends[0] = 0
    for row, slot in enumerate(slots):
        first, after = int(q_starts[row]), int(q_starts[row + 1])
        end = after
        if first < after:
            end = min(after - int(a.num_drafts[row]) + int(a.accepted[slot]), after)
            last = a.last_tokens[slot] if a.emits[row] else a.following[row]
            a.next_ids[first:after] = 0
            a.next_ids[first : end - 1] = a.token_ids[first + 1 : end]
            a.next_ids[end - 1] = max(last, 0)
            if slot > 0:
                a.lens[slot] = a.positions[first]
        a.ends[row + 1] = end


def _follow_launches(target: Target, a: _FollowArgs[Tensor]) -> Iterator[Command]:
    yield op.launch(_MODULE, "follow", (a.slots.shape[0],), op.tensors(a), {"BLOCK": 256})


@dataclass(frozen=True, kw_only=True, slots=True)
class _ProposeArgs(Generic[T]):
    """Keep the tokens int32 [R] that were drawn for draft number `place` (1, 2, ...) after a step, -1 = none.

    Row r is the sequence in slot slots[r]. It has a proposal if emits[r] and alive[slot] are not 0. drafts int32
    [S, L], L a power of two, gets it at its position seq_lens[slot] + place, modulo L.

    Then the row is a step of one token, the proposal. next_ids, positions and token_slots int32 [R] get its id, its
    place seq_lens[slot] + place - 1 among the tokens of the drafting layers, and its slot. Where that place is not
    below reserved[slot] (int32 [S]), the row has no block: position and slot are 0. lens int32 [S] gets the place too.
    spans int32 [R + 1] gets 0, 1, 2, ... times place + 1.

    With survival float32 [R], the chance that the row's drafts up to this one are right, drafts gets -1 where it is
    less than floor float32 [1]. A chance of NaN says nothing.
    """

    drafts: T
    next_ids: T
    positions: T
    token_slots: T
    lens: T
    spans: T
    tokens: T
    slots: T
    emits: T
    alive: T
    seq_lens: T
    reserved: T
    place: int
    survival: T | None = None
    floor: T | None = None


def _propose_check(a: _ProposeArgs[Tensor]) -> None:
    rows, size = a.slots.shape[0], a.seq_lens.shape[0]
    op.expect_each(a, (rows,), int32, "next_ids", "positions", "token_slots", "tokens", "emits", "slots")
    op.expect_each(a, (size,), int32, "lens", "alive", "reserved", "seq_lens")
    op.expect("spans", a.spans, (rows + 1,), int32)
    op.expect("drafts", a.drafts, (size, -1), int32)
    op.require(a.place >= 1, f"place is {a.place}; it must be 1 or more")
    op.require((a.survival is None) == (a.floor is None), "survival and floor are given together")
    if a.survival is not None and a.floor is not None:
        op.expect("survival", a.survival, (rows,), float32)
        op.expect("floor", a.floor, (1,), float32)


def _propose_reference(a: _ProposeArgs[Array]) -> None:
    slots, tokens = a.slots, a.tokens
    position = a.seq_lens[slots] + a.place - 1
    live = (a.emits != 0) & (a.alive[slots] != 0) & (tokens >= 0)
    said = tokens if a.survival is None or a.floor is None else np.where(a.survival < a.floor, -1, tokens)
    a.drafts[slots[live], (position[live] + 1) % a.drafts.shape[1]] = said[live]
    kept = live & (position < a.reserved[slots])
    a.next_ids[:] = np.where(live, tokens, 0)
    a.positions[:] = np.where(kept, position, 0)
    a.token_slots[:] = np.where(kept, slots, 0)
    a.lens[slots[live]] = position[live]
    a.spans[1:] = np.arange(1, len(slots) + 1) * (a.place + 1)


def _propose_launches(target: Target, a: _ProposeArgs[Tensor]) -> Iterator[Command]:
    rows, block = a.slots.shape[0], 128
    grid, sizes = (-(-rows // block),), {"rows": rows, "width": a.drafts.shape[1], "place": a.place}
    cut = {"survival": a.survival or a.tokens, "floor": a.floor or a.tokens}
    constants = {"BLOCK": block, "CUT": a.floor is not None}
    yield op.launch(_MODULE, "propose", grid, {**op.tensors(a), **cut, **sizes}, constants)


def _cost(workload: Workload, a: _FollowArgs[Tensor] | _ProposeArgs[Tensor]) -> Cost:
    return Cost(12 * workload.tokens + 40 * workload.rows, 0)


follow = Op("follow", _FollowArgs[Tensor], _follow_check, _follow_reference, _follow_launches, _cost)
propose = Op("propose", _ProposeArgs[Tensor], _propose_check, _propose_reference, _propose_launches, _cost)


BLOCK = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class _WidenArgs(Generic[T]):
    """out[r, v] = logits[r, sources[v]], and -inf where sources[v] is below 0.

    out float32 [R, V], logits float32 [R, D], sources int32 [V] below D.
    """

    out: T
    logits: T
    sources: T


def _widen_check(a: _WidenArgs[Tensor]) -> None:
    op.expect("logits", a.logits, (-1, -1), float32)
    op.expect("out", a.out, (a.logits.shape[0], -1), float32)
    op.expect("sources", a.sources, (a.out.shape[1],), int32)


def _widen_reference(a: _WidenArgs[Array]) -> None:
    a.out[:] = np.where(a.sources >= 0, a.logits[:, np.maximum(a.sources, 0)], -np.inf)


def _widen_launches(target: Target, a: _WidenArgs[Tensor]) -> Iterator[Command]:
    rows, vocabulary = a.out.shape
    sizes = {"vocabulary": vocabulary, "width": a.logits.shape[1]}
    yield op.launch(
        _MODULE, "widen", (rows, -(-vocabulary // BLOCK)), {**op.tensors(a), **sizes}, {"BLOCK": BLOCK}
    )


def _widen_cost(workload: Workload, a: _WidenArgs[Tensor]) -> Cost:
    return Cost(4 * workload.rows * (a.out.shape[1] + a.logits.shape[1]) + 4 * a.out.shape[1], 0)


widen = Op("widen", _WidenArgs[Tensor], _widen_check, _widen_reference, _widen_launches, _widen_cost)
