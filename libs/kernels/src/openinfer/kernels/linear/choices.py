"""Which kernel a matrix product uses: by measured tables, and by a rule where no table has an entry. Rings and
clusters, kernels of CUDA C++ for few tokens, come before tables.

A table is a file `tables/<gpu name>.json` of this package. The name is in lower case, with _ for characters that are
not letters or digits. `openinfer tune` writes such tables too, and keeps them beside the compiled kernels:

    {"sha256": "...", "norm_linear": {"6144x2560": {"1": {"kind": "gemv", "bn": 8, "bk": 512}, "16": {...}}}}

A table is by op ("logits" is norm_linear into float32), by N x K of the weight, by M. A product takes the entry of the
smallest M that is not less than its own. "sha256" is the digest of the rest. A table is as powerful as code, since it
chooses kernels and their tiles.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from openinfer.kernels.errors import InvalidTable
from openinfer.kernels.linear.cluster_memory import (
    CLUSTER_TOKENS,
    MOST_CLUSTER_TOKENS,
    ROW_BYTES,
    adapters_bytes,
    copied_tokens,
    sent_bytes,
)
from openinfer.kernels.op.target import Target
from openinfer.kernels.store.cache_folder import check_owner, digest, make_private, unfinished
from openinfer.kernels.store.cubins import default_cache

Kind = Literal["gemv", "ring", "cluster", "small", "tma", "pointer", "cublas"]

TABLES = Path(__file__).parent / "tables"

SHARED_BYTES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10, 103: 227 << 10}
"""Shared memory a block may have, by architecture; the others have CONSUMER_SHARED_BYTES."""
CONSUMER_SHARED_BYTES = 99 << 10

Table = Mapping[str, Mapping[str, Mapping[str, Mapping[str, Any]]]]
"""Entries by op, by "NxK", by M."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A kernel for a product and its tile: `bm` tokens by `bn` rows of the weight by `bk` of K; K in `split` parts.
    Of a gated product a cluster has `bn` rows of the gate and of up."""

    kind: Kind
    bm: int = 1
    bn: int = 1
    bk: int = 1
    split: int = 1
    warps: int = 4
    stages: int = 3


@dataclass(frozen=True, slots=True)
class Exchange:
    """A way to add up the rows of several ranks, where a row has `warps`. push: each rank sends its rows to all others,
    and adds up by itself. two_shot: the ranks share the rows, add up and send the results. nccl: NCCL's all-reduce."""

    kind: Literal["push", "two_shot", "nccl"]
    warps: int = 16


NCCL = Exchange("nccl")
MOST_PUSHED = 4 << 20
"""Bytes of a sum that the rule still pushes. Figures: docs/lessons/ranks.md."""
MOST_OF_TWO = 32 << 20
"""The same between two ranks, for sums whose kernel is push_sum."""
ROWS_OF_16 = 128
"""The most rows that programs of 16 warps push. Of 8 warps twice as many run at once."""
ONE_SHOT_SENT = 768 << 10
"""Bytes that a rank sends to more than one other up to which the rule takes one shot."""
EXCHANGES = "sum_of_ranks"
"""The op of a table whose entries are Exchanges: by "RANKSxWIDTH", by rows."""


@functools.cache
def choose_exchange(target: Target, ranks: int, rows: int, width: int, most: int = MOST_PUSHED) -> Exchange:
    """The way to add up bf16 [rows, width] over ranks. most: bytes that the rule still pushes."""
    if target.batch_invariant:
        return Exchange("push", 8)
    by_rows = _table(target.gpu).get(EXCHANGES, {}).get(f"{ranks}x{width}", {})
    for limit, entry in sorted((int(limit), entry) for limit, entry in by_rows.items()):
        if rows <= limit:
            return Exchange(**entry)
    return exchange_rule(ranks, rows, width, most)


def exchange_rule(ranks: int, rows: int, width: int, most: int = MOST_PUSHED) -> Exchange:
    """The choice for a sum without a measurement. In one shot a rank sends its rows to each other rank; in two shots it
    sends them twice, less a part, and waits twice. NCCL alone has no bound of rows at once."""
    nbytes = 2 * rows * width
    if nbytes > most:
        return NCCL
    one_shot = ranks == 2 or nbytes * (ranks - 1) <= ONE_SHOT_SENT
    return Exchange("push" if one_shot else "two_shot", 16 if rows <= ROWS_OF_16 else 8)


@functools.cache
def choose(target: Target, op: str, m: int, n: int, k: int) -> Choice:
    """The kernel for out[m, n] = x[m, k] @ weight^T as part of `op`; n counts the weight's rows."""
    if target.batch_invariant:
        return rule(target, op, m, n, k)
    found = ring_choice(target, op, m, n, k) or cluster_choice(target, op, m, n, k)
    return found or measured(target, op, m, n, k)


