"""Measured choices of a GPU: which kernel makes a product, and which way sums of ranks go.

A table is a file `gpu_tables/<gpu name>.json` of this package. The name is in lower case, with _ for characters that
are not letters or digits. `openinfer tune` writes such tables too, and keeps them beside the compiled kernels:

    {"sha256": "...", "norm_linear": {"6144x2560": {"1": {"kind": "gemv", "bn": 8, "bk": 512}, "16": {...}}}}

A table is by op ("logits" is norm_linear into float32), by N x K of the weight, by M. A product takes the entry of the
smallest M that is not less than its own. "sha256" is the digest of the rest. A table is as powerful as code, since it
chooses kernels and their tiles.
"""

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from openinfer.kernels.errors import InvalidTable
from openinfer.kernels.store import check_owner, digest, make_private, write_whole
from openinfer.kernels.store.cubins import default_cache

Kind = Literal["gemv", "ring", "cluster", "small", "tma", "pointer", "cublas"]

TABLES = Path(__file__).parent / "gpu_tables"

Table = Mapping[str, Mapping[str, Mapping[str, Mapping[str, Any]]]]
"""Entries by op, by "NxK", by M."""


@dataclass(frozen=True, slots=True)
class ProductChoice:
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


EXCHANGES = "sum_of_ranks"
"""The op of a table whose entries are Exchanges: by "RANKSxWIDTH", by rows."""


def entry_for(gpu: str, op: str, shape: str, size: int) -> Mapping[str, Any] | None:
    """The entry of a GPU's table for `size` tokens or rows: that of the smallest number that is not less."""
    entries = gpu_table(gpu).get(op, {}).get(shape, {})
    limit = min((n for n in map(int, entries) if n >= size), default=None)
    return None if limit is None else entries[str(limit)]


@functools.cache
def gpu_table(gpu: str) -> Table:
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
            of = Exchange if op == EXCHANGES else ProductChoice
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
    write_whole(file, f"{text}\n".encode())
