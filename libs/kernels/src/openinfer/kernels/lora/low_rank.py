"""The arguments by which an op's product has adapters (LoRA), and what they add to it in numpy."""

from __future__ import annotations

from typing import Any, TypedDict, Unpack

import numpy as np

from openinfer.kernels.op.contract import expect, require
from openinfer.kernels.op.reference import Array, matmul_nt, rounded
from openinfer.tensor import Tensor, int32

MOST_PARTS = 4


class Lora(TypedDict, total=False):
    """The adapters of a call, all of these or none: (h @ A^T) @ B^T by projection is added to h @ weight^T.

    Token t has the adapter adapters[token_slots[t]]; 0 adds nothing. Adapter n has A in lora_a[n - 1] and B in
    lora_b[n - 1]. h @ A^T is rounded, as published. A scale is a factor of B.
    """

    lora_a: Tensor
    """[places, P R, K] at any stride of the first axis: projection p has rows p R and up. The rank R is a power of two
    from 16 on; smaller adapters are padded with zeros."""
    lora_b: Tensor
    """[places, N, R] at any stride of the first axis."""
    lora_parts: tuple[int, ...]
    """The columns of the product of P projections that lie side by side, at most 4. Their sum is N. The product may
    have more columns after them."""
    adapters: Tensor
    """int32 [S]"""
    token_slots: Tensor
    """int32 [T]"""


def lora_of(args: Any) -> Any:
    """The adapters of a call as a Lora, of tensors or of arrays, as far as they are given."""
    found = {name: getattr(args, name) for name in Lora.__annotations__}
    return {name: value for name, value in found.items() if value is not None}


def expect_lora(x: Tensor, columns: int, **lora: Unpack[Lora]) -> None:
    """Raise ContractError unless `lora` is empty or fits a product of x [T, K] with that many columns."""
    if not lora:
        return
    require(
        lora.keys() == Lora.__annotations__.keys(),
        f"{', '.join(lora)} are given; adapters are {', '.join(Lora.__annotations__)}",
    )
    a, b, parts = lora["lora_a"], lora["lora_b"], lora["lora_parts"]
    (tokens, width), rank = x.shape, b.shape[-1]
    expect("lora_a", a, (-1, -1, width), x.dtype, dense=False)
    expect("lora_b", b, (a.shape[0], sum(parts), -1), x.dtype, dense=False)
    for name, matrix in (("lora_a[0]", a[0]), ("lora_b[0]", b[0])):
        expect(name, matrix, matrix.shape)
    require(1 <= len(parts) <= MOST_PARTS, f"{len(parts)} parts; 1 to {MOST_PARTS} are possible")
    require(
        rank >= 16 and rank & (rank - 1) == 0, f"the rank is {rank}; it must be a power of two from 16 on"
    )
    require(
        a.shape[1] == len(parts) * rank, f"lora_a is {a.shape}; {len(parts)} parts of rank {rank} were given"
    )
    require(width % 16 == 0, f"x has {width} columns; they must be a multiple of 16")
    require(sum(parts) <= columns, f"the parts have {sum(parts)} columns, and the product {columns}")
    expect("adapters", lora["adapters"], (-1,), int32)
    expect("token_slots", lora["token_slots"], (tokens,), int32)


def lora_sums(
    h: Array,
    *,
    lora_a: Array,
    lora_b: Array,
    lora_parts: tuple[int, ...],
    adapters: Array,
    token_slots: Array,
) -> Array:
    """float32 [T, N]: what the adapters add to the products of h."""
    ids, rank = adapters[token_slots], lora_b.shape[2]
    added = np.zeros((len(h), sum(lora_parts)), np.float32)
    for adapter in np.unique(ids[ids > 0]):
        rows = np.flatnonzero(ids == adapter)
        low, start = rounded(matmul_nt(h[rows], lora_a[adapter - 1]), h.dtype), 0
        for part, size in enumerate(lora_parts):
            up = lora_b[adapter - 1, start : start + size]
            added[rows, start : start + size] = matmul_nt(low[:, part * rank : (part + 1) * rank], up)
            start += size
    return added


def lora_numbers(**lora: Unpack[Lora]) -> int:
    """Numbers of one adapter's matrices."""
    return lora["lora_a"][0].numel + lora["lora_b"][0].numel if lora else 0
