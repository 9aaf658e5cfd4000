"""keep_states, take_states: hidden states of a sequence's last tokens, kept until a layer reads several at once."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Generic

import numpy as np

from openinfer.kernels.op.contract import FLOATS, expect, expect_each, require
from openinfer.kernels.op.launch import Command, Launch, aligned, launch
from openinfer.kernels.op.op import Cost, Op, T, Workload, tensors
from openinfer.kernels.op.reference import Array
from openinfer.kernels.op.target import Target
from openinfer.tensor import Tensor, int32

_BLOCK = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class _StatesArgs(Generic[T]):
    """Hidden states of tokens, and where they are kept."""

    x: T
    states: T
    ids: T
    places: T
    positions: T
    token_slots: T


def _expect(a: _StatesArgs[Tensor], *by_token: str) -> None:
    expect("x", a.x, (-1, -1), *FLOATS)
    expect("states", a.states, (-1, -1, a.x.shape[1]), a.x.dtype)
    size, width = a.states.shape[:2]
    require(width & (width - 1) == 0, f"states has {width} places; it must have a power of two")
    expect_each(a, (size, width), int32, "ids", "places")
    expect_each(a, (a.x.shape[0],), int32, "positions", "token_slots", *by_token)


def _launch(function: str, a: _StatesArgs[Tensor], given: Mapping[str, Tensor]) -> Launch:
    tokens, width = a.x.shape
    args = {**given, "width": aligned(width), "kept": a.states.shape[1]}
    return launch(
        "openinfer.kernels.device.rows", function, (tokens, -(-width // _BLOCK)), args, {"BLOCK": _BLOCK}
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _KeepArgs(_StatesArgs[T], Generic[T]):
    """Keep the hidden state x[t] of each token of a step, its id and its position p at [token_slots[t], p % W].

    x [T, H] and states [S, W, H] of one float dtype, W a power of two; ids and places int32 [S, W]; token_ids,
    positions, token_slots int32 [T]. No two tokens have the same place, but for those of slot 0, padding.
    """

    token_ids: T


def _keep_check(a: _KeepArgs[Tensor]) -> None:
    _expect(a, "token_ids")


def _keep_reference(a: _KeepArgs[Array]) -> None:
    at = a.token_slots, a.positions % a.ids.shape[1]
    a.states[at], a.ids[at], a.places[at] = a.x, a.token_ids, a.positions


def _keep_launches(target: Target, a: _KeepArgs[Tensor]) -> Iterator[Command]:
    given = tensors(a, "states", "x", "ids", "places", "token_ids", "positions", "token_slots")
    yield _launch("keep_states", a, given)


@dataclass(frozen=True, kw_only=True, slots=True)
class _TakeArgs(_StatesArgs[T], Generic[T]):
    """Bring back the last W tokens of R rows: token i of row r is that at position seq_lens[slots[r]] - W + i.

    It was kept if its place has its position, and if the token that follows was kept too, or is the one sampled last.
    x [T, H], T = R * W, gets its state; next_ids, positions, token_slots int32 [T] the following token's id, its
    position and its slot. A token that was not kept gets zeros, and so the padding slot. The kept: `keep_states`.
    slots int32 [R]; seq_lens, last_tokens int32 [S].
    """

    next_ids: T
    slots: T
    seq_lens: T
    last_tokens: T


def _take_check(a: _TakeArgs[Tensor]) -> None:
    _expect(a, "next_ids")
    size, width = a.ids.shape
    expect("slots", a.slots, (a.x.shape[0] // width,), int32)
    require(a.x.shape[0] % width == 0, f"x has {a.x.shape[0]} tokens; it must have {width} a row")
    expect_each(a, (size,), int32, "seq_lens", "last_tokens")


def _take_reference(a: _TakeArgs[Array]) -> None:
    width = a.ids.shape[1]
    slot = a.slots.repeat(width)
    length = a.seq_lens[slot]
    position = length - width + np.tile(np.arange(width, dtype=np.int32), len(a.slots))
    at, behind = (slot, position % width), (slot, (position + 1) % width)
    last = position + 1 == length
    kept = (slot > 0) & (position >= 0) & (a.places[at] == position)
    kept &= last | (a.places[behind] == position + 1)
    a.x[:] = np.where(kept[:, None], a.states[at], np.zeros((), a.x.dtype))
    a.next_ids[:] = np.where(kept, np.where(last, a.last_tokens[slot], a.ids[behind]), 0)
    a.positions[:], a.token_slots[:] = np.where(kept, position, 0), np.where(kept, slot, 0)


def _take_launches(target: Target, a: _TakeArgs[Tensor]) -> Iterator[Command]:
    kept = "ids", "places", "slots", "seq_lens", "last_tokens"
    yield _launch("take_states", a, tensors(a, "x", "states", "next_ids", "positions", "token_slots", *kept))


def _cost(workload: Workload, a: _StatesArgs[Tensor]) -> Cost:
    return Cost(2 * workload.tokens * a.x.shape[1] * a.x.itemsize, 0)


keep_states = Op("keep_states", _KeepArgs[Tensor], _keep_check, _keep_reference, _keep_launches, _cost)
take_states = Op("take_states", _TakeArgs[Tensor], _take_check, _take_reference, _take_launches, _cost)
