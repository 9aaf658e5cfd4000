"""Which kernel a product with a weight in bf16 or FP8 takes: rings and clusters, kernels of CUDA C++ for few tokens,
then measured tables (store.tables), and a rule where no table has an entry."""

import dataclasses
import functools
import math
from typing import NamedTuple

from openinfer.kernels.formats.fp8 import Fp8
from openinfer.kernels.linear.problem import Problem
from openinfer.kernels.op.launch import depth
from openinfer.kernels.op.target import CONSUMER_SHARED_BYTES, Target, shared_bytes
from openinfer.kernels.store.tables import Kind, ProductChoice, entry_for


class CodedTile(NamedTuple):
    """Rows of the weight and tokens at a time, and how many programs share the columns."""

    rows: int
    bm: int
    split: int
    warps: int = 4
    stages: int = 4


def planned(p: Problem) -> ProductChoice:
    """The kernel and tile of plain or FP8 numbers; of INT4 those of the weight made bf16."""
    choose_by = scaled_rule if isinstance(p.form, Fp8) else choose
    return p.choice or choose_by(p.target, p.op, p.m, p.rows, p.k)


@functools.cache
def choose(target: Target, op: str, m: int, n: int, k: int) -> ProductChoice:
    """The kernel for out[m, n] = x[m, k] @ weight^T as part of `op`; n counts the weight's rows."""
    if target.batch_invariant:
        return rule(target, op, m, n, k)
    ways = (ring_choice, cluster_choice) if m <= FAST_RING_TOKENS else (cluster_choice, ring_choice)
    found = ways[0](target, op, m, n, k) or ways[1](target, op, m, n, k)
    return found or measured(target, op, m, n, k)


def measured(target: Target, op: str, m: int, n: int, k: int) -> ProductChoice:
    """The choice by a table, or by the rule where none has an entry."""
    entry = entry_for(target.gpu, op, f"{n}x{k}", m)
    if entry is not None and (target.cublas or entry["kind"] != "cublas"):
        return ProductChoice(**entry)
    return rule(target, op, m, n, k)


RING_TOKENS = 4
"""The most tokens of a product by a ring. Its warps hold their parts of all tokens in registers."""
FAST_RING_TOKENS = 2
"""The most tokens of which a ring takes no longer than clusters (docs/lessons/products.md)."""
RING_COLUMNS = 256
"""Columns that a warp of a ring multiplies at once."""
RING_STAGE = 43 << 10
"""The most bytes of a stage of a ring."""
RING_BYTES = 205 << 10
"""The most bytes of a ring."""
MOST_HELD = 512
"""The most columns of x that a warp of a ring of several tokens holds."""
MOST_RING_WARPS = 20
"""The most warps of a ring that multiply: with more, a thread has too few registers."""
GROUP_STAGES = {True: 16 << 10, False: 24 << 10}
"""The most bytes of a stage of a ring of INT4 codes, and of FP8 codes, if it has more rows than its warps need."""
RING_BESIDE = 170 << 10
"""The most bytes of a ring of one token that adds to the residual, of at most BESIDE_COLUMNS: it starts beside
decode attention. One of more columns is behind another ring."""
BESIDE_COLUMNS = 8192
RING_PART = 0.7
"""The most of a program's rows that its ring holds. A ring that holds all of them takes memory from the kernel behind
it (docs/lessons/products.md)."""


UNDER_WAY = {True: 40 << 10, False: 80 << 10}
"""The most bytes of a weight, of codes or not, that a block has under way. More do not come sooner, and what the block
reads of the kernel ahead comes behind them (docs/lessons/products.md)."""


