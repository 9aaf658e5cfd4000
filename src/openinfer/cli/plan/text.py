"""A plan as text and as a picture."""

import math
import shlex
from collections.abc import Callable
from pathlib import Path

from openinfer.cli.plan.compare import Objectives, Variant
from openinfer.cli.plan.load import FULL, PlannedServer, Point
from openinfer.cli.plan.tiers import describe
from openinfer.cli.recipe_flags import figure_type
from openinfer.tensor import format_bytes


def title(server: PlannedServer) -> str:
    """The model, the GPU and the sizes of the engine."""
    options, outline = server.asked.options, server.outline
    return (
        f"{server.asked.model_dir.name} on {server.gpus} x {outline.target.gpu}, {options.scheduling_policy}, "
        f"{outline.buckets.max_tokens} tokens a step, {options.max_num_seqs} rows"
    )


def memory_lines(server: PlannedServer) -> str:
    """The memory of a GPU, the fixed parts and the cache; and the kernels that it is planned for."""
    parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in server.outline.memory.items())
    pool = server.outline.cache(server.cache_bytes)
    lines = [f"memory: {parts}, cache {format_bytes(server.cache_bytes)} ({pool.capacity_tokens} tokens)"]
    if server.outline.target.nvrtc:
        lines.append(server.outline.kernels)
    if server.agents is not None:
        lines += describe(server.asked.options, pool.groups, server.outline.parts, server.agents.speeds)
    return "\n".join(lines)


def name_of(point: Point) -> str:
    """The load of a point."""
    if math.isfinite(point.load.request_rate):
        return f"{point.load.request_rate:g} req/s"
    return f"{point.load.max_concurrency} at a time" if point.load.max_concurrency else "all at once"


HEAD = (
    f"{'load':>12}{'req/s':>8}{'tokens/s':>10}{'TTFT p50/p99 ms':>20}{'TPOT p50/p99 ms':>18}{'busy':>6}{'rows':>6}"
    f"{'cache':>7}  binds"
)


def row(p: Point, most: float) -> str:
    """A point as a line. most: requests a second that the server completes when all requests wait."""
    ttft = f"{p.ttft_ms['p50']:.1f} / {p.ttft_ms['p99']:.1f}"
    tpot = f"{p.tpot_ms['p50']:.2f} / {p.tpot_ms['p99']:.2f}"
    found = [f"{p.hits:.0%} cached"] if p.hits else []
    found += [f"{name} {share:.0%}" for name, share in list(p.binds.items())[:2]]
    if not p.load.max_concurrency and p.load.request_rate > FULL * most:
        found.append("queue" + (f" for {' and '.join(p.limits)}" if p.limits else ""))
    if p.rejected:
        found.append(f"{p.rejected} refused")
    return (
        f"{name_of(p):>12}{p.requests_per_s:>8.2f}{p.output_tokens_per_s:>10.0f}{ttft:>20}{tpot:>18}{p.busy:>6.0%}"
        f"{p.rows:>6}{p.cache:>7.1%}  {', '.join(found)}"
    )


def verdict(variant: Variant, objectives: Objectives) -> str:
    """The knee, and the largest load within the objectives."""
    knee = variant.knee
    most = f"{variant.most:.1f} req/s when all requests wait"
    lines = [f"knee: {name_of(knee)} (most throughput for its latency); it completes {most}"]
    if objectives:
        limits = (("TTFT", objectives.ttft_ms), ("TPOT", objectives.tpot_ms))
        text = " and ".join(f"{name} p99 <= {limit:g} ms" for name, limit in limits if limit is not None)
        within = variant.score(objectives)
        lines.append(f"{text}: " + (f"up to {within:.1f} req/s" if within else "at none of these loads"))
    return "\n".join(lines)


def comparison(variants: list[Variant], objectives: Objectives) -> str:
    """A line a variant: at its knee, and when all requests wait."""
    what = "req/s within" if objectives else "power"
    width = max(12, *(len(one.flags) for one in variants))
    rows = [f"{'flags':<{width}}{'knee':>11}{'TTFT p99':>10}{'TPOT p99':>10}{'most req/s':>12}{what:>14}"]
    for one in variants:
        knee = one.knee
        rows.append(
            f"{one.flags:<{width}}{name_of(knee):>11}{knee.ttft_ms['p99']:>10.1f}{knee.tpot_ms['p99']:>10.2f}"
            f"{one.most:>12.1f}{one.score(objectives) * (1 if objectives else 1e3):>14.1f}"
        )
    return "\n".join(rows)


def advice(asked: Variant, best: Variant, objectives: Objectives, flags: list[str]) -> str:
    """The command to take. flags: those of `best` that are not as asked."""
    if not objectives:
        return "give --ttft-ms or --tpot-ms, and the flags that serve the largest load within them are chosen"
    model, named = str(best.server.asked.model_dir), best.server.asked.published is not None
    words = ["FOLDER" if named else model, *flags]
    if best.server.gpus > 1 and "--tensor-parallel-size" not in words:
        words += ["--tensor-parallel-size", str(best.server.gpus)]
    same = " (no other flags in the table are better by 2 %)" if best is asked else ""
    where = f"; FOLDER has the checkpoint of {model}" if named else ""
    return f"take: openinfer serve {shlex.join(words)}{same}, and the other flags as asked{where}"


def plot_latencies(variants: list[Variant], path: Path) -> None:
    """Draw TTFT, TPOT, throughput and used cache over load, a line for each variant. Raises BadFlags."""
    figure = figure_type()(figsize=(11, 7), layout="constrained")
    for axis, (label, value) in zip(figure.subplots(2, 2).flat, _CURVES, strict=True):
        for one in variants:
            rated = sorted(one.rated, key=lambda point: point.load.request_rate)
            loads = [point.load.request_rate for point in rated]
            axis.plot(loads, [value(point) for point in rated], marker="o", label=one.flags)
        axis.set_xlabel("offered requests/s")
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    figure.axes[0].legend(fontsize=8)
    figure.savefig(path, dpi=120)


_CURVES: tuple[tuple[str, Callable[[Point], float]], ...] = (
    ("TTFT p99 (ms)", lambda point: point.ttft_ms["p99"]),
    ("TPOT p99 (ms)", lambda point: point.tpot_ms["p99"]),
    ("completed requests/s", lambda point: point.requests_per_s),
    ("used part of the cache (%)", lambda point: 100 * point.cache),
)
