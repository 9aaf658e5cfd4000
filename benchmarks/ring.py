"""The products of a decode step of one token, as rings and as Triton's kernels: microseconds a layer in a graph.

`python benchmarks/ring.py [--json FILE] [--seconds 60]` runs chains over 36
layers of different weights of Qwen3-4B. First each ring is compared with float64 and run twice for the same bits.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from openinfer.graph import StepGraphs
from openinfer.kernels import (
    Command,
    CublasLt,
    CudaDriver,
    Launch,
    LaunchPack,
    Op,
    Store,
    Target,
    cublas_available,
    gate_up_silu,
    linear_add,
    norm_linear,
)
from openinfer.kernels.ring import ring_product
from openinfer.kernels.tuning import Choice
from openinfer.tensor import Arena, Device, Event, Stream, Tensor, bfloat16, uint8

LAYERS, REPEATS, EPS = 36, 9, 1e-6


class Shape(NamedTuple):
    """A product of a layer: rows and columns of its weight, its op, and where its input and output
    are."""

    n: int
    k: int
    op: Op[Any]
    source: str
    to: str


SHAPES = {
    "qkv": Shape(6144, 2560, norm_linear, "x", "qkv"),
    "o": Shape(2560, 4096, linear_add, "heads", "x"),
    "gate_up": Shape(19456, 2560, gate_up_silu, "x", "mlp"),
    "down": Shape(2560, 9728, linear_add, "mlp", "x"),
}
WIDTHS = {"x": 2560, "qkv": 6144, "heads": 4096, "mlp": 9728}
TILES: Mapping[str, Sequence[tuple[int, int, int]]] = {  # rows of a stage, stages, warps
    "qkv": ((8, 4, 10), (8, 3, 10), (4, 5, 10), (4, 8, 10)),
    "o": ((4, 3, 8), (4, 3, 16), (4, 5, 8)),
    "gate_up": ((4, 9, 10), (8, 5, 10), (8, 4, 10)),
    "down": ((2, 5, 19), (2, 4, 19), (1, 10, 19)),
}


def tiles_of(name: str) -> list[Choice]:
    """The rings to try."""
    return [Choice("ring", 1, rows, 256, 1, warps, stages) for rows, stages, warps in TILES[name]]


def floor(name: str) -> float:
    """Microseconds that reading the weight takes at the memory's speed."""
    return SHAPES[name].n * SHAPES[name].k * 2 / 4.59e6


def label_of(c: Choice) -> str:
    return f"{c.bn} rows x {c.stages}, {c.warps} warps"


