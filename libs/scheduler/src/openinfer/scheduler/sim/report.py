"""Report: the figures of a simulation, and their plot."""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .workloads import Request


@dataclass(slots=True)
class Record:
    """The outcome of one request. Times are seconds of the simulation."""

    request: Request
    arrival: float
    rejected: bool = False
    num_cached: int = 0
    num_preemptions: int = 0
    first_token: float = 0.0
    last_token: float = 0.0
    num_output: int = 0

    @property
    def ttft(self) -> float:
        """From arrival to the first token."""
        return self.first_token - self.arrival

    @property
    def tpot(self) -> float | None:
        """Mean time of a token after the first; None if there is only one token."""
        if self.num_output < 2:
            return None
        return (self.last_token - self.first_token) / (self.num_output - 1)


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Percentiles of a sample, in seconds; 0 if the sample is empty."""

    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0
    mean: float = 0.0

    @classmethod
    def of(cls, values: Sequence[float]) -> "Percentiles":
        """The percentiles of `values`, by the nearest rank."""
        if not values:
            return cls()
        ranked = sorted(values)
        p50, p90, p99 = (ranked[len(ranked) * p // 100] for p in (50, 90, 99))
        return cls(p50, p90, p99, sum(ranked) / len(ranked))


@dataclass(frozen=True, slots=True)
class Report:
    """The figures of a simulation, in seconds, tokens and requests."""

    seconds: float
    """From the first arrival to the last token."""
    finished: int
    rejected: int
    preemptions: int
    steps: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    busy: float
    """Part of the time during which the device was busy."""
    ttft: Percentiles
    tpot: Percentiles
    itl: Percentiles
    """Time between two tokens of a request, over all requests."""
    requests_per_s: float
    output_tokens_per_s: float
    hit_rate: float
    """Cached tokens of prompts."""
    goodput: float
    """Requests per second that met both objectives, or that finished, if there are no objectives."""
    records: Sequence[Record] = field(repr=False, default=())

    def as_dict(self) -> dict[str, Any]:
        """The figures for JSON, without the records."""
        names = [name for name in self.__slots__ if name != "records"]
        values = ((name, getattr(self, name)) for name in names)
        return {name: asdict(v) if isinstance(v, Percentiles) else v for name, v in values}

    @classmethod
    def of(
        cls,
        records: Sequence[Record],
        gaps: "array[float]",
        *,
        busy_s: float,
        steps: int,
        preemptions: int,
        ttft_s: float | None,
        tpot_s: float | None,
    ) -> "Report":
        done = [record for record in records if record.num_output]
        start = min((record.arrival for record in records), default=0.0)
        seconds = max((record.last_token for record in done), default=start) - start
        tpots = [tpot for record in done if (tpot := record.tpot) is not None]
        good = sum(
            (ttft_s is None or record.ttft <= ttft_s) and (tpot_s is None or (record.tpot or 0.0) <= tpot_s)
            for record in done
        )
        prompt = sum(len(record.request.prompt) for record in done)
        cached = sum(record.num_cached for record in done)
        output = sum(record.num_output for record in done)
        per_s = 1 / seconds if seconds else 0.0
        return cls(
            seconds, len(done), len(records) - len(done), preemptions, steps, prompt, cached, output,
            busy_s * per_s, Percentiles.of([record.ttft for record in done]), Percentiles.of(tpots),
            Percentiles.of(gaps), len(done) * per_s, output * per_s, cached / prompt if prompt else 0.0,
            good * per_s, records,
        )  # fmt: skip


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
