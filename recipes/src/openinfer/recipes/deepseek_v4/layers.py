"""Each layer alone, for the accuracy gate of an engine that rounds activations.

Rounding to codes turns the last bits of bf16 into whole codes, and errors of layers add up. Over five layers two right
engines are as far apart as one that rounds and one that does not. A layer that gets the reference's own input has no
error of earlier layers. So its output is compared with the reference's, relative to the contribution of the layer.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from openinfer.kernels import Op, Pack
from openinfer.recipes.engine.engine import Engine
from openinfer.recipes.engine.forced import Forced
from openinfer.recipes.engine.verdict import OWN_DEVIATION_FACTOR, Reference
from openinfer.tensor import Stream, Tensor, bfloat16

Array = np.ndarray[Any, Any]

MEDIAN, P90 = 0.01, 0.02
"""The least limits. They are of quantiles, because another expert or entry moves single positions far."""


@dataclass(frozen=True, slots=True)
class LayerCheck:
    """The distance of a layer's output from the reference's, relative to the contribution of the layer.

    It has the median and the 90th percentile over the positions, and their limits."""

    path: str
    positions: int
    median: float
    p90: float
    median_limit: float
    p90_limit: float

    @property
    def passed(self) -> bool:
        return self.median <= self.median_limit and self.p90 <= self.p90_limit

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "passed": self.passed}

    def __str__(self) -> str:
        return (
            f"{'pass' if self.passed else 'FAIL'} {self.path:28s} {self.positions:4d} positions: "
            f"median {self.median:.4f} (<= {self.median_limit:.4f}), "
            f"p90 {self.p90:.4f} (<= {self.p90_limit:.4f}) of what the layer adds"
        )


class Injected:
    """A pack that runs another, puts the given input before each layer, and keeps the output of each layer.

    inputs bf16 [L, T, n, D]. A layer has two hc_pre, of which the first reads its input, and two hc_post.
    """

    def __init__(self, inner: Pack, stream: Stream, inputs: Array) -> None:
        self._inner, self._stream, self._inputs = inner, stream, inputs
        self.outputs: list[list[Array]] = [[] for _ in inputs]
        self._span = slice(0, 0)
        self._reads = self._writes = 0

    def begin(self, start: int, count: int) -> None:
        """The next step has these tokens."""
        self._span, self._reads, self._writes = slice(start, start + count), 0, 0

    def run(self, op: Op[Any], args: Any) -> None:
        if op.name == "hc_pre":
            layer, second = divmod(self._reads, 2)
            self._reads += 1
            if not second:
                streams: Tensor = args.streams
                given = np.ascontiguousarray(self._inputs[layer, self._span].astype(streams.dtype))
                streams[: len(given)].copy_from(given, self._stream)
        self._inner.run(op, args)
        if op.name == "hc_post":
            layer, second = divmod(self._writes, 2)
            self._writes += 1
            if second:
                self._stream.synchronize()
                count = self._span.stop - self._span.start
                self.outputs[layer].append(args.streams[:count].numpy().astype(np.float32))


def layers_alone(
    engine: Engine, reference: Reference, wrong_table: str | None = None
) -> Iterator[LayerCheck]:
    """A check of each layer, if the reference has outputs of layers for given inputs."""
    if not reference.layers:
        return
    inputs = reference.layers["inputs"].view(bfloat16)
    wanted, own = reference.layers["outputs"], reference.layers["own"]
    pack = Injected(engine.runner.pack, engine.runner.stream, inputs)
    forced = Forced(engine, engine.runner.eager(pack), wrong_table)
    row = forced.join(1, reference.tokens)
    while row.fed < len(reference.tokens):
        count = min(engine.runner.buckets.max_tokens, len(reference.tokens) - row.fed)
        pack.begin(row.fed, count)
        forced.step([(row, count)])
    forced.leave()
    for n, (given, want) in enumerate(zip(inputs, wanted, strict=True)):
        last = len(want)
        got = np.concatenate(pack.outputs[n])[-last:]
        added = np.linalg.norm((want - given[-last:].astype(np.float32)).reshape(last, -1), axis=1)
        away = np.linalg.norm((got - want).reshape(last, -1), axis=1) / added
        away = np.where(np.isfinite(away), away, np.inf)
        limits = (
            max(floor, OWN_DEVIATION_FACTOR * float(np.quantile(own[n], q)))
            for floor, q in ((MEDIAN, 0.5), (P90, 0.9))
        )
        median, p90 = (float(np.quantile(away, q)) for q in (0.5, 0.9))
        yield LayerCheck(f"layer {n} alone, {len(reference.tokens)} tokens", last, median, p90, *limits)
