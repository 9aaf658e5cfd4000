"""A mixture of experts as commands: how the pairs of a step are cut up among the experts' packed weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from openinfer.kernels import Command, Launch, Scratch, Target, launch
from openinfer.kernels.launch import Aligned, Arg, power_of_two
from openinfer.kernels.tuning import depth, shared_bytes
from openinfer.recipes.deepseek_v4.linear import takes_codes
from openinfer.tensor import Tensor, bfloat16, float8_e4m3fn, float32, int32, uint8

_DEVICE = "openinfer.recipes.deepseek_v4.device.experts"

_HOPPER = "openinfer.recipes.deepseek_v4.device.experts_hopper"

BF16, FLOAT8, FP4 = 0, 1, 2
"""Kinds of weights, as device/experts.py numbers them."""

SORT_BLOCK = 4096
"""Pairs that a sorting program looks at, at a time."""
COPY_BLOCK = 2048
"""Numbers of x that a program puts in another order."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows of the weights and places at a time, and by which kernel; coded_product also so many blocks of columns."""

    rows: int
    bm: int
    warps: int
    stages: int
    kernel: Literal["experts_product", "coded_product", "fp4_product"] = "experts_product"
    turn: int = 1

    @property
    def coded(self) -> bool:
        """Whether the products are of float8 codes."""
        return self.kernel != "experts_product"


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


