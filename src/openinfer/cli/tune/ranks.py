"""`openinfer tune -tp N`: the ways in which the GPUs of a model add up their parts. A process a GPU measures them.

`python -m openinfer.cli.tune.ranks WIDTH ROWS,... BOOT` is a rank above 0.
"""

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence

from openinfer.cli.explain.ledger import recorded_calls
from openinfer.cli.explain.segments import Outline
from openinfer.kernels.measure.exchange_tuner import ExchangeRank, exchange_entry, other_ranks
from openinfer.kernels.store import tables
from openinfer.kernels.store.tables import Exchange

Found = tuple[int, Mapping[Exchange, float]]
"""Rows, and seconds by way."""


def width_of(outline: Outline) -> int | None:
    """Columns of the rows that ranks add up; None where there is one rank."""
    for op, args in recorded_calls(outline.prefill(outline.buckets.max_tokens)[0]):
        if op.collective and getattr(args, "ranks", 1) > 1 and op.name != "gather_columns":
            summed = args.x if hasattr(args, "x") else args.y
            return int(summed.shape[1])
    return None


def _missing(ranks: int, width: int, rows: Sequence[int], known: tables.Table) -> list[int]:
    """The rows that a table has no way for."""
    entries = known.get(tables.EXCHANGES, {}).get(f"{ranks}x{width}", {})
    return [count for count in rows if str(count) not in entries]


def _measured(ranks: int, width: int, rows: Sequence[int]) -> Iterator[Found]:
    """Each number of rows in each way, on GPUs 0 to ranks - 1. Raises RankLost."""
    command = [sys.executable, "-m", "openinfer.cli.tune.ranks", str(width), ",".join(map(str, rows))]
    with other_ranks(ranks, command) as (memory, links):
        rank = ExchangeRank(0, ranks, width, memory, links)
        yield from rank.sums(rows)
        rank.close()


def _table(ranks: int, width: int, found: Found) -> tables.Table:
    rows, seconds = found
    best = min(seconds, key=seconds.__getitem__)
    return {tables.EXCHANGES: {f"{ranks}x{width}": {str(rows): exchange_entry(best)}}}


def _line(ranks: int, width: int, found: Found) -> str:
    rows, seconds = found
    ways = ", ".join(
        f"{_name(way)} {1e6 * s:.1f}" for way, s in sorted(seconds.items(), key=lambda one: one[1])
    )
    return f"sum of {ranks} ranks [{rows}, {width}]: {ways} us"


def _name(way: Exchange) -> str:
    return {"push": "one shot", "two_shot": "two shots", "nccl": "NCCL"}[way.kind] + (
        "" if way.kind == "nccl" else f" of {way.warps} warps"
    )


def tune_ranks(
    outline: Outline,
    ranks: int,
    tokens: Sequence[int],
    known: tables.Table,
    keep: Callable[[tables.Table], None],
) -> list[dict[str, object]]:
    """Measure what `known` lacks; `keep` gets each entry. The measurements, for JSON."""
    width, results = width_of(outline), list[dict[str, object]]()
    rows = [] if width is None else _missing(ranks, width, tokens, known)
    if width is None or not rows:
        return results
    for found in _measured(ranks, width, rows):
        keep(_table(ranks, width, found))
        print(_line(ranks, width, found), flush=True)
        us = [{**exchange_entry(way), "us": 1e6 * s} for way, s in found[1].items() if not math.isnan(s)]
        results.append({"op": tables.EXCHANGES, "ranks": ranks, "width": width, "rows": found[0], "us": us})
    return results


def main(argv: Sequence[str]) -> int:
    """A rank above 0."""
    width, rows, boot = argv
    rank = ExchangeRank.joined(boot, int(width))
    for _ in rank.sums([int(count) for count in rows.split(",")]):
        pass
    rank.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
