"""The kernels of a mixture of experts with packed weights: FP4 or float8 with E8M0 scales, and bf16 beside these.

The gate has a kernel of its own between the products, which also weighs the pairs and rounds them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Generic, Literal

import numpy as np

from openinfer.kernels.formats.linear import Linear, linear_of
from openinfer.kernels.linear.mx import multiplies_codes
from openinfer.kernels.moe import Pairs
from openinfer.kernels.op.coded import Coded
from openinfer.kernels.op.launch import Aligned, Arg, Launch, Scratch, depth, launch, power_of_two
from openinfer.kernels.op.op import T, tensors
from openinfer.kernels.op.target import Target, shared_bytes
from openinfer.tensor import Tensor, bfloat16, float8_e4m3fn, float32, int32, uint8

_DEVICE = "openinfer.kernels.device.packed_experts"

_HOPPER = "openinfer.kernels.device.packed_experts_hopper"

BF16, FLOAT8, FP4 = 0, 1, 2
"""Kinds of weights, as device/experts.py numbers them."""

COPY_BLOCK = 2048
"""Numbers of x that a program puts in another order."""


@dataclass(frozen=True, slots=True)
class PackedExpertTile:
    """Rows of the weights and places of one program, and the kernel. `turn`: blocks of columns that coded_product
    takes at a time."""

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

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the values that the products read."""
        return float8_e4m3fn if self.coded else bfloat16


def kind_of(layer: Linear[Tensor]) -> int:
    """BF16, FLOAT8 or FP4."""
    return {uint8: FP4, float8_e4m3fn: FLOAT8}.get(layer.weight.dtype, BF16)


