"""experts_add: a mixture of gated MLPs, each token through the experts that it was routed to."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Generic

import numpy as np

from openinfer.kernels import moe
from openinfer.kernels.formats.fp8 import Fp8
from openinfer.kernels.formats.linear import EXPERTS, Linear, expect_linear, linear_of
from openinfer.kernels.linear.problem import expect_bf16, expect_float8
from openinfer.kernels.moe import Pairs
from openinfer.kernels.moe.plain import PlainExperts, expert_tile
from openinfer.kernels.norms import norm
from openinfer.kernels.op.cases import Memory, OpCase
from openinfer.kernels.op.contract import FLOATS, expect, expect_norm, require
from openinfer.kernels.op.launch import Command, Scratch
from openinfer.kernels.op.op import Cost, Op, T, Workload
from openinfer.kernels.op.reference import Array, f32, matmul_nt, normed, rounded, silu
from openinfer.kernels.op.target import Target
from openinfer.tensor import Tensor, float32, int32


@dataclass(frozen=True, kw_only=True, slots=True)
class _Args(Generic[T]):
    """x[t] += sum over j of expert_weights[t, j] * MLP_e(rms_norm(x[t]; norm_weight, eps)), in place, where e is
    expert_ids[t, j] and MLP_e(h) = (silu(h Wg_e^T) * (h Wu_e^T)) Wd_e^T.

    x [T, H], expert_weights [T, K] of one float dtype; norm_weight [H] of that dtype or float32 (as in norm_linear).
    expert_ids int32 [T, K], each in [-1, E): -1 is no expert, and adds nothing. gate_up [E, 2 I, H] has the gate's
    rows, then the up projection's. gate_up and down [E, H, I] are of x's dtype, or Linears of a format of
    formats.linear.EXPERTS (gate_up has parts=2), whose activations are not quantised. The outputs of both projections
    are rounded, so are silu(g) and its product with u; the weighted sum over the experts is in float32 and rounded, and
    added. H and I are multiples of 16.
    How many rows an expert gets is data: an implementation sorts them on the device.

    With `out` (as x, apart from it) the sum over the experts goes there alone, and x does not change: the sum of one of
    several ranks. `adds`: it is added onto `out`, which is the residual stream then. Without norm_weight and eps, x is
    normalised already, and there is an `out`. `all_experts`: how many all ranks have; the cost takes an even part of
    the choices to be for these.
    """

    x: T
    expert_ids: T
    expert_weights: T
    gate_up: Linear[T] | T
    down: Linear[T] | T
    norm_weight: T | None = None
    eps: float | None = None
    out: T | None = None
    adds: bool = False
    all_experts: int | None = None

    @property
    def kernels_for(self) -> str:
        """See Call.kind."""
        packed = linear_of(self.gate_up).packed
        return f"{packed} experts" if packed else ""

    @property
    def rows_each(self: "_Args[Tensor]") -> float:
        """Rows of an expert, where routing is even."""
        tokens, chosen = self.expert_ids.shape
        return tokens * chosen / (self.all_experts or self.down.shape[0])


def _weights(a: _Args[T]) -> tuple[Linear[T], Linear[T]]:
    return linear_of(a.gate_up), linear_of(a.down)


def _check(a: _Args[Tensor]) -> None:
    expect("x", a.x, (-1, -1), *FLOATS)
    tokens, hidden = a.x.shape
    expect_norm(a.norm_weight, a.eps, hidden, a.x.dtype)
    require(a.norm_weight is not None or a.out is not None, "a normalised x cannot be added to; give an out")
    expect("expert_ids", a.expert_ids, (tokens, -1), int32)
    expect("expert_weights", a.expert_weights, a.expert_ids.shape, a.x.dtype)
    stacked = len(a.gate_up.shape) == 3
    require(stacked, f"gate_up has shape {a.gate_up.shape}; it must be [experts, any, {hidden}]")
    require(len(a.down.shape) == 3, f"down has shape {a.down.shape}; it must be [experts, {hidden}, any]")
    experts, inter = a.down.shape[0], a.gate_up.shape[-2] // 2
    first, second, forms = *_weights(a), EXPERTS
    expect_linear("gate_up", first, (experts, 2 * inter, hidden), a.x.dtype, *forms, parts=2)
    expect_linear("down", second, (experts, hidden, inter), a.x.dtype, *forms)
    even = hidden % 16 == 0 and inter % 16 == 0
    require(even, f"down is {a.down.shape}; its sizes must be multiples of 16")
    require(a.out is not None or not a.adds, "adds is True, but there is no out to add to; give one")
    if a.out is not None:
        expect("out", a.out, a.x.shape, a.x.dtype)


def _reference(a: _Args[Array]) -> None:
    h, (first, second) = normed(a.x, a.norm_weight, a.eps), _weights(a)

    def mlp(expert: int, token: Array, _: Array) -> Array:
        gate, up = (rounded(matmul_nt(h[token], half), a.x.dtype) for half in first[expert].halves())
        hidden = rounded(rounded(silu(gate), a.x.dtype) * up, a.x.dtype)
        return rounded(matmul_nt(hidden, second[expert].values()), a.x.dtype)

    results = moe.results(a.expert_ids, a.x.shape[1], mlp)
    # One choice after the other: the sum must not depend on what numpy does with the other tokens.
    total = np.zeros(a.x.shape, np.float32)
    for j in range(a.expert_ids.shape[1]):
        total += f32(a.expert_weights[:, j])[:, None] * results[:, j]
    if a.out is not None and not a.adds:
        a.out[:] = total
    else:
        onto = a.x if a.out is None else a.out
        onto[:] = f32(onto) + rounded(total, a.x.dtype)


def _launches(target: Target, a: _Args[Tensor]) -> Iterator[Command]:
    expect_bf16(a.x)
    if any(isinstance(one.form, Fp8) for one in _weights(a)):
        expect_float8(target)
    hidden: Tensor | Scratch = a.x
    if a.norm_weight is not None and a.eps is not None:
        hidden = Scratch(a.x.shape, a.x.dtype)
        yield norm(hidden, a.x, a.norm_weight, a.eps, early=target.starts_early)
    experts, width = a.down.shape[:2]
    pairs = Pairs.of(target, a.expert_ids, experts)
    tile, weights = partial(expert_tile, target, pairs.count), _weights(a)
    kernels = PlainExperts(
        target, a.x if a.out is None else a.out, hidden, a.expert_ids, a.expert_weights, *weights,
        adds=a.adds or a.out is None, first=tile(weights[0], first=True), second=tile(weights[1], first=False),
        results=Scratch((pairs.count, width), a.x.dtype),
    )  # fmt: skip
    yield from kernels.launches(pairs)


def _cost(workload: Workload, a: _Args[Tensor]) -> Cost:
    experts, hidden, inter = *a.down.shape[:2], a.gate_up.shape[1] // 2
    tokens, chosen = workload.tokens, a.expert_ids.shape[1]
    every = a.all_experts or experts
    weights = moe.weight_bytes(tokens, chosen, every, a.gate_up, a.down)
    activations = tokens * (2 * hidden * a.x.itemsize + chosen * (a.x.itemsize + 4))
    norm_bytes = a.norm_weight.nbytes if a.norm_weight is not None else 0
    return Cost(weights + norm_bytes + activations, 6 * tokens * chosen * hidden * inter * experts // every)


experts_add = Op("experts_add", _Args[Tensor], _check, _reference, _launches, _cost, writes=("x", "out"))


def cases(memory: Memory) -> Iterator[OpCase]:
    """Qwen3.5-35B-A3B's layer, in bf16 and in FP8."""
    hidden, inter, count, chosen = 2048, 512, 256, 8
    for scaled in (False, True):
        weights: dict[str, Linear[Tensor]] = {}
        for name, n, k, blocks in (
            ("gate_up", 2 * inter, hidden, 2 * -(-inter // 128)), ("down", hidden, inter, -(-hidden // 128)),
        ):  # fmt: skip
            if scaled:
                scales = memory.normal(count, blocks, -(-k // 128), scale=0.01, dtype=float32)
                weights[name] = Linear(memory.float8(count, n, k), scales)
            else:
                weights[name] = Linear(memory.normal(count, n, k, scale=k**-0.5))
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
