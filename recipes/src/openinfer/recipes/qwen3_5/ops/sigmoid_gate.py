"""sigmoid_gate: the output of a layer times the sigmoid of a gate."""

from __future__ import annotations

from collections.abc import Iterator

from openinfer.kernels.authoring import (
    FLOATS,
    Array,
    Command,
    Cost,
    Op,
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


def _contract(*, out: Tensor, gate: Tensor) -> None:
    """out *= sigmoid(gate), in place. out [T, A, d], gate [T, A, d] or [T, A, 1] (one for all of d), of one float
    dtype; the first two axes of gate are at any stride. The sigmoid is rounded, then the product."""
    expect("out", out, (-1, -1, -1), *FLOATS)
    tokens, heads, dim = out.shape
    expect("gate", gate, (tokens, heads, -1), out.dtype, dense=False)
    require(gate.shape[2] in (1, dim), f"gate has {gate.shape[2]} columns a head; it must have 1 or {dim}")
    require(gate.shape[2] == 1 or gate.strides[2] == 1, "the columns of gate must be next to each other")


def _reference(*, out: Array, gate: Array) -> None:
    out[:] = f32(out) * rounded(sigmoid(f32(gate)), out.dtype)


def _launches(target: Target, *, out: Tensor, gate: Tensor) -> Iterator[Command]:
    (tokens, heads, dim), block = out.shape, 1024
    yield launch(
        "openinfer.recipes.qwen3_5.device.gate",
        "sigmoid_gate",
        (tokens, -(-heads * dim // block)),
        {
            "out": out,
            "gate": gate,
            "width": aligned(heads * dim),
            "token_stride": aligned(gate.strides[0]),
            "head_stride": aligned(gate.strides[1]),
        },
        {"DIM": dim, "GATES": gate.shape[2], "BLOCK": block},
    )


def _cost(workload: Workload, *, out: Tensor, gate: Tensor) -> Cost:
    heads, dim = out.shape[1:]
    numbers = workload.tokens * heads * (2 * dim + gate.shape[2])
    return Cost(numbers * out.itemsize, workload.tokens * heads * dim)


sigmoid_gate = Op("sigmoid_gate", _contract, reference=_reference, launches=_launches, cost=_cost)