def packed_expert_tile(
    target: Target, pairs: int, experts: int, kind: int, quantized: bool
) -> PackedExpertTile:
    """The tile for the products of `pairs` pairs, as measured on an H200 for 256 experts of V4-Flash's size.

    Where experts get few pairs each, reading the weights takes all the time. Tiles then have few places. They have
    fewer rows too where programs would not fill the GPU. Where experts get many pairs, a tile takes as many places as
    most experts have pairs, so that their weights are unpacked once. Values that go through q8 are multiplied as codes
    on Hopper (README.md). Its tensor cores do so twice as fast as in bf16. Float8 weights then need no unpacking, and
    FP4 weights half of it.
    """
    mean = -(-pairs // experts)
    if target.arch < 90 or shared_bytes(target.arch) < 128 << 10 or target.batch_invariant:
        return PackedExpertTile(64, 16, 4, 2)
    few = max(16, power_of_two(mean))
    if quantized and kind != BF16 and multiplies_codes(target) and not 24 < mean <= 48:
        if kind == FLOAT8:
            return PackedExpertTile(64, *((few, 4, 4) if mean <= 24 else (128, 4, 3)), "coded_product")
        if mean <= 16 or target.interpreted:
            return PackedExpertTile(64, min(few, 128), 4, 3, "coded_product", 2)
        return PackedExpertTile(128, 32 if mean <= 24 else 128, 8, 4, "fp4_product")
    if mean <= 24:
        return PackedExpertTile(128 if pairs >= target.num_sms else 64, few, 4, 4)
    if mean <= 48:
        return PackedExpertTile(128, 64, 8, 3)
    return PackedExpertTile(128, 128, 4, 3)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsArgs(Generic[T]):
    """out[t] = shared[t] + sum over j of MLP_e(x[t]), with e = expert_ids[t, j] and w = expert_weights[t, j].

        MLP_e(x) = (silu(min(g, limit)) * clamp(u, -limit, limit) * w) Wd_e^T, [g, u] = x Wgu_e^T

    x, shared, out [T, D] of one float dtype; x may be Coded. expert_ids int32 [T, K], each in [-1, E), no expert twice
    in a row but -1, which is no expert and adds nothing; expert_weights float32 [T, K]. gate_up is [E, 2 I, D]: the
    gate's rows, then the up projection's. down is [E, D, I]. Both are of x's dtype, or both Linears of FP4 or FP8 with
    E8M0 scales (formats.linear; gate_up with parts=2). D and I are multiples of 128.

    g and u are rounded as outputs of a linear layer. The product, with w in it, is in float32 and rounded. Where x is
    Coded it then goes through q8 as well, in blocks of 128 (rounding.q8). Each expert's output is rounded. Their sum
    and shared are added in float32 and rounded once.

    The number of tokens of an expert is data: an implementation sorts them on the device. `all_experts`: how many all
    ranks have, where these are one rank's; the cost takes an even part of the choices to be for these.
    """

    out: T
    x: Coded[T] | T
    shared: T
    expert_ids: T
    expert_weights: T
    gate_up: Linear[T] | T
    down: Linear[T] | T
    limit: float
    all_experts: int | None = None

    @property
    def quantized(self) -> bool:
        """Whether inputs of products go through q8."""
        return isinstance(self.x, Coded)


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """A call of `experts`, and the tile of its products."""

    tile: PackedExpertTile
    target: Target
    a: ExpertsArgs[Tensor]
    arranged: Scratch | Tensor  # x as the first product reads it
    x_scales: Scratch
    results: Scratch  # [pairs, D]

    @classmethod
    def of(cls, target: Target, tile: PackedExpertTile, a: ExpertsArgs[Tensor]) -> "PackedExperts":
        """The kernels for a call, with scratch for the values that they pass to each other."""
        tokens, width = a.x.shape
        arranged: Scratch | Tensor = Scratch((tokens, width), tile.dtype)
        if kind_of(linear_of(a.down)) == BF16 and not isinstance(a.x, Coded):
            arranged = a.x
        x_scales = Scratch((width // 128, tokens) if tile.coded else (1,), float32)
        return cls(tile, target, a, arranged, x_scales, Scratch((a.expert_ids.numel, width), bfloat16))

    def launches(self) -> Iterator[Launch]:
        """The pairs in order and x as the first product reads it, the products, and their sums with `shared`."""
        pairs = Pairs.of(self.target, self.a.expert_ids, self.a.gate_up.shape[0])
        yield self._sort(pairs)
        inter, tile = self.a.gate_up.shape[1] // 2, self.tile
        both, hidden = Scratch((pairs.count, 2 * inter), bfloat16), Scratch((pairs.count, inter), tile.dtype)
        scales = Scratch((inter // 128, pairs.count + tile.bm) if tile.coded else (1,), float32)
        yield self._product(pairs, both, self.arranged, self.x_scales, linear_of(self.a.gate_up))
        blocks = min(8, power_of_two(inter // 128))
        args: dict[str, Arg] = {"hidden": hidden, "scales": scales, "both": both, **pairs.sorted}
        args |= {**tensors(self.a, "expert_weights"), "limit": self.a.limit, "width": Aligned(inter)}
        args["STRIDE"] = pairs.count + tile.bm
        constants = {"EXPERTS": pairs.experts, "BLOCKS": blocks, "KIND": kind_of(linear_of(self.a.down))}
        constants |= {"QUANTIZED": self.a.quantized, "CODES": tile.coded}
        grid = (pairs.count, -(-inter // (128 * blocks)))
        yield launch(_DEVICE, "activate", grid, args, constants, early=self._early)
        yield self._product(pairs, self.results, hidden, scales, linear_of(self.a.down))
        yield add_chosen(self.target, self.a, self.results)

    def _sort(self, pairs: Pairs) -> Launch:
        """Fill `order` and `starts`, and write x as the first product reads it."""
        x, (tokens, width), kind = self.a.x, self.a.x.shape, kind_of(linear_of(self.a.down))
        block = pairs.sorted_at_once
        copies = -(-tokens * width // COPY_BLOCK) if isinstance(self.arranged, Scratch) else 0
        codes, scales = (x.codes, x.scales) if isinstance(x, Coded) else (x, x)
        args: dict[str, Arg] = {**pairs.sorted, "arranged": self.arranged, "scales": self.x_scales}
        args |= {"expert_ids": self.a.expert_ids, "x": codes, "x_scales": scales, "pairs": pairs.count}
        args |= {"numbers": Aligned(tokens * width), "K_BLOCKS": width // 128, "STRIDE": tokens}
        constants = {"EXPERTS": pairs.experts, "BLOCK": block, "COPY": COPY_BLOCK, "KIND": kind}
        constants |= {"CODED": isinstance(x, Coded), "CODES": self.tile.coded}
        grid, warps = (pairs.experts + 1 + copies,), 4 if block < 2048 else 8
        return launch(_DEVICE, "sort_pairs", grid, args, constants, num_warps=warps, early=self._early)

    @property
    def _early(self) -> bool:
        return self.target.early(self.a.x.shape[0])

    def _product(
        self, pairs: Pairs, out: Scratch, x: Scratch | Tensor, x_scales: Scratch, layer: Linear[Tensor]
    ) -> Launch:
        """One of the two products; the first is that from tokens."""
        target, tile, first = self.target, self.tile, x is self.arranged
        weight, scales = layer.weight, layer.scales
        kind, n, k = kind_of(layer), weight.shape[1], x.shape[1]
        rows, few = min(tile.rows, n & -n), pairs.few(tile.bm)
        words = weight if kind == BF16 or (kind == FLOAT8 and tile.coded) else weight.view_as(int32)
        if scales is None:
            scales = weight
        elif kind == FP4 and tile.kernel != "coded_product":
            scales = scales.view_as(int32)
        args: dict[str, Arg] = {"out": out, "x": x}
        if tile.coded:
            args["x_scales"] = x_scales
        args |= {"weight": words, "scales": scales, **pairs.sorted, "N": Aligned(n), "K": Aligned(k)}
        args |= {"K_WORDS": Aligned(words.shape[2]), "K_BLOCKS": k // 128}
        if tile.coded:
            args["STRIDE"] = x_scales.shape[1]
        constants = {"CHOSEN": pairs.chosen if first else 1, "EXPERTS": pairs.experts}
        constants |= {"E_BLOCK": power_of_two(pairs.experts), "BM": tile.bm, "FIRST": first}
        warps = min(tile.warps, rows // 16)
        if tile.kernel == "fp4_product":
            grid = (n // rows, pairs.count // tile.bm + pairs.experts)
            constants["STAGES"] = tile.stages
            return launch(_HOPPER, tile.kernel, grid, args, constants, num_warps=warps)
        assembly = target.arch >= 90 and not target.interpreted
        constants |= {"ROWS": rows, "WARPS": warps, "KIND": kind, "PAIRS": assembly, "FEW": few}
        if tile.coded:
            constants["TURN"] = tile.turn if k // 128 % tile.turn == 0 else 1
        else:
            constants["BK"] = depth(k, 64 if tile.bm > 64 else 128)
        grid, early = (n // rows, pairs.tiles(tile.bm)), self._early
        return launch(
            _DEVICE, tile.kernel, grid, args, constants, num_warps=warps, num_stages=tile.stages, early=early
        )


def add_chosen(target: Target, a: ExpertsArgs[Tensor], results: Scratch) -> Launch:
    """The results [pairs, D] of each token and `shared`, in `out`."""
    (tokens, width), chosen = a.x.shape, a.expert_ids.shape[1]
    block = min(1024, power_of_two(width))
    args: dict[str, Arg] = {**tensors(a, "out", "shared"), "results": results}
    args |= {"expert_ids": a.expert_ids, "width": Aligned(width)}
    grid, constants = (tokens, -(-width // block)), {"CHOSEN": chosen, "BLOCK": block}
    return launch(_DEVICE, "add_chosen", grid, args, constants, early=target.early(tokens))
