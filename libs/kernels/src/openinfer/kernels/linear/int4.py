"""Products with INT4 and FP4 weights by clusters (device/int4_cluster.cu)."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from openinfer.kernels.formats.fp4 import Fp4
from openinfer.kernels.formats.int4 import Int4Groups
from openinfer.kernels.linear.choices import CLUSTERED, sent_bytes, under_way
from openinfer.kernels.linear.problem import Kernel, Problem
from openinfer.kernels.op.launch import Arg, Command, Launch, TensorMap, launch_cuda, power_of_two
from openinfer.kernels.op.target import shared_bytes

FEW_TOKENS, MOST_TOKENS, BLOCK_TOKENS = 8, 256, 128
"""The fewest tokens of a kernel, which multiplies so few by warps, the most of a call, and the most of a block. More
tokens than those of a block are several waves."""
LARGE = 20 << 20
"""Numbers of a weight from which two waves cost less than making the weight bf16."""
DEPTH, GROUP, TILE = 256, 128, 64
"""Columns of K of a stage and of a group, and rows of a tile of the weight. The kernel has these numbers too."""
FEWEST_ROWS, FEWEST_STAGES = 32, 3
"""A block has no fewer, because what a tile reads of rows that do not exist must lie in shared memory."""
FOLDED_TOKENS = 64
"""With more tokens there are no registers for the sums of a group, so the kernel scales the weight in bf16."""
MOST_TILES, MOST_FOLDED_TILES, MOST_STAGES = 6, 4, 12
"""The most tiles of a block, whose sums are in registers, also of such tokens, and the most stages of its ring."""
MOST_COPIED = 256
"""The most rows of a tile that is copied."""


@dataclass(frozen=True, slots=True)
class Clusters:
    """`columns` of out for each cluster of `split` blocks, and a ring of `stages`."""

    tokens: int
    columns: int
    split: int
    stages: int


def int4_choice(p: Problem) -> Clusters | None:
    """The clusters for a product, or None where their kernel does not take it."""
    fp4 = p.form == Fp4()
    if not (fp4 or (p.form == Int4Groups(GROUP) and p.m > 1)) or p.target.batch_invariant:
        return None
    if not p.target.nvrtc or p.target.arch != 90 or p.k % DEPTH or p.n % 16:
        return None
    if p.m > MOST_TOKENS or (p.m > BLOCK_TOKENS and p.rows * p.k < LARGE):
        return None
    tokens = min(BLOCK_TOKENS, max(FEW_TOKENS, power_of_two(p.m)))
    return _choose(p.target.num_sms, tokens, p.n, p.k, p.gated, fp4)


@functools.cache
def _choose(num_sms: int, tokens: int, n: int, k: int, gated: bool, fp4: bool) -> Clusters | None:
    """All clusters run at once, a block an SM. K has as many parts as let a block read least, where x counts half,
    because the second-level cache has it."""
    found = {}
    word_bytes = 8 if fp4 else 4
    for split, share in CLUSTERED.items():
        columns = max(FEWEST_ROWS, -(-n // (int(num_sms * share) // split) // 8) * 8)
        rows = 2 * columns if gated else columns
        cost = rows * (k // 2 + k * word_bytes // GROUP) // split + tokens * k // split
        if split > 1:
            cost += 4 * tokens * rows
        held = _held(rows, k, split, word_bytes) + sent_bytes(tokens, rows, split, _sent(tokens, rows))
        room = (shared_bytes(90) - 16 - held) // (_stage(tokens, rows) + 16)
        stages = min(MOST_STAGES, -(-k // DEPTH // split), room)
        most = MOST_TILES if tokens <= FOLDED_TOKENS else MOST_FOLDED_TILES
        fits = rows <= most * TILE and columns <= MOST_COPIED and stages >= 2
        if fits and k >= split * FEWEST_STAGES * DEPTH:
            found[cost] = Clusters(tokens, columns, split, stages)
    return found[min(found)] if found else None


def words_of(k: int, split: int) -> int:
    """Groups of a row whose words a block holds: those of its part of K, and one more so that rows have other banks."""
    return -(-k // DEPTH // split) * (DEPTH // GROUP) + 1


def _held(rows: int, k: int, split: int, word_bytes: int) -> int:
    """Bytes of a block's words, whole tiles of them, and of FP4's factors."""
    return -(-rows // TILE) * TILE * (words_of(k, split) * word_bytes + 4 * (word_bytes > 4))


def _stage(tokens: int, rows: int) -> int:
    """Bytes of a stage of the ring."""
    return DEPTH * (rows // 2 + 2 * tokens)


def shares(tokens: int, rows: int) -> tuple[int, int]:
    """Into how many parts warpgroups divide a block's tiles, and the groups of a stage."""
    tiles = -(-rows // TILE)
    if tokens > FOLDED_TOKENS and tiles == 3:
        return 3, 1
    if tokens >= FOLDED_TOKENS:  # more than two warpgroups have too few registers
        return (2, 1) if tiles > 1 else (1, 2)
    return (tiles if tiles < 5 else 3), (2 if tiles < 3 else 1)


def _sent(tokens: int, rows: int) -> int:
    """The sums that a block sends of each number: few tokens' are added up before."""
    return 1 if tokens == FEW_TOKENS else shares(tokens, rows)[1]


def int4_cluster(c: Clusters, p: Problem) -> Launch:
    """The product by the clusters of `c`."""
    k, rows, pitch = p.k, 2 * c.columns if p.gated else c.columns, words_of(p.k, c.split)
    sides, parts = shares(c.tokens, rows)
    fp4 = p.form == Fp4()
    sums = parts * c.tokens * (rows + (20 - rows % 16) % 16) * 4
    ring = max(c.stages * _stage(c.tokens, rows), sums)
    assert p.weight.scales is not None
    x, weight = TensorMap(p.x, (c.tokens, 64)), TensorMap(p.weight.weight, (c.columns, DEPTH // 2))
    args: dict[str, Arg] = {"out": p.out, "x": x, "weight": weight, "words": p.weight.scales, **p.sizes}
    most = under_way(c.stages, DEPTH * rows // 2, c.tokens, codes=True)
    constants = {"TOKENS": c.tokens, "ROWS": c.columns, "SPLIT": c.split, "STAGES": c.stages}
    constants |= {"UNDER_WAY": most, "SIDES": sides, "PARTS": parts, "WORDS": pitch}
    constants |= {"GATED": p.gated, "ADD": p.add, **({"FP4": True} if fp4 else {})}
    grid = (-(-p.n // c.columns) * c.split, -(-p.m // c.tokens))
    shared = ring + _held(rows, k, c.split, 8 if fp4 else 4) + 16 * (c.stages + 1)
    shared += sent_bytes(c.tokens, rows, c.split, _sent(c.tokens, rows))
    kernel = "openinfer.kernels.device", "int4_cluster.cu", "int4_cluster"
    threads = 128 * (sides * parts + 1)
    return launch_cuda(*kernel, grid, args, constants, threads=threads, shared=shared, early=True)


def _clusters(p: Problem) -> Iterator[Command]:
    choice = int4_choice(p)
    assert choice is not None
    yield int4_cluster(choice, p)


CLUSTERS = Kernel("clusters of INT4 and FP4", lambda p: int4_choice(p) is not None, _clusters)
