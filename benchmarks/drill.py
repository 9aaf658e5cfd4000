"""Troubles of a GPU, injected into an engine under load, and the line that its watch wrote about each.

    python benchmarks/drill.py MODEL_DIR [--json FILE]

Weights are random, so MODEL_DIR needs no more than config.json. docs/slow.md has the lines. The neighbour is a process
that copies memory of the same GPU from one place to another.

`watch_us` is the host's time that trace and watch take a step. `longest_ms` is the longest turn of the engine with a
trouble. It has the time in which the watch finds the cause.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from openinfer.cli import recipes
from openinfer.cli.bench import idle as bench_idle
from openinfer.cli.explain.ledger import CallRecorder
from openinfer.frontend.contract import SlowTraces
from openinfer.frontend.errors import is_users_error, one_line
from openinfer.recipes.engine.startup import build
from openinfer.recipes.engine.testing import Session
from openinfer.tensor import DeviceClock, PinnedBuffer, Tensor

ROWS, WARM_STEPS = 8, 400
COPIED = 512 << 20
SLOW_OP, MORE = "gate_up_silu", 1500
"""The op that one step runs 1,500 times more."""
NEIGHBOUR = """
from openinfer.tensor import Device, Stream, Tensor
device = Device("cuda")
stream, size = Stream(device), 4 << 30
here, there = (Tensor.empty((size,), "uint8", device) for _ in range(2))
stream.synchronize()
print("ready", flush=True)
while True:
    for _ in range(20):
        stream.copy_async(there.ptr, here.ptr, size, "d2d")
    stream.synchronize()
"""


class Drill:
    """An engine whose rows decode without end."""

    def __init__(self, model_dir: Path, trace: str | None) -> None:
        self.engine: Any = build(
            recipes.find(model_dir), model_dir, device="cuda", load_format="dummy", max_num_seqs=ROWS,
            max_model_len=8192, enable_prefix_caching=False, kv_cache_memory_bytes=16 << 30, trace=trace,
        ).engine  # fmt: skip
        self.watch = self.engine.runner.watch
        self.watch.quiet_s = 0.0
        self.longest_s = 0.0
        device = self.engine.runner.stream.device
        self.host, self.there = PinnedBuffer(device, COPIED), Tensor.empty((COPIED,), "uint8", device)
        self.session, rng = Session(self.engine), random.Random(1)
        for _ in range(ROWS):
            self.session.submit([rng.randrange(256, 30_000) for _ in range(256)], 7_500, ignore_eos=True)
        self.steps(WARM_STEPS)

    def steps(self, count: int) -> float:
        """Run `count` turns. Their median in seconds."""
        times = []
        for _ in range(count):
            began = time.perf_counter()
            self.session.step(0.01)
            times.append(time.perf_counter() - began)
        self.longest_s = max(self.longest_s, *times)
        return statistics.median(times)

    def lines(self) -> list[str]:
        """The findings since the last call."""
        found = [trace["line"] for trace in json.loads(self.engine.control(SlowTraces()))["traces"]]
        self.watch.findings.clear()
        return found

    def in_the_next_step(self, work: Callable[[], None], *, before: bool = False) -> None:
        """Put work on the stream of the steps, between the two segments of one step, or before them."""
        kind = type(self.engine.runner.graphs)
        launch = kind.launch

        def once(graphs: Any, key: Any) -> None:
            if key[0] == "forward":
                kind.launch = launch
                if before:
                    work()
            launch(graphs, key)
            if key[0] == "forward" and not before:
                work()

        kind.launch = once
        self.steps(20)
        if kind.launch is once:
            kind.launch = launch
            raise AssertionError("no step launched a forward segment")

    def slow_kernel(self) -> list[str]:
        """The kernels of one op run many times in a step."""
        runner, shape = self.engine.runner, self.engine.runner._shape
        recorder = CallRecorder()
        runner.model.forward(recorder, num_tokens=shape.tokens, num_rows=shape.rows, max_q_len=shape.longest)
        call = next(call for call in recorder.calls if call.op.name == SLOW_OP)

        def work() -> None:
            for _ in range(MORE):
                runner.pack.run(call.op, call.args)

        self.in_the_next_step(work)
        return self.lines()

    def slow_host(self) -> list[str]:
        """The host's thread sleeps while it launches a step."""
        self.in_the_next_step(lambda: time.sleep(0.15), before=True)
        return self.lines()

    def copies(self) -> list[str]:
        """Copies of 2 GB from host memory stand between the kernels of a step."""
        stream = self.engine.runner.stream

        def work() -> None:
            for _ in range(4):
                stream.copy_async(self.there.ptr, self.host.ptr, COPIED, "h2d")

        self.in_the_next_step(work)
        return self.lines()

    def neighbour(self) -> list[str]:
        """Another process uses the same GPU."""
        process = subprocess.Popen([sys.executable, "-c", NEIGHBOUR], stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            process.stdout.readline()
            self.steps(300)
        finally:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
        return self.lines()


def main() -> int:
    """Run the drill; returns 1 where it cannot run, which is then said in one line."""
    try:
        return _drill()
    except Exception as error:
        if not is_users_error(error):
            raise
        print(
            f"drill.py: error: {one_line(error)} (it needs a GPU; tests/test_slow_traces.py does not)",
            file=sys.stderr,
        )
        return 1


def _drill() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--no-trace", action="store_true", help="without CUPTI")
    args = parser.parse_args()
    found: dict[str, Any] = {"command": " ".join(sys.argv), "date": time.strftime("%Y-%m-%d")}
    with tempfile.TemporaryDirectory() as folder:
        drill = Drill(args.model_dir, None if args.no_trace else f"{folder}/trace.json")
        found["device"] = drill.engine.runner.trace.source
        clock = DeviceClock.of(drill.engine.runner.stream.device)
        found["clock"] = clock.read()._asdict() if clock is not None else None
        found["step_ms"] = 1e3 * drill.steps(200)
        found["calm"] = drill.lines()
        for name in ("slow_kernel", "copies", "neighbour", "slow_host"):
            drill.longest_s = 0.0
            found[name] = {"lines": getattr(drill, name)(), "longest_ms": 1e3 * drill.longest_s}
            print(
                f"{name}, longest turn {1e3 * drill.longest_s:.1f} ms",
                *found[name]["lines"],
                sep="\n  ",
                flush=True,
            )
            drill.steps(100)
            drill.lines()
        drill.engine.close()
    times = bench_idle.measure_idle(recipes.find(args.model_dir), ROWS, steps=2000, changes=10)["watch"]
    found["watch_us"] = statistics.median(times)
    print(json.dumps({key: found[key] for key in ("device", "clock", "step_ms", "watch_us", "calm")}))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
