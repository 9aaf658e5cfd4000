"""gate_up_silu: RMS norm into the two halves of a gated MLP, and their product."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Generic

import numpy as np

from openinfer.kernels.formats.fp8 import Fp8
from openinfer.kernels.formats.int4 import Int4Groups
from openinfer.kernels.formats.linear import Linear, Plain, expect_linear
from openinfer.kernels.linear import kernels as linear
from openinfer.kernels.linear.problem import Problem
from openinfer.kernels.lora.low_rank import expect_lora, lora_numbers, lora_of, lora_sums
from openinfer.kernels.norms import Norm
from openinfer.kernels.op.contract import FLOATS, expect, expect_norm, require
from openinfer.kernels.op.launch import Command
from openinfer.kernels.op.op import Cost, Op, T, Workload
from openinfer.kernels.op.reference import Array, matmul_nt, normed, rounded, silu
from openinfer.kernels.op.rounding import SCALE_BLOCK, Coding, coded
from openinfer.kernels.op.target import Target
from openinfer.tensor import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class _Args(Generic[T]):
    """out = silu(g) * u with [g, u] = rms_norm(x; norm_weight, eps) @ weight^T.

    x [T, H], norm_weight [H], weight [2 I, H] (the gate's rows, then the up projection's), out [T, I], of one float
    dtype; norm_weight may also be float32 (as in norm_linear). g and u are rounded as outputs of a linear layer,
    silu(g) is rounded, and the product is rounded. H and I are multiples of 16. With `scales` the weight is
    float8_e4m3fn, each half with blocks of its own (formats.linear, parts=2), or INT4. coding and
    x_scale: how the normalised x is quantised, as in norm_linear. Without norm_weight and eps, x is normalised already.

    lora: adapters of the product of the normalised x, before it is quantised, two parts (low_rank.Lora). With scales of
    blocks, I is then a multiple of 128.
    """

    out: T
    x: T
    weight: T
    norm_weight: T | None = None
    eps: float | None = None
    scales: T | None = None
    coding: Coding | None = None
    x_scale: T | None = None
    lora_a: T | None = None
    lora_b: T | None = None
    lora_parts: tuple[int, ...] | None = None
    adapters: T | None = None
    token_slots: T | None = None


def _linear(a: _Args[T]) -> Linear[Any]:
    return Linear(a.weight, a.scales, a.coding, a.x_scale)


def _check(a: _Args[Tensor]) -> None:
    lora = lora_of(a)
    expect("x", a.x, (-1, -1), *FLOATS)
    tokens, hidden = a.x.shape
    expect_norm(a.norm_weight, a.eps, hidden, a.x.dtype)
    expect("out", a.out, (tokens, -1), a.x.dtype)
    shape, forms = (2 * a.out.shape[1], hidden), (Plain, Fp8, Int4Groups)
    expect_linear("weight", _linear(a), shape, a.x.dtype, *forms, parts=2)
    require(
        hidden % 16 == 0 and a.out.shape[1] % 16 == 0,
        f"weight is {a.weight.shape}; sizes must be multiples of 16",
    )
    expect_lora(a.x, a.weight.shape[0], **lora)
    if lora:
        require(
            lora["lora_parts"] == a.out.shape[1:] * 2, f"two parts of {a.out.shape[1]} columns are possible"
        )
        require(
            _linear(a).form != Fp8(by_row=False) or a.out.shape[1] % SCALE_BLOCK == 0,
            f"weight is {a.weight.shape} in float8; adapters are possible where each half is of whole blocks",
        )


def _reference(a: _Args[Array]) -> None:
    lora = lora_of(a)
    h = normed(a.x, a.norm_weight, a.eps)
    both = [matmul_nt(coded(h, a.coding, a.x_scale), half) for half in _linear(a).halves()]
    if lora:
        sums = np.split(lora_sums(h, **lora), 2, axis=1)
        both = [half + more for half, more in zip(both, sums, strict=True)]
    gate, up = (rounded(half, a.x.dtype) for half in both)
    a.out[:] = rounded(silu(gate), a.x.dtype) * up


def _launches(target: Target, a: _Args[Tensor]) -> Iterator[Command]:
    lora = lora_of(a)
    norm, adapter = Norm.of(a.norm_weight, a.eps), lora or None
    yield from linear.launches(
        Problem(target, "gate_up_silu", a.out, a.x, _linear(a), "gated", norm, adapter)
    )


def _cost(workload: Workload, a: _Args[Tensor]) -> Cost:
    lora = lora_of(a)
    n, h = a.weight.shape[0], a.x.shape[1]
    tokens = workload.tokens
    weights = sum(t.nbytes for t in (a.weight, a.norm_weight, a.scales) if t is not None)
    weights += lora_numbers(**lora) * a.x.itemsize
    numbers = n * h + lora_numbers(**lora)
    return Cost(weights + tokens * (h + n // 2) * a.x.itemsize, 2 * tokens * numbers)


gate_up_silu = Op(
    "gate_up_silu", _Args[Tensor], check=_check, reference=_reference, launches=_launches, cost=_cost
)
