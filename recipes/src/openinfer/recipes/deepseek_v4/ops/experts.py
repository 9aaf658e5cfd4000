"""experts: a mixture of clamped gated MLPs with FP4 or FP8 weights, and the shared expert's output on top."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from openinfer.kernels import Command, Cost, Op, Target, Workload
from openinfer.kernels.contract import FLOATS, expect, require
from openinfer.kernels.reference import Array, f32, matmul_nt, rounded
from openinfer.recipes.deepseek_v4 import mixture
from openinfer.recipes.deepseek_v4.formats import dequantized, q8
from openinfer.recipes.deepseek_v4.ops.common import SCALE_BLOCK, expect_packed
from openinfer.recipes.deepseek_v4.ops.project import clamped_product
from openinfer.tensor import Tensor, bfloat16, float32, int32


def _contract(
    *,
    out: Tensor,
    x: Tensor,
    shared: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    gate_up: Tensor,
    gate_up_scales: Tensor | None,
    down: Tensor,
    down_scales: Tensor | None,
    limit: float,
    quantized: bool,
) -> None:
    """out[t] = shared[t] + sum over j of MLP_e(x[t]) with e = expert_ids[t, j], w = expert_weights[t, j] and
    MLP_e(x) = (silu(min(g, limit)) * clamp(u, -limit, limit) * w) Wd_e^T, [g, u] = x Wgu_e^T.

    x, shared, out [T, D] of one float dtype. expert_ids int32 [T, K], each in [-1, E), no expert twice in a row but
    -1, which is no expert and adds nothing; expert_weights float32 [T, K]. gate_up [E, 2 I, D] (the gate's rows, then
    the up projection's) and down [E, D, I], both of x's dtype, or both packed FP4 or float8 (ops.common.expect_packed;
    gate_up with parts=2). g and u are rounded as outputs of a linear layer; the product, w in it, is in float32 and
    rounded, and with `quantized` goes through q8 in blocks of 128 (formats.q8), as x must have by its maker; each
    expert's output is rounded; their sum and shared are added in float32 and rounded once. D and I are multiples of
    128. How many tokens an expert gets is data: an implementation sorts them on the device.
    """
    expect("x", x, (-1, -1), *FLOATS)
    tokens, width = x.shape
    expect("out", out, x.shape, x.dtype)
    expect("shared", shared, x.shape, x.dtype)
    expect("expert_ids", expert_ids, (tokens, -1), int32)
    expect("expert_weights", expert_weights, expert_ids.shape, float32)
    require(len(gate_up.shape) == 3, f"gate_up has shape {gate_up.shape}; it must be [experts, any, any]")
    count, inter = gate_up.shape[0], gate_up.shape[1] // 2
    expect_packed("gate_up", gate_up, gate_up_scales, (count, 2 * inter, width), x.dtype, parts=2)
    expect_packed("down", down, down_scales, (count, width, inter), x.dtype)
    require(
        gate_up.dtype == down.dtype,
        f"gate_up is {gate_up.dtype.name} and down {down.dtype.name}; both must be one",
    )
    require(
        width % SCALE_BLOCK == 0 and inter % SCALE_BLOCK == 0,
        f"experts are {width} to {inter}; both must be multiples of {SCALE_BLOCK}",
    )
    require(limit > 0, f"limit is {limit}; it must be positive")


def _reference(
    *,
    out: Array,
    x: Array,
    shared: Array,
    expert_ids: Array,
    expert_weights: Array,
    gate_up: Array,
    gate_up_scales: Array | None,
    down: Array,
    down_scales: Array | None,
    limit: float,
    quantized: bool,
) -> None:
    results = np.zeros((*expert_ids.shape, x.shape[1]), np.float32)
    inter = gate_up.shape[1] // 2
    for expert in np.unique(expert_ids[expert_ids >= 0]):
        token, choice = np.nonzero(expert_ids == expert)
        first = dequantized(
            gate_up[expert], None if gate_up_scales is None else gate_up_scales[expert], parts=2
        )
        gate, up = (rounded(matmul_nt(x[token], half), x.dtype) for half in (first[:inter], first[inter:]))
        hidden = clamped_product(gate, up, limit) * expert_weights[token, choice][:, None]
        hidden = rounded(hidden, x.dtype)
        if quantized:
            hidden = q8(hidden, SCALE_BLOCK)
        second = dequantized(down[expert], None if down_scales is None else down_scales[expert])
        results[token, choice] = rounded(matmul_nt(hidden, second), x.dtype)
    # One choice after the other: the sum must not depend on what numpy does with the other tokens.
    total = results[:, 0].copy()
    for j in range(1, expert_ids.shape[1]):
        total += results[:, j]
    out[:] = total + f32(shared)


def _launches(
    target: Target, *, x: Tensor, gate_up: Tensor, expert_ids: Tensor, quantized: bool, **rest: Any
) -> Iterator[Command]:
    require(x.dtype == bfloat16, f"x is {x.dtype.name}; on a GPU it is bfloat16 (float32: the cpu pack)")
    pairs = expert_ids.shape[0] * expert_ids.shape[1]
    require(
        target.arch >= 89 or not quantized,
        f"q8 is asked for on sm_{target.arch}; float8 numbers are for sm_89 and up",
    )
    call = mixture.Call(x=x, gate_up=gate_up, expert_ids=expert_ids, quantized=quantized, **rest)
    kind = mixture.kind_of(gate_up)
    found = mixture.tile(target, pairs, gate_up.shape[0], kind, quantized)
    yield from mixture.launches(target, call, found)


def _cost(
    workload: Workload,
    *,
    x: Tensor,
    expert_ids: Tensor,
    gate_up: Tensor,
    gate_up_scales: Tensor | None,
    down: Tensor,
    down_scales: Tensor | None,
    **_: object,
) -> Cost:
    """Expert weights count once for each expert that is hit, which are so many as evenly random routing hits."""
    count, width = gate_up.shape[0], x.shape[1]
    inter, tokens, chosen = gate_up.shape[1] // 2, workload.tokens, expert_ids.shape[1]
    hit = count * (1 - (1 - min(1, chosen / count)) ** tokens)
    tensors = (gate_up, gate_up_scales, down, down_scales)
    weights = int(sum(t.nbytes for t in tensors if t is not None) * hit / count)
    activations = tokens * (3 * width * x.itemsize + chosen * 8)
    return Cost(weights + activations, 6 * tokens * chosen * width * inter)


experts = Op("experts", _contract, reference=_reference, launches=_launches, cost=_cost)
