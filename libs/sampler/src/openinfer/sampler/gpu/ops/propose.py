"""follow, propose: the ids that layers which draft read after a step has sampled, and the places of their proposals."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from openinfer.kernels.authoring import Command, Cost, Op, Target, Workload, expect, launch, require
from openinfer.sampler.gpu.ops.rows import Array
from openinfer.tensor import Tensor, int32

_MODULE = "openinfer.sampler.gpu.device.propose"
_FOLLOW = (
    "next_ids", "lens", "ends", "spans", "token_ids", "positions", "slots", "q_starts", "emits", "num_drafts",
    "accepted", "last_tokens", "following",
)  # fmt: skip
_PROPOSE = (
    "drafts", "next_ids", "positions", "token_slots", "lens", "spans", "tokens", "slots", "emits", "alive", "seq_lens",
    "reserved",
)  # fmt: skip


def _follow_contract(**t: Tensor) -> None:
    """Find the token that follows each token of a step that has sampled and advanced.

    The step's rows are slots, emits, num_drafts int32 [R] and q_starts int32 [R + 1]; its tokens had token_ids and
    positions int32 [T]. By slot, int32 [S]: accepted (`accept`) and last_tokens. following int32 [R]: the prompt's next
    token, for a row that does not emit.

    A row's last counting token is its last accepted draft, or its last certain token. next_ids int32 [T] gets the id
    of the next token of the row; after the last counting one the token just sampled, or `following`; after later ones
    0. ends int32 [R + 1]: 0, and 1 + the index of the last counting token of each row. lens int32 [S]: the row's tokens
    before the step, where it has tokens. spans int32 [R + 1] gets 0, 1, 2, ...
    """
    rows, tokens, size = t["slots"].shape[0], t["token_ids"].shape[0], t["accepted"].shape[0]
    require(t.keys() == set(_FOLLOW), f"follow takes {', '.join(_FOLLOW)}")
    shapes = {"next_ids": tokens, "token_ids": tokens, "positions": tokens, "lens": size, "accepted": size}
    shapes |= {"last_tokens": size, "ends": rows + 1, "spans": rows + 1, "q_starts": rows + 1}
    for name, tensor in t.items():
        expect(name, tensor, (shapes.get(name, rows),), int32)


def _follow_reference(**t: Array) -> None:
    slots, q_starts = t["slots"], t["q_starts"]
    t["spans"][:] = np.arange(len(t["spans"]))
    t["ends"][0] = 0
    for row, slot in enumerate(slots):
        first, after = int(q_starts[row]), int(q_starts[row + 1])
        end = after
        if first < after:
            end = min(after - int(t["num_drafts"][row]) + int(t["accepted"][slot]), after)
            last = t["last_tokens"][slot] if t["emits"][row] else t["following"][row]
            t["next_ids"][first:after] = 0
            t["next_ids"][first : end - 1] = t["token_ids"][first + 1 : end]
            t["next_ids"][end - 1] = max(last, 0)
            if slot > 0:
                t["lens"][slot] = t["positions"][first]
        t["ends"][row + 1] = end


def _follow_launches(target: Target, **t: Tensor) -> Iterator[Command]:
    args = {name: t[name] for name in _FOLLOW}
    yield launch(_MODULE, "follow", (t["slots"].shape[0],), args, {"BLOCK": 256})


def _propose_contract(*, place: int, **t: Tensor) -> None:
    """Keep the tokens int32 [R] that were drawn for draft number `place` (1, 2, ...) after a step, -1 = none.

    Row r is the sequence in slot slots[r]. It has a proposal if emits[r] and alive[slot] are not 0. drafts int32
    [S, L], L a power of two, gets it at its position seq_lens[slot] + place, modulo L.

    Then the row is a step of one token, the proposal. next_ids, positions and token_slots int32 [R] get its id, its
    place seq_lens[slot] + place - 1 among the tokens of the drafting layers, and its slot. Where that place is not
    below reserved[slot] (int32 [S]), the row has no block: position and slot are 0. lens int32 [S] gets the place too.
    spans int32 [R + 1] gets 0, 1, 2, ... times place + 1.
    """
    rows, size = t["slots"].shape[0], t["seq_lens"].shape[0]
    require(t.keys() == set(_PROPOSE), f"propose takes {', '.join(_PROPOSE)}")
    for name in ("next_ids", "positions", "token_slots", "tokens", "emits", "slots"):
        expect(name, t[name], (rows,), int32)
    for name in ("lens", "alive", "reserved", "seq_lens"):
        expect(name, t[name], (size,), int32)
    expect("spans", t["spans"], (rows + 1,), int32)
    expect("drafts", t["drafts"], (size, -1), int32)
    require(place >= 1, f"place is {place}; it must be 1 or more")


def _propose_reference(*, place: int, **t: Array) -> None:
    slots, tokens = t["slots"], t["tokens"]
    position = t["seq_lens"][slots] + place - 1
    live = (t["emits"] != 0) & (t["alive"][slots] != 0) & (tokens >= 0)
    t["drafts"][slots[live], (position[live] + 1) % t["drafts"].shape[1]] = tokens[live]
    kept = live & (position < t["reserved"][slots])
    t["next_ids"][:] = np.where(live, tokens, 0)
    t["positions"][:] = np.where(kept, position, 0)
    t["token_slots"][:] = np.where(kept, slots, 0)
    t["lens"][slots[live]] = position[live]
    t["spans"][1:] = np.arange(1, len(slots) + 1) * (place + 1)


def _propose_launches(target: Target, *, place: int, **t: Tensor) -> Iterator[Command]:
    rows, block = t["slots"].shape[0], 128
    args = {name: t[name] for name in _PROPOSE}
    yield launch(
        _MODULE,
        "propose",
        (-(-rows // block),),
        {**args, "rows": rows, "width": t["drafts"].shape[1], "place": place},
        {"BLOCK": block},
    )


def _cost(workload: Workload, **_: object) -> Cost:
    return Cost(12 * workload.tokens + 40 * workload.rows, 0)


follow = Op("follow", _follow_contract, reference=_follow_reference, launches=_follow_launches, cost=_cost)
propose = Op(
    "propose", _propose_contract, reference=_propose_reference, launches=_propose_launches, cost=_cost
)
