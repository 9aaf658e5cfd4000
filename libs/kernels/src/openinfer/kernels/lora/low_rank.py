"""The arguments by which an op's product has adapters (LoRA), and what they add to it in numpy."""

from dataclasses import dataclass
from typing import Generic

import numpy as np

from openinfer.kernels.op.contract import expect, expect_columns, require
from openinfer.kernels.op.op import T
from openinfer.kernels.op.reference import Array, matmul_nt, rounded
from openinfer.tensor import Tensor, int32

MOST_PARTS = 4


@dataclass(frozen=True, slots=True)
class Lora(Generic[T]):
    """The adapters of a call: (h @ A^T) @ B^T by projection is added to h @ weight^T.

    Token t has the adapter adapters[token_slots[t]]; 0 adds nothing. Adapter n has A in a[n - 1] and B in b[n - 1].
    h @ A^T is rounded, as published. A scale is a factor of B.
    """

    a: T
    """[places, P R, K] at any stride of the first axis: projection p has rows p R and up. The rank R is a power of two
    from 16 on; smaller adapters are padded with zeros."""
    b: T
    """[places, N, R] at any stride of the first axis."""
    parts: tuple[int, ...]
    """The columns of the product of P projections that lie side by side, at most 4. Their sum is N. The product may
    have more columns after them."""
    adapters: T
    """int32 [S]"""
    token_slots: T
    """int32 [T]"""

    @property
    def sizes(self) -> dict[str, int]:
        """The parts as arguments of a kernel, which takes MOST_PARTS."""
        rest = (0,) * (MOST_PARTS - len(self.parts))
        return {f"size{n}": size for n, size in enumerate((*self.parts, *rest))}


def expect_lora(x: Tensor, columns: int, lora: Lora[Tensor] | None) -> None:
    """Raise ContractError unless the adapters fit a product of x [T, K] with that many columns."""
    if lora is None:
        return
    a, b, parts = lora.a, lora.b, lora.parts
    (tokens, width), rank = x.shape, b.shape[-1]
    expect_columns("lora.a", a, (-1, -1, width), x.dtype)
    expect_columns("lora.b", b, (a.shape[0], sum(parts), -1), x.dtype)
    require(1 <= len(parts) <= MOST_PARTS, f"{len(parts)} parts; 1 to {MOST_PARTS} are possible")
    possible = rank >= 16 and rank & (rank - 1) == 0
    require(possible, f"the rank is {rank}; it must be a power of two from 16 on")
    fits = a.shape[1] == len(parts) * rank
    require(fits, f"lora.a is {a.shape}; {len(parts)} parts of rank {rank} were given")
    require(width % 16 == 0, f"x has {width} columns; they must be a multiple of 16")
    require(sum(parts) <= columns, f"the parts have {sum(parts)} columns, and the product {columns}")
    expect("lora.adapters", lora.adapters, (-1,), int32)
    expect("lora.token_slots", lora.token_slots, (tokens,), int32)


def lora_sums(h: Array, lora: Lora[Array], tokens: slice = slice(None)) -> Array:
    """float32 [T, N]: what the adapters add to the products of h, which are those `tokens` of the step."""
    ids, rank = lora.adapters[lora.token_slots[tokens]], lora.b.shape[2]
    added = np.zeros((len(h), sum(lora.parts)), np.float32)
    for adapter in np.unique(ids[ids > 0]):
        rows = np.flatnonzero(ids == adapter)
        low, start = rounded(matmul_nt(h[rows], lora.a[adapter - 1]), h.dtype), 0
        for part, size in enumerate(lora.parts):
            up = lora.b[adapter - 1, start : start + size]
            added[rows, start : start + size] = matmul_nt(low[:, part * rank : (part + 1) * rank], up)
            start += size
    return added


def lora_numbers(lora: Lora[Tensor] | None) -> int:
    """Numbers of one adapter's matrices."""
    return 0 if lora is None else lora.a[0].numel + lora.b[0].numel
