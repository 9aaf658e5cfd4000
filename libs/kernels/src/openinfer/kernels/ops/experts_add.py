"""experts_add: a mixture of gated MLPs, each token through the experts that it was routed to."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from openinfer.kernels.formats.codes import dequantized, halves
from openinfer.kernels.formats.int4 import is_int4
from openinfer.kernels.linear.products import expect_float8
from openinfer.kernels.moe import mixture
from openinfer.kernels.moe.mixture import Pairs
from openinfer.kernels.moe.plain import PlainExperts, tile
from openinfer.kernels.norms import norm
from openinfer.kernels.op.cases import Memory, OpCase
from openinfer.kernels.op.contract import FLOATS, expect, expect_norm, expect_weight, require
from openinfer.kernels.op.launch import Command, Scratch
from openinfer.kernels.op.op import Cost, Op, Workload
from openinfer.kernels.op.reference import Array, f32, matmul_nt, normed, rounded, silu
from openinfer.kernels.op.target import Target
from openinfer.tensor import Tensor, bfloat16, float32, int32


def _contract(
    *,
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    norm_weight: Tensor | None = None,
    eps: float | None = None,
    gate_up_scales: Tensor | None = None,
    down_scales: Tensor | None = None,
    out: Tensor | None = None,
    all_experts: int | None = None,
) -> None:
    """x[t] += sum over j of expert_weights[t, j] * MLP_e(rms_norm(x[t]; norm_weight, eps)), in place, where e is
    expert_ids[t, j] and MLP_e(h) = (silu(h Wg_e^T) * (h Wu_e^T)) Wd_e^T.

    x [T, H], expert_weights [T, K] of one float dtype; norm_weight [H] of that dtype or float32 (as in norm_linear).
    expert_ids int32 [T, K], each in [-1, E): -1 is no expert, and adds nothing. gate_up [E, 2 I, H] has the gate's
    rows, then the up projection's. gate_up and down [E, H, I] are of x's dtype, or float8_e4m3fn or INT4 with scales
    (contract.expect_weight; gate_up has parts=2). The outputs of both projections are rounded, so are silu(g) and its
    product with u; the weighted sum over the experts is in float32 and rounded, and added. H and I are multiples of 16.
    How many rows an expert gets is data: an implementation sorts them on the device.

    With `out` (as x, apart from it) the sum over the experts goes there alone, and x does not change: the sum of one of
    several ranks. Without norm_weight and eps, x is normalised already, and there is an `out`. `all_experts`: how many
    all ranks have; the cost takes an even part of the choices to be for these.
    """
    expect("x", x, (-1, -1), *FLOATS)
    tokens, hidden = x.shape
    expect_norm(norm_weight, eps, hidden, x.dtype)
    require(norm_weight is not None or out is not None, "a normalised x cannot be added to; give an out")
    expect("expert_ids", expert_ids, (tokens, -1), int32)
    expect("expert_weights", expert_weights, expert_ids.shape, x.dtype)
    require(
        len(gate_up.shape) == 3, f"gate_up has shape {gate_up.shape}; it must be [experts, any, {hidden}]"
    )
    require(len(down.shape) == 3, f"down has shape {down.shape}; it must be [experts, {hidden}, any]")
    experts, inter = down.shape[0], gate_up.shape[-2] // 2
    expect_weight("gate_up", gate_up, gate_up_scales, (experts, 2 * inter, hidden), x.dtype, parts=2)
    expect_weight("down", down, down_scales, (experts, hidden, inter), x.dtype)
    require(hidden % 16 == 0 and inter % 16 == 0, f"down is {down.shape}; its sizes must be multiples of 16")
    if out is not None:
        expect("out", out, x.shape, x.dtype)


def _reference(
    *,
    x: Array,
    expert_ids: Array,
    expert_weights: Array,
    gate_up: Array,
    down: Array,
    norm_weight: Array | None = None,
    eps: float | None = None,
    gate_up_scales: Array | None = None,
    down_scales: Array | None = None,
    out: Array | None = None,
    all_experts: int | None = None,
) -> None:
    h = normed(x, norm_weight, eps)

    def mlp(expert: int, token: Array, _: Array) -> Array:
        scales = None if gate_up_scales is None else gate_up_scales[expert]
        gate, up = (rounded(matmul_nt(h[token], half), x.dtype) for half in halves(gate_up[expert], scales))
        hidden = rounded(rounded(silu(gate), x.dtype) * up, x.dtype)
        weight = dequantized(down[expert], None if down_scales is None else down_scales[expert])
        return rounded(matmul_nt(hidden, weight), x.dtype)

    results = mixture.results(expert_ids, x.shape[1], mlp)
    # One choice after the other: the sum must not depend on what numpy does with the other tokens.
    total = np.zeros(x.shape, np.float32)
    for j in range(expert_ids.shape[1]):
        total += f32(expert_weights[:, j])[:, None] * results[:, j]
    if out is None:
        x[:] = f32(x) + rounded(total, x.dtype)
    else:
        out[:] = total


def _launches(
    target: Target,
    *,
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    norm_weight: Tensor | None = None,
    eps: float | None = None,
    gate_up_scales: Tensor | None = None,
    down_scales: Tensor | None = None,
    out: Tensor | None = None,
    all_experts: int | None = None,
) -> Iterator[Command]:
    require(x.dtype == bfloat16, f"x is {x.dtype.name}; on a GPU it is bfloat16 (float32: the cpu pack)")
    if not is_int4(gate_up_scales):
        expect_float8(target, gate_up_scales or down_scales)
    hidden: Tensor | Scratch = x
    if norm_weight is not None and eps is not None:
        hidden = Scratch(x.shape, x.dtype)
        yield norm(hidden, x, norm_weight, eps)
    experts, width, inter = *down.shape[:2], gate_up.shape[1] // 2
    pairs = Pairs.of(expert_ids, experts)
    kernels = PlainExperts(
        x if out is None else out, hidden, expert_ids, expert_weights, gate_up, down, gate_up_scales, down_scales,
        adds=out is None, first=tile(target, pairs.count, experts, inter, width, first=True),
        second=tile(target, pairs.count, experts, width, inter, first=False),
        results=Scratch((pairs.count, width), x.dtype),
    )  # fmt: skip
    yield from mixture.launches(kernels, pairs)


def _cost(
    workload: Workload,
    *,
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    norm_weight: Tensor | None = None,
    eps: float | None = None,
    gate_up_scales: Tensor | None = None,
    down_scales: Tensor | None = None,
    out: Tensor | None = None,
    all_experts: int | None = None,
) -> Cost:
    experts, hidden, inter = *down.shape[:2], gate_up.shape[1] // 2
    tokens, chosen = workload.tokens, expert_ids.shape[1]
    every = all_experts or experts
    weights = mixture.weight_bytes(tokens, chosen, every, gate_up, down, gate_up_scales, down_scales)
    activations = tokens * (2 * hidden * x.itemsize + chosen * (x.itemsize + 4))
    norm_bytes = norm_weight.nbytes if norm_weight is not None else 0
    return Cost(weights + norm_bytes + activations, 6 * tokens * chosen * hidden * inter * experts // every)


experts_add = Op("experts_add", _contract, reference=_reference, launches=_launches, cost=_cost)


def cases(memory: Memory) -> Iterator[OpCase]:
    """Qwen3.5-35B-A3B's layer, in bf16 and in FP8."""
    hidden, inter, count, chosen = 2048, 512, 256, 8
    for scaled in (False, True):
        weights: dict[str, Tensor | None] = {}
        for name, n, k, blocks in (
            ("gate_up", 2 * inter, hidden, 2 * -(-inter // 128)), ("down", hidden, inter, -(-hidden // 128)),
        ):  # fmt: skip
            weights[name] = (
                memory.float8(count, n, k) if scaled else memory.normal(count, n, k, scale=k**-0.5)
            )
            shape = (count, blocks, -(-k // 128))
            weights[name + "_scales"] = memory.normal(*shape, scale=0.01, dtype=float32) if scaled else None
        for tokens in (1, 8, 32, 128, 1024, 4096):
            ids = np.stack([memory.rng.permutation(count)[:chosen] for _ in range(tokens)])
            args = {
                "x": memory.normal(tokens, hidden),
                "norm_weight": memory.normal(hidden, dtype=float32),
                "expert_ids": memory.ints(ids),
                "expert_weights": memory.normal(tokens, chosen, scale=0.1),
                "eps": 1e-6,
                **weights,
            }
            name = f"35B-A3B {'fp8' if scaled else 'bf16'}, {tokens} tokens"
            yield OpCase(name, experts_add, [args], Workload(tokens, tokens, 0, 0))
