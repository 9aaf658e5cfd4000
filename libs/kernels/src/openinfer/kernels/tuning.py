"""Which kernel a matrix product uses: measured tables where there are some, a rule where there are none.

A table is a file `tables/<gpu name>.json` of this package (lower case, _ for what is not a letter or digit), written by
`benchmarks/bench_linear.py`:

    {"norm_linear": {"6144x2560": {"1": {"kind": "gemv", "bn": 8, "bk": 512}, "16": {...}}}}

by op ("logits" is norm_linear into float32), by N x K of the weight, by M: the entry of the smallest M that is not
less than the product's.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from openinfer.kernels.target import Target

Kind = Literal["gemv", "small", "tma", "pointer", "cublas"]

TABLES = Path(__file__).parent / "tables"

SHARED_BYTES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10, 103: 227 << 10}
"""Shared memory a block may have, by architecture; the others have CONSUMER_SHARED_BYTES."""
CONSUMER_SHARED_BYTES = 99 << 10


@dataclass(frozen=True, slots=True)
class Choice:
    """A kernel for a product and its tile: `bm` tokens by `bn` rows of the weight by `bk` of K; K in `split` parts."""

    kind: Kind
    bm: int = 1
    bn: int = 1
    bk: int = 1
    split: int = 1
    warps: int = 4
    stages: int = 3


@functools.cache
def choose(target: Target, op: str, m: int, n: int, k: int) -> Choice:
    """The kernel for out[m, n] = x[m, k] @ weight^T as part of `op`; n counts the weight's rows."""
    by_m = _table(target.gpu).get(op, {}).get(f"{n}x{k}", {})
    for limit, entry in sorted((int(limit), entry) for limit, entry in by_m.items()):
        if m <= limit:
            choice = Choice(**entry)
            if target.cublas or choice.kind != "cublas":
                return choice
            break
    return rule(target, op, m, n, k)


def rule(target: Target, op: str, m: int, n: int, k: int) -> Choice:
    """The choice for a product that nobody has measured."""
    gated = op == "gate_up_silu"
    if m == 1:
        bn = 4 if gated else 8  # gated programs read two sets of rows
        return Choice("gemv", 1, bn, depth(k, 512))
    if m <= 64:
        return _small(target, m, n // 2 if gated else n, k, 2 if gated else 1)
    if target.cublas:
        return Choice("cublas")
    return _large(target, op, m, k)


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
def _table(gpu: str) -> Mapping[str, Mapping[str, Mapping[str, Any]]]:
    name = re.sub(r"[^a-z0-9]+", "_", gpu.lower()) + ".json"
    file = TABLES / name
    if not file.is_file():
        return {}
    table: Mapping[str, Mapping[str, Mapping[str, Any]]] = json.loads(file.read_text())
    return table
