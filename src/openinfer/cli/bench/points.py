"""The step benchmark: how long steps take on the device and through the engine, and offline throughput.

A point is a name with numbers: `decode:ROWS,CONTEXT` (sequences, tokens of each), `prefill:TOKENS` (one prompt),
`mixed:ROWS,CONTEXT,TOKENS` (decode rows with a prompt chunk in the same step), `offline:REQUESTS,IN,OUT`.
"""

import statistics
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from openinfer.cli.explain.segments import Placed
from openinfer.frontend.contract import TERMINALS, Finished, Request
from openinfer.recipes.engine.engine import Engine
from openinfer.sampler import SamplingParams
from openinfer.tensor import Activity, ActivityRecorder, Event

POINTS = (
    "decode:1,1024", "decode:8,1024", "decode:32,1024", "decode:64,1024", "decode:128,1024", "decode:256,512",
    "prefill:128", "prefill:1024", "prefill:4096", "prefill:16384", "offline:512,512,128", "offline:256,1024,128",
)  # fmt: skip
"""The points that have a target."""

RECORD_POINTS = (
    "decode:1,8192", "decode:8,8192", "decode:32,4096", "decode:64,256", "decode:128,256", "decode:256,256",
    "mixed:8,1024,256", "mixed:32,1024,512", "mixed:64,1024,1024", "mixed:128,1024,512", "mixed:224,512,1024",
)  # fmt: skip
"""The points that a model of step times needs besides POINTS."""

NUMBERS = {"decode": 2, "prefill": 1, "mixed": 3, "offline": 3}
OFFLINE_REPEATS = 3
WARM_UP = 3

Point = tuple[str, tuple[int, ...]]
Result = dict[str, Any]


class BadPoint(ValueError):
    """A point that is malformed, or that the engine is too small for; the message says which and why."""

    user_can_mend = True


def parse_points(text: str) -> Point:
    """`kind:number,...` as a point. Raises BadPoint."""
    kind, _, rest = text.partition(":")
    numbers = tuple(int(n) for n in rest.split(",") if n.isdigit())
    if len(numbers) != NUMBERS.get(kind) or min(numbers) < 1 or rest != ",".join(map(str, numbers)):
        forms = "decode:ROWS,CONTEXT prefill:TOKENS mixed:ROWS,CONTEXT,TOKENS offline:REQUESTS,IN,OUT"
        raise BadPoint(f"point {text!r} is not one of {forms}")
    return kind, numbers


def measure_points(engine: Engine, points: Sequence[str], *, repeats: int = 20) -> Iterator[Result]:
    """Measure points, one after the other, on an idle engine without prefix cache.

    A result has the medians `wall_ms` (through the engine, on the host's clock; of a prefill to its first token) and
    `device_ms` (of a step's two segments), an offline one `output_tokens_per_s`; `repeats` with every value; and
    `records`, the device times of steps by what was in them: {"decode_rows", "decode_context" (tokens in the cache, sum
    over the rows), "prefill_tokens", "prefill_context" (tokens that those attend to, sum over them), "seconds"}.
    Raises BadPoint, before anything is measured.
    """
    bench = StepBench(engine, repeats)
    parsed = [parse_points(text) for text in points]
    for point in parsed:
        bench.check(point)
    for text, (kind, numbers) in zip(points, parsed, strict=True):
        result: Result = getattr(bench, kind)(*numbers)
        yield {"point": text, **result}


