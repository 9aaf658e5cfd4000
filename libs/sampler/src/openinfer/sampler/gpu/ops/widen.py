"""widen: the logits of a draft vocabulary, which has a part of the tokens, as logits of the whole vocabulary."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from openinfer.kernels.authoring import Command, Cost, Op, Target, Workload, expect, launch
from openinfer.sampler.gpu.ops.rows import Array
from openinfer.tensor import Tensor, float32, int32

BLOCK = 1024


def _contract(*, out: Tensor, logits: Tensor, sources: Tensor) -> None:
    """out[r, v] = logits[r, sources[v]], and -inf where sources[v] is below 0.

    out float32 [R, V], logits float32 [R, D], sources int32 [V] below D.
    """
    expect("logits", logits, (-1, -1), float32)
    expect("out", out, (logits.shape[0], -1), float32)
    expect("sources", sources, (out.shape[1],), int32)


def _reference(*, out: Array, logits: Array, sources: Array) -> None:
    out[:] = np.where(sources >= 0, logits[:, np.maximum(sources, 0)], -np.inf)


def _launches(target: Target, *, out: Tensor, logits: Tensor, sources: Tensor) -> Iterator[Command]:
    rows, vocabulary = out.shape
    yield launch(
        "openinfer.sampler.gpu.device.widen",
        "widen",
        (rows, -(-vocabulary // BLOCK)),
        {
            "out": out,
            "logits": logits,
            "sources": sources,
            "vocabulary": vocabulary,
            "width": logits.shape[1],
        },
        {"BLOCK": BLOCK},
    )


def _cost(workload: Workload, *, out: Tensor, logits: Tensor, **_: Tensor) -> Cost:
    return Cost(4 * workload.rows * (out.shape[1] + logits.shape[1]) + 4 * out.shape[1], 0)


widen = Op("widen", _contract, reference=_reference, launches=_launches, cost=_cost)
