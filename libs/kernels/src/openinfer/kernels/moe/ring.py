"""Products of a mixture by a ring of the weights in shared memory: of float8 with float32 scales for few pairs an
expert (device/experts_ring.cu) and for many (experts_many.cu), and of FP4 with codes for few (experts_fp4.cu)."""

from dataclasses import dataclass, replace

from openinfer.kernels.formats.fp8 import Fp8
from openinfer.kernels.formats.linear import Linear, linear_of
from openinfer.kernels.moe import Pairs
from openinfer.kernels.moe.packed import FP4, ExpertsArgs, add_chosen, kind_of
from openinfer.kernels.op.coded import Coded
from openinfer.kernels.op.launch import Aligned, Arg, Launch, Scratch, TensorMap, launch_cuda
from openinfer.kernels.op.target import Target, shared_bytes
from openinfer.tensor import Tensor, bfloat16

PAIRS, MOST_MEAN = 8, 2.5
"""Pairs of an expert that are multiplied at once, and the most of an expert on average. Of more, weights of too many
experts are read again."""
COLUMNS, STAGE = 512, 32 << 10
"""The most columns of a warp, which holds x of them in registers, and the most bytes of a stage that has more rows than
its warps need."""


MOST_PAIRS, MANY_STAGES = 160, 3
"""The most pairs that are multiplied at once where experts have many, and the stages of their ring. A stage is 256 rows
of 128 columns, and as many columns of x."""
MANY_MEAN = 32
"""The pairs of an expert on average from which on that is faster."""


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


def takes_many(target: Target, pairs: int, *weights: Linear[Tensor]) -> bool:
    """Whether device/experts_many.cu multiplies with both weights of a mixture, of which experts have many pairs."""
    if not target.nvrtc or target.arch != 90 or target.batch_invariant:
        return False
    if pairs < MANY_MEAN * weights[0].shape[0] or any(w.form != Fp8(by_row=False) for w in weights):
        return False
    sizes = [w.shape for w in weights]
    return all(e <= 512 and rows % 256 == k % 128 == 0 and k > MANY_STAGES * 128 for e, rows, k in sizes)


def launch_ring(
    target: Target,
    pairs: Pairs,
    tile: RingTile | None,
    out: Scratch,
    x: Tensor | Scratch,
    weight: Linear[Tensor],
    *,
    first: bool,
) -> Launch:
    """The first product, from tokens to places and gated, or the second, from places to pairs. Without a tile it is of
    many pairs an expert, and rows of x are arranged; so are those of the first product's `out`."""
    assert weight.scales is not None
    k, experts = x.shape[1], pairs.experts
    constants = {"K": k, "EXPERTS": experts, "CHOSEN": pairs.chosen, "GATED": first}
    weights: Arg
    if tile is None:
        name, weights, threads = "experts_many", TensorMap(weight.weight.reshape(-1, k), (128, 64)), 384
        constants |= {"MOST": MOST_PAIRS, "STAGES": MANY_STAGES}
        shared = MANY_STAGES * (128 * (256 + 2 * MOST_PAIRS) + 16) + 8 * (experts + 1) + 8 * MOST_PAIRS
    else:
        name, weights, threads = "experts_ring", weight.weight, 32 * tile.warps + 32
        constants |= {"ROWS": tile.rows, "PARTS": tile.parts, "WARPS": tile.warps, "STAGES": tile.stages}
        shared = tile.shared(k, experts)
    args: dict[str, Arg] = {"out": out, "x": x, "weight": weights, "scales": weight.scales, **pairs.sorted}
    args["N"] = Aligned(out.shape[1])
    kernel = "openinfer.kernels.device", f"{name}.cu", name, (target.num_sms,)
    return launch_cuda(*kernel, args, constants, threads=threads, shared=shared, early=target.starts_early)


