"""add_lora: the low-rank products of adapters (LoRA), each token's by its own adapter."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic

import numpy as np

from openinfer.kernels.errors import ContractError
from openinfer.kernels.lora.launches import low_rank_product
from openinfer.kernels.lora.low_rank import Lora, expect_lora, lora_numbers, lora_sums
from openinfer.kernels.norms import Norm
from openinfer.kernels.op.cases import Memory, OpCase
from openinfer.kernels.op.contract import FLOATS, expect, expect_columns, expect_norm
from openinfer.kernels.op.launch import Command
from openinfer.kernels.op.op import Cost, Op, T, Workload
from openinfer.kernels.op.reference import Array, f32, normed
from openinfer.kernels.op.target import Target
from openinfer.tensor import Tensor, bfloat16


@dataclass(frozen=True, kw_only=True, slots=True)
class _Args(Generic[T]):
    """out += what the adapters `lora` (low_rank.Lora) add to a product of x or, with norm_weight, of rms_norm(x;
    norm_weight, eps).

    x [T, K], K a multiple of 16; out [T, N], rows at any stride; all of one float dtype, norm_weight also float32.
    `add` false: out is set, to zeros for tokens without an adapter.
    """

    out: T
    x: T
    lora: Lora[T]
    add: bool
    norm_weight: T | None = None
    eps: float | None = None


def _check(a: _Args[Tensor]) -> None:
    expect("x", a.x, (-1, -1), *FLOATS)
    columns = sum(a.lora.parts)
    expect_lora(a.x, columns, a.lora)
    expect_columns("out", a.out, (a.x.shape[0], columns), a.x.dtype)
    expect_norm(a.norm_weight, a.eps, a.x.shape[1], a.x.dtype)


def _reference(a: _Args[Array]) -> None:
    sums = lora_sums(normed(a.x, a.norm_weight, a.eps), a.lora)
    a.out[:] = f32(a.out) + sums if a.add else sums


def _launches(target: Target, a: _Args[Tensor]) -> Iterator[Command]:
    if a.x.dtype != bfloat16:
        raise ContractError(f"x is {a.x.dtype.name}; adapters on a GPU are bfloat16 (float32: the cpu pack)")
    yield from low_rank_product(target, a.out, a.x, Norm.of(a.norm_weight, a.eps), a.lora, add=a.add)


def _cost(workload: Workload, a: _Args[Tensor]) -> Cost:
    """The floor if all tokens have one adapter."""
    tokens, one = workload.tokens, lora_numbers(a.lora)
    activations = tokens * (a.x.shape[1] + (2 if a.add else 1) * a.out.shape[1])
    return Cost((one + activations) * a.x.itemsize, 2 * tokens * one)


add_lora = Op("add_lora", _Args[Tensor], _check, _reference, _launches, _cost)


def cases(memory: Memory) -> Iterator[OpCase]:
    """The qkv projection of Qwen3-8B with four adapters of rank 16, of which two are in use."""
    parts, columns, rank = (4096, 1024, 1024), 4096, 16
    a = memory.normal(4, 3 * rank, columns, scale=columns**-0.5)
    b = memory.normal(4, sum(parts), rank, scale=0.1)
    for tokens in (1, 32, 256, 2048):
        slots = np.arange(tokens)
        out, x = memory.normal(tokens, sum(parts)), memory.normal(tokens, columns)
        lora = Lora(a, b, parts, memory.ints(1 + slots % 2), memory.ints(slots))
        args = {"out": out, "x": x, "lora": lora, "add": True}
        workload = Workload(tokens, tokens, 0, 0)
        yield OpCase(f"{tokens} tokens", add_lora, memory.copies(args, "lora"), workload)
