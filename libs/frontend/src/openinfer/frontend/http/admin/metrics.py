"""Prometheus metrics under the names that vLLM's dashboards read, with finer buckets for inter-token latency.

Each HTTP process shows the sums over all. The engine's counts come from the engine, all others from a Board.
"""

import mmap
import time
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from openinfer.frontend.client import EngineClient
from openinfer.frontend.contract import Failed, Rejected, Request

if TYPE_CHECKING:
    from openinfer.frontend.http.admin.tracing import Tracing

_LABELS = ["model_name", "engine"]
_TTFT = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0),
    *(40.0, 80.0, 160.0, 640.0, 2560.0),
)
_ITL = (
    *(0.001, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5),
    *(0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_E2E = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0),
    *(960.0, 1920.0, 7680.0),
)
_TOKENS = tuple(float(digit * 10**power) for power in range(7) for digit in (1, 2, 5))
_COUNTS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 128.0)

_REASONS = ("stop", "length", "abort", "error")
_REFUSALS = ("invalid", "too_long", "queue_full", "unsupported", "grammar")
_TOTALS = (
    ("vllm:prompt_tokens", "prompt_tokens", "Prompt tokens of scheduled sequences."),
    ("vllm:prompt_tokens_cached", "prefix_hit_tokens", "Prompt tokens from the prefix cache."),
    ("vllm:generation_tokens", "generation_tokens", "Tokens generated."),
    ("vllm:prefix_cache_queries", "prefix_query_tokens", "Tokens looked up in the prefix cache."),
    ("vllm:prefix_cache_hits", "prefix_hit_tokens", "Tokens found in the prefix cache."),
    (
        "vllm:external_prefix_cache_hits",
        "prefix_loaded_tokens",
        "... and that host memory or a disk brought.",
    ),
    ("vllm:num_preemptions", "preemptions", "Preemptions."),
    ("vllm:spec_decode_num_drafts", "drafts", "Verifications of drafts, one a row and step."),
    ("vllm:spec_decode_num_draft_tokens", "draft_tokens", "Draft tokens."),
    ("vllm:spec_decode_num_accepted_tokens", "accepted_draft_tokens", "Accepted drafts."),
)
"""Counters by vLLM's names: the field of EngineStats, and the help text."""
_OWN = {
    "steps": "Engine steps.",
    "compiles_after_ready": "Kernels compiled while serving.",
    "allocations_after_ready": "Driver calls that took memory while serving.",
    "host_waits_after_ready": "Times the host waited for the device, other than to read a step's results.",
    "outlier_steps": "Steps that took more than twice their prediction.",
    "slow_findings": "Steps, runs of steps and first tokens out of line; /debug/traces has the last.",
}
"""The help text of counters that are a field of EngineStats, by its name."""
Times = tuple[float, float, float]
"""When a sequence was scheduled and had its first and last token: time.monotonic() seconds, 0.0 for what never was."""


class Histogram:
    """Counts by bucket. The client library's own takes a lock and walks its buckets, which a token cannot afford."""

    __slots__ = ("_bounds", "_cells", "_help", "_name", "_own")

    def __init__(self, board: "Board", name: str, help_text: str, bounds: Sequence[float]) -> None:
        self._name, self._help, self._bounds = name, help_text, bounds
        self._cells = board.claim(len(bounds) + 2)  # the last two: above all bounds, and the sum
        self._own = self._cells.own

    def observe(self, value: float) -> None:
        self._own[bisect_left(self._bounds, value)] += 1
        self._own[-1] += value

    def total(self) -> float:
        return self._cells.sums()[-1]

    def collect(self, labels: Sequence[str]) -> Metric:
        """The family in Prometheus' cumulative form."""
        total, buckets = 0.0, []
        *counts, total_value = self._cells.sums()
        for bound, count in zip((*self._bounds, float("inf")), counts, strict=True):
            total += count
            buckets.append(("+Inf" if bound == float("inf") else str(bound), total))
        family = HistogramMetricFamily(self._name, self._help, labels=_LABELS)
        family.add_metric(labels, buckets, total_value)
        return family