def under_way(stages: int, stage: int, tokens: int, *, codes: bool) -> int:
    """The most of a ring's stages that are under way, each of `stage` bytes: two at least in bf16, and all of them with
    many tokens, whose x is as many bytes."""
    if tokens > FEW_CLUSTER_TOKENS:
        return stages
    return min(stages, max(1 if codes else 2, UNDER_WAY[codes] // stage))


def ring_choice(target: Target, op: str, m: int, n: int, k: int) -> ProductChoice | None:
    """The ring for a product of few tokens, or None where its kernel does not take it. The head's rows are too many for
    the sums that a program keeps."""
    if not target.nvrtc or target.arch != 90 or m > RING_TOKENS or op == "logits" or k % RING_COLUMNS:
        return None
    if m > 1:
        return _ring_of_tokens(target, op, m, n, k)
    chunks = k // RING_COLUMNS
    warps = max((w for w in range(4, 21) if chunks % w == 0 and chunks // w <= 5), default=0)
    if not warps:
        return None
    rows, fewest = 8, 2 if op == "gate_up_silu" else 1
    while rows > fewest and rows * k * 2 > RING_STAGE:
        rows //= 2
    most = -(-n // target.num_sms)  # rows of a program
    sums = (most + rows) * (warps + 2) * 4
    beside = op == "linear_add" and k <= BESIDE_COLUMNS
    room = min(shared_bytes(target.arch) - sums - 2048, int(most * k * 2 * RING_PART))
    room = min(RING_BESIDE if beside else RING_BYTES, room)
    return ProductChoice("ring", 1, rows, RING_COLUMNS, 1, warps, max(2, room // (rows * k * 2)))


def _ring_of_tokens(target: Target, op: str, m: int, n: int, k: int) -> ProductChoice | None:
    """ring_choice of several tokens. A stage has 8 rows of one of `split` parts of K. A warp holds x of its columns of
    every part in registers, so these are at most MOST_HELD."""
    part = next((s for s in range(1, 17) if k % (64 * s) == 0 and 16 * k // s <= RING_STAGE), 0)
    found = [
        w for w in range(4, MOST_RING_WARPS + 1) if part and k % (32 * part * w) == 0 and k // w <= MOST_HELD
    ]
    if not found:
        return None
    warps, stage = max(found), 8 * (2 * k // part + 64)
    most = -(-n // target.num_sms)
    sums = (most + 8) * m * (warps | 1) * 4 + warps * m * 4
    room = min(shared_bytes(target.arch) - sums - 2048, int(most * k * 2 * RING_PART), RING_BYTES)
    return ProductChoice("ring", m, 8, RING_COLUMNS, part, warps, max(2, room // stage))


CLUSTER_TOKENS = 64
"""The most tokens of any product by clusters. More are for products whose weight is large beside their tokens."""
MOST_CLUSTER_TOKENS = 128
FEW_CLUSTER_TOKENS = 16
"""Tokens up to which clusters copy no more than these rows of x, and send each other their sums."""
ROW_BYTES = 128
"""Bytes of a row of a stage of the ring: 64 columns of K in bf16, 128 in float8."""


def copied_tokens(m: int) -> int:
    """The rows of x that clusters copy for m tokens. A warpgroup multiplies 64."""
    return next(n for n in (FEW_CLUSTER_TOKENS, CLUSTER_TOKENS, MOST_CLUSTER_TOKENS) if m <= n)


def sent_bytes(tokens: int, columns: int, split: int, parts: int) -> int:
    """Bytes for the sums of its tokens that a block gets, in `parts` from each of the cluster's `split` blocks. tokens:
    of all blocks. Sums of many tokens are not sent."""
    few = split > 1 and tokens <= FEW_CLUSTER_TOKENS
    return split * parts * -(-tokens // split) * columns * 4 if few else 0


def adapters_bytes(bm: int, tokens: int, rank: int) -> int:
    """Bytes for adapters: three lists of tokens, each token's adapter, and what A makes of the tokens, of two
    projections."""
    return 4 * bm + tokens * 2 * rank * 2 + 16


CLUSTERED = {1: 1.0, 2: 1.0, 4: 0.85}
"""The part of the SMs that clusters fill, by their blocks. SMs are in groups of at most 18, and a cluster lies in one.
More clusters than run at once take twice as long (docs/lessons/products.md)."""
CLUSTER_ROWS = 64
"""The fewest rows of the weight of a cluster, because each reads all tokens."""
MOST_SUMS = 144
"""The most sums that a thread of a cluster keeps. With codes it has those of one stage besides."""


def releases(target: Target, tokens: int) -> bool:
    """Whether the product behind attention reads its weight before attention has ended."""
    return target.nvrtc and target.arch == 90 and tokens <= CLUSTER_TOKENS


@functools.cache
def cluster_choice(
    target: Target, op: str, m: int, n: int, k: int, *, codes: bool = False, rank: int = 0
) -> ProductChoice | None:
    """The clusters for a product of few tokens, or None where their kernel does not take it. All of them run at once,
    and K has as few parts as that allows. `codes`: x and the weight are float8. `rank`: of the adapters that tokens
    have, if not 0. For those no other kernel is as fast with any shape."""
    gated, deep = op == "gate_up_silu", ROW_BYTES if codes else ROW_BYTES // 2
    if not target.nvrtc or target.arch != 90 or not 1 < m <= MOST_CLUSTER_TOKENS or k % deep:
        return None
    if op not in ("norm_linear", "linear_add", "gate_up_silu") or n % 16 or target.batch_invariant:
        return None
    if m > CLUSTER_TOKENS and not (gated or codes or rank) and k <= 2 * n:
        return None
    bm, halves = CLUSTER_TOKENS if m <= CLUSTER_TOKENS else MOST_CLUSTER_TOKENS, 2 if gated else 1
    most_columns, copied = 128 if codes else 160, copied_tokens(m)
    for split, share in CLUSTERED.items():
        most = int(target.num_sms * share) // split
        columns = max(40, -(-n // halves // most // 8) * 8)
        if halves * columns < CLUSTER_ROWS:
            continue
        clusters, sums = -(-n // halves // columns), (halves + codes) * columns
        if columns > most_columns or sums > 2 * MOST_SUMS or 4 * clusters * split < 3 * target.num_sms:
            return None
        steps = -(-k // deep // split)
        held = (2 * halves + copied) * steps * 4 if codes else 0  # scales
        held += adapters_bytes(bm, copied, rank) if rank else 0
        held += sent_bytes(copied, halves * columns, split, parts=2)
        room = (shared_bytes(target.arch) - 16 - held) // ((copied + halves * columns) * ROW_BYTES + 16)
        return ProductChoice("cluster", bm, columns, deep, split, 8, min(16, steps, room))
    return None


def group_ring_choice(target: Target, n: int, k: int, *, words: int, gated: bool) -> ProductChoice | None:
    """The ring for a product of one token with n rows of codes, or None where its kernel does not take it.

    words: bytes of a row's words beside codes of 4 bits, 0 for those of FP8. Gated: there are twice as many rows. Warps
    multiply 8 groups of 128 columns at once. Words are copied in pieces of 16 bytes.
    """
    packed = words > 0
    if not target.nvrtc or target.arch != 90 or target.batch_invariant or k % (512 if packed else 128):
        return None
    unit = 8 // math.gcd(k // 128, 8)  # rows whose groups are runs of 8
    places = unit * k // 1024
    if places > MOST_RING_WARPS:
        return None
    replicas = max(1, min(4, (15 if packed else 12) // places))  # unpacking takes long
    rows, row_bytes = 2 * unit * replicas, k // 2 + words if packed else k
    while 2 * rows * row_bytes <= GROUP_STAGES[packed]:
        rows *= 2
    most = -(-n // target.num_sms) * (2 if gated else 1)  # rows of a program
    sums = (most + 2 * rows) * (k // 128 + 1) * 4
    stage, room = rows * row_bytes, shared_bytes(target.arch) - sums - 2 * k - 2048
    if 2 * stage > room:
        return None
    # A ring of four bits has half of an SM, so that a second program has no room: two would lie on each SM that
    # is free early, while others have none (docs/lessons/few_bits.md).
    wanted = -(-shared_bytes(target.arch) // 2 // stage) if packed else RING_BYTES // stage
    stages = min(max(wanted, 3), room // stage, int(most * row_bytes * RING_PART) // stage)
    return ProductChoice("ring", 1, rows, 128, 1, places * replicas, max(2, stages))


def rule(target: Target, op: str, m: int, n: int, k: int) -> ProductChoice:
    """The choice for a product without a measurement."""
    if target.batch_invariant:
        return _large(target, op, 1, k)
    gated = op == "gate_up_silu"
    if m == 1:
        bn = 4 if gated else 8  # gated programs read two sets of rows
        return ProductChoice("gemv", 1, bn, depth(k, 512))
    if m <= 64:
        return _small(target, m, n // 2 if gated else n, k, 2 if gated else 1)
    if target.cublas:
        return ProductChoice("cublas")
    return _large(target, op, m, k)


def scaled_rule(target: Target, op: str, m: int, n: int, k: int) -> ProductChoice:
    """The choice for a product with a weight of float8: half the bytes, and more to do for each. The tensor cores wait
    for each block's scale, which more parts of K hide."""
    if target.batch_invariant:
        return rule(target, op, m, n, k)
    if m == 1:
        if op == "gate_up_silu":
            return ProductChoice("gemv", 1, 4, depth(k, 512), 1, 2, 4)
        return ProductChoice("gemv", 1, 8, depth(k, 1024), 1, 4, 3)
    choice = rule(target, op, m, n, k)
    if choice.kind == "small" and m <= 32 and choice.split < 8 and k // choice.bk >= choice.split * 4:
        choice = dataclasses.replace(choice, split=2 * choice.split)
    return choice


def _small(target: Target, m: int, n: int, k: int, sets: int) -> ProductChoice:
    """For `sets` of n rows of weights (2: gated): two programs an SM, and K split until they fill one wave."""
    bm, bn, room = max(16, 1 << (m - 1).bit_length()), 64, shared_bytes(target.arch) // 2
    column = (sets * bn + bm) * 2  # bytes of one step of K
    bk = depth(k, 128 if 3 * 128 * column <= room else 64)
    split = 1
    while split < 8 and -(-n // bn) * split <= target.num_sms and k // bk >= split * 4:
        split *= 2
    return ProductChoice("small", bm, bn, bk, split, 4, min(4, max(2, room // (bk * column))))


def _large(target: Target, op: str, m: int, k: int) -> ProductChoice:
    kind: Kind = "tma" if target.arch >= 90 else "pointer"
    bk = depth(k, 64)
    if shared_bytes(target.arch) == CONSUMER_SHARED_BYTES:
        return ProductChoice(kind, 64, 128, bk, 1, 4, 2)
    if m <= 128:
        return ProductChoice(kind, 64, 128, bk, 1, 4, 4)
    # The wide tile has no room to add to, nor for float32.
    if m <= 512 or kind == "pointer" or op in ("linear_add", "logits"):
        return ProductChoice(kind, 128, 128, bk, 1, 8, 4)
    return ProductChoice(kind, 128, 256, bk, 1, 8, 3)