def measured(target: Target, op: str, m: int, n: int, k: int) -> Choice:
    """The choice by a table, or by the rule where none has an entry."""
    by_m = _table(target.gpu).get(op, {}).get(f"{n}x{k}", {})
    for limit, entry in sorted((int(limit), entry) for limit, entry in by_m.items()):
        if m <= limit:
            choice = Choice(**entry)
            if target.cublas or choice.kind != "cublas":
                return choice
            break
    return rule(target, op, m, n, k)


RING_TOKENS = 4
"""The most tokens of a product by a ring. Its warps hold their parts of all tokens in registers."""
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
GROUP_RINGS = {True: 64 << 10, False: RING_BYTES}
"""The most bytes of such a ring. A small one is faster by itself, and in a step it is faster for INT4 only
(docs/lessons/products.md)."""
RING_BESIDE = 170 << 10
"""The most bytes of a ring of one token that adds to the residual, of at most BESIDE_COLUMNS: it starts beside
decode attention. One of more columns is behind another ring."""
BESIDE_COLUMNS = 8192
RING_PART = 0.7
"""The most of a program's rows that its ring holds. A ring that holds all of them takes memory from the kernel behind
it (docs/lessons/products.md)."""


def ring_choice(target: Target, op: str, m: int, n: int, k: int) -> Choice | None:
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
    return Choice("ring", 1, rows, RING_COLUMNS, 1, warps, max(2, room // (rows * k * 2)))


def _ring_of_tokens(target: Target, op: str, m: int, n: int, k: int) -> Choice | None:
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
    return Choice("ring", m, 8, RING_COLUMNS, part, warps, max(2, room // stage))


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
) -> Choice | None:
    """The clusters for a product of few tokens, or None where their kernel does not take it. All of them run at once,
    and K has as few parts as that allows. `codes`: x and the weight are float8. `rank`: of the adapters that tokens
    have, if not 0. For those no other kernel is as fast with any shape."""
    gated, depth = op == "gate_up_silu", ROW_BYTES if codes else ROW_BYTES // 2
    if not target.nvrtc or target.arch != 90 or not 1 < m <= MOST_CLUSTER_TOKENS or k % depth:
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
        steps = -(-k // depth // split)
        held = (2 * halves + copied) * steps * 4 if codes else 0  # scales
        held += adapters_bytes(bm, copied, rank) if rank else 0
        held += sent_bytes(copied, halves * columns, split, parts=2)
        room = (shared_bytes(target.arch) - 16 - held) // ((copied + halves * columns) * ROW_BYTES + 16)
        return Choice("cluster", bm, columns, depth, split, 8, min(16, steps, room))
    return None


def group_ring_choice(target: Target, n: int, k: int, *, packed: bool, gated: bool) -> Choice | None:
    """The ring for a product of one token with n rows of codes, or None where its kernel does not take it.

    `packed`: the codes are INT4, else FP8. Gated: there are twice as many rows. Warps multiply 8 groups
    of 128 columns at once. INT4's words are copied in pieces of 16 bytes.
    """
    if not target.nvrtc or target.arch != 90 or target.batch_invariant or k % (512 if packed else 128):
        return None
    unit = 8 // math.gcd(k // 128, 8)  # rows whose groups are runs of 8
    places = unit * k // 1024
    if places > MOST_RING_WARPS:
        return None
    if packed:
        replicas = max(4 // places, 2 if gated and 2 * places <= MOST_RING_WARPS else 1)
    else:
        replicas = max(1, min(4, 12 // places))
    rows, row_bytes = 2 * unit * replicas, k // 2 + k // 32 if packed else k
    while 2 * rows * row_bytes <= GROUP_STAGES[packed]:
        rows *= 2
    most = -(-n // target.num_sms) * (2 if gated else 1)  # rows of a program
    sums = (most + 2 * rows) * (k // 128 + 1) * 4
    stage, room = rows * row_bytes, shared_bytes(target.arch) - sums - 2048
    if 2 * stage > room:
        return None
    wanted = max(GROUP_RINGS[packed], 3 * stage)
    stages = min(wanted, room, int(most * row_bytes * RING_PART)) // stage
    return Choice("ring", 1, rows, 128, 1, places * replicas, max(2, stages))


def rule(target: Target, op: str, m: int, n: int, k: int) -> Choice:
    """The choice for a product without a measurement."""
    if target.batch_invariant:
        return _large(target, op, 1, k)
    gated = op == "gate_up_silu"
    if m == 1:
        bn = 4 if gated else 8  # gated programs read two sets of rows
        return Choice("gemv", 1, bn, depth(k, 512))
    if m <= 64:
        return _small(target, m, n // 2 if gated else n, k, 2 if gated else 1)
    if target.cublas:
        return Choice("cublas")
    return _large(target, op, m, k)


def scaled_rule(target: Target, op: str, m: int, n: int, k: int) -> Choice:
    """The choice for a product with a weight of float8: half the bytes, and more to do for each. The tensor cores wait
    for each block's scale, which more parts of K hide."""
    if target.batch_invariant:
        return rule(target, op, m, n, k)
    if m == 1:
        if op == "gate_up_silu":
            return Choice("gemv", 1, 4, depth(k, 512), 1, 2, 4)
        return Choice("gemv", 1, 8, depth(k, 1024), 1, 4, 3)
    choice = rule(target, op, m, n, k)
    if choice.kind == "small" and m <= 32 and choice.split < 8 and k // choice.bk >= choice.split * 4:
        choice = dataclasses.replace(choice, split=2 * choice.split)
    return choice


def _small(target: Target, m: int, n: int, k: int, sets: int) -> Choice:
    """For `sets` of n rows of weights (2: gated): two programs an SM, and K split until they fill one wave."""
    bm, bn, room = max(16, 1 << (m - 1).bit_length()), 64, shared_bytes(target.arch) // 2
    column = (sets * bn + bm) * 2  # bytes of one step of K
    bk = depth(k, 128 if 3 * 128 * column <= room else 64)
    split = 1
    while split < 8 and -(-n // bn) * split <= target.num_sms and k // bk >= split * 4:
        split *= 2
    return Choice("small", bm, bn, bk, split, 4, min(4, max(2, room // (bk * column))))


def _large(target: Target, op: str, m: int, k: int) -> Choice:
    kind: Kind = "tma" if target.arch >= 90 else "pointer"
    bk = depth(k, 64)
    if shared_bytes(target.arch) == CONSUMER_SHARED_BYTES:
        return Choice(kind, 64, 128, bk, 1, 4, 2)
    if m <= 128:
        return Choice(kind, 64, 128, bk, 1, 4, 4)
    # The wide tile has no room to add to, nor for float32.
    if m <= 512 or kind == "pointer" or op in ("linear_add", "logits"):
        return Choice(kind, 128, 128, bk, 1, 8, 4)
    return Choice(kind, 128, 256, bk, 1, 8, 3)


def shared_bytes(arch: int) -> int:
    """Bytes of shared memory a block may have."""
    return SHARED_BYTES.get(arch, CONSUMER_SHARED_BYTES)


def depth(k: int, most: int) -> int:
    """The largest power of two that divides k, at most `most`."""
    return min(k & -k, most)


@functools.cache
def _table(gpu: str) -> Table:
    """The package's measurements of a GPU, replaced by this machine's where there are any. Raises UntrustedCache."""
    check_owner(user_tables())
    shipped, own = load(table_file(TABLES, gpu)), load(table_file(user_tables(), gpu))
    return merged(shipped, own)


def table_file(folder: Path, gpu: str) -> Path:
    """Where a folder has the table of a GPU."""
    return folder / (re.sub(r"[^a-z0-9]+", "_", gpu.lower()) + ".json")


def user_tables() -> Path:
    """The folder that `openinfer tune` writes to: `tables` beside the compiled kernels."""
    return default_cache().parent / "tables"


def load(file: Path) -> Table:
    """A table, empty if there is no such file. Raises InvalidTable (a ValueError) for a file that is not a table."""
    if not file.is_file():
        return {}
    try:
        table: dict[str, Any] = json.loads(file.read_text())
        found = table.pop("sha256", None)
        if found != digest(table):
            raise ValueError("its digest does not match")
        for op, shapes in table.items():
            of = Exchange if op == EXCHANGES else Choice
            for by_m in shapes.values():
                for m, entry in by_m.items():
                    int(m)
                    of(**entry)
    except (ValueError, TypeError, AttributeError) as error:
        raise InvalidTable(f"{file} is no table of kernels ({error}); tune again or delete it") from None
    return table


def merged(table: Table, over: Table) -> Table:
    """Both, `over` before `table` where both have an entry."""
    found: dict[str, dict[str, dict[str, Mapping[str, Any]]]] = {}
    for part in (table, over):
        for op, shapes in part.items():
            for shape, by_m in shapes.items():
                found.setdefault(op, {}).setdefault(shape, {}).update(by_m)
    return found


def save(file: Path, table: Table) -> None:
    """Write a table with its digest, an entry a line, in one piece."""
    text = json.dumps({"sha256": digest(table), **table}, indent=2)
    text = re.sub(r"\{\s+(\"kind\"[^{}]*?)\s+\}", lambda m: "{" + re.sub(r"\s+", " ", m[1]) + "}", text)
    if file.parent == user_tables():
        make_private(file.parent)
    file.parent.mkdir(parents=True, exist_ok=True)
    fresh = unfinished(file)
    fresh.write_text(text + "\n")
    fresh.replace(file)