def tile(target: Target, pairs: int, experts: int, kind: int, quantized: bool) -> Tile:
    """The tile for the products of so many pairs, as measured on an H200 for 256 experts of V4-Flash's size.

    Where experts get few pairs each, reading the weights is all there is: tiles have few places, and fewer rows where
    pairs are so few that programs would not fill the GPU. Where they get many, a tile takes as many places as most
    experts have pairs, so that their weights are unpacked once. Values that go through q8 are multiplied as codes on
    Hopper (README.md): its tensor cores do so twice as fast as in bf16, float8 weights need no unpacking, FP4 half.
    """
    mean = -(-pairs // experts)
    if target.arch < 90 or shared_bytes(target.arch) < 128 << 10 or target.batch_invariant:
        return Tile(64, 16, 4, 2)
    few = max(16, power_of_two(mean))
    if quantized and kind != BF16 and takes_codes(target) and not 24 < mean <= 48:
        if kind == FLOAT8:
            return (
                Tile(64, few, 4, 4, "coded_product") if mean <= 24 else Tile(64, 128, 4, 3, "coded_product")
            )
        if mean <= 16 or target.interpreted:
            return Tile(64, min(few, 128), 4, 3, "coded_product", 2)
        return Tile(128, 32 if mean <= 24 else 128, 8, 4, "fp4_product")
    if mean <= 24:
        return Tile(128 if pairs >= target.num_sms else 64, few, 4, 4)
    if mean <= 48:
        return Tile(128, 64, 8, 3)
    return Tile(128, 128, 4, 3)


def launches(target: Target, call: Call, tile: Tile) -> Iterator[Command]:
    """Sort the pairs by expert, multiply twice with the gate between, and add up each token's results."""
    (tokens, width), chosen = call.x.shape, call.expert_ids.shape[1]
    experts, inter, pairs = call.down.shape[0], call.gate_up.shape[1] // 2, tokens * chosen
    kind, dtype = kind_of(call.down), float8_e4m3fn if tile.coded else bfloat16
    order, starts = Scratch((pairs,), int32), Scratch((experts + 1,), int32)
    arranged = Scratch((tokens, width), dtype) if kind != BF16 else call.x
    x_scales = Scratch((width // 128, tokens) if tile.coded else (1,), float32)
    both, hidden = Scratch((pairs, 2 * inter), bfloat16), Scratch((pairs, inter), dtype)
    hidden_scales = Scratch((inter // 128, pairs + tile.bm) if tile.coded else (1,), float32)
    results = Scratch((pairs, width), bfloat16)
    yield _sort(call, tile, order, starts, arranged, x_scales)
    yield _product(
        target, tile, both, arranged, x_scales, call.gate_up, call.gate_up_scales, order, starts, chosen
    )
    blocks = min(8, power_of_two(inter // 128))
    yield launch(
        _DEVICE,
        "activate",
        (pairs, -(-inter // (128 * blocks))),
        {
            "hidden": hidden,
            "scales": hidden_scales,
            "both": both,
            "order": order,
            "starts": starts,
            "expert_weights": call.expert_weights,
            "limit": call.limit,
            "width": Aligned(inter),
            "STRIDE": pairs + tile.bm,
        },
        {
            "EXPERTS": experts,
            "BLOCKS": blocks,
            "KIND": kind,
            "QUANTIZED": call.quantized,
            "CODES": tile.coded,
        },
    )
    yield _product(
        target, tile, results, hidden, hidden_scales, call.down, call.down_scales, order, starts, None
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


def _sort(
    call: Call, tile: Tile, order: Scratch, starts: Scratch, arranged: Scratch | Tensor, scales: Scratch
) -> Launch:
    """The pairs by expert, and x as the first product reads it."""
    (tokens, width), kind, experts = call.x.shape, kind_of(call.down), call.down.shape[0]
    pairs = order.shape[0]
    block = min(SORT_BLOCK, power_of_two(pairs))
    copies = -(-tokens * width // COPY_BLOCK) if kind != BF16 else 0
    return launch(
        _DEVICE,
        "sort_pairs",
        (experts + 1 + copies,),
        {
            "order": order,
            "starts": starts,
            "arranged": arranged,
            "scales": scales,
            "expert_ids": call.expert_ids,
            "x": call.x,
            "pairs": pairs,
            "numbers": Aligned(tokens * width),
            "K_BLOCKS": width // 128,
            "STRIDE": tokens,
        },
        {"EXPERTS": experts, "BLOCK": block, "COPY": COPY_BLOCK, "KIND": kind, "CODES": tile.coded},
        num_warps=4 if block < 2048 else 8,
    )


def _product(
    target: Target,
    tile: Tile,
    out: Scratch,
    x: Scratch | Tensor,
    x_scales: Scratch,
    weight: Tensor,
    scales: Tensor | None,
    order: Scratch,
    starts: Scratch,
    chosen: int | None,
) -> Launch:
    """One of the two products: from the tokens, which have so many pairs each, or from hidden values (None)."""
    kind, (experts, n), k, pairs = kind_of(weight), weight.shape[:2], x.shape[1], order.shape[0]
    rows, bm = min(tile.rows, n & -n), tile.bm
    few = pairs < pairs // bm + experts
    words = weight if kind == BF16 or (kind == FLOAT8 and tile.coded) else weight.view_as(int32)
    if scales is None:
        scales = weight
    elif kind == FP4 and tile.kernel != "coded_product":
        scales = scales.view_as(int32)
    args: dict[str, Arg] = {"out": out, "x": x}
    if tile.coded:
        args["x_scales"] = x_scales
    args |= {
        "weight": words,
        "scales": scales,
        "order": order,
        "starts": starts,
        "N": Aligned(n),
        "K": Aligned(k),
        "K_WORDS": Aligned(words.shape[2]),
        "K_BLOCKS": k // 128,
    }
    if tile.coded:
        args["STRIDE"] = x_scales.shape[1]
    constants = {
        "CHOSEN": chosen or 1,
        "EXPERTS": experts,
        "E_BLOCK": power_of_two(experts),
        "BM": bm,
        "FIRST": chosen is not None,
    }
    grid, warps = (n // rows, pairs if few else pairs // bm + experts), min(tile.warps, rows // 16)
    if tile.kernel == "fp4_product":
        grid = (n // rows, pairs // bm + experts)
        constants["STAGES"] = tile.stages
        return launch(_HOPPER, tile.kernel, grid, args, constants, num_warps=warps)
    assembly = target.arch >= 90 and not target.interpreted
    constants |= {"ROWS": rows, "WARPS": warps, "KIND": kind, "PAIRS": assembly, "FEW": few}
    if tile.coded:
        constants["TURN"] = tile.turn if k // 128 % tile.turn == 0 else 1
    else:
        constants["BK"] = depth(k, 64 if bm > 64 else 128)
    return launch(_DEVICE, tile.kernel, grid, args, constants, num_warps=warps, num_stages=tile.stages)
