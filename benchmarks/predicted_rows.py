"""The predictions of `openinfer plan` for recorded rows and steps beside the measured figures, for docs/planning.md.

    python benchmarks/predicted_rows.py [--write]

The rows are those of `openinfer bench serve` in benchmarks/results. The fit has seen none of them: speeds come from the
recorded steps, the time of an arrival from another run, of 2026-11-21. Arrivals are the client's (same seeds).
The second table has steps of several GPUs, where no server was measured. The fit has seen none of them either.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from openinfer.cli import recipe_flags
from openinfer.cli.bench.serve import Load
from openinfer.cli.explain.segments import Outline
from openinfer.cli.plan.load import Point, Server
from openinfer.cli.plan.text import name_of
from openinfer.cli.tune import speed as tune_speed
from openinfer.kernels import GPUS, H200, Figures, Parts

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PAGE = ROOT / "benchmarks" / "results", ROOT / "docs" / "planning.md"
FEW_ROWS = ("--max-num-seqs", "128", "--max-model-len", "8192")
RUNS: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "qwen3-4b/2026-11-23-h200-serve-one-commit.json": ("qwen3-4B", 1, ()),
    "qwen3_5-4b/2026-11-24-h200-serve-one-commit.json": ("qwen3_5-4B", 1, ()),
    "served-deepseek_v4-flash-2-gpus-2026-11-23-h200.json": ("deepseek_v4-Flash", 2, FEW_ROWS),
}
"""The model, GPUs and flags of each run of servers. Earlier runs had other kernels for steps of up to 128 tokens."""
TWO_GPUS, FOUR_GPUS = "two-gpus-2026-11-23-h200.json", "four-gpus-2026-11-28-h200.json"
ONE_OF_SEVERAL = (
    "rank-deepseek_v4-flash-of-2-2026-11-23-h200.json",
    "rank-deepseek_v4-flash-2026-11-22-h200.json",
)
STEP_RUNS = {
    (TWO_GPUS, "Qwen3-4B, 2 ranks"): ("qwen3-4B", 2, ()),
    (TWO_GPUS, "Qwen3-32B, 1 rank"): ("qwen3-32B", 1, ()),
    (TWO_GPUS, "Qwen3-32B, 2 ranks"): ("qwen3-32B", 2, ()),
    (FOUR_GPUS, "Qwen3-32B, 4 ranks"): ("qwen3-32B", 4, FEW_ROWS),
    (TWO_GPUS, "V4-Flash, 43 layers, 2 ranks"): ("deepseek_v4-Flash", 2, FEW_ROWS),
    (FOUR_GPUS, "V4-Flash, 43 layers, 4 ranks"): ("deepseek_v4-Flash", 4, FEW_ROWS),
    (FOUR_GPUS, "V4-Flash, 43 layers, 4 ranks, steps of 4,096 tokens"): (
        "deepseek_v4-Flash",
        4,
        (*FEW_ROWS, "--max-num-batched-tokens", "4096"),
    ),
}
"""The model, GPUs and flags of recorded steps, by their file and name there."""
ONE_RANK = ("--max-num-seqs", "128", "--max-num-batched-tokens", "4096", "--max-model-len", "4352")
"""The flags of the steps of ONE_OF_SEVERAL (benchmarks/deepseek_rank.py)."""
BEGIN, END = "<!-- table of benchmarks/predicted_rows.py -->\n", "<!-- end of table -->"
STEPS_BEGIN = "<!-- steps of benchmarks/predicted_rows.py -->\n"
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
    for file, (model, gpus, flags) in RUNS.items():
        _, asked = recipe_flags.parse([model, *flags], "plan", __doc__, lambda parser: None, named=True)
        server = Server.of(asked, H200, GPUS[H200.gpu], gpus)
        for result in json.loads((RESULTS / file).read_text())["results"]:
            rate = float(result["request_rate"])
            names = ("num_prompts", "max_concurrency", "input_len", "output_len", "seed")
            point = server.serve(Load(rate, *(result[name] for name in names)))
            found = [
                Figure(f"{what.upper()} {p}", getattr(point, f"{what}_ms")[p], result[f"{what}_ms"][p])
                for what in ("ttft", "tpot")
                for p in LIMITS
            ]
            name = model if gpus == 1 else f"{model}, {gpus} GPUs"
            yield name, point, result["requests_per_s"], found


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


def steps(figures: Figures = GPUS[H200.gpu]) -> Iterator[tuple[str, str, float, float]]:
    """Each recorded step of several GPUs: its run, point, predicted and measured milliseconds. figures: of the GPU."""
    for (file, name), (model, gpus, flags) in STEP_RUNS.items():
        made = outline(model, gpus, flags)
        for result in json.loads((RESULTS / file).read_text())["steps"][name]["results"]:
            if "device_ms" in result:
                found = predicted(made, result["point"], gpus, figures)
                yield name, result["point"], found, result["device_ms"]
    made = {gpus: outline("deepseek_v4-Flash", gpus, ONE_RANK) for gpus in (2, 4, 8)}
    for result in (r for file in ONE_OF_SEVERAL for r in json.loads((RESULTS / file).read_text())["figures"]):
        gpus, words = result["ranks"], result["step"].split()
        point = f"decode:{words[1]},{words[3]}" if words[0] == "decode" else f"prefill:{words[2]}"
        name = f"deepseek_v4-Flash, the part of 1 of {gpus} GPUs without collectives"
        yield name, point, predicted(made[gpus], point, 1, figures, links=False), result["device_ms"]


@functools.cache
def outline(model: str, gpus: int, flags: tuple[str, ...]) -> Outline:
    """The engine of a published model on GPUs that share it."""
    _, asked = recipe_flags.parse([model, *flags], "plan", __doc__, lambda parser: None, named=True)
    return Outline(asked.recipe, asked.source(), asked.options, H200, ranks=gpus)


def predicted(made: Outline, point: str, gpus: int, figures: Figures, *, links: bool = True) -> float:
    """Milliseconds of a point. links: with the collectives."""
    found = 0.0
    for calls, workload in tune_speed.point_steps(made, point):
        # hc_post is more than its sum of ranks, which one GPU leaves out.
        kept = [call for call in calls if links or call.op.name == "hc_post" or not call.cost(workload).link]
        parts = Parts.of(kept, workload, figures, gpus)
        found += sum(parts) - (0.0 if links else parts.link_s)
    return 1e3 * found


def steps_table() -> str:
    """The steps in Markdown, and how many are within the limit."""
    lines, within = ["| model | step | ms |", "| --- | --- | --- |"], []
    for name, point, guess, measured in steps():
        figure = Figure("step p50", guess, measured)
        within.append(figure.within)
        lines.append(f"| {name.replace(', 1 GPUs', ', 1 GPU')} | {point} | {figure} |")
    held = f"{sum(within)} of {len(within)} within {LIMITS['p50']:.0%}"
    return "\n".join([*lines, "", f"Predicted / measured; {held}; others are bold.", ""])


def main() -> int:
    """Print the table, or write it into the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help=f"put it into {PAGE.name}")
    if not parser.parse_args().write:
        print(table(), steps_table(), sep="\n")
        return 0
    for begin, text in ((BEGIN, table()), (STEPS_BEGIN, steps_table())):
        before, _, rest = PAGE.read_text().partition(begin)
        PAGE.write_text(f"{before}{begin}\n{text}\n{END}{rest.partition(END)[2]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
