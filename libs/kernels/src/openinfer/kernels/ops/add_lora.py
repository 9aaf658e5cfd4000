"""add_lora: the low-rank products of adapters (LoRA), each token's by its own adapter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Unpack

import numpy as np

from openinfer.kernels.benchmark import Case, Memory
from openinfer.kernels.contract import FLOATS, expect, expect_columns, expect_norm, require
from openinfer.kernels.errors import ContractError
from openinfer.kernels.launch import Arg, Command, Scratch, aligned, launch, power_of_two
from openinfer.kernels.low_rank import MOST_PARTS, Lora, expect_lora, lora_numbers, lora_sums
from openinfer.kernels.op import Cost, Op, Workload
from openinfer.kernels.reference import Array, f32, normed
from openinfer.kernels.target import Target
from openinfer.tensor import Tensor, bfloat16, float32

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
    add: bool,
    norm_weight: Tensor | None = None,
    eps: float | None = None,
    **lora: Unpack[Lora],
) -> None:
    """out += what the adapters `lora` (low_rank.Lora) add to a product of x or, with norm_weight, of rms_norm(x;
    norm_weight, eps).

    x [T, K], K a multiple of 16; out [T, N], rows at any stride; all of one float dtype, norm_weight also float32.
    `add` false: out is set, to zeros for tokens without an adapter.
    """
    expect("x", x, (-1, -1), *FLOATS)
    require(bool(lora), "no adapters are given")
    columns = sum(lora["lora_parts"])
    expect_lora(x, columns, **lora)
    expect_columns("out", out, (x.shape[0], columns), x.dtype)
    expect_norm(norm_weight, eps, x.shape[1], x.dtype)


def _reference(
    *,
    out: Array,
    x: Array,
    add: bool,
    norm_weight: Array | None = None,
    eps: float | None = None,
    **lora: Any,
) -> None:
    sums = lora_sums(normed(x, norm_weight, eps), **lora)
    out[:] = f32(out) + sums if add else sums


def _launches(
    target: Target,
    *,
    out: Tensor | Scratch,
    x: Tensor,
    add: bool,
    norm_weight: Tensor | None = None,
    eps: float | None = None,
    **lora: Unpack[Lora],
) -> Iterator[Command]:
    if x.dtype != bfloat16:
        raise ContractError(f"x is {x.dtype.name}; adapters on a GPU are bfloat16 (float32: the cpu pack)")
    a, b, parts = lora["lora_a"], lora["lora_b"], lora["lora_parts"]
    adapters, token_slots = lora["adapters"], lora["token_slots"]
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
        "out_stride": aligned(out.strides[0] if isinstance(out, Tensor) else out.shape[1]),
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
    out: Tensor | Scratch,
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
    add: bool,
    norm_weight: Tensor | None = None,
    eps: float | None = None,
    **lora: Unpack[Lora],
) -> Cost:
    """The floor if all tokens have one adapter."""
    tokens, one = workload.tokens, lora_numbers(**lora)
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
            "lora_a": a,
            "lora_b": b,
            "lora_parts": parts,
            "adapters": memory.ints(1 + slots % 2),
            "token_slots": memory.ints(slots),
            "add": True,
        }
        yield Case(
            f"{tokens} tokens",
            add_lora,
            memory.copies(args, "lora_a", "lora_b"),
            Workload(tokens, tokens, 0, 0),
        )
