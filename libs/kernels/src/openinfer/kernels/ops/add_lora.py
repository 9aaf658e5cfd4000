"""add_lora: the low-rank products of adapters (LoRA), each token's by its own adapter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from openinfer.kernels.benchmark import Case, Memory
from openinfer.kernels.contract import FLOATS, expect, expect_columns, require
from openinfer.kernels.errors import ContractError
from openinfer.kernels.launch import Arg, Command, Scratch, aligned, launch, power_of_two
from openinfer.kernels.op import Cost, Op, Workload
from openinfer.kernels.reference import Array, f32, matmul_nt, rms_norm, rounded
from openinfer.kernels.target import Target
from openinfer.tensor import Tensor, bfloat16, float32, int32

MOST_PARTS = 4
SPLIT = 1024
"""Columns of x that a program of the first product has. The number is fixed, so that sums do not depend on the step."""
FEW_TILE, FEW_PROGRAMS = 16, 64
"""Tokens of a program in a step of few tokens, and the most pairs of an adapter and such a tile: with more, programs
without work cost more than one adapter after the other."""
_DEVICE = "openinfer.kernels.device.lora"


def _contract(
    *,
    out: Tensor,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    parts: tuple[int, ...],
    adapters: Tensor,
    token_slots: Tensor,
    add: bool,
    norm_weight: Tensor | None = None,
    eps: float | None = None,
) -> None:
    """out += (h @ A^T) @ B^T by projection, where h is x or, with norm_weight, rms_norm(x; norm_weight, eps).

    Token t has the adapter adapters[token_slots[t]]; 0 adds nothing. adapters int32 [S], token_slots int32
    [T]. Adapter n has A in a[n - 1] and B in b[n - 1]: a [places, P R, K], b [places, N, R], both at any stride of the
    first axis. `parts`: the columns of out of P projections that lie side by side, at most 4, with the sum N.
    Projection p has rows p R .. of A and its own rows of B. The rank R is a power of two from 16 on; smaller adapters
    are padded with zeros. A scale is a factor of B.

    x [T, K], K a multiple of 16; out [T, N], rows at any stride; all of one float dtype, norm_weight also float32. h @
    A^T is rounded, as published. `add` false: out is set, to zeros for tokens without an adapter.
    """
    expect("x", x, (-1, -1), *FLOATS)
    tokens, columns = x.shape
    expect("a", a, (-1, -1, columns), x.dtype, dense=False)
    expect("b", b, (a.shape[0], sum(parts), -1), x.dtype, dense=False)
    for name, matrix in (("a[0]", a[0]), ("b[0]", b[0])):
        expect(name, matrix, matrix.shape)
    rank = b.shape[2]
    require(1 <= len(parts) <= MOST_PARTS, f"{len(parts)} parts; 1 to {MOST_PARTS} are possible")
    require(
        rank >= 16 and rank & (rank - 1) == 0, f"the rank is {rank}; it must be a power of two from 16 on"
    )
    require(a.shape[1] == len(parts) * rank, f"a is {a.shape}; {len(parts)} parts of rank {rank} were given")
    require(columns % 16 == 0, f"x has {columns} columns; they must be a multiple of 16")
    expect_columns("out", out, (tokens, sum(parts)), x.dtype)
    expect("adapters", adapters, (-1,), int32)
    expect("token_slots", token_slots, (tokens,), int32)
    if norm_weight is not None:
        expect("norm_weight", norm_weight, (columns,), x.dtype, float32)
    require((norm_weight is None) == (eps is None), "norm_weight and eps come together")


def _reference(
    *,
    out: Array,
    x: Array,
    a: Array,
    b: Array,
    parts: tuple[int, ...],
    adapters: Array,
    token_slots: Array,
    add: bool,
    norm_weight: Array | None = None,
    eps: float | None = None,
) -> None:
    if not add:
        out[:] = 0
    ids, rank = adapters[token_slots], b.shape[2]
    for adapter in np.unique(ids[ids > 0]):
        rows = np.flatnonzero(ids == adapter)
        h = x[rows] if norm_weight is None or eps is None else rms_norm(x[rows], norm_weight, eps)
        low, start = rounded(matmul_nt(h, a[adapter - 1]), x.dtype), 0
        for part, size in enumerate(parts):
            up = b[adapter - 1, start : start + size]
            product = matmul_nt(low[:, part * rank : (part + 1) * rank], up)
            out[rows, start : start + size] = f32(out[rows, start : start + size]) + product
            start += size


def _launches(
    target: Target,
    *,
    out: Tensor,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    parts: tuple[int, ...],
    adapters: Tensor,
    token_slots: Tensor,
    add: bool,
    norm_weight: Tensor | None = None,
    eps: float | None = None,
) -> Iterator[Command]:
    if x.dtype != bfloat16:
        raise ContractError(f"x is {x.dtype.name}; adapters on a GPU are bfloat16 (float32: the cpu pack)")
    (tokens, columns), (places, rows, _), rank = x.shape, a.shape, b.shape[2]
    common: dict[str, Arg] = {"adapters": adapters, "token_slots": token_slots, "tokens": tokens}
    of_a: dict[str, Arg] = {
        "x": x,
        "gain": x if norm_weight is None else norm_weight,
        "a": a,
        **common,
        "x_stride": aligned(x.strides[0]),
        "a_stride": aligned(a.strides[0]),
        "K": aligned(columns),
        "rows": aligned(rows),
    }
    of_b: dict[str, Arg] = {
        "b": b,
        **common,
        "out_stride": aligned(out.strides[0]),
        "b_stride": aligned(b.strides[0]),
        **{f"size{n}": parts[n] if n < len(parts) else 0 for n in range(MOST_PARTS)},
    }
    if not target.batch_invariant and places * -(-tokens // FEW_TILE) <= FEW_PROGRAMS:
        yield from _few(out, x, a, parts, rank, of_a, of_b, eps, add=add)
        return
    few = tokens <= 128 or target.batch_invariant
    tile, splits = 16 if few else 64, -(-columns // SPLIT)
    low = 16 if few else 64
    partial = Scratch((splits, tokens, rows), float32)
    args = {"partial": partial, **of_a, "places": places, "eps": eps or 0.0}
    constants = {"BM": tile, "BR": low, "BK": 128, "SPLIT": SPLIT, "NORM": norm_weight is not None}
    grid = (-(-tokens // tile), splits, -(-rows // low))
    yield launch(_DEVICE, "lora_shrink", grid, args, constants)
    width = 64 if few else 128
    args = {"out": out, "partial": partial, **of_b, "splits": splits, "places": places}
    constants = {"BM": tile, "BN": width, "BR": min(rank, 64), "RANK": rank, "PARTS": len(parts), "ADD": add}
    yield launch(
        _DEVICE, "lora_expand", (-(-tokens // tile), -(-max(parts) // width), len(parts)), args, constants
    )


def _few(
    out: Tensor,
    x: Tensor,
    a: Tensor,
    parts: tuple[int, ...],
    rank: int,
    of_a: Mapping[str, Arg],
    of_b: Mapping[str, Arg],
    eps: float | None,
    *,
    add: bool,
) -> Iterator[Command]:
    """The launches of a step of few tokens: programs of one adapter each. The norm's factor comes last. of_a, of_b: the
    arguments of the two products. eps: None without a norm."""
    (tokens, columns), (places, rows, _) = x.shape, a.shape
    width = 256 if columns <= 4096 else 512  # columns of a program
    tiles, splits, normed = -(-tokens // FEW_TILE), -(-columns // width), eps is not None
    partial, squares = Scratch((splits, tokens, rows), float32), Scratch((splits, tokens), float32)
    args: dict[str, Arg] = {"partial": partial, "squares": squares, **of_a, "tiles": tiles}
    constants = {"BM": FEW_TILE, "BR": 16, "BK": 256, "SPLIT": width, "NORM": normed}
    yield launch(_DEVICE, "lora_shrink_few", (places * tiles, splits, rows // 16), args, constants)
    block = 256 if max(parts) > 8192 else 128
    more: dict[str, Arg] = {"tiles": tiles, "places": places, "K": columns, "eps": eps or 0.0}
    args = {"out": out, "partial": partial, "squares": squares, **of_b, "splits": splits, **more}
    constants = {
        "BM": FEW_TILE,
        "BN": block,
        "RANK": rank,
        "SPLITS": power_of_two(splits),
        "PARTS": len(parts),
    }
    constants |= {"ADD": add, "NORM": normed}
    grid = (tiles * (places + (not add)), -(-max(parts) // block), len(parts))
    yield launch(_DEVICE, "lora_expand_few", grid, args, constants)


def _cost(
    workload: Workload,
    *,
    out: Tensor,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    parts: tuple[int, ...],
    adapters: Tensor,
    token_slots: Tensor,
    add: bool,
    norm_weight: Tensor | None = None,
    eps: float | None = None,
) -> Cost:
    """The floor if all tokens have one adapter."""
    tokens, one = workload.tokens, a[0].numel + b[0].numel
    activations = tokens * (x.shape[1] + (2 if add else 1) * out.shape[1])
    return Cost((one + activations) * x.itemsize, 2 * tokens * one)


add_lora = Op("add_lora", _contract, reference=_reference, launches=_launches, cost=_cost)


def cases(memory: Memory) -> Iterator[Case]:
    """The qkv projection of Qwen3-8B with four adapters of rank 16, of which two are in use."""
    parts, columns, rank = (4096, 1024, 1024), 4096, 16
    a = memory.normal(4, 3 * rank, columns, scale=columns**-0.5)
    b = memory.normal(4, sum(parts), rank, scale=0.1)
    for tokens in (1, 32, 256, 2048):
        slots = np.arange(tokens)
        args = {
            "out": memory.normal(tokens, sum(parts)),
            "x": memory.normal(tokens, columns),
            "a": a,
            "b": b,
            "parts": parts,
            "adapters": memory.ints(1 + slots % 2),
            "token_slots": memory.ints(slots),
            "add": True,
        }
        yield Case(
            f"{tokens} tokens", add_lora, memory.copies(args, "a", "b"), Workload(tokens, tokens, 0, 0)
        )
