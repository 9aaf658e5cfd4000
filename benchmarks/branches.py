"""Mixed steps with branches in the graph, beside the same steps on one stream: whether all bits agree, and the times.

    python benchmarks/branches.py MODEL_DIR [--points 224,512,1024 ...] [FLAGS OF THE ENGINE]

The engine records a mixed step with branches: the commands of an op that may run beside each other. A point is decode
rows, the tokens of each, and the tokens of a prompt beside them. The cache and the states of the layers are copied, so
give --kv-cache-memory-bytes that fits twice.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from openinfer.cli import recipes
from openinfer.kernels import CudaDriver
from openinfer.tensor import Event, Tensor

POINTS = ("252,512,1792", "224,512,1024", "60,1024,128", "31,1024,1024", "6,512,500")
COMPARED, TIMED = 4, 15


def kept(model: Any) -> Iterator[Tensor]:
    """The tensors in which layers keep keys, values and states."""
    yield from (t for name in ("kv", "state", "conv_state") if (t := getattr(model, name, None)) is not None)
    if hasattr(model, "cache"):
        yield from (getattr(model.cache, f.name) for f in dataclasses.fields(model.cache))


class Steps:
    """An engine, and sequences in it."""

    def __init__(self, engine: Any, segments: Any, points: list[tuple[int, ...]]) -> None:
        self.runner, self.segments = engine.runner, segments
        rows, context, prompt = (max(sizes) for sizes in zip(*points, strict=True))
        self.place_of_prompt = rows + 1
        rng = np.random.default_rng(7)
        self.placed = segments.Placed(engine, [context - 1] * rows + [0], [8] * rows + [prompt + 8], rng)
        self.kept = [t for t in kept(self.runner.model) if t.numel]
        self.before = [Tensor.empty(t.shape, t.dtype, t.device) for t in self.kept]

    def compare(self, rows: int, context: int, prompt: int) -> str:
        """The line of one point."""
        runner, model = self.runner, self.runner.model
        state = {**dict.fromkeys(range(1, rows + 1), context - 1), self.place_of_prompt: 0}
        self.placed.rewind(state)
        self.placed.step(list(state), prompt)
        self.placed.rewind(state)
        for copy, tensor in zip(self.before, self.kept, strict=True):
            copy.copy_from(tensor)
        tokens, num_rows, longest, _ = runner.buckets.choose(rows + prompt, rows + 1)
        forward = functools.partial(model.forward, runner.pack, tokens, num_rows, longest)
        branch = CudaDriver.branch
        CudaDriver.branch = lambda self, number: None  # type: ignore[method-assign]
        runner.graphs.record("one stream", forward)
        CudaDriver.branch = branch  # type: ignore[method-assign]
        ways: dict[str, Callable[[], None]] = {
            "one stream": functools.partial(runner.graphs.launch, "one stream"),
            "as recorded": functools.partial(runner.graphs.launch, ("forward", tokens, num_rows, longest)),
            "eager": forward,
        }
        wanted, differing = self.left_by(ways["one stream"]), set()
        for way, run in ways.items():
            for _ in range(COMPARED):
                found = self.left_by(run)
                if not all(np.array_equal(a, b) for a, b in zip(found, wanted, strict=True)):
                    differing.add(way)
        del ways["eager"]
        one, recorded = self.milliseconds(list(ways.values()))
        return (
            f"{rows} x {context} and {prompt} ({tokens} tokens, {num_rows} rows): one stream {one:.3f} ms, as recorded "
            f"{recorded:.3f}, {one / recorded - 1:+.1%}; {', '.join(sorted(differing)) or 'nothing'} differs"
        )

    def left_by(self, run: Callable[[], None]) -> list[np.ndarray[Any, Any]]:
        """The bytes of logits, hidden states and all that is kept, after the step from where it began."""
        for copy, tensor in zip(self.before, self.kept, strict=True):
            tensor.copy_from(copy)
        run()
        self.runner.stream.synchronize()
        b = self.runner.model.buffers
        hidden = b.streams if hasattr(b, "streams") else b.x
        return [t.numpy().reshape(-1).view(np.uint8).copy() for t in (b.logits, hidden, *self.kept)]

    def milliseconds(self, runs: list[Callable[[], None]]) -> list[float]:
        """Medians, measured by turns."""
        stream = self.runner.stream
        start, end = Event(stream.device, timing=True), Event(stream.device, timing=True)
        times: list[list[float]] = [[] for _ in runs]
        for _ in range(TIMED):
            for run, taken in zip(runs, times, strict=True):
                start.record(stream)
                run()
                end.record(stream)
                end.synchronize()
                taken.append(1e3 * end.elapsed_s(start))
        return [statistics.median(taken[2:]) for taken in times]


def main() -> None:
    """Build the engine and print a line a point."""
    model_dir = recipes.checkpoint(sys.argv[1])
    recipe = recipes.find(model_dir)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("--points", nargs="+", default=POINTS)
    recipe.add_arguments(parser)
    args = parser.parse_args([str(model_dir), *sys.argv[2:]])
    args.enable_prefix_caching = False
    points = [tuple(map(int, point.split(","))) for point in args.points]
    spec = recipe.engine_spec(model_dir, args)
    module = spec.target.partition(":")[0].rpartition(".")[0] + ".segments"
    engine: Any = spec.build()
    steps = Steps(engine, importlib.import_module(module), points)
    for point in points:
        print(steps.compare(*point), flush=True)


if __name__ == "__main__":
    main()