class Bench:
    """Weights of all layers, and chains of products over them in graphs."""

    def __init__(self) -> None:
        self.device = Device("cuda")
        self.device.activate()
        self.stream = Stream(self.device)
        self.target = Target.of(self.device, cublas=cublas_available())
        self.store = Store(self.device.arch)
        arena = Arena(self.device, 9 << 30)
        rng = np.random.default_rng(0)
        self.block = (rng.standard_normal(19456 * 2560, np.float32) * 0.02).astype(bfloat16)
        source = arena.alloc((self.block.size,), bfloat16)
        source.copy_from(self.block)
        self.weights = {
            name: [self._weight(arena, source, shape, layer) for layer in range(LAYERS)]
            for name, shape in SHAPES.items()
        }
        self.gain = arena.alloc((2560,), bfloat16)
        self.gain.copy_from((1 + 0.1 * rng.standard_normal(2560)).astype(bfloat16))
        self.at = {name: arena.alloc((1, width), bfloat16) for name, width in WIDTHS.items()}
        self.values = {
            name: rng.standard_normal((1, width)).astype(bfloat16) for name, width in WIDTHS.items()
        }
        self.reset()
        self.wanted: dict[str, np.ndarray[Any, Any]] = {}
        scratch, zeroed = arena.alloc((64 << 20,), uint8), arena.alloc((1 << 20,), uint8)
        zeroed.zero_(self.stream)
        cublas = CublasLt() if self.target.cublas else None
        driver = CudaDriver(self.device, self.stream, self.store, cublas)
        self.pack = LaunchPack(self.target, driver, scratch, zeroed)

    def _weight(self, arena: Arena, source: Tensor, shape: Shape, layer: int) -> Tensor:
        made = arena.alloc((shape.n, shape.k), bfloat16)
        flat = Tensor(made.ptr, (shape.n * shape.k,), bfloat16, self.device)
        shift = 16 * layer if shape.n * shape.k < source.shape[0] - 16 * LAYERS else 0
        flat.copy_from(source[shift : shift + flat.shape[0]], self.stream)
        return made

    def reset(self) -> None:
        for name, value in self.values.items():
            self.at[name].copy_from(value)

    def commands(self, name: str, layer: int, choice: Choice | None, *, early: bool) -> list[Command]:
        """One product of a layer by a ring; by the kernels of today if `choice` is None."""
        shape, weight = SHAPES[name], self.weights[name][layer]
        out, x = self.at[shape.to], self.at[shape.source]
        if choice is None:
            if shape.op is linear_add:
                return linear_add.plan(self.target, {"x": out, "h": x, "weight": weight})
            args = {"out": out, "x": x, "norm_weight": self.gain, "weight": weight, "eps": EPS}
            return shape.op.plan(self.target, args)
        norm = None if shape.op is linear_add else (self.gain, EPS)
        add, gated = shape.op is linear_add, shape.op is gate_up_silu
        made = ring_product(choice, self.target.num_sms, out, x, weight, add=add, gated=gated, norm=norm)
        return [replace(made, early=early)]

    def check(self, name: str, choice: Choice) -> float:
        """The largest difference from float64 over the largest value. Raises AssertionError where two runs differ."""
        shape, found = SHAPES[name], []
        for _ in range(2):
            self.reset()
            self.pack.submit(name, self.commands(name, 3, choice, early=False))
            self.stream.synchronize()
            found.append(np.array(self.at[shape.to].numpy()))
        assert (found[0].view(np.uint16) == found[1].view(np.uint16)).all(), (name, choice)
        want = self.wanted.get(name)
        if want is None:
            want = self.wanted[name] = self._reference(name)
        return float(np.abs(found[0].astype(np.float32) - want).max() / np.abs(want).max())

    def _reference(self, name: str) -> np.ndarray[Any, Any]:
        shape = SHAPES[name]
        weight = np.array(self.weights[name][3].numpy()).astype(np.float32)
        x = self.values[shape.source].astype(np.float64)
        if shape.op is not linear_add:
            x = (
                x
                * np.array(self.gain.numpy()).astype(np.float64)
                / np.sqrt(np.mean(x * x, 1, keepdims=True) + EPS)
            )
        want = x.astype(np.float32) @ weight.T
        if shape.op is gate_up_silu:
            gate, up = np.split(want, 2, axis=1)
            want = gate / (1 + np.exp(-gate)) * up
        if shape.op is linear_add:
            want = want + self.values[shape.to].astype(np.float32)
        return want

    def _submit(self, layers: Sequence[Sequence[Command]]) -> None:
        for layer in layers:
            self.pack.submit("chain", layer)

    def time(self, chain: Mapping[str, Choice | None], *, early: bool) -> list[float]:
        """Microseconds a layer of these products in their order: the median, and all repeats."""
        layers = [
            [c for name, how in chain.items() for c in self.commands(name, layer, how, early=early)]
            for layer in range(LAYERS)
        ]
        self.pack.submit("chain", layers[0])  # loads the kernels, which no capture may do
        graphs = StepGraphs(self.device, self.stream, capture=True)
        graphs.record("chain", lambda: self._submit(layers))
        begin, end, found = Event(self.device, timing=True), Event(self.device, timing=True), []
        for _ in range(REPEATS):
            begin.record(self.stream)
            graphs.launch("chain")
            end.record(self.stream)
            self.stream.synchronize()
            found.append(round(1e6 * end.elapsed_s(begin) / LAYERS, 3))
        graphs.close()
        self.reset()
        return [statistics.median(found), *found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seconds", type=float, default=60)
    args = parser.parse_args()
    start, bench = time.monotonic(), Bench()
    result: dict[str, Any] = {"device": bench.device.name, "alone": {}, "chain": {}}
    bench.store.prepare(
        [
            command.spec
            for name in SHAPES
            for choice in (*tiles_of(name), None)
            for command in bench.commands(name, 0, choice, early=True)
            if isinstance(command, Launch)
        ]
    )
    best: dict[str, list[tuple[float, Choice]]] = {}
    for name in SHAPES:
        result["alone"][f"{name} today"] = today = bench.time({name: None}, early=False)
        print(f"{name}: floor {floor(name):.2f}, today {today[0]:.2f}", flush=True)
        for choice in tiles_of(name):
            error = bench.check(name, choice)
            plain, early = (bench.time({name: choice}, early=early)[0] for early in (False, True))
            best.setdefault(name, []).append((early, choice))
            entry = {"error": error, "plain": plain, "early": early}
            result["alone"][f"{name} {label_of(choice)}"] = entry
            print(
                f"  {label_of(choice)}: error {error:.1e}, plain {plain:.2f}, early {early:.2f}", flush=True
            )
    for names in (("o", "gate_up", "down"), tuple(SHAPES)):
        today = bench.time(dict.fromkeys(names), early=False)
        bytes_us = sum(map(floor, names))
        print(f"{' -> '.join(names)}: floor {bytes_us:.2f}, today {today[0]:.2f}", flush=True)
        result["chain"][" ".join(names)] = found = {"floor": bytes_us, "today": today[0]}
        for picks in itertools.product(*(sorted(best[name], key=lambda t: t[0])[:3] for name in names)):
            if time.monotonic() - start > args.seconds:
                break
            chain = {name: choice for name, (_, choice) in zip(names, picks, strict=True)}
            label = "; ".join(f"{name} {label_of(choice)}" for name, choice in chain.items())
            found[label] = bench.time(chain, early=True)[0]
        label, us = min(list(found.items())[2:], key=lambda item: item[1])
        print(f"  early {us:.2f}: {label}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
