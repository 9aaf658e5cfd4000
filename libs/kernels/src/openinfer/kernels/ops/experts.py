"""experts: a mixture of clamped gated MLPs with FP4 or FP8 weights, and the shared expert's output on top."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from openinfer.kernels.formats.codes import SCALE_BLOCK, dequantized, halves, q8
from openinfer.kernels.moe import mixture
from openinfer.kernels.moe.mixture import Pairs
from openinfer.kernels.moe.packed import PackedExperts, kind_of, tile
from openinfer.kernels.op.cases import Commands, Memory, OpCase
from openinfer.kernels.op.contract import FLOATS, expect, expect_packed, require
from openinfer.kernels.op.launch import Command
from openinfer.kernels.op.op import Cost, Op, Workload
from openinfer.kernels.op.reference import Array, f32, matmul_nt, rounded
from openinfer.kernels.op.target import Target
from openinfer.kernels.ops.project import clamped_product
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
    all_experts: int | None = None,
) -> None:
    """out[t] = shared[t] + sum over j of MLP_e(x[t]), with e = expert_ids[t, j] and w = expert_weights[t, j].

        MLP_e(x) = (silu(min(g, limit)) * clamp(u, -limit, limit) * w) Wd_e^T, [g, u] = x Wgu_e^T

    x, shared, out [T, D] of one float dtype. expert_ids int32 [T, K], each in [-1, E), no expert twice in a row but
    -1, which is no expert and adds nothing; expert_weights float32 [T, K]. gate_up is [E, 2 I, D]: the gate's rows,
    then the up projection's. down is [E, D, I]. Both are of x's dtype, or both packed FP4 or float8
    (contract.expect_packed; gate_up with parts=2). D and I are multiples of 128.

    g and u are rounded as outputs of a linear layer. The product, with w in it, is in float32 and rounded. With
    `quantized` it then goes through q8 in blocks of 128 (formats.q8); the caller must have done the same to x. Each
    expert's output is rounded. Their sum and shared are added in float32 and rounded once.

    The number of tokens of an expert is data: an implementation sorts them on the device. `all_experts`: how many all
    ranks have, where these are one rank's; the cost takes an even part of the choices to be for these.
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
    all_experts: int | None = None,
) -> None:
    def mlp(expert: int, token: Array, choice: Array) -> Array:
        scales = None if gate_up_scales is None else gate_up_scales[expert]
        gate, up = (rounded(matmul_nt(x[token], half), x.dtype) for half in halves(gate_up[expert], scales))
        hidden = clamped_product(gate, up, limit) * expert_weights[token, choice][:, None]
        hidden = rounded(hidden, x.dtype)
        if quantized:
            hidden = q8(hidden, SCALE_BLOCK)
        second = dequantized(down[expert], None if down_scales is None else down_scales[expert])
        return rounded(matmul_nt(hidden, second), x.dtype)

    results = mixture.results(expert_ids, x.shape[1], mlp)
    # One choice after the other: the sum must not depend on what numpy does with the other tokens.
    total = results[:, 0].copy()
    for j in range(1, expert_ids.shape[1]):
        total += results[:, j]
    out[:] = total + f32(shared)


def _launches(
    target: Target,
    *,
    x: Tensor,
    gate_up: Tensor,
    expert_ids: Tensor,
    quantized: bool,
    all_experts: int | None = None,
    **rest: Any,
) -> Iterator[Command]:
    require(x.dtype == bfloat16, f"x is {x.dtype.name}; on a GPU it is bfloat16 (float32: the cpu pack)")
    pairs = expert_ids.shape[0] * expert_ids.shape[1]
    require(
        target.arch >= 89 or not quantized,
        f"q8 is asked for on sm_{target.arch}; float8 numbers are for sm_89 and up",
    )
    count = gate_up.shape[0]
    found = tile(target, pairs, count, kind_of(gate_up), quantized)
    kernels = PackedExperts.of(
        target, found, x=x, gate_up=gate_up, expert_ids=expert_ids, quantized=quantized, **rest
    )
    yield from mixture.launches(kernels, Pairs.of(expert_ids, count))


def _cost(
    workload: Workload,
    *,
    x: Tensor,
    expert_ids: Tensor,
    gate_up: Tensor,
    gate_up_scales: Tensor | None,
    down: Tensor,
    down_scales: Tensor | None,
    all_experts: int | None = None,
    **_: object,
) -> Cost:
    count, width = gate_up.shape[0], x.shape[1]
    inter, tokens, chosen = gate_up.shape[1] // 2, workload.tokens, expert_ids.shape[1]
    every = all_experts or count
    weights = mixture.weight_bytes(tokens, chosen, every, gate_up, gate_up_scales, down, down_scales)
    activations = tokens * (3 * width * x.itemsize + chosen * 8)
    return Cost(weights + activations, 6 * tokens * chosen * width * inter * count // every)


experts = Op("experts", _contract, reference=_reference, launches=_launches, cost=_cost)


def cases(memory: Memory) -> Iterator[OpCase]:
    """DeepSeek-V4-Flash's layer, with FP4 and with FP8 weights and values that went through q8."""
    hidden, inter, count, chosen = 4096, 2048, 256, 6
    for fp4 in (True, False):
        weights = {}
        for name, n, k in (("gate_up", 2 * inter, hidden), ("down", hidden, inter)):
            weights[name] = memory.codes(count, n, k // 2) if fp4 else memory.float8(count, n, k)
            shape = (count, n, k // 32) if fp4 else (count, n // 128, k // 128)
            weights[name + "_scales"] = memory.codes(*shape, low=117, high=120)
        for tokens in (1, 8, 32, 128, 1024, 4096):
            args = {
                "out": memory.empty(tokens, hidden),
                "x": memory.rounded(tokens, hidden),
                "shared": memory.normal(tokens, hidden),
                "expert_weights": memory.normal(tokens, chosen, scale=0.3, dtype=float32),
                "limit": 10.0,
                "quantized": True,
                **weights,
            }
            order = memory.rng.permutation(count)
            copies = []
            for copy in range(12 if tokens < 16 else 2):  # other experts in every copy
                rows = [np.roll(order, (copy * tokens + token) * chosen)[:chosen] for token in range(tokens)]
                copies.append({**args, "expert_ids": memory.ints(np.stack(rows))})
            name = f"V4-Flash {'fp4' if fp4 else 'fp8'}, {tokens} tokens"
            yield OpCase(name, experts, copies, Workload(tokens, tokens, 0, 0))


def variants(target: Target, case: OpCase) -> Iterator[tuple[str, Commands]]:
    """Other tiles of the same products."""
    first = case.args[0]
    count, pairs = first["gate_up"].shape[0], first["expert_ids"].numel
    kind = kind_of(first["gate_up"])
    chosen = tile(target, pairs, count, kind, first["quantized"])
    for places in (16, 32, 64, 128):
        if places == chosen.bm:
            continue

        def commands(args: Mapping[str, Any], places: int = places) -> Iterator[Command]:
            kernels = PackedExperts.of(target, replace(chosen, bm=places), **args)
            return mixture.launches(kernels, Pairs.of(args["expert_ids"], count))

        yield f"{places} places", commands
