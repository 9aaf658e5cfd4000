"""greedy: the most likely token of every row that asks for one, in a step whose rows ask for nothing else."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from openinfer.kernels.authoring import Command, Cost, Op, Scratch, Target, Workload, expect, launch
from openinfer.sampler.gpu.ops.rows import NO_TOKEN, UNSOUND, Array
from openinfer.sampler.gpu.ops.state import expect_state
from openinfer.sampler.gpu.ops.tiles import Tiles
from openinfer.sampler.reference import without
from openinfer.tensor import Tensor, float32, int32

GREEDY_FIELDS = ("min_lens", "stop_ids")
"""The fields that `greedy` reads."""

_MODULE = "openinfer.sampler.gpu.device.greedy"


def _contract(
    *,
    tokens: Tensor,
    logprobs: Tensor,
    logits: Tensor,
    slots: Tensor,
    q_starts: Tensor,
    seq_lens: Tensor,
    alive: Tensor,
    emits: Tensor,
    **state: Tensor,
) -> None:
    """The tokens of `sample` for rows that are greedy and adjust nothing, whatever their other fields by slot say.

    Arguments are those of `sample`; of the state by slot there are min_lens and stop_ids. logprobs float32 [R] become
    NaN: no row has one.
    """
    rows, size = slots.shape[0], seq_lens.shape[0]
    expect("logits", logits, (rows, -1), float32)
    expect("tokens", tokens, (rows,), int32)
    expect("logprobs", logprobs, (rows,), float32)
    expect("slots", slots, (rows,), int32)
    expect("q_starts", q_starts, (rows + 1,), int32)
    expect("emits", emits, (rows,), int32)
    for name, tensor in (("seq_lens", seq_lens), ("alive", alive)):
        expect(name, tensor, (size,), int32)
    expect_state(state, GREEDY_FIELDS, size)


def _reference(
    *,
    tokens: Array,
    logprobs: Array,
    logits: Array,
    slots: Array,
    q_starts: Array,
    seq_lens: Array,
    alive: Array,
    emits: Array,
    **state: Array,
) -> None:
    tokens[:], logprobs[:] = NO_TOKEN, np.nan
    rows = np.flatnonzero((emits != 0) & (alive[slots] != 0))
    slot = slots[rows]
    stop_ids = state["stop_ids"][slot]
    early = (seq_lens[slot] + np.diff(q_starts)[rows] < state["min_lens"][slot])[:, None]
    forbidden = np.where(early & (stop_ids < logits.shape[1]), stop_ids, -1)
    raw = logits if len(rows) == len(logits) else logits[rows]
    allowed = without(raw, forbidden) if (forbidden >= 0).any() else raw
    chosen = allowed.argmax(axis=1)
    peak = np.take_along_axis(allowed, chosen[:, None], 1)[:, 0]
    sound = np.isfinite(raw.max(axis=1)) & np.isfinite(peak)  # a maximum of NaN is NaN
    tokens[rows] = np.where(sound, chosen, UNSOUND)


def _launches(
    target: Target,
    *,
    tokens: Tensor,
    logprobs: Tensor,
    logits: Tensor,
    slots: Tensor,
    q_starts: Tensor,
    seq_lens: Tensor,
    alive: Tensor,
    emits: Tensor,
    **state: Tensor,
) -> Iterator[Command]:
    rows, tiles = logits.shape[0], Tiles.of(logits.shape[1])
    found = {name: Scratch((rows, tiles.parts), float32) for name in ("tops", "bests")}
    found["best_ids"] = Scratch((rows, tiles.parts), int32)
    live = {"alive": alive, "emits": emits}
    lengths = {"slots": slots, "q_starts": q_starts, "seq_lens": seq_lens}
    yield launch(
        _MODULE,
        "scan_greedy",
        (rows, tiles.parts),
        {
            **found,
            "logits": logits,
            **lengths,
            **live,
            **{name: state[name] for name in GREEDY_FIELDS},
            "vocabulary": tiles.row_length,
            "stop_width": state["stop_ids"].shape[1],
            "parts": tiles.parts,
        },
        {"CHUNK": tiles.chunk},
    )
    yield launch(
        _MODULE,
        "take_greedy",
        (rows,),
        {"tokens": tokens, "logprobs": logprobs, **found, "slots": slots, **live, "parts": tiles.parts},
        {"NO_TOKEN": NO_TOKEN, "UNSOUND": UNSOUND, "PARTS": tiles.parts_padded},
        num_warps=1,
    )


def _cost(workload: Workload, *, logits: Tensor, **_: Tensor) -> Cost:
    vocabulary = logits.shape[1]
    return Cost(workload.rows * (vocabulary * logits.itemsize + 8), workload.rows * vocabulary)


greedy = Op("greedy", _contract, reference=_reference, launches=_launches, cost=_cost)
