"""widen: the logits of a draft vocabulary, which has a part of the tokens, as logits of the whole vocabulary."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic

import numpy as np

from openinfer.kernels.authoring import Command, Cost, Op, T, Target, Workload, expect, launch, tensors
from openinfer.sampler.gpu.ops import Array
from openinfer.tensor import Tensor, float32, int32

BLOCK = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class _Args(Generic[T]):
    """out[r, v] = logits[r, sources[v]], and -inf where sources[v] is below 0.

    out float32 [R, V], logits float32 [R, D], sources int32 [V] below D.
    """

    out: T
    logits: T
    sources: T


def _check(a: _Args[Tensor]) -> None:
    expect("logits", a.logits, (-1, -1), float32)
    expect("out", a.out, (a.logits.shape[0], -1), float32)
    expect("sources", a.sources, (a.out.shape[1],), int32)


def _reference(a: _Args[Array]) -> None:
    a.out[:] = np.where(a.sources >= 0, a.logits[:, np.maximum(a.sources, 0)], -np.inf)


def _launches(target: Target, a: _Args[Tensor]) -> Iterator[Command]:
    rows, vocabulary = a.out.shape
    yield launch(
        "openinfer.sampler.gpu.device.propose",
        "widen",
        (rows, -(-vocabulary // BLOCK)),
        {**tensors(a), "vocabulary": vocabulary, "width": a.logits.shape[1]},
        {"BLOCK": BLOCK},
    )


def _cost(workload: Workload, a: _Args[Tensor]) -> Cost:
    return Cost(4 * workload.rows * (a.out.shape[1] + a.logits.shape[1]) + 4 * a.out.shape[1], 0)


widen = Op("widen", _Args[Tensor], _check, _reference, _launches, _cost)
