"""Distributions of a simulation's latencies as a picture. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .report import Report


def figure_class() -> Any:
    """matplotlib's Figure. Raises ImportError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'openinfer-scheduler[plot]'") from error
    return Figure


def plot(reports: Mapping[str, Report], path: str | Path) -> None:
    """Write a PNG: the share of requests whose TTFT, TPOT and time to the last token are below a value, a line for each
    report. Raises ImportError without matplotlib."""
    figure = figure_class()(figsize=(12, 4), layout="constrained")
    titles = ("time to the first token (s)", "time per output token (s)", "time to the last token (s)")
    axes = figure.subplots(1, 3, sharey=True)
    for axis, title in zip(axes, titles, strict=True):
        axis.set_xlabel(title)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("share of requests")
    for name, report in reports.items():
        done = [record for record in report.records if record.num_output]
        samples: Sequence[list[float]] = (
            [record.ttft for record in done],
            [tpot for record in done if (tpot := record.tpot) is not None],
            [record.last_token - record.arrival for record in done],
        )
        for axis, values in zip(axes, samples, strict=True):
            axis.step(sorted(values), [(i + 1) / len(values) for i in range(len(values))], label=name)
    axes[-1].legend(loc="lower right")
    figure.savefig(path, dpi=120)
