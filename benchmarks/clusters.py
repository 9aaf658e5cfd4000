"""The products of a decode step of 8 to 128 tokens by clusters of blocks: microseconds a layer in a graph.

    python benchmarks/clusters.py [--tokens 8 32 64 128] [--seconds 60] [--json FILE]

The shapes and weights are those of ring.py: 36 layers of different weights of Qwen3-4B. Each product runs by several
sizes of clusters, with plain and with early launches, and with early ones without its norm. First its results are
compared with a reference, and both launches must give the same bits. "chosen" is what the op runs on this GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from ring import EPS, LAYERS, REPEATS, SHAPES, WIDTHS, floor

from openinfer.graph import StepGraphs
from openinfer.kernels import (
    Command,
    CublasLt,
    CudaDriver,
    Launch,
    LaunchPack,
    Store,
    Target,
    cublas_available,
    gate_up_silu,
    linear_add,
)
from openinfer.kernels.linear.choices import Choice, shared_bytes
from openinfer.kernels.linear.cluster_memory import CLUSTER_TOKENS, ROW_BYTES, copied_tokens, sent_bytes
from openinfer.kernels.linear.cluster_product import cluster_product
from openinfer.kernels.norms import norm
from openinfer.kernels.testing import run_reference
from openinfer.tensor import Arena, Device, Event, Stream, Tensor, bfloat16, uint8

SIZES = {  # rows of the weight, and blocks of a cluster
    "qkv": ((96, 2), (48, 1)),
    "o": ((40, 2), (96, 4)),
    "gate_up": ((80, 1), (144, 2)),
    "down": ((40, 2), (96, 4)),
}
Norm = Literal["early", "plain", "none"]
Chain = Mapping[str, Choice | None]
Array = np.ndarray[Any, Any]


class Gpu:
    """The GPU, and the weights of all layers."""

    def __init__(self) -> None:
        self.device = Device("cuda")
        self.device.activate()
        self.stream = Stream(self.device)
        self.target = Target.of(self.device, cublas=cublas_available(), nvrtc=True)
        self.store, self.arena = Store(self.device.arch), Arena(self.device, 9 << 30)
        self.rng = np.random.default_rng(0)
        self.weights = {name: self._weights(shape.n, shape.k) for name, shape in SHAPES.items()}
        self.gain = self.arena.alloc((WIDTHS["x"],), bfloat16)
        self.gain.copy_from((1 + 0.1 * self.rng.standard_normal(WIDTHS["x"])).astype(bfloat16))
        scratch, zeroed = self.arena.alloc((256 << 20,), uint8), self.arena.alloc((1 << 20,), uint8)
        zeroed.zero_(self.stream)
        driver = CudaDriver(self.device, self.stream, self.store, CublasLt() if self.target.cublas else None)
        self.pack = LaunchPack(self.target, driver, scratch, zeroed)

    def _weights(self, n: int, k: int) -> list[Tensor]:
        """A weight a layer; the layers' values are those of the first, shifted."""
        source, found = self.arena.alloc((n * k + 16 * LAYERS,), bfloat16), []
        source.copy_from((self.rng.standard_normal(source.shape, np.float32) * 0.02).astype(bfloat16))
        for layer in range(LAYERS):
            weight = self.arena.alloc((n, k), bfloat16)
            flat = Tensor(weight.ptr, (n * k,), bfloat16, self.device)
            flat.copy_from(source[16 * layer : 16 * layer + n * k], self.stream)
            found.append(weight)
        return found


