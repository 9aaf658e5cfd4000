"""add_lora: the low-rank products of adapters (LoRA), each token's by its own adapter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Unpack

import numpy as np

from openinfer.kernels.benchmark import Case, Memory
from openinfer.kernels.contract import FLOATS, expect, expect_columns, expect_norm, require
from openinfer.kernels.errors import ContractError
from openinfer.kernels.launch import Arg, Command, Scratch, aligned, launch, power_of_two
from openinfer.kernels.low_rank import MOST_PARTS, Lora, expect_lora, lora_numbers, lora_sums
from openinfer.kernels.norms import norm
from openinfer.kernels.op import Cost, Op, Workload
from openinfer.kernels.reference import Array, f32, normed
from openinfer.kernels.target import Target
from openinfer.tensor import Tensor, bfloat16, float32, int32

SPLIT = 512
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
    x: Tensor | Scratch,
    add: bool,
    norm_weight: Tensor | None = None,
    eps: float | None = None,
    **lora: Unpack[Lora],
) -> Iterator[Command]:
    if x.dtype != bfloat16:
        raise ContractError(f"x is {x.dtype.name}; adapters on a GPU are bfloat16 (float32: the cpu pack)")
    if takes_few(target, x.shape[0], lora):
        yield from _few(out, x, norm_weight, eps, lora, add=add)
        return
    if norm_weight is not None and eps is not None:
        assert isinstance(x, Tensor)
        hidden = Scratch(x.shape, x.dtype)
        yield norm(hidden, x, norm_weight, eps)
        x = hidden
    yield from _many(target, out, x, None, lora, add=add)


def takes_few(target: Target, tokens: int, lora: Lora) -> bool:
    """Whether each program has one adapter."""
    places = lora["lora_a"].shape[0]
    return not target.batch_invariant and places * -(-tokens // FEW_TILE) <= FEW_PROGRAMS


def gated_sums(
    target: Target, out: Tensor | Scratch, both: Scratch, x: Tensor | Scratch, lora: Lora
) -> Iterator[Command]:
    """out [T, N] = silu(gate) * up, where both [T, 2 N] is gate and up, and gets what the adapters add to a product of
    x. For tokens that are not few (takes_few)."""
    yield from _many(target, out, x, both, lora, add=True)


def _many(
    target: Target,
    out: Tensor | Scratch,
    x: Tensor | Scratch,
    both: Scratch | None,
    lora: Lora,
    *,
    add: bool,
) -> Iterator[Command]:
    a, b, parts = lora["lora_a"], lora["lora_b"], lora["lora_parts"]
    (tokens, columns), (places, rows, _), rank = x.shape, a.shape, b.shape[2]
    few = tokens <= 128 or target.batch_invariant
    tile, block, width = (16, 16, 64) if few else (64, min(64, power_of_two(rows)), 64 if both else 128)
    tiles, splits, blocks = -(-tokens // tile), -(-columns // SPLIT), -(-rows // block)
    low = Scratch((tokens, rows), x.dtype)
    args: dict[str, Arg] = {
        "low": low,
        "partial": Scratch((splits, tokens, rows), float32),
        "counter": Scratch((tiles * blocks,), int32, zeroed=True),
        "x": x,
        "a": a,
        "adapters": lora["adapters"],
        "token_slots": lora["token_slots"],
        "tokens": tokens,
        "x_stride": aligned(columns),
        "a_stride": aligned(a.strides[0]),
        "K": aligned(columns),
        "rows": aligned(rows),
        "places": places,
    }
    constants = {"BM": tile, "BR": block, "BK": 128, "SPLIT": SPLIT}
    yield launch(_DEVICE, "lora_shrink", (tiles, splits, blocks), args, constants)
    args = {"out": out, "both": both or out, "low": low, **_of_b(out, lora), "places": places}
    constants = {"BM": tile, "BN": width, "BR": min(rank, 64), "RANK": rank, "PARTS": len(parts)}
    constants |= {"ADD": add, "GATED": both is not None}
    grid = (tiles, -(-max(parts) // width), 1 if both else len(parts))
    yield launch(_DEVICE, "lora_expand", grid, args, constants)


def _of_b(out: Tensor | Scratch, lora: Lora) -> dict[str, Arg]:
    parts = lora["lora_parts"]
    return {
        "b": lora["lora_b"],
        "adapters": lora["adapters"],
        "token_slots": lora["token_slots"],
        "tokens": out.shape[0],
        "out_stride": aligned(out.strides[0] if isinstance(out, Tensor) else out.shape[1]),
        "b_stride": aligned(lora["lora_b"].strides[0]),
        **{f"size{n}": parts[n] if n < len(parts) else 0 for n in range(MOST_PARTS)},
    }


def _few(
    out: Tensor | Scratch,
    x: Tensor | Scratch,
    gain: Tensor | None,
    eps: float | None,
    lora: Lora,
    *,
    add: bool,
) -> Iterator[Command]:
    """The launches of a step of few tokens: programs of one adapter each. The norm's factor comes last."""
    a, parts = lora["lora_a"], lora["lora_parts"]
    (tokens, columns), (places, rows, _), rank = x.shape, a.shape, lora["lora_b"].shape[2]
    width = 256 if columns <= 4096 else 512  # columns of a program
    tiles, splits, normed = -(-tokens // FEW_TILE), -(-columns // width), gain is not None
    partial, squares = Scratch((splits, tokens, rows), float32), Scratch((splits, tokens), float32)
    args: dict[str, Arg] = {
        "partial": partial,
        "squares": squares,
        "x": x,
        "gain": x if gain is None else gain,
        "a": a,
        "adapters": lora["adapters"],
        "token_slots": lora["token_slots"],
        "tokens": tokens,
        "x_stride": aligned(columns),
        "a_stride": aligned(a.strides[0]),
        "K": aligned(columns),
        "rows": aligned(rows),
        "tiles": tiles,
    }
    constants = {"BM": FEW_TILE, "BR": 16, "BK": 256, "SPLIT": width, "NORM": normed}
    yield launch(_DEVICE, "lora_shrink_few", (places * tiles, splits, rows // 16), args, constants)
    block = 256 if max(parts) > 8192 else 128
    more: dict[str, Arg] = {"tiles": tiles, "places": places, "K": columns, "eps": eps or 0.0}
    args = {
        "out": out,
        "partial": partial,
        "squares": squares,
        **_of_b(out, lora),
        "splits": splits,
        **more,
    }
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