FP4_ROWS, FP4_DEPTH, FP4_PARTS, FP4_PAIRS = 64, 1024, 4, 1024
"""Rows of a tile, columns of a stage, warpgroups that multiply a part of it each, and the most pairs that a program
sorts."""
FP4_STAGE = FP4_ROWS * (FP4_DEPTH // 2 + FP4_DEPTH // 32)  # bytes of codes and their scales
FP4_UNDER_WAY = 2
"""The most stages that a program has under way. With all five x comes behind them; with one the bytes come later."""
FP4_MEAN = 3.0
"""The most pairs of an expert on average, where the ring is faster than tiles of 16 places (measured to there)."""


def _buffers(stages: int, k: int) -> int:
    """Tiles whose sums are held, which are more than a warpgroup can be ahead of another."""
    return stages // (k // FP4_DEPTH) + 1


def _fp4_shared(stages: int, k: int, experts: int) -> int:
    """Bytes of shared memory: stages with their barriers, x, sums, scales of x, starts of the experts, and pairs."""
    sums = _buffers(stages, k) * FP4_PARTS * PAIRS * (FP4_ROWS + 4) * 4 + k // 128 * PAIRS * 4
    return stages * (FP4_STAGE + 16) + PAIRS * k + sums + 4 * (experts + 8) + 2 * FP4_PAIRS


def fp4_ring(target: Target, a: ExpertsArgs[Tensor]) -> list[Launch] | None:
    """A call of `experts` in two launches and the sum, or None where the ring does not take it or another kernel is
    faster. Each product sorts the pairs, and the second one gates."""
    (experts, both, width), inter, count = a.gate_up.shape, a.down.shape[2], a.expert_ids.numel
    if not target.nvrtc or target.arch != 90 or target.batch_invariant:
        return None
    if (
        not isinstance(a.x, Coded)
        or kind_of(linear_of(a.down)) != FP4
        or width % FP4_DEPTH
        or inter % FP4_DEPTH
    ):
        return None
    if count > FP4_PAIRS or count > FP4_MEAN * (a.all_experts or experts):
        return None
    halves, results = Scratch((count, both), bfloat16), Scratch((count, width), bfloat16)
    return [
        _fp4_product(target, a, halves, a.x.codes, a.x.scales, linear_of(a.gate_up), first=True),
        _fp4_product(target, a, results, halves, a.expert_weights, linear_of(a.down), first=False),
        add_chosen(target, a, results),
    ]


def _fp4_product(
    target: Target,
    a: ExpertsArgs[Tensor],
    out: Scratch,
    x: Tensor | Scratch,
    factors: Tensor,
    weight: Linear[Tensor],
    *,
    first: bool,
) -> Launch:
    assert weight.scales is not None
    experts, n, words = weight.weight.shape
    k, ids = 2 * words, a.expert_ids
    room = shared_bytes(target.arch) - 1024
    stages = max(s for s in range(2, 9) if _fp4_shared(s, k, experts) <= room)
    codes = TensorMap(weight.weight.reshape(-1, k // 2), (FP4_ROWS, 128))
    scales = TensorMap(weight.scales.reshape(-1, k // 32), (FP4_ROWS, FP4_DEPTH // 32))
    args: dict[str, Arg] = {"out": out, "x": x, "factors": factors, "weight": codes, "scales": scales}
    args |= {"expert_ids": ids, "pairs": ids.numel, "N": Aligned(n), "limit": a.limit}
    constants = {"K": k, "STAGES": stages, "UNDER_WAY": min(stages, FP4_UNDER_WAY)}
    constants |= {"BUFFERS": _buffers(stages, k), "EXPERTS": experts, "CHOSEN": ids.shape[1]}
    constants |= {"MOST_PAIRS": FP4_PAIRS, "FIRST": first}
    kernel = "openinfer.kernels.device", "experts_fp4.cu", "experts_fp4", (target.num_sms,)
    threads, shared = 128 * (FP4_PARTS + 1), _fp4_shared(stages, k, experts)
    early = target.early(a.x.shape[0])
    return launch_cuda(*kernel, args, constants, threads=threads, shared=shared, early=early)