class StepBench:
    """The measurements, a method a kind of point. Token ids are random, new for every measurement."""

    def __init__(self, engine: Engine, repeats: int) -> None:
        self._engine, self._repeats = engine, repeats
        self._runner = engine.runner
        self._chunk = self._runner.buckets.max_tokens
        self._rng = np.random.default_rng(7)

    def check(self, point: Point) -> None:
        """Raise BadPoint if the engine cannot run it."""
        info, grown = self._engine.info, self._repeats + WARM_UP + 8
        match point:
            case "decode", (rows, context):
                length, tokens = context + self._lead(rows, context) + grown, 1
            case "mixed", (rows, context, tokens):
                length, rows, tokens = max(context + grown, tokens + 8), rows + 1, rows + tokens
            case "offline", (_, inputs, outputs):
                rows, length, tokens = 1, inputs + outputs, 1
            case _, (count,):
                rows, length, tokens = 1, count + 8, 1
        name = f"{point[0]}:{','.join(map(str, point[1]))}"
        for needed, there, what, flag in (
            (rows, self._runner.buckets.max_rows, "rows", "--max-num-seqs"),
            (tokens, self._chunk, "tokens in a step", "--max-num-batched-tokens"),
            (length, info.max_model_len, "tokens in a sequence", "--max-model-len"),
            (rows * length, info.kv_capacity_tokens, "tokens of cache", "--kv-cache-memory-bytes"),
        ):
            if needed > there:
                raise BadPoint(f"{name} needs {needed} {what}; this engine has {there} ({flag})")

    def decode(self, rows: int, context: int) -> Result:
        lead = self._lead(rows, context)
        prompt_len = max(1, context - (lead + self._repeats) // 2)
        tokens = 2 * lead + self._repeats + WARM_UP + 2
        _, steps, _ = run_points(self._engine, [self._ids(prompt_len) for _ in range(rows)], tokens)
        wall = steps[WARM_UP:][: self._repeats] or steps
        device = self._device(rows, context, 0, 0)
        return _result(wall, device, [_record(device, rows, rows * context, 0, 0)])

    def prefill(self, tokens: int) -> Result:
        run_points(self._engine, [self._ids(tokens)], 1)
        wall = [run_points(self._engine, [self._ids(tokens)], 1)[0] for _ in range(self._repeats)]
        chunks = list(self._runner.buckets.chunks(tokens))
        found = [self._device(0, 0, count, start) for start, count in chunks]
        device = [sum(times) for times in zip(*found, strict=True)]
        pairs = zip(found, chunks, strict=True)
        return _result(wall, device, [_record(times, 0, 0, count, start) for times, (start, count) in pairs])

    def mixed(self, rows: int, context: int, tokens: int) -> Result:
        device = self._device(rows, context, tokens, 0)
        return _result([], device, [_record(device, rows, rows * context, tokens, 0)])

    def offline(self, requests: int, inputs: int, outputs: int) -> Result:
        prompts = ([self._ids(inputs) for _ in range(requests)] for _ in range(OFFLINE_REPEATS))
        rates = [requests * outputs / run_points(self._engine, p, outputs)[2] for p in prompts]
        rate = statistics.median(rates)
        return {"output_tokens_per_s": rate, "repeats": {"output_tokens_per_s": rates}, "records": []}

    def replays(self, recorder: ActivityRecorder, rows: int, context: int) -> list[list[Activity]]:
        """The device's activities in each repeat of one decode step; a repeat starts when the one before is done."""
        runner, total = self._runner, WARM_UP + self._repeats
        placed = Placed(self._engine, [context - 1] * rows, [total] * rows, self._rng)
        placed.step(range(1, rows + 1))
        shape = runner.buckets.choose(rows, rows)
        steps = []
        placed.rewind(dict.fromkeys(range(1, rows + 1), context - 1))
        for _ in range(total):
            runner.stream.synchronize()
            recorder.read()
            runner.replay(("forward", shape))
            runner.replay(runner.choosing(shape))
            runner.stream.synchronize()
            steps.append(recorder.read())
        placed.leave()
        return steps[WARM_UP:]

    def served(self, recorder: ActivityRecorder, rows: int, context: int) -> list[list[Activity]]:
        """The device's activities in each step of sequences that decode through the engine.

        A step goes from one read-back to the next."""
        tokens = self._lead(rows, context) + WARM_UP + self._repeats
        recorder.read()
        run_points(self._engine, [self._ids(max(1, context - tokens)) for _ in range(rows)], tokens)
        self._runner.stream.synchronize()
        steps: list[list[Activity]] = [[]]
        for activity in recorder.read():
            steps[-1].append(activity)
            if activity.name == "copy to host":
                steps.append([activity])
        return steps[1:-1]

    def _lead(self, rows: int, context: int) -> int:
        """About how many steps the prompts take, while those that are done decode."""
        return -(-rows * context // max(1, self._chunk - rows // 2))

    def _ids(self, count: int) -> list[int]:
        ids: list[int] = self._rng.integers(0, self._engine.info.vocab_size, count).tolist()
        return ids

    def _device(self, rows: int, context: int, prefill: int, start: int) -> list[float]:
        """Seconds of device time of a step, both segments: `rows` sequences get their token number `context`, and one
        more gets `prefill` tokens after `start`. The same step again and again, but that decode rows grow."""
        runner, total = self._runner, WARM_UP + self._repeats
        lengths = [context - 1] * rows + [start] * bool(prefill)
        placed = Placed(self._engine, lengths, [total] * rows + [prefill] * bool(prefill), self._rng)
        placed.step(range(1, len(lengths) + 1), prefill)
        shape = runner.buckets.choose(rows + prefill, len(lengths))
        marks: list[tuple[Event, Event]] = []
        for _ in range(total):
            if prefill or not marks:
                placed.rewind(dict(enumerate(lengths, start=1)))
            before, after = (Event(runner.stream.device, timing=True) for _ in range(2))
            before.record(runner.stream)
            runner.replay(("forward", shape))
            runner.replay(runner.choosing(shape))
            after.record(runner.stream)
            marks.append((before, after))
        runner.stream.synchronize()
        placed.leave()
        return [after.elapsed_s(before) for before, after in marks[WARM_UP:]]


def run_points(
    engine: Engine, prompts: Sequence[Sequence[int]], num_tokens: int
) -> tuple[float, list[float], float]:
    """Submit the prompts at once, greedy, each for num_tokens, with the engine's adapters in turn. Wall seconds to the
    moment when all have begun, of every step after that in which all got a token, and of the whole."""
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    adapters = [state.name for state in engine.stats().adapters] or [""]
    start = time.perf_counter()
    asked = partial(Request, sampling=params, max_tokens=num_tokens, arrival=start)
    for n, prompt in enumerate(prompts, start=1):
        engine.submit(asked(id=-n, prompt_token_ids=list(prompt), adapter=adapters[n % len(adapters)]))
    begun: set[int] = set()
    first, last, steps, terminals = 0.0, start, [], 0
    while terminals < len(prompts):
        outputs = engine.step(1.0)
        now = time.perf_counter()
        for update in outputs.updates:
            if isinstance(update, TERMINALS):
                terminals += 1
                if not isinstance(update, Finished):
                    raise RuntimeError(f"a request of the benchmark was not served: {update}")
        if not outputs.request_ids:
            continue
        if first and len(outputs.request_ids) == len(prompts):
            steps.append(now - last)
        begun.update(outputs.request_ids)
        if not first and len(begun) == len(prompts):
            first = now - start
        last = now
    return first, steps, time.perf_counter() - start


def _result(wall: list[float], device: list[float], records: list[Result]) -> Result:
    given = {"wall_ms": wall, "device_ms": device}
    repeats = {name: [s * 1e3 for s in values] for name, values in given.items() if values}
    medians = {name: statistics.median(values) for name, values in repeats.items()}
    return {**medians, "repeats": repeats, "records": records}


def _record(seconds: list[float], rows: int, context: int, prefill: int, start: int) -> Result:
    return {
        "decode_rows": rows,
        "decode_context": context,
        "prefill_tokens": prefill,
        "prefill_context": prefill * start + prefill * (prefill + 1) // 2,
        "seconds": statistics.median(seconds),
    }
