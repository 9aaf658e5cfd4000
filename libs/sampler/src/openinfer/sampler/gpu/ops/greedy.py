"""greedy: the most likely token of every row that asks for one, in a step whose rows ask for nothing else."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from openinfer.kernels.authoring import Command, Cost, Op, Scratch, Target, Workload, expect, launch
from openinfer.sampler.gpu.ops.rows import NO_TOKEN, UNSOUND, Array
from openinfer.sampler.gpu.ops.state import GREEDY_FIELDS, expect_state
from openinfer.sampler.gpu.ops.step import STEP, candidates, expect_step
from openinfer.sampler.gpu.ops.tiles import Tiles
from openinfer.tensor import Tensor, float32, int32

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
    step = {"q_starts": q_starts, "emits": emits, "seq_lens": seq_lens, "alive": alive}
    rows, size = expect_step(tokens=tokens, logprobs=logprobs, slots=slots, **step)
    expect("logits", logits, (rows, -1), float32)
    expect_state(state, GREEDY_FIELDS, size)


def _reference(*, tokens: Array, logprobs: Array, logits: Array, **args: Array) -> None:
    tokens[:], logprobs[:] = NO_TOKEN, np.nan
    found = candidates(logits, **args)
    chosen = found.allowed.argmax(axis=1)
    peak = np.take_along_axis(found.allowed, chosen[:, None], 1)[:, 0]
    sound = np.isfinite(found.raw.max(axis=1)) & np.isfinite(peak)  # a maximum of NaN is NaN
    tokens[found.rows] = np.where(sound, chosen, UNSOUND)


def _launches(
    target: Target, *, tokens: Tensor, logprobs: Tensor, logits: Tensor, **args: Tensor
) -> Iterator[Command]:
    rows, tiles = logits.shape[0], Tiles.of(logits.shape[1])
    found = {name: Scratch((rows, tiles.parts), float32) for name in ("tops", "bests")}
    found["best_ids"] = Scratch((rows, tiles.parts), int32)
    yield launch(
        _MODULE,
        "scan_greedy",
        (rows, tiles.parts),
        {
            **found,
            "logits": logits,
            **{name: args[name] for name in (*STEP, *GREEDY_FIELDS)},
            "vocabulary": tiles.row_length,
            "stop_width": args["stop_ids"].shape[1],
            "parts": tiles.parts,
        },
        {"CHUNK": tiles.chunk},
    )
    yield launch(
        _MODULE,
        "take_greedy",
        (rows,),
        {
            "tokens": tokens,
            "logprobs": logprobs,
            **found,
            **{name: args[name] for name in ("slots", "alive", "emits")},
            "parts": tiles.parts,
        },
        {"NO_TOKEN": NO_TOKEN, "UNSOUND": UNSOUND, "PARTS": tiles.parts_padded},
        num_warps=1,
    )


def _cost(workload: Workload, *, logits: Tensor, **_: Tensor) -> Cost:
    vocabulary = logits.shape[1]
    return Cost(workload.rows * (vocabulary * logits.itemsize + 8), workload.rows * vocabulary)


greedy = Op("greedy", _contract, reference=_reference, launches=_launches, cost=_cost)
