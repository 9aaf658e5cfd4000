"""Products with adapters (LoRA) as commands: one kernel for few tokens; else the product, then low-rank ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from openinfer.kernels.formats.codes import Coding
from openinfer.kernels.linear.choices import Choice, measured, rule
from openinfer.kernels.linear.cluster_product import adapted_choice, cluster_product
from openinfer.kernels.linear.products import normed_product, product
from openinfer.kernels.lora.launches import gated_sums, low_rank_product, takes_few
from openinfer.kernels.lora.low_rank import MOST_PARTS, Lora
from openinfer.kernels.norms import Norm, norm, silu_mul
from openinfer.kernels.op.launch import Aligned, Arg, Command, Launch, Scratch, aligned, launch, power_of_two
from openinfer.kernels.op.target import Target
from openinfer.tensor import Tensor, bfloat16, float32, int32

FEW_TOKENS = 64
"""The most tokens of the one kernel, which has a tile for all of them."""
COLUMNS = 128
"""The most columns that the adapters of one turn add to K."""
NUMBERS = 1 << 12
"""The most numbers of B that a warp keeps while it waits for the first product, because more do not fit into registers.
Of that product it has a quarter of this at once, in float32."""
CHUNK, CHUNKS = 1024, 4
"""Columns of x that a program of the first product has, about, and the most parts of K: a thread adds up all of them at
once. The numbers are fixed, so that sums do not depend on the step."""
ROWS = 64
"""The most rows of A that such a program has."""
MOST_UNITS = 256
"""The most such programs. A program whose adapter no token has costs its start."""

_DEVICE = "openinfer.kernels.device.adapted_linear"


def adapted_product(
    target: Target,
    op: str,
    out: Tensor | Scratch,
    x: Tensor,
    weight: Tensor,
    scales: Tensor | None,
    lora: Lora,
    *,
    normed: Norm | None = None,
    coding: Coding | None = None,
    x_scale: Tensor | None = None,
    add: bool = False,
    gated: bool = False,
) -> Iterator[Command]:
    """products.product of x, or of its norm, with what adapters add. gated: its gated form."""
    bf16 = scales is None and x.dtype == bfloat16
    clusters = adapted_choice(target, op, x, weight, lora, gated=gated) if bf16 else None
    tile = few_tile(target, op, x, weight, scales, lora, gated=gated)
    if clusters is not None:
        h: Tensor | Scratch = x
        if normed is not None:
            h = Scratch(x.shape, x.dtype)
            yield norm(h, x, *normed, early=True)
        yield cluster_product(clusters, out, h, weight, lora=lora, add=add, gated=gated)
    elif tile is not None:
        h = x
        if normed is not None:
            h = Scratch(x.shape, x.dtype)
            yield norm(h, x, *normed)
        yield _together(tile, out, h, weight, lora, add=add, gated=gated)
    elif gated:
        both, h, few = Scratch((x.shape[0], weight.shape[0]), x.dtype), x, takes_few(target, x.shape[0], lora)
        if few:
            yield from _after(target, both, x, lora, normed, add=False)
        if normed is not None:
            h = Scratch(x.shape, x.dtype)
            yield norm(h, x, *normed)
        yield from product(target, op, both, h, weight, scales, add=few, coding=coding, x_scale=x_scale)
        yield from [silu_mul(out, both)] if few else gated_sums(target, out, both, h, lora)
    elif normed is None:
        yield from product(target, op, out, x, weight, scales, add=add, coding=coding, x_scale=x_scale)
        yield from _after(target, out, x, lora, None, add=True)
    elif coding is None and not takes_few(target, x.shape[0], lora):
        h = Scratch(x.shape, x.dtype)
        yield norm(h, x, *normed)
        yield from product(target, op, out, h, weight, scales)
        yield from _after(target, out, h, lora, None, add=True)
    else:
        assert isinstance(out, Tensor)
        yield from normed_product(target, op, out, x, *normed, weight, scales, coding=coding, x_scale=x_scale)
        yield from _after(target, out, x, lora, normed, add=True)


def _after(
    target: Target, out: Tensor | Scratch, x: Tensor | Scratch, lora: Lora, normed: Norm | None, *, add: bool
) -> Iterator[Command]:
    columns = sum(lora["lora_parts"])
    own = out if isinstance(out, Scratch) else out[:, :columns]
    yield from low_rank_product(target, own, x, normed, lora, add=add)


def few_tile(
    target: Target, op: str, x: Tensor, weight: Tensor, scales: Tensor | None, lora: Lora, *, gated: bool
) -> Choice | None:
    """The tile of the one kernel, or None where it does not take the product."""
    (tokens, k), parts = x.shape, lora["lora_parts"]
    places, rows, rank = lora["lora_a"].shape[0], lora["lora_a"].shape[1], lora["lora_b"].shape[2]
    if target.batch_invariant or scales is not None or x.dtype != bfloat16 or tokens > FEW_TOKENS:
        return None
    tile = measured(target, op, tokens, *weight.shape)
    if tile.kind != "small":  # one token: the kernel has no form for it
        tile = rule(target, op, max(2, tokens), *weight.shape)
    if gated:
        tile = dataclasses.replace(tile, warps=8)
    elif tile.bk > 128:  # two programs fit on an SM
        tile = dataclasses.replace(tile, bk=128, stages=4)
    units = places * _chunks(k) * -(-rows // ROWS)
    whole = parts == (weight.shape[0] // 2,) * 2 if gated else not any(size % tile.bn for size in parts)
    return tile if whole and rank <= COLUMNS and units <= MOST_UNITS else None


def _chunks(k: int) -> int:
    return min(CHUNKS, -(-k // CHUNK))


def _together(
    c: Choice,
    out: Tensor | Scratch,
    x: Tensor | Scratch,
    weight: Tensor,
    lora: Lora,
    *,
    add: bool,
    gated: bool,
) -> Launch:
    (m, n), k, a, b = out.shape, weight.shape[1], lora["lora_a"], lora["lora_b"]
    (places, rows, _), rank, parts = a.shape, b.shape[2], lora["lora_parts"]
    chunks, block = _chunks(k), min(ROWS, power_of_two(rows))
    width = -(-k // (chunks * c.bk)) * c.bk
    units, tiles, whole = places * chunks * -(-rows // block), -(-n // c.bn), c.split == 1
    programs = 1 if whole else c.split + 1  # of a tile; with parts of K the adapters are one more
    args: dict[str, Arg] = {
        "out": out,
        "x": x,
        "weight": weight,
        "a": a,
        "b": b,
        "adapters": lora["adapters"],
        "token_slots": lora["token_slots"],
        "low": Scratch((chunks, c.bm, rows), float32),
        "state": Scratch((2,), int32, zeroed=True),
        "partial": Scratch((1,) if whole else ((2 if gated else 1) * programs, c.bm, n), float32),
        "counter": Scratch((1,) if whole else (tiles,), int32, zeroed=True),
        "M": m,
        "N": Aligned(n),
        "K": Aligned(k),
        "a_stride": aligned(a.strides[0]),
        "b_stride": aligned(b.strides[0]),
        "places": places,
        "rows": Aligned(rows),
        "units": units,
        **{f"size{i}": parts[i] if i < len(parts) else 0 for i in range(MOST_PARTS)},
    }
    constants = {"BM": c.bm, "BN": c.bn, "BK": c.bk, "SPLIT": c.split, "PARTS": programs}
    constants |= {"ADD": add, "GATED": gated}
    columns = min(COLUMNS, c.warps * NUMBERS // max(c.bn * (2 if gated else 1), 4 * c.bm))
    constants |= {"RANK": rank, "PLACES": min(power_of_two(places), max(1, columns // rank))}
    constants |= {"BR": block, "CHUNK": width, "CHUNKS": chunks}
    grid = (units + tiles * programs,)
    return launch(
        _DEVICE, "gemm_small_adapted", grid, args, constants, num_warps=c.warps, num_stages=c.stages
    )
