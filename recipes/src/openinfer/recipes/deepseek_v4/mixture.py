"""A mixture of experts as commands: how the pairs of a step are cut up among the experts' packed weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from openinfer.kernels import Command, Launch, Scratch, Target, launch
from openinfer.kernels.launch import Aligned, power_of_two
from openinfer.kernels.tuning import depth, shared_bytes
from openinfer.tensor import Tensor, bfloat16, float8_e4m3fn, int32, uint8

_DEVICE = "openinfer.recipes.deepseek_v4.device.experts"

BF16, FLOAT8, FP4 = 0, 1, 2
"""Kinds of weights, as device/experts.py numbers them."""

SORT_BLOCK = 4096
"""Pairs that a sorting program looks at, at a time."""
COPY_BLOCK = 2048
"""Numbers of x that a program puts in another order."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows of the weights and places at a time."""

    rows: int
    bm: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of one `experts`."""

    out: Tensor
    x: Tensor
    shared: Tensor
    expert_ids: Tensor
    expert_weights: Tensor
    gate_up: Tensor
    gate_up_scales: Tensor | None
    down: Tensor
    down_scales: Tensor | None
    limit: float
    quantized: bool


def kind_of(weight: Tensor) -> int:
    """BF16, FLOAT8 or FP4."""
    return {uint8: FP4, float8_e4m3fn: FLOAT8}.get(weight.dtype, BF16)


def tile(target: Target, pairs: int, experts: int) -> Tile:
    """The tile for the products of so many pairs, as measured on an H200 for 256 experts of V4-Flash's size.

    Where experts get few pairs each, reading the weights is all there is: tiles have few places, and fewer rows where
    pairs are so few that programs would not fill the GPU. Where they get many, a tile takes as many places as most
    experts have pairs, so that their weights are unpacked once, and two programs an SM hide each other's waits.
    """
    mean = -(-pairs // experts)
    if target.arch < 90 or shared_bytes(target.arch) < 128 << 10 or target.batch_invariant:
        return Tile(64, 16, 4, 2)
    if mean <= 24:
        rows = 128 if pairs >= target.num_sms else 64
        return Tile(rows, max(16, power_of_two(mean)), 4, 4)
    if mean <= 48:
        return Tile(128, 64, 8, 3)
    return Tile(128, 128, 4, 3)


def launches(target: Target, call: Call, tile: Tile) -> Iterator[Command]:
    """Sort the pairs by expert, multiply twice with the gate between, and add up each token's results."""
    (tokens, width), chosen = call.x.shape, call.expert_ids.shape[1]
    experts, inter, pairs = call.down.shape[0], call.gate_up.shape[1] // 2, tokens * chosen
    kind = kind_of(call.down)
    order, starts = Scratch((pairs,), int32), Scratch((experts + 1,), int32)
    arranged = Scratch((tokens, width), bfloat16) if kind != BF16 else call.x
    both, hidden = Scratch((pairs, 2 * inter), bfloat16), Scratch((pairs, inter), bfloat16)
    results = Scratch((pairs, width), bfloat16)
    block = min(SORT_BLOCK, power_of_two(pairs))
    copies = -(-tokens * width // COPY_BLOCK) if kind != BF16 else 0
    yield launch(
        _DEVICE,
        "sort_pairs",
        (experts + 1 + copies,),
        {
            "order": order,
            "starts": starts,
            "arranged": arranged,
            "expert_ids": call.expert_ids,
            "x": call.x,
            "pairs": pairs,
            "numbers": Aligned(tokens * width),
        },
        {"EXPERTS": experts, "BLOCK": block, "COPY": COPY_BLOCK, "KIND": kind},
        num_warps=4 if block < 2048 else 8,
    )
    yield _product(
        target, tile, both, arranged, call.gate_up, call.gate_up_scales, order, starts, chosen, first=True
    )
    blocks = min(8, power_of_two(inter // 128))
    yield launch(
        _DEVICE,
        "activate",
        (pairs, -(-inter // (128 * blocks))),
        {
            "hidden": hidden,
            "both": both,
            "order": order,
            "starts": starts,
            "expert_weights": call.expert_weights,
            "limit": call.limit,
            "width": Aligned(inter),
        },
        {"EXPERTS": experts, "BLOCKS": blocks, "KIND": kind, "QUANTIZED": call.quantized},
    )
    yield _product(
        target, tile, results, hidden, call.down, call.down_scales, order, starts, chosen, first=False
    )
    block = min(1024, power_of_two(width))
    yield launch(
        _DEVICE,
        "add_chosen",
        (tokens, -(-width // block)),
        {
            "out": call.out,
            "shared": call.shared,
            "results": results,
            "expert_ids": call.expert_ids,
            "width": Aligned(width),
        },
        {"CHOSEN": chosen, "BLOCK": block},
    )


def _product(
    target: Target,
    tile: Tile,
    out: Scratch,
    x: Scratch | Tensor,
    weight: Tensor,
    scales: Tensor | None,
    order: Scratch,
    starts: Scratch,
    chosen: int,
    *,
    first: bool,
) -> Launch:
    """One of the two products; the first is that from the tokens."""
    kind, (experts, n), k, pairs = kind_of(weight), weight.shape[:2], x.shape[1], order.shape[0]
    rows = min(tile.rows, n & -n)
    few = pairs < pairs // tile.bm + experts
    words = weight if kind == BF16 else weight.view_as(int32)
    if scales is None:
        scales = weight
    return launch(
        _DEVICE,
        "experts_product",
        (n // rows, pairs if few else pairs // tile.bm + experts),
        {
            "out": out,
            "x": x,
            "weight": words,
            "scales": scales.view_as(int32) if kind == FP4 else scales,
            "order": order,
            "starts": starts,
            "N": Aligned(n),
            "K": Aligned(k),
            "K_WORDS": Aligned(words.shape[2]),
            "K_BLOCKS": k // 128,
        },
        {
            "CHOSEN": chosen,
            "EXPERTS": experts,
            "E_BLOCK": power_of_two(experts),
            "ROWS": rows,
            "BM": tile.bm,
            "BK": depth(k, 64 if tile.bm > 64 else 128),
            "WARPS": min(tile.warps, rows // 16),
            "KIND": kind,
            "PAIRS": target.arch >= 90 and not target.interpreted,
            "FIRST": first,
            "FEW": few,
        },
        num_warps=min(tile.warps, rows // 16),
        num_stages=tile.stages,
    )
