"""keep_states, take_states: hidden states of a sequence's last tokens, kept until a layer reads several at once."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from openinfer.kernels.op.contract import FLOATS, expect, require
from openinfer.kernels.op.launch import Aligned, Command, launch
from openinfer.kernels.op.op import Cost, Op, Workload
from openinfer.kernels.op.reference import Array
from openinfer.kernels.op.target import Target
from openinfer.tensor import Tensor, int32

_MODULE, _BLOCK = "openinfer.kernels.device.rows", 1024


def _expect(states: Tensor, ids: Tensor, places: Tensor, x: Tensor, by_token: dict[str, Tensor]) -> None:
    expect("x", x, (-1, -1), *FLOATS)
    expect("states", states, (-1, -1, x.shape[1]), x.dtype)
    size, width = states.shape[:2]
    require(width & (width - 1) == 0, f"states has {width} places; it must have a power of two")
    for name, tensor in (("ids", ids), ("places", places)):
        expect(name, tensor, (size, width), int32)
    for name, tensor in by_token.items():
        expect(name, tensor, (x.shape[0],), int32)


def _keep_contract(
    *,
    states: Tensor,
    ids: Tensor,
    places: Tensor,
    x: Tensor,
    token_ids: Tensor,
    positions: Tensor,
    token_slots: Tensor,
) -> None:
    """Keep the hidden state x[t] of each token of a step, its id and its position p at [token_slots[t], p % W].

    x [T, H] and states [S, W, H] of one float dtype, W a power of two; ids and places int32 [S, W]; token_ids,
    positions, token_slots int32 [T]. No two tokens have the same place, but for those of slot 0, padding.
    """
    _expect(
        states, ids, places, x, {"token_ids": token_ids, "positions": positions, "token_slots": token_slots}
    )


def _keep_reference(
    *,
    states: Array,
    ids: Array,
    places: Array,
    x: Array,
    token_ids: Array,
    positions: Array,
    token_slots: Array,
) -> None:
    at = token_slots, positions % ids.shape[1]
    states[at], ids[at], places[at] = x, token_ids, positions


def _keep_launches(target: Target, *, x: Tensor, states: Tensor, **t: Tensor) -> Iterator[Command]:
    tokens, width = x.shape
    given = {name: t[name] for name in ("ids", "places", "token_ids", "positions", "token_slots")}
    sizes = {"width": Aligned(width) if width % 16 == 0 else width, "kept": states.shape[1]}
    args = {"states": states, "x": x, **given, **sizes}
    yield launch(_MODULE, "keep_states", (tokens, -(-width // _BLOCK)), args, {"BLOCK": _BLOCK})


_TAKE = ("next_ids", "positions", "token_slots", "ids", "places", "slots", "seq_lens", "last_tokens")


def _take_contract(
    *,
    x: Tensor,
    next_ids: Tensor,
    positions: Tensor,
    token_slots: Tensor,
    states: Tensor,
    ids: Tensor,
    places: Tensor,
    slots: Tensor,
    seq_lens: Tensor,
    last_tokens: Tensor,
) -> None:
    """Bring back the last W tokens of R rows: token i of row r is that at position seq_lens[slots[r]] - W + i.

    It was kept if its place has its position, and if the token that follows was kept too, or is the one sampled last.
    x [T, H], T = R * W, gets its state; next_ids, positions, token_slots int32 [T] the following token's id, its
    position and its slot. A token that was not kept gets zeros, and so the padding slot. The kept: `keep_states`.
    slots int32 [R]; seq_lens, last_tokens int32 [S].
    """
    by_token = {"next_ids": next_ids, "positions": positions, "token_slots": token_slots}
    _expect(states, ids, places, x, by_token)
    size, width = ids.shape
    expect("slots", slots, (x.shape[0] // width,), int32)
    require(x.shape[0] % width == 0, f"x has {x.shape[0]} tokens; it must have {width} a row")
    for name, tensor in (("seq_lens", seq_lens), ("last_tokens", last_tokens)):
        expect(name, tensor, (size,), int32)


def _take_reference(
    *,
    x: Array,
    next_ids: Array,
    positions: Array,
    token_slots: Array,
    states: Array,
    ids: Array,
    places: Array,
    slots: Array,
    seq_lens: Array,
    last_tokens: Array,
) -> None:
    width = ids.shape[1]
    slot = slots.repeat(width)
    length = seq_lens[slot]
    position = length - width + np.tile(np.arange(width, dtype=np.int32), len(slots))
    at, behind = (slot, position % width), (slot, (position + 1) % width)
    last = position + 1 == length
    kept = (slot > 0) & (position >= 0) & (places[at] == position) & (last | (places[behind] == position + 1))
    x[:] = np.where(kept[:, None], states[at], np.zeros((), x.dtype))
    next_ids[:] = np.where(kept, np.where(last, last_tokens[slot], ids[behind]), 0)
    positions[:], token_slots[:] = np.where(kept, position, 0), np.where(kept, slot, 0)


def _take_launches(target: Target, *, x: Tensor, states: Tensor, **t: Tensor) -> Iterator[Command]:
    tokens, width = x.shape
    sizes = {"width": Aligned(width) if width % 16 == 0 else width, "kept": states.shape[1]}
    args = {"x": x, "states": states, **{name: t[name] for name in _TAKE}, **sizes}
    yield launch(_MODULE, "take_states", (tokens, -(-width // _BLOCK)), args, {"BLOCK": _BLOCK})


def _cost(workload: Workload, *, x: Tensor, **_: Tensor) -> Cost:
    return Cost(2 * workload.tokens * x.shape[1] * x.itemsize, 0)


keep_states = Op(
    "keep_states", _keep_contract, reference=_keep_reference, launches=_keep_launches, cost=_cost
)
take_states = Op(
    "take_states", _take_contract, reference=_take_reference, launches=_take_launches, cost=_cost
)