class Metrics:
    """All metrics of one server. A prometheus collector; observe from the event loop's thread."""

    def __init__(
        self,
        client: EngineClient,
        model_name: str | None,
        tracing: "Tracing | None" = None,
        board: "Board | None" = None,
    ) -> None:
        self.tracing = tracing
        self._client = client
        self._model_name = model_name
        board = board or Board()
        self._successes = board.claim(len(_REASONS))
        self._rejections = board.claim(len(_REFUSALS))

        def new(name: str, text: str, bounds: Sequence[float]) -> Histogram:
            return Histogram(board, f"vllm:{name}", text, bounds)

        self.time_to_first_token = new(
            "time_to_first_token_seconds", "From arrival to the first token.", _TTFT
        )
        self.inter_token_latency = new(
            "inter_token_latency_seconds", "Between two deliveries of tokens of a sequence.", _ITL
        )
        self._per_token = new(
            "request_time_per_output_token_seconds", "Mean time of a sequence's tokens but the first.", _ITL
        )
        self._e2e = new("e2e_request_latency_seconds", "From arrival to the last token.", _E2E)
        self._queue = new("request_queue_time_seconds", "From arrival to the first schedule.", _E2E)
        self._prefill = new("request_prefill_time_seconds", "First schedule to first token.", _E2E)
        self._decode = new("request_decode_time_seconds", "From first to last token.", _E2E)
        self._inference = new("request_inference_time_seconds", "First schedule to last token.", _E2E)
        self._prompt = new("request_prompt_tokens", "Prompt tokens a sequence.", _TOKENS)
        self._generation = new("request_generation_tokens", "Tokens generated a sequence.", _TOKENS)
        self._max_tokens = new("request_params_max_tokens", "max_tokens a sequence.", _TOKENS)
        self.n = new("request_params_n", "n a request.", _COUNTS)
        self.longest = new("request_max_num_generation_tokens", "Of a request's longest sequence.", _TOKENS)
        self._computed = new(
            "request_prefill_kv_computed_tokens", "Prompt tokens a sequence but the cached ones.", _TOKENS
        )
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)  # of this HTTP process alone

    def finished(self, request: Request, reason: str, tokens: int, times: Times, cached: int) -> None:
        """A sequence ended in order; cached: of its prompt's tokens."""
        scheduled, first, last = times
        self.ended(request, reason, tokens, times)
        self._prompt.observe(len(request.prompt_token_ids))
        self._computed.observe(len(request.prompt_token_ids) - cached)
        self._generation.observe(tokens)
        self._max_tokens.observe(request.max_tokens)
        if not first or not scheduled:
            return
        self._e2e.observe(last - request.arrival)
        self._queue.observe(scheduled - request.arrival)
        self._prefill.observe(first - scheduled)
        self._decode.observe(last - first)
        self._inference.observe(last - scheduled)
        if tokens > 1:
            self._per_token.observe((last - first) / (tokens - 1))

    def rejected(self, terminal: Rejected | Failed, request: Request, tokens: int, times: Times) -> None:
        """The engine refused a sequence, or failed; where its own settings are the cause, it counts as refused."""
        problem = terminal.reason if isinstance(terminal, Rejected) else terminal.message
        refused = terminal.code != "engine"
        self.ended(request, "rejected" if refused else "error", tokens, times, problem)
        if refused:
            self._rejections.own[_REFUSALS.index(terminal.code)] += 1

    def ended(self, request: Request, reason: str, tokens: int, times: Times, problem: str = "") -> None:
        """Count a sequence by the reason of its end."""
        if self.tracing is not None:
            self.tracing.finished(request, reason, tokens, times, problem)
        if reason in _REASONS:
            self._successes.own[_REASONS.index(reason)] += 1

    def served(self) -> str:
        """The totals of all processes so far, as text. Tokens are those of answers that came to their end."""
        stop, length, aborted, failed = map(int, self._successes.sums())
        prompt, computed = int(self._prompt.total()), int(self._computed.total())
        return (
            f"{stop + length} answers, {aborted} aborted, {failed} failed; {prompt} prompt tokens "
            f"({prompt - computed} cached), {int(self._generation.total())} tokens generated"
        )

    def render(self) -> bytes:
        """The exposition, text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Metric]:
        """Called by the registry for each scrape."""
        labels = [self._model_name or self._client.info.model, "0"]
        yield from self._gauges(labels)
        if self._client.info.max_adapters:
            yield self._adapters()
        yield from self._counters(labels)
        for value in vars(self).values():
            if isinstance(value, Histogram):
                yield value.collect(labels)

    def describe(self) -> Iterable[Metric]:
        """Nothing: names are only known with an engine, and the registry would collect otherwise."""
        return ()

    def _gauges(self, labels: list[str]) -> Iterable[Metric]:
        gauge = partial(_family, GaugeMetricFamily, labels)
        stats, info = self._client.stats(), self._client.info
        usage = stats.kv_used_tokens / info.kv_capacity_tokens if info.kv_capacity_tokens else 0.0
        blocks = info.kv_capacity_tokens // info.block_size if info.block_size else 0
        now = "awake" if not stats.asleep else "discard_all" if stats.weights_dropped else "weights_offloaded"
        states = {state: state == now for state in ("awake", "weights_offloaded", "discard_all")}
        yield gauge("vllm:num_requests_running", "Sequences in the batch.", stats.running)
        yield gauge("vllm:num_requests_waiting", "Sequences in the queue.", stats.waiting)
        yield gauge("vllm:kv_cache_usage_perc", "Part of the KV capacity in use; 1 is all.", usage)
        reasons = {"capacity": stats.waiting}
        yield gauge("vllm:num_requests_waiting_by_reason", "Sequences in the queue.", reasons, "reason")
        yield gauge("vllm:engine_sleep_state", "1 at the state that the engine is in.", states, "sleep_state")
        text = "Bytes of cached prefixes in a tier."
        yield gauge("openinfer:kv_offload_bytes", text, stats.offload_bytes, "tier")
        more = [*_LABELS, "block_size", "num_gpu_blocks"]
        layout = GaugeMetricFamily("vllm:cache_config_info", "KV cache layout.", labels=more)
        layout.add_metric([*labels, str(info.block_size), str(blocks)], 1.0)
        yield layout
        ratios = {one.key: one.measured_s / one.predicted_s for one in stats.step_times}
        yield gauge("openinfer:step_time_ratio", "Measured over predicted.", ratios, "step")

    def _adapters(self) -> Metric:
        """The adapters with requests: labels that change, and the time as the value."""
        states = self._client.stats().adapters
        gauge = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "Adapters with requests that run, and that wait.",
            labels=["max_lora", "waiting_lora_adapters", "running_lora_adapters"],
        )
        waiting = ",".join(state.name for state in states if state.waiting)
        running = ",".join(state.name for state in states if state.running)
        gauge.add_metric([str(self._client.info.max_adapters), waiting, running], time.time())
        return gauge

    def _counters(self, labels: list[str]) -> Iterable[Metric]:
        counter = partial(_family, CounterMetricFamily, labels)
        stats = self._client.stats()
        for name, field, text in (*_TOTALS, *((f"openinfer:{own}", own, text) for own, text in _OWN.items())):
            yield counter(name, text, getattr(stats, field))
        beyond = stats.prefix_query_tokens - stats.prefix_hit_tokens + stats.prefix_loaded_tokens
        text = "Tokens that the prefix cache of the device had not."
        yield counter("vllm:external_prefix_cache_queries", text, beyond)
        accepted = {str(at): count for at, count in enumerate(stats.accepted_by_position)}
        name = "vllm:spec_decode_num_accepted_tokens_per_pos"
        yield counter(name, "Accepted drafts by their position in the row.", accepted, "position")
        sources = {
            "local_compute": stats.prompt_tokens - stats.prefix_hit_tokens,
            "local_cache_hit": stats.prefix_hit_tokens - stats.prefix_loaded_tokens,
            "external_kv_transfer": stats.prefix_loaded_tokens,
        }
        text = "Prompt tokens of scheduled sequences."
        yield counter("vllm:prompt_tokens_by_source", text, sources, "source")
        text = "Blocks by what became of them."
        yield counter("openinfer:kv_offload_blocks", text, stats.offload_blocks, "event")
        measured = {one.key: one.measured_s for one in stats.step_times}
        predicted = {one.key: one.predicted_s for one in stats.step_times}
        yield counter("openinfer:step_seconds", "Device time of steps.", measured, "step")
        yield counter("openinfer:step_predicted_seconds", "... as predicted.", predicted, "step")
        ended = dict(zip(_REASONS, self._successes.sums(), strict=True))
        yield counter("vllm:request_success", "Sequences that ended.", ended, "finished_reason")
        refused = dict(zip(_REFUSALS, self._rejections.sums(), strict=True))
        yield counter("vllm:admission_rejections", "Sequences the engine refused.", refused, "reason")


def _family(
    kind: type[CounterMetricFamily] | type[GaugeMetricFamily],
    labels: list[str],
    name: str,
    text: str,
    values: float | Mapping[str, float],
    *by: str,
) -> Metric:
    """A counter or gauge. values: one, or one for each value of the label `by`, which comes after the others."""
    family = kind(name, text, labels=[*_LABELS, *by])
    for last, value in values.items() if isinstance(values, Mapping) else [(None, values)]:
        family.add_metric(labels if last is None else [*labels, last], float(value))
    return family


CELLS = 1024
"""Numbers a process has room for, 8 bytes each."""


class Cells:
    """Some neighbouring numbers of a Board. `own` is written to, by one process and thread only."""

    __slots__ = ("_all", "own")

    def __init__(self, boards: "Sequence[memoryview[float]]", start: int, count: int) -> None:
        self._all = [board[start : start + count] for board in boards]
        self.own = self._all[0]

    def sums(self) -> list[float]:
        """The sums over all processes."""
        return [sum(numbers) for numbers in zip(*self._all, strict=True)]


class Board:
    """Float64 numbers, starting at zero: our own, and where there are more processes, theirs to read. All processes
    claim cells in the same order. One that dies leaves its numbers to the next, so sums never go down."""

    def __init__(self, buffers: Sequence[bytearray | mmap.mmap] = ()) -> None:
        self._boards = [memoryview(one).cast("d") for one in buffers or [bytearray(8 * CELLS)]]
        self._claimed = 0

    @classmethod
    def shared(cls, paths: Sequence[Path]) -> "Board":
        """Over files of create(): the first is ours."""
        buffers = []
        for path in paths:
            with path.open("r+b") as file:
                buffers.append(mmap.mmap(file.fileno(), 8 * CELLS))
        return cls(buffers)

    @staticmethod
    def create(path: Path) -> None:
        """Make a file for one process."""
        path.write_bytes(bytes(8 * CELLS))

    def claim(self, count: int) -> Cells:
        """The next `count` numbers. Raises MemoryError when there is no room."""
        start, self._claimed = self._claimed, self._claimed + count
        if self._claimed > CELLS:
            raise MemoryError(f"a board has {CELLS} numbers, and {self._claimed} are needed")
        return Cells(self._boards, start, count)
