"""add_bias: what a projection gave, plus its biases. An op that openinfer lacks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic

from openinfer.kernels import authoring
from openinfer.kernels.authoring import Array, T, expect, f32
from openinfer.tensor import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class _Args(Generic[T]):
    """x [T, N] += bias [N] in each row, in place, of one float dtype. Added in float32 and rounded once."""

    x: T
    bias: T


def _check(a: _Args[Tensor]) -> None:
    expect("x", a.x, (-1, -1), *authoring.FLOATS)
    expect("bias", a.bias, a.x.shape[1:], a.x.dtype)


def _reference(a: _Args[Array]) -> None:
    a.x[:] = authoring.rounded(f32(a.x) + f32(a.bias), a.x.dtype)


def _launches(target: authoring.Target, a: _Args[Tensor]) -> Iterator[authoring.Command]:
    (tokens, width), block = a.x.shape, 1024
    args = {**authoring.tensors(a), "width": authoring.aligned(width)}
    grid = (tokens, -(-width // block))
    yield authoring.launch("openinfer_llama.device.bias", "add_bias", grid, args, {"BLOCK": block})


def _cost(workload: authoring.Workload, a: _Args[Tensor]) -> authoring.Cost:
    numbers = workload.tokens * a.x.shape[1]
    return authoring.Cost((2 * numbers + a.x.shape[1]) * a.x.itemsize, numbers)


add_bias = authoring.Op(
    "add_bias", _Args[Tensor], check=_check, reference=_reference, launches=_launches, cost=_cost
)
