"""Products of few pairs an expert with float8 weights by a ring of these in shared memory: device/experts_ring.cu."""

from dataclasses import dataclass, replace

from openinfer.kernels.formats.fp8 import Fp8
from openinfer.kernels.formats.linear import Linear
from openinfer.kernels.moe import Pairs
from openinfer.kernels.op.launch import Aligned, Arg, Launch, Scratch, launch_cuda
from openinfer.kernels.op.target import Target, shared_bytes
from openinfer.tensor import Tensor

PAIRS, MOST_MEAN = 8, 2.5
"""Pairs of an expert that are multiplied at once, and the most of an expert on average. Of more, weights of too many
experts are read again."""
COLUMNS, STAGE = 512, 32 << 10
"""The most columns of a warp, which holds x of them in registers, and the most bytes of a stage that has more rows than
its warps need."""


@dataclass(frozen=True, slots=True)
class RingTile:
    """Rows of a stage, parts of K, warps that multiply, and stages."""

    rows: int
    parts: int
    warps: int
    stages: int

    def shared(self, k: int, experts: int) -> int:
        """Bytes of shared memory."""
        return self.stages * (self.rows * k + 16) + 2 * self.parts * self.rows * PAIRS * 4 + 4 * (experts + 8)


def ring_tile(target: Target, pairs: int, weight: Linear[Tensor], *, first: bool) -> RingTile | None:
    """The tile of a product with each expert's weights, two of them in the `first`, or None where the kernel does not
    take it or another one is faster."""
    (experts, rows, k), halves = weight.shape, 1 + first
    if not target.nvrtc or target.arch != 90 or target.batch_invariant or weight.form != Fp8(by_row=False):
        return None
    parts = max(n for n in range(1, 9) if k // 128 % n == 0)
    needed = 16 * (8 // parts)  # rows, for all warps
    if pairs > MOST_MEAN * experts or k % 128 or k // parts > COLUMNS or rows % (needed * halves):
        return None
    tile = RingTile(needed, parts, 8 // parts * parts, 2)
    while 2 * tile.rows * k <= STAGE and rows % (2 * tile.rows * halves) == 0 and tile.rows < 64 * halves:
        tile = replace(tile, rows=2 * tile.rows)
    room = shared_bytes(target.arch) - 1024
    stages = max((n for n in range(2, 13) if replace(tile, stages=n).shared(k, experts) <= room), default=0)
    return replace(tile, stages=stages) if stages else None


def launch_ring(
    target: Target,
    pairs: Pairs,
    tile: RingTile,
    out: Scratch,
    x: Tensor | Scratch,
    weight: Linear[Tensor],
    *,
    first: bool,
) -> Launch:
    """The first product, from tokens to places and gated, or the second, from places to pairs."""
    assert weight.scales is not None
    args: dict[str, Arg] = {
        "out": out,
        "x": x,
        "weight": weight.weight,
        "scales": weight.scales,
        "order": pairs.order,
        "starts": pairs.starts,
        "N": Aligned(out.shape[1]),
    }
    k, experts = x.shape[1], pairs.experts
    constants = {
        "K": k,
        "ROWS": tile.rows,
        "PARTS": tile.parts,
        "WARPS": tile.warps,
        "STAGES": tile.stages,
        "EXPERTS": experts,
        "CHOSEN": pairs.chosen,
        "GATED": first,
    }
    return launch_cuda(
        "openinfer.kernels.device",
        "experts_ring.cu",
        "experts_ring",
        (target.num_sms,),
        args,
        constants,
        threads=32 * tile.warps + 32,
        shared=tile.shared(k, experts),
        early=target.starts_early,
    )
