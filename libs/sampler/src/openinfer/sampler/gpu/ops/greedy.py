"""greedy: the most likely token of every row that asks for one, in a step whose rows ask for nothing else."""

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
    launch,
    tensors,
)
from openinfer.sampler.gpu.ops import NO_TOKEN, UNSOUND, Array, Tiles
from openinfer.sampler.gpu.ops.state import GREEDY_FIELDS, expect_state
from openinfer.sampler.gpu.ops.step import STEP, ChoiceArgs, expect_step, sampling_rows
from openinfer.tensor import Tensor, float32, int32

_MODULE = "openinfer.sampler.gpu.device.greedy"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Args(ChoiceArgs[T], Generic[T]):
    """The tokens of `sample` for rows that are greedy and adjust nothing, whatever their other fields by slot say.

    Arguments are those of `sample`; of the state by slot there are min_lens and stop_ids. logprobs float32 [R] become
    NaN: no row has one.
    """


def _check(a: _Args[Tensor]) -> None:
    rows, size = expect_step(a)
    expect("logits", a.logits, (rows, -1), float32)
    expect_state(tensors(a, *GREEDY_FIELDS), size)


def _reference(a: _Args[Array]) -> None:
    a.tokens[:], a.logprobs[:] = NO_TOKEN, np.nan
    found = sampling_rows(a)
    chosen = found.allowed.argmax(axis=1)
    peak = np.take_along_axis(found.allowed, chosen[:, None], 1)[:, 0]
    sound = np.isfinite(found.raw.max(axis=1)) & np.isfinite(peak)  # a maximum of NaN is NaN
    a.tokens[found.rows] = np.where(sound, chosen, UNSOUND)


def _launches(target: Target, a: _Args[Tensor]) -> Iterator[Command]:
    rows, tiles = a.logits.shape[0], Tiles.of(a.logits.shape[1])
    found = {name: Scratch((rows, tiles.parts), float32) for name in ("tops", "bests")}
    found["best_ids"] = Scratch((rows, tiles.parts), int32)
    yield launch(
        _MODULE,
        "scan_greedy",
        (rows, tiles.parts),
        {
            **found,
            **tensors(a, "logits", *STEP, *GREEDY_FIELDS),
            "vocabulary": tiles.row_length,
            "stop_width": a.stop_ids.shape[1],
            "parts": tiles.parts,
        },
        {"CHUNK": tiles.chunk},
    )
    yield launch(
        _MODULE,
        "take_greedy",
        (rows,),
        {
            **tensors(a, "tokens", "logprobs"),
            **found,
            **tensors(a, "slots", "alive", "emits"),
            "parts": tiles.parts,
        },
        {"NO_TOKEN": NO_TOKEN, "UNSOUND": UNSOUND, "PARTS": tiles.parts_padded},
        num_warps=1,
    )


def _cost(workload: Workload, a: _Args[Tensor]) -> Cost:
    vocabulary = a.logits.shape[1]
    return Cost(workload.rows * (vocabulary * a.logits.itemsize + 8), workload.rows * vocabulary)


greedy = Op("greedy", _Args[Tensor], _check, _reference, _launches, _cost)
