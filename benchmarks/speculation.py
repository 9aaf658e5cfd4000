"""Tokens a second with and without drafts, by requests at once and by the chance that a draft is right.

    python benchmarks/speculation.py demo/qwen3
    python benchmarks/speculation.py --predict qwen3:4B qwen3_5:4B

The first measures an engine. Drafts of a chosen acceptance come from an oracle, which has the answers of a run before.
No server has it. The second simulates steps of a published model on an H200 at their predicted cost.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from openinfer.cli import recipes
from openinfer.cli.plan_cost import StepCost
from openinfer.cli.segments import Outline
from openinfer.kernels import GPUS, H200
from openinfer.recipes.engine import Source
from openinfer.recipes.engine.startup import build
from openinfer.recipes.engine.testing import Planted, Session
from openinfer.scheduler import Worth
from openinfer.scheduler.sim import StepWork

CONTEXT = 1024


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("model_dir", nargs="?", type=Path)
    add("--predict", nargs="*", default=(), metavar="RECIPE:SIZE")
    add("--config", default='{"method": "ngram", "num_speculative_tokens": 3}', help="--speculative-config")
    add("--concurrency", nargs="+", type=int, default=[1, 8, 32])
    add("--acceptance", nargs="+", type=float, default=[0.0, 0.5, 0.8, 0.95])
    add("--tokens", type=int, default=96, help="tokens of an answer")
    add("--device", default="cpu")
    args = parser.parse_args()
    print("| model | requests at once | without |", *(f"{chance:g} |" for chance in args.acceptance))
    print("| --- | --- | --- |" + " --- |" * len(args.acceptance))
    if args.model_dir is not None:
        measure(args)
    for name in args.predict:
        predict(args, *name.split(":"))


def measure(args: argparse.Namespace) -> None:
    """Rows of the table of an engine. Answers must not depend on the drafts."""
    rng = random.Random(0)
    prompts = [[rng.randrange(20, 400) for _ in range(32)] for _ in range(max(args.concurrency))]
    make = functools.partial(
        build, recipes.find(args.model_dir), args.model_dir, device=args.device, max_num_seqs=len(prompts),
        max_model_len=256, kv_cache_memory_bytes=256 << 20, enable_prefix_caching=False,
    )  # fmt: skip
    plain, drafted = (Session(make(speculative_config=config).engine) for config in (None, args.config))
    drafting: Any = drafted.engine.runner.drafting  # type: ignore[attr-defined]
    for count in args.concurrency:
        run(plain, prompts[:count], args.tokens)  # times of a first run are of a cold machine
        speed, answers = run(plain, prompts[:count], args.tokens)
        known, cells = [a + b for a, b in zip(prompts, answers, strict=False)], []
        for chance in args.acceptance:
            drafting.make_drafter = functools.partial(Planted, known, chance)
            drafting.worth = Worth(drafting.buckets.draft_levels)
            run(drafted, prompts[:count], args.tokens)
            found, tokens = run(drafted, prompts[:count], args.tokens)
            if tokens != answers:
                raise SystemExit(f"drafts of acceptance {chance} changed a token")
            cells.append(f"{found:,.0f} |")
        print(f"| {args.model_dir} | {count} | {speed:,.0f} |", *cells, flush=True)
    for session in (plain, drafted):
        session.engine.close()


def run(session: Session, prompts: Sequence[list[int]], tokens: int) -> tuple[float, list[list[int]]]:
    """Tokens a second, and the answers."""
    began = time.perf_counter()
    found = session.outcomes_of([(prompt, tokens, {"ignore_eos": True}) for prompt in prompts])
    answers = [outcome.tokens for outcome in found]
    return sum(map(len, answers)) / (time.perf_counter() - began), answers


def predict(args: argparse.Namespace, name: str, size: str) -> None:
    """Rows of the table of a published model on an H200, by the cost of its steps."""
    recipe = next(one for one in recipes.installed() if one.name == name)
    drafts = json.loads(args.config)["num_speculative_tokens"]
    costs = {}
    for config in (None, args.config):
        options = recipe.options(
            speculative_config=config, max_num_seqs=max(args.concurrency), max_model_len=8192
        )
        outline = Outline(recipe, Source(recipe.published()[size]), options, H200)
        costs[config] = StepCost(outline.steps, outline.buckets, GPUS[H200.gpu])
    levels = outline.buckets.draft_levels
    for rows in args.concurrency:
        off = costs[None](StepWork(rows, rows * CONTEXT, 0, 0))
        of_level = {
            n: costs[args.config](StepWork(rows, rows * CONTEXT, 0, 0, rows * n)) for n in (0, *levels)
        }
        speeds = [simulate(rows, chance, drafts, levels, of_level) for chance in args.acceptance]
        cells = (f"{speed:,.0f} |" for speed in speeds)
        print(f"| {name} {size}, predicted | {rows} | {rows / off:,.0f} |", *cells, flush=True)


def simulate(rows: int, chance: float, drafts: int, levels: Sequence[int], cost: dict[int, float]) -> float:
    """Tokens a second of 2,000 steps."""
    rng, worth, tokens, seconds = random.Random(0), Worth(levels), 0, 0.0
    for _ in range(2000):
        level = worth.choose([drafts] * rows, rows, cost.get)
        found: Counter[tuple[int, int]] = Counter()
        for _ in range(rows if level else 0):
            right = 0
            while right < level and rng.random() < chance:
                right += 1
            found[level, right] += 1
        accepted = sum(right * count for (_, right), count in found.items())
        worth.saw(found)
        worth.spent(rows, accepted, cost[level], cost[0])
        tokens += rows + accepted
        seconds += cost[level]
    return tokens / seconds


if __name__ == "__main__":
    main()
