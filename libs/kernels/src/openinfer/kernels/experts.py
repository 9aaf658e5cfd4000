"""A mixture of experts as commands: how the rows of a step are cut up among the experts' weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from openinfer.kernels.launch import Aligned, Command, Launch, Scratch, launch, power_of_two
from openinfer.kernels.target import Target
from openinfer.kernels.tuning import depth, shared_bytes
from openinfer.tensor import Tensor, int32

_DEVICE = "openinfer.kernels.device.experts"

SORT_BLOCK = 4096
"""Pairs that a sorting program looks at, at a time."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows of tokens, rows of weights and columns at a time; `tall`: the weights are the tall operand."""

    bm: int
    bn: int
    bk: int
    tall: bool
    warps: int = 4
    stages: int = 3


def tile(target: Target, pairs: int, experts: int, n: int, k: int, *, first: bool) -> Tile:
    """The tile for a product with [n, k] of each expert's weights, two of them in the `first` product.

    Where experts get few rows each, reading the weights is all there is: many programs, small tiles. Twice the mean
    fills a tile well enough, since the fullest experts get about that.
    """
    mean = -(-pairs // experts)
    consumer = shared_bytes(target.arch) < 128 << 10
    if target.batch_invariant:
        return Tile(64, 64, depth(k, 64), False, 4, 2 if consumer else 3)
    if mean <= 32:
        bn = 64
        while bn > 16 and min(pairs, experts) * (n // bn) < 2 * target.num_sms:
            bn //= 2
        stages = 2 if consumer else 3 if bn == 64 else 5
        return Tile(max(16, power_of_two(2 * mean)), bn, depth(k, 128), True, 4, stages)
    if consumer:
        return Tile(64, 64, depth(k, 64), False, 4, 2)
    return Tile(128, 64 if first else 128, depth(k, 64), False, 8, 3)


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of one experts_add after the norm: `hidden` [T, H] is the normed x."""

    x: Tensor
    hidden: Scratch
    expert_ids: Tensor
    expert_weights: Tensor
    gate_up: Tensor
    down: Tensor
    gate_up_scales: Tensor | None
    down_scales: Tensor | None


def launches(call: Call, first: Tile, second: Tile) -> Iterator[Command]:
    """Sort the pairs by expert, multiply twice, and add up each token's results."""
    (tokens, width), chosen = call.x.shape, call.expert_ids.shape[1]
    experts, inter, pairs = call.down.shape[0], call.down.shape[2], tokens * chosen
    order, starts = Scratch((pairs,), int32), Scratch((experts + 1,), int32)
    mlp, results = Scratch((pairs, inter), call.x.dtype), Scratch((pairs, width), call.x.dtype)
    yield launch(
        _DEVICE,
        "sort_pairs",
        (experts + 1,),
        {"order": order, "starts": starts, "expert_ids": call.expert_ids, "pairs": pairs},
        {"BLOCK": min(SORT_BLOCK, power_of_two(pairs))},
    )
    yield _product(call, first, mlp, call.hidden, call.gate_up, call.gate_up_scales, order, starts)
    yield _product(call, second, results, mlp, call.down, call.down_scales, order, starts)
    block = min(1024, power_of_two(width))
    yield launch(
        _DEVICE,
        "add_chosen",
        (tokens, -(-width // block)),
        {
            "x": call.x,
            "results": results,
            "expert_ids": call.expert_ids,
            "expert_weights": call.expert_weights,
            "width": Aligned(width),
        },
        {"CHOSEN": chosen, "BLOCK": block},
    )


def _product(
    call: Call,
    tile: Tile,
    out: Scratch,
    x: Scratch,
    weight: Tensor,
    scales: Tensor | None,
    order: Scratch,
    starts: Scratch,
) -> Launch:
    """One of the two products; the first is that from the tokens' hidden rows."""
    (n, k), experts, chosen = (out.shape[1], x.shape[1]), weight.shape[0], call.expert_ids.shape[1]
    pairs = order.shape[0]
    few = pairs < pairs // tile.bm + experts
    tiles = pairs if few else pairs // tile.bm + experts
    return launch(
        _DEVICE,
        "experts_product",
        (-(-n // tile.bn), tiles),
        {
            "out": out,
            "x": x,
            "weight": weight,
            "scales": x if scales is None else scales,
            "order": order,
            "starts": starts,
            "N": Aligned(n),
            "K": Aligned(k),
        },
        {
            "CHOSEN": chosen,
            "EXPERTS": experts,
            "E_BLOCK": power_of_two(experts),
            "BM": tile.bm,
            "BN": tile.bn,
            "BK": tile.bk,
            "FIRST": x is call.hidden,
            "SCALED": scales is not None,
            "TALL": tile.tall,
            "FEW": few,
        },
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
