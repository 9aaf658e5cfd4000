"""Troubles of a GPU, injected into an engine under load, and the line that its watch wrote about each.

    python benchmarks/drill.py MODEL_DIR [--json FILE]

Weights are random, so MODEL_DIR needs no more than config.json. docs/slow.md has the lines. The neighbour is a process
that multiplies matrices with PyTorch; without PyTorch that trouble is left out.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from openinfer.cli import recipes
from openinfer.frontend.contract import SlowTraces
from openinfer.recipes.engine.startup import build
from openinfer.recipes.engine.testing import Session
from openinfer.tensor import DeviceClock, PinnedBuffer, Tensor

ROWS, WARM_STEPS = 8, 400
MOST_BYTES = 512 << 20
NEIGHBOUR = """
import torch
a = torch.randn(16384, 16384, dtype=torch.bfloat16, device="cuda")
torch.cuda.synchronize()
print("ready", flush=True)
while True:
    for _ in range(20):
        a @ a
    torch.cuda.synchronize()
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
        self.session, rng = Session(self.engine), random.Random(1)
        for _ in range(ROWS):
            self.session.submit([rng.randrange(256, 30_000) for _ in range(256)], 7_500, ignore_eos=True)
        self.steps(WARM_STEPS)

    def steps(self, count: int) -> float:
        began = time.perf_counter()
        for _ in range(count):
            self.session.step(0.01)
        return (time.perf_counter() - began) / count

    def lines(self) -> list[str]:
        """The findings since the last call."""
        found = [trace["line"] for trace in json.loads(self.engine.control(SlowTraces()))["traces"]]
        self.watch.findings.clear()
        return found

    def in_the_next_step(self, work: Callable[[], None]) -> None:
        """Put work on the stream of the steps, between the two segments of one step."""
        kind = type(self.engine.runner)
        replay = kind.replay

        def once(runner: Any, key: Any) -> None:
            replay(runner, key)
            if key[0] == "forward":
                kind.replay = replay
                work()

        kind.replay = once
        self.steps(20)

    def slow_kernels(self) -> list[str]:
        """The kernels of a step run five times."""
        runner = self.engine.runner

        def work() -> None:
            for _ in range(4):
                runner.replay(("forward", runner._shape))

        self.in_the_next_step(work)
        return self.lines()

    def copies(self) -> list[str]:
        """Copies of 2 GB from host memory stand between the kernels of a step."""
        runner = self.engine.runner
        device = runner.stream.device
        host = PinnedBuffer(device, MOST_BYTES)
        there = Tensor.empty((MOST_BYTES,), "uint8", device)

        def work() -> None:
            for _ in range(4):
                runner.stream.copy_async(there.ptr, host.ptr, MOST_BYTES, "h2d")

        self.in_the_next_step(work)
        return self.lines()

    def neighbour(self) -> list[str]:
        """Another process uses the same GPU."""
        if importlib.util.find_spec("torch") is None:
            return ["PyTorch is missing"]
        process = subprocess.Popen([sys.executable, "-c", NEIGHBOUR], stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            process.stdout.readline()
            self.steps(250)
        finally:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
        return self.lines()


def main() -> int:
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
        for name in ("slow_kernels", "copies", "neighbour"):
            found[name] = getattr(drill, name)()
            drill.steps(100)
            print(name, *found[name], sep="\n  ", flush=True)
            drill.lines()
        drill.engine.close()
    print(json.dumps({key: found[key] for key in ("device", "clock", "step_ms", "calm")}))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
