"""sigmoid_gate: the output of a layer times the sigmoid of a gate."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic

from openinfer.kernels.authoring import (
    FLOATS,
    Array,
    Command,
    Cost,
    Op,
    T,
    Target,
    Workload,
    aligned,
    expect,
    f32,
    launch,
    require,
    rounded,
)
from openinfer.recipes.qwen3_5.ops.gated_delta_net import sigmoid
from openinfer.tensor import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class GateArgs(Generic[T]):
    """out *= sigmoid(gate), in place. out [T, A, d], gate [T, A, d] or [T, A, 1] (one for all of d), of one float
    dtype; the first two axes of gate are at any stride. The sigmoid is rounded, then the product."""

    out: T
    gate: T


def _check(a: GateArgs[Tensor]) -> None:
    expect("out", a.out, (-1, -1, -1), *FLOATS)
    tokens, heads, dim = a.out.shape
    expect("gate", a.gate, (tokens, heads, -1), a.out.dtype, dense=False)
    require(
        a.gate.shape[2] in (1, dim), f"gate has {a.gate.shape[2]} columns a head; it must have 1 or {dim}"
    )
    require(a.gate.shape[2] == 1 or a.gate.strides[2] == 1, "the columns of gate must be next to each other")


def _reference(a: GateArgs[Array]) -> None:
    a.out[:] = f32(a.out) * rounded(sigmoid(f32(a.gate)), a.out.dtype)


def _launches(target: Target, a: GateArgs[Tensor]) -> Iterator[Command]:
    (tokens, heads, dim), block = a.out.shape, 1024
    yield launch(
        "openinfer.recipes.qwen3_5.device.gate",
        "sigmoid_gate",
        (tokens, -(-heads * dim // block)),
        {
            "out": a.out,
            "gate": a.gate,
            "width": aligned(heads * dim),
            "token_stride": aligned(a.gate.strides[0]),
            "head_stride": aligned(a.gate.strides[1]),
        },
        {"DIM": dim, "GATES": a.gate.shape[2], "BLOCK": block},
    )


def _cost(workload: Workload, a: GateArgs[Tensor]) -> Cost:
    heads, dim = a.out.shape[1:]
    numbers = workload.tokens * heads * (2 * dim + a.gate.shape[2])
    return Cost(numbers * a.out.itemsize, workload.tokens * heads * dim)


sigmoid_gate = Op("sigmoid_gate", GateArgs[Tensor], _check, _reference, _launches, _cost)