class Tokens:
    """The products of `m` tokens."""

    def __init__(self, gpu: Gpu, m: int) -> None:
        self.gpu, self.m = gpu, m
        self.values = {
            name: gpu.rng.standard_normal((m, width)).astype(bfloat16) for name, width in WIDTHS.items()
        }
        self.at = {name: gpu.arena.alloc((m, width), bfloat16) for name, width in WIDTHS.items()}
        self.hidden = gpu.arena.alloc((m, WIDTHS["x"]), bfloat16)
        self.reset()

    def reset(self) -> None:
        for name, value in self.values.items():
            self.at[name].copy_from(value)

    def sizes(self, name: str) -> Iterator[Choice]:
        """The clusters to try, with all stages that fit."""
        bm, halves = CLUSTER_TOKENS if self.m <= CLUSTER_TOKENS else 128, 2 if name == "gate_up" else 1
        for rows, split in SIZES[name]:
            room = shared_bytes(90) - 16 - sent_bytes(copied_tokens(self.m), halves * rows, split, parts=2)
            stages = room // ((copied_tokens(self.m) + halves * rows) * ROW_BYTES + 16)
            yield Choice("cluster", bm, rows, ROW_BYTES // 2, split, 8, min(16, stages))

    def _args(self, name: str, weight: Any, x: Any, out: Any, gain: Any) -> dict[str, Any]:
        if SHAPES[name].op is linear_add:
            return {"x": out, "h": x, "weight": weight}
        return {"out": out, "x": x, "norm_weight": gain, "eps": EPS, "weight": weight}

    def commands(
        self, name: str, layer: int, choice: Choice | None, *, early: bool, normed: Norm = "early"
    ) -> list[Command]:
        """One product of a layer by clusters; as the op runs it if `choice` is None."""
        shape, gpu = SHAPES[name], self.gpu
        weight, x, out = gpu.weights[name][layer], self.at[shape.source], self.at[shape.to]
        if choice is None:
            return shape.op.plan(gpu.target, self._args(name, weight, x, out, gpu.gain))
        found: list[Command] = []
        if shape.op is not linear_add:
            if normed != "none":
                found.append(norm(self.hidden, x, gpu.gain, EPS, early=early and normed == "early"))
            x = self.hidden
        made = cluster_product(
            choice, out, x, weight, add=shape.op is linear_add, gated=shape.op is gate_up_silu
        )
        return [*found, replace(made, early=early)]

    def check(self, name: str, choice: Choice) -> float:
        """The largest distance of a token from the reference, over its size. Raises AssertionError where launches
        differ."""
        shape, gpu, found = SHAPES[name], self.gpu, []
        for early in (False, True):
            self.reset()
            gpu.pack.submit(name, self.commands(name, 3, choice, early=early))
            gpu.stream.synchronize()
            found.append(np.array(self.at[shape.to].numpy()))
        assert (found[0].view(np.uint16) == found[1].view(np.uint16)).all(), (name, choice)
        some = np.unique(np.r_[0, self.m - 1, gpu.rng.integers(0, self.m, 4)])
        x, out = self.values[shape.source][some].copy(), self.values[shape.to][some].copy()
        weight, gain = np.array(gpu.weights[name][3].numpy()), np.array(gpu.gain.numpy())
        args = self._args(name, weight, x, out, gain)
        want: Array = run_reference(shape.op, args)["x" if shape.op is linear_add else "out"]
        want, got = want.astype(np.float32), found[0][some].astype(np.float32)
        return float((np.linalg.norm(got - want, axis=1) / np.linalg.norm(want, axis=1)).max())

    def time(self, chain: Chain, *, early: bool, normed: Norm = "early") -> float:
        """Microseconds a layer of these products in their order, in the median."""
        gpu = self.gpu
        layers = [
            [
                command
                for name, how in chain.items()
                for command in self.commands(name, layer, how, early=early, normed=normed)
            ]
            for layer in range(LAYERS)
        ]
        gpu.pack.submit("chain", layers[0])  # loads the kernels, which no capture may do
        gpu.stream.synchronize()
        graphs = StepGraphs(gpu.device, gpu.stream, capture=True)

        def submit() -> None:
            for layer in layers:
                gpu.pack.submit("chain", layer)

        graphs.record("chain", submit)
        begin, end = Event(gpu.device, timing=True), Event(gpu.device, timing=True)
        found = []
        for _ in range(REPEATS):
            begin.record(gpu.stream)
            graphs.launch("chain")
            end.record(gpu.stream)
            gpu.stream.synchronize()
            found.append(1e6 * end.elapsed_s(begin) / LAYERS)
        graphs.close()
        self.reset()
        return round(statistics.median(found), 2)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[8, 32, 64, 128])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    began, gpu = time.monotonic(), Gpu()
    result: dict[str, Any] = {"device": gpu.device.name}
    of_tokens = [Tokens(gpu, m) for m in args.tokens]
    ways = [(t, name, c, early) for t in of_tokens for name in SHAPES for c in (*t.sizes(name), None)
            for early in (True, False)]  # fmt: skip
    commands = [c for t, name, choice, early in ways for c in t.commands(name, 0, choice, early=early)]
    gpu.store.prepare(list(dict.fromkeys(c.spec for c in commands if isinstance(c, Launch))))
    for t in of_tokens:
        best: dict[str, Choice | None] = {}
        for name in SHAPES:
            chosen = t.time({name: None}, early=True)
            result[f"{t.m} {name} chosen"] = chosen
            print(f"{t.m} tokens, {name}: floor {floor('bf16', name):.1f}, chosen {chosen}", flush=True)
            times: dict[Choice, float] = {}
            for c in t.sizes(name):
                error, label = t.check(name, c), f"{c.bn} x {c.split} blocks, {c.stages} stages"
                plain, times[c] = (t.time({name: c}, early=early) for early in (False, True))
                bare = t.time({name: c}, early=True, normed="none")
                found = {"plain": plain, "early": times[c], "bare": bare, "error": error}
                result[f"{t.m} {name} {label}"] = found
                print(f"  {label}: {found}", flush=True)
            best[name] = min(times, key=times.__getitem__)
        early, plain = (t.time(best, early=early) for early in (True, False))
        after_norms = t.time(best, early=True, normed="plain")
        chosen = t.time(dict.fromkeys(SHAPES), early=True)
        found = {"chosen": chosen, "early": early, "norms not early": after_norms, "plain": plain}
        result[f"{t.m} all"] = found
        print(f"{t.m} tokens, all: {found}", flush=True)
        if args.json:
            args.json.write_text(json.dumps(result, indent=1) + "\n")
        if time.monotonic() - began > args.seconds:
            break


if __name__ == "__main__":
    main()
