"""The predictions of `openinfer plan` for recorded server rows beside the measured figures, for docs/planning.md.

    python benchmarks/predicted_rows.py [--write]

The rows are those of `openinfer bench serve` in benchmarks/results. The fit has seen none of them: speeds come from the
recorded steps, the time of an arrival from another run, of 2026-11-21. Arrivals are the client's (same seeds).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from openinfer.cli import bench_recipe
from openinfer.cli.bench_serve import Load
from openinfer.cli.plan_load import Point, Server
from openinfer.cli.plan_text import name_of
from openinfer.kernels import GPUS, H200

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PAGE = ROOT / "benchmarks" / "results", ROOT / "docs" / "planning.md"
RUNS = {
    "qwen3-4b/2026-11-22-h200-serve.json": "qwen3-4B",
    "serve-minute-qwen3-4b-2026-11-21-h200.json": "qwen3-4B",
    "qwen3_5-4b/2026-11-22-h200-serve.json": "qwen3_5-4B",
}
BEGIN, END = "<!-- table of benchmarks/predicted_rows.py -->\n", "<!-- end of table -->"
LIMITS = {"p50": 0.10, "p99": 0.20}


class Figure(NamedTuple):
    """A predicted figure in milliseconds beside the measured one."""

    name: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Relative to the measured figure."""
        return self.predicted / self.measured - 1

    @property
    def within(self) -> bool:
        """Whether the error is within the limit of its percentile."""
        return abs(self.error) <= LIMITS[self.name[-3:]]

    def __str__(self) -> str:
        text = f"{self.predicted:.4g} / {self.measured:.4g} ({100 * self.error:+.0f} %)"
        return text if self.within else f"**{text}**"


def rows() -> Iterator[tuple[str, Point, float, list[Figure]]]:
    """Each recorded row: its model, the predicted point, the measured requests a second, the figures."""
    for file, model in RUNS.items():
        _, asked = bench_recipe.parse([model], "plan", __doc__, lambda parser: None, named=True)
        server = Server.of(asked, H200, GPUS[H200.gpu], 1)
        for result in json.loads((RESULTS / file).read_text())["results"]:
            rate = float(result["request_rate"])
            names = ("num_prompts", "max_concurrency", "input_len", "output_len", "seed")
            point = server.serve(Load(rate, *(result[name] for name in names)))
            found = [
                Figure(f"{what.upper()} {p}", getattr(point, f"{what}_ms")[p], result[f"{what}_ms"][p])
                for what in ("ttft", "tpot")
                for p in LIMITS
            ]
            yield model, point, result["requests_per_s"], found


def table() -> str:
    """The table in Markdown, and how many figures are within the limits."""
    names = [f"{what} {p} (ms)" for what in ("TTFT", "TPOT") for p in LIMITS]
    lines = [
        f"| server | load | req/s | {' | '.join(names)} |",
        "| --- " * (3 + len(names)) + "|",
    ]
    figures: list[Figure] = []
    for model, point, measured, found in rows():
        figures += found
        load = f"{name_of(point)}, {point.load.input_len:,} in"
        cells = [model, load, f"{point.requests_per_s:.2f} / {measured:.2f}", *map(str, found)]
        lines.append("| " + " | ".join(cells) + " |")
    held = ", ".join(
        f"{sum(f.within for f in figures if f.name.endswith(p))} of "
        f"{sum(f.name.endswith(p) for f in figures)} {p} within {limit:.0%}"
        for p, limit in LIMITS.items()
    )
    return "\n".join([*lines, "", f"Predicted / measured; {held}; others are bold.", ""])


def main() -> int:
    """Print the table, or write it into the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help=f"put it into {PAGE.name}")
    if not parser.parse_args().write:
        print(table())
        return 0
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
