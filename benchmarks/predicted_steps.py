"""The predicted time of some steps of each model, in predicted_steps.json: a plan that grows is seen without a GPU.

    python benchmarks/predicted_steps.py [--write]     # how the steps differ from the file; or write it
    python benchmarks/predicted_steps.py --fit         # the H200's speeds, from the newest recorded steps of each model

A test compares the file with the plans of this checkout.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from openinfer.cli import recipe_flags
from openinfer.cli.explain.segments import Outline
from openinfer.cli.tune import speed as tune_speed
from openinfer.kernels import GPUS, H200, Parts, Speed
from openinfer.kernels.measure.speed_fit import errors, fit_speed

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "benchmarks" / "predicted_steps.json"
MODELS = ("qwen3-4B", "qwen3-8B", "qwen3_5-4B", "qwen3_5-4B-FP8", "qwen3_5-35B-A3B", "deepseek_v4-Flash")
POINTS = (
    "decode:1,1024",
    "decode:8,1024",
    "decode:64,1024",
    "decode:256,512",
    "prefill:1024",
    "prefill:4096",
    "mixed:64,1024,1024",
)
RECORDED = {
    "qwen3-4B": "qwen3-4b/2026-11-22-h200-step.json",
    "qwen3-8B": "qwen3-8b/2026-11-21-h200-step.json",
    "qwen3_5-4B": "qwen3_5-4b/2026-11-22-h200-step.json",
}


def outline(model: str, *flags: str) -> Outline:
    """The engine of a published model with these flags."""
    _, asked = recipe_flags.parse([model, *flags], "plan", __doc__, lambda parser: None, named=True)
    return Outline(asked.recipe, asked.source(), asked.options, H200)


def predicted() -> dict[str, dict[str, dict[str, Any]]]:
    """Microseconds, kernels, MB and GFLOP of each model's points."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for model in MODELS:
        made = outline(model)
        found[model] = {point: figures(made, point) for point in POINTS}
    return found


def figures(made: Outline, point: str) -> dict[str, Any]:
    """The figures of one point."""
    seconds, kernels, size, flops = 0.0, 0, 0, 0
    for calls, workload in tune_speed.point_steps(made, point):
        seconds += sum(Parts.of(calls, workload, GPUS[H200.gpu]))
        for call in calls:
            cost = call.cost(workload)
            kernels += call.times * len(call.commands)
            size += call.times * cost.bytes
            flops += call.times * cost.flops
    return {
        "us": round(seconds * 1e6, 1),
        "kernels": kernels,
        "MB": round(size / 1e6, 1),
        "GFLOP": round(flops / 1e9, 1),
    }


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """A line for each figure that changed."""
    return [
        f"{model} {point}: {name} {before.get(model, {}).get(point, {}).get(name)} -> {value}"
        for model, points in after.items()
        for point, found in points.items()
        for name, value in found.items()
        if before.get(model, {}).get(point, {}).get(name) != value
    ]


def fitted() -> tuple[Speed, list[float]]:
    """The speeds that the newest recorded steps give, and the relative error of each step."""
    steps = []
    for model, file in RECORDED.items():
        # Prompts were cut so when they were recorded.
        made = outline(model, "--max-num-batched-tokens", "2048")
        steps += tune_speed.measured(made, ROOT / "benchmarks" / "results" / file)
    figures = GPUS[H200.gpu]._replace(ops={})
    speed = fit_speed(steps, figures)
    return speed, errors(steps, figures.at(speed))


def main() -> int:
    """Compare, write or fit; 1 if a figure differs from the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help=f"write {FILE.name}")
    parser.add_argument("--fit", action="store_true", help="print the speeds that the recorded steps give")
    args = parser.parse_args()
    if args.fit:
        speed, found = fitted()
        print(f"{speed}\nerrors from {min(found):+.1%} to {max(found):+.1%}")
        return 0
    after = predicted()
    if args.write:
        FILE.write_text(json.dumps(after, indent=1) + "\n")
        return 0
    changed = differences(json.loads(FILE.read_text()), after)
    print("\n".join(changed) or "no figure has changed")
    return int(bool(changed))


if __name__ == "__main__":
    sys.exit(main())
