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
Keep = Callable[[tables.Table], None]


def width_of(outline: Outline) -> int | None:
    """Columns of the rows that ranks add up; None where there is one rank."""
    for op, args in recorded_calls(outline.prefill(outline.buckets.max_tokens)[0]):
        if op.collective and getattr(args, "ranks", 1) > 1 and op.name != "gather_columns":
            summed = args.x if hasattr(args, "x") else args.y
            return int(summed.shape[1])
    return None


def _measured(ranks: int, width: int, rows: Sequence[int]) -> Iterator[Found]:
    """Each number of rows in each way, on GPUs 0 to ranks - 1. Raises RankLost."""
    command = [sys.executable, "-m", "openinfer.cli.tune.ranks", str(width), ",".join(map(str, rows))]
    with other_ranks(ranks, command) as (memory, links):
        rank = ExchangeRank(0, ranks, width, memory, links)
        yield from rank.sums(rows)
        rank.close()


def _name(way: Exchange) -> str:
    return {"push": "one shot", "two_shot": "two shots", "nccl": "NCCL"}[way.kind] + (
        "" if way.kind == "nccl" else f" of {way.warps} warps"
    )


def tune_ranks(
    outline: Outline, ranks: int, tokens: Sequence[int], known: tables.Table, keep: Keep
) -> list[dict[str, object]]:
    """Measure what `known` lacks; `keep` gets each entry. The measurements, for JSON."""
    width, results = width_of(outline), list[dict[str, object]]()
    entries = known.get(tables.EXCHANGES, {}).get(f"{ranks}x{width}", {})
    missing = [rows for rows in tokens if str(rows) not in entries]
    if width is None or not missing:
        return results
    for rows, seconds in _measured(ranks, width, missing):
        best = min(seconds, key=seconds.__getitem__)
        keep({tables.EXCHANGES: {f"{ranks}x{width}": {str(rows): exchange_entry(best)}}})
        fastest_first = sorted(seconds.items(), key=lambda one: one[1])
        ways = ", ".join(f"{_name(way)} {1e6 * s:.1f}" for way, s in fastest_first)
        print(f"sum of {ranks} ranks [{rows}, {width}]: {ways} us", flush=True)
        us = [{**exchange_entry(way), "us": 1e6 * s} for way, s in seconds.items() if not math.isnan(s)]
        results.append({"op": tables.EXCHANGES, "ranks": ranks, "width": width, "rows": rows, "us": us})
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
