"""experts: a mixture of clamped gated MLPs with FP4 or FP8 weights, and the shared expert's output on top."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from openinfer.kernels import moe
from openinfer.kernels.formats.fp8 import Mx
from openinfer.kernels.formats.linear import Linear, Plain, expect_linear, linear_of
from openinfer.kernels.linear.problem import expect_q8
from openinfer.kernels.moe.packed import (
    ExpertsArgs,
    PackedExperts,
    PackedExpertTile,
    kind_of,
    packed_expert_tile,
)
from openinfer.kernels.moe.ring import fp4_ring
from openinfer.kernels.op.cases import Commands, Memory, OpCase
from openinfer.kernels.op.coded import decoded, expect_values
from openinfer.kernels.op.contract import FLOATS, expect, require
from openinfer.kernels.op.launch import Command
from openinfer.kernels.op.op import Cost, Op, Workload
from openinfer.kernels.op.reference import Array, f32, matmul_nt, rounded
from openinfer.kernels.op.rounding import SCALE_BLOCK, q8
from openinfer.kernels.op.target import Target
from openinfer.kernels.ops.project import clamped_product
from openinfer.tensor import Tensor, bfloat16, float32, int32


def _check(a: ExpertsArgs[Tensor]) -> None:
    expect_values("x", a.x, (-1, -1), *FLOATS)
    tokens, width = a.x.shape
    expect("out", a.out, a.x.shape, a.x.dtype)
    expect("shared", a.shared, a.x.shape, a.x.dtype)
    expect("expert_ids", a.expert_ids, (tokens, -1), int32)
    expect("expert_weights", a.expert_weights, a.expert_ids.shape, float32)
    require(len(a.gate_up.shape) == 3, f"gate_up has shape {a.gate_up.shape}; it must be [experts, any, any]")
    count, inter = a.gate_up.shape[0], a.gate_up.shape[1] // 2
    first, second = linear_of(a.gate_up), linear_of(a.down)
    expect_linear("gate_up", first, (count, 2 * inter, width), a.x.dtype, Plain, Mx, parts=2)
    expect_linear("down", second, (count, width, inter), a.x.dtype, Plain, Mx)
    alike = first.weight.dtype == second.weight.dtype
    require(alike, f"gate_up is {first.form} and down {second.form}; both must be one")
    whole = width % SCALE_BLOCK == 0 and inter % SCALE_BLOCK == 0
    require(whole, f"experts are {width} to {inter}; both must be multiples of {SCALE_BLOCK}")
    require(a.limit > 0, f"limit is {a.limit}; it must be positive")


def _reference(a: ExpertsArgs[Array]) -> None:
    x, dtype = decoded(a.x), a.x.dtype

    def mlp(expert: int, token: Array, choice: Array) -> Array:
        halves = linear_of(a.gate_up)[expert].halves()
        gate, up = (rounded(matmul_nt(x[token], half), dtype) for half in halves)
        hidden = clamped_product(gate, up, a.limit) * a.expert_weights[token, choice][:, None]
        hidden = rounded(hidden, dtype)
        if a.quantized:
            hidden = q8(hidden, SCALE_BLOCK)
        second = linear_of(a.down)[expert].values()
        return rounded(matmul_nt(hidden, second), dtype)

    results = moe.results(a.expert_ids, a.x.shape[1], mlp)
    # One choice after the other: the sum must not depend on what numpy does with the other tokens.
    total = results[:, 0].copy()
    for j in range(1, a.expert_ids.shape[1]):
        total += results[:, j]
    a.out[:] = total + f32(a.shared)


def _launches(target: Target, a: ExpertsArgs[Tensor]) -> Iterator[Command]:
    require(a.x.dtype == bfloat16, f"x is {a.x.dtype.name}; on a GPU it is bfloat16 (float32: the cpu pack)")
    expect_q8(target, a.quantized)
    yield from fp4_ring(target, a) or PackedExperts.of(target, _tile(target, a), a).launches()


def _tile(target: Target, a: ExpertsArgs[Tensor]) -> PackedExpertTile:
    kind = kind_of(linear_of(a.gate_up))
    return packed_expert_tile(target, a.expert_ids.numel, a.gate_up.shape[0], kind, a.quantized)


def _cost(workload: Workload, a: ExpertsArgs[Tensor]) -> Cost:
    count, width = a.gate_up.shape[0], a.x.shape[1]
    inter, tokens, chosen = a.gate_up.shape[1] // 2, workload.tokens, a.expert_ids.shape[1]
    every = a.all_experts or count
    weights = moe.weight_bytes(tokens, chosen, every, a.gate_up, a.down)
    activations = tokens * (a.x.nbytes // a.x.shape[0] + 2 * width * a.out.itemsize + chosen * 8)
    return Cost(weights + activations, 6 * tokens * chosen * width * inter * count // every)


experts = Op("experts", ExpertsArgs[Tensor], _check, _reference, _launches, _cost)


def cases(memory: Memory) -> Iterator[OpCase]:
    """DeepSeek-V4-Flash's layer, with FP4 and with FP8 weights and values that went through q8."""
    hidden, inter, count, chosen = 4096, 2048, 256, 6
    for fp4 in (True, False):
        weights = {}
        for name, n, k in (("gate_up", 2 * inter, hidden), ("down", hidden, inter)):
            codes = memory.codes(count, n, k // 2) if fp4 else memory.float8(count, n, k)
            shape = (count, n, k // 32) if fp4 else (count, n // 128, k // 128)
            weights[name] = Linear(codes, memory.codes(*shape, low=117, high=120))
        for tokens in (1, 8, 32, 128, 1024, 4096):
            args = {
                "out": memory.empty(tokens, hidden),
                "x": memory.coded(tokens, hidden),
                "shared": memory.normal(tokens, hidden),
                "expert_weights": memory.normal(tokens, chosen, scale=0.3, dtype=float32),
                "limit": 10.0,
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
    chosen = _tile(target, case.calls[0])
    for places in (16, 32, 64, 128):
        if places == chosen.bm:
            continue

        def commands(a: ExpertsArgs[Tensor], places: int = places) -> Iterator[Command]:
            return PackedExperts.of(target, replace(chosen, bm=places), a).launches()

        yield f"{places} places", commands
