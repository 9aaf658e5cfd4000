"""Agents on a predicted server with and without tiers, as a table for docs/planning.md.

    python benchmarks/predicted_tiers.py [--write]

The engine's own scheduler and pool run in virtual time, with the simulator's tiers (`openinfer.scheduler.sim.SimTiers`)
and agents (`chats`). No figure is measured but the speeds of the GPU and of its copies.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from openinfer.cli import recipe_flags
from openinfer.cli.bench.serve import Load
from openinfer.cli.plan import tiers as plan_tiers
from openinfer.cli.plan.load import Agents, Point, Server
from openinfer.kernels import GPUS, H200

PAGE = Path(__file__).resolve().parents[1] / "docs" / "planning.md"
BEGIN, END = "<!-- table of benchmarks/predicted_tiers.py -->\n", "<!-- end of tiers -->"
MODEL = "Qwen3-32B"
RATES, REQUESTS = (0.75, 1.5), 600
INPUT, OUTPUT, TURNS, SYSTEM, THINK_S = 1500, 300, 20, 4000, 10.0
TIERS = {
    "device only": "",
    "+ 64 GB of host memory": "--kv-offload-gb 64",
    "+ 512 GB of host memory": "--kv-offload-gb 512",
    "+ 64 GB of host memory, 4 TB of disk": "--kv-offload-gb 64 --kv-offload-dir /data/kv --kv-offload-disk-gb 4000",
}


def points() -> Iterator[tuple[str, Point]]:
    """Each server under each load."""
    parser = argparse.ArgumentParser()
    plan_tiers.flags(parser)
    agents = Agents(TURNS, SYSTEM, THINK_S, plan_tiers.speeds(parser.parse_args([])))
    for name, flags in TIERS.items():
        words = [MODEL, "--max-model-len", "40960", *flags.split()]
        _, asked = recipe_flags.parse(words, "plan", __doc__, lambda parser: None, named=True)
        server = Server.of(asked, H200, GPUS[H200.gpu], 1, agents=agents)
        for rate in RATES:
            yield name, server.serve(Load(rate, REQUESTS, 0, INPUT, OUTPUT, 1))


def table() -> str:
    """The table, and a line that says what it is."""
    about = (
        f"{MODEL} on one H200. {REQUESTS // TURNS} agents take {TURNS} turns each: {INPUT:,} tokens in, {OUTPUT} out, "
        f"{THINK_S:g} s between.\nAll begin with the same {SYSTEM:,} tokens. Agents come at the offered rate over "
        f"{TURNS}; later turns wait for answers.\n"
    )
    rows = [
        about,
        "| tiers | req/s offered | done | tokens cached | TTFT p50 (ms) | TTFT p99 (ms) | TPOT p50 (ms) |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, point in points():
        rows.append(
            f"| {name} | {point.load.request_rate:g} | {point.requests_per_s:.2f} | {point.hits:.0%} | "
            f"{point.ttft_ms['p50']:,.0f} | {point.ttft_ms['p99']:,.0f} | {point.tpot_ms['p50']:.1f} |"
        )
        print(rows[-1], flush=True)
    return "\n".join(rows) + "\n\n**These figures are predicted, not measured.**\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="write the table into docs/planning.md")
    args = parser.parse_args()
    text = table()
    if args.write:
        page = PAGE.read_text()
        before, _, rest = page.partition(BEGIN)
        PAGE.write_text(before + BEGIN + "\n" + text + "\n" + END + rest.partition(END)[2])
    return 0


if __name__ == "__main__":
    sys.exit(main())
