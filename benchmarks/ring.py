"""The products of a decode step of one token, as rings and as Triton's kernels: microseconds a layer in a graph.

`python benchmarks/ring.py [--weights bf16|fp8|int4] [--json FILE] [--seconds 60]` runs chains over 36 layers of
different weights of Qwen3-4B. First each ring is compared with a reference and run twice for the same bits.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
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
from openinfer.kernels.formats.codes import Coding
from openinfer.kernels.formats.int4 import group_words
from openinfer.kernels.linear.choices import Choice, group_ring_choice
from openinfer.kernels.linear.ring import group_ring_product, ring_product
from openinfer.kernels.testing import run_reference
from openinfer.tensor import (
    Arena,
    Device,
    Event,
    Stream,
    Tensor,
    bfloat16,
    float8_e4m3fn,
    float32,
    int32,
    uint8,
)

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


BYTES = {"bf16": 2.0, "fp8": 1.0, "int4": 0.5 + 4 / 128}
"""Bytes of a number of the weight, with those of scales of INT4."""
STAGE_BYTES, RING_BYTES = (10 << 10, 20 << 10, 40 << 10), (32 << 10, 64 << 10, 110 << 10, 200 << 10)
"""Sizes of rings of codes to try."""


def tiles_of(kind: str, name: str, target: Target) -> list[Choice]:
    """The rings to try."""
    if kind == "bf16":
        return [Choice("ring", 1, rows, 256, 1, warps, stages) for rows, stages, warps in TILES[name]]
    n, k, gated = SHAPES[name].n, SHAPES[name].k, SHAPES[name].op is gate_up_silu
    chosen = group_ring_choice(target, n // 2 if gated else n, k, packed=kind == "int4", gated=gated)
    if chosen is None:
        raise ValueError(f"no ring takes {name} of {kind}")
    row_bytes = k * BYTES[kind]
    unit = 8 // math.gcd(k // 128, 8)
    found = [chosen]
    for replicas, stage, ring in itertools.product((1, 2, 4), STAGE_BYTES, RING_BYTES):
        warps, fewest = unit * k // 1024 * replicas, 2 * unit * replicas
        rows = fewest * max(1, round(stage / row_bytes / fewest))
        stages = round(ring / row_bytes / rows)
        if warps <= 20 and stages >= 2 and rows * stages * row_bytes <= RING_BYTES[-1]:
            found.append(Choice("ring", 1, rows, 128, 1, warps, stages))
    return list(dict.fromkeys(found))


def floor(kind: str, name: str) -> float:
    """Microseconds that reading the weight takes at the memory's speed."""
    return SHAPES[name].n * SHAPES[name].k * BYTES[kind] / 4.59e6


def label_of(c: Choice) -> str:
    return f"{c.bn} rows x {c.stages}, {c.warps} warps"


class Bench:
    """Weights of all layers, and chains of products over them in graphs."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.device = Device("cuda")
        self.device.activate()
        self.stream = Stream(self.device)
        self.target = Target.of(self.device, cublas=cublas_available())
        self.store = Store(self.device.arch)
        arena = Arena(self.device, 9 << 30)
        self.rng = np.random.default_rng(0)
        self.weights = {name: self._weights(arena, shape) for name, shape in SHAPES.items()}
        self.gain = arena.alloc((2560,), bfloat16)
        self.gain.copy_from((1 + 0.1 * self.rng.standard_normal(2560)).astype(bfloat16))
        self.at = {name: arena.alloc((1, width), bfloat16) for name, width in WIDTHS.items()}
        self.values = {
            name: self.rng.standard_normal((1, width)).astype(bfloat16) for name, width in WIDTHS.items()
        }
        self.reset()
        self.wanted: dict[str, np.ndarray[Any, Any]] = {}
        scratch, zeroed = arena.alloc((400 << 20,), uint8), arena.alloc((1 << 20,), uint8)
        zeroed.zero_(self.stream)
        cublas = CublasLt() if self.target.cublas else None
        driver = CudaDriver(self.device, self.stream, self.store, cublas)
        self.pack = LaunchPack(self.target, driver, scratch, zeroed)

    def _weights(self, arena: Arena, shape: Shape) -> list[dict[str, Tensor]]:
        """The weight of each layer, with its scales; the layers' values are those of the first, shifted."""
        n, k = shape.n, shape.k
        one = {"bf16": (n, k, bfloat16), "fp8": (n, k, float8_e4m3fn), "int4": (n, k // 2, uint8)}[self.kind]
        size, dtype = one[0] * one[1], one[2]
        source = arena.alloc((size + 16 * LAYERS,), dtype)
        if self.kind == "bf16":
            source.copy_from((self.rng.standard_normal(source.shape, np.float32) * 0.02).astype(bfloat16))
        else:  # no NaN among codes of FP8
            source.copy_from((self.rng.integers(0, 256, source.shape, np.uint8) & 0xBF).view(dtype))
        layers = []
        for layer in range(LAYERS):
            tensors = {"weight": arena.alloc((n, k if self.kind != "int4" else k // 2), dtype)}
            flat = Tensor(tensors["weight"].ptr, (size,), dtype, self.device)
            flat.copy_from(source[16 * layer : 16 * layer + size], self.stream)
            if self.kind == "fp8":
                tensors["scales"] = arena.alloc((n // 128, k // 128), float32)
                tensors["scales"].copy_from(0.02 + 0.01 * self.rng.random((n // 128, k // 128), np.float32))
            elif self.kind == "int4":
                tensors["scales"] = arena.alloc((n, k // 128), int32)
                if layer == 0:
                    words = group_words(
                        (0.003 + 0.001 * self.rng.random((n, k // 128))).astype(bfloat16),
                        self.rng.integers(0, 16, (n, k // 128)),
                    )
                tensors["scales"].copy_from(words)
            layers.append(tensors)
        return layers

    def reset(self) -> None:
        for name, value in self.values.items():
            self.at[name].copy_from(value)

    def _args(self, name: str, tensors: Mapping[str, Any], x: Any, out: Any, gain: Any) -> dict[str, Any]:
        """The arguments of the product's op."""
        args = {**tensors, **({"coding": "block"} if self.kind == "fp8" else {})}
        if SHAPES[name].op is linear_add:
            return {"x": out, "h": x, **args}
        return {"out": out, "x": x, "norm_weight": gain, "eps": EPS, **args}

    def commands(self, name: str, layer: int, choice: Choice | None, *, early: bool) -> list[Command]:
        """One product of a layer by a ring; by the kernels of today if `choice` is None."""
        shape, tensors = SHAPES[name], self.weights[name][layer]
        out, x = self.at[shape.to], self.at[shape.source]
        if choice is None:
            return shape.op.plan(self.target, self._args(name, tensors, x, out, self.gain))
        norm = None if shape.op is linear_add else (self.gain, EPS)
        how: dict[str, Any] = {"add": shape.op is linear_add, "gated": shape.op is gate_up_silu, "norm": norm}
        sms, weight = self.target.num_sms, tensors["weight"]
        if self.kind == "bf16":
            made = ring_product(choice, sms, out, x, weight, **how)
        else:
            coding: Coding | None = "block" if self.kind == "fp8" else None
            made = group_ring_product(choice, sms, out, x, weight, tensors["scales"], coding, None, **how)
        return [replace(made, early=early)]

    def check(self, name: str, choice: Choice | None) -> float:
        """The distance from the reference over its size. Raises AssertionError where two runs differ."""
        shape, found = SHAPES[name], []
        for _ in range(2):
            self.reset()
            self.pack.submit(name, self.commands(name, 3, choice, early=False))
            self.stream.synchronize()
            found.append(np.array(self.at[shape.to].numpy()))
        assert (found[0].view(np.uint16) == found[1].view(np.uint16)).all(), (name, choice)
        if name not in self.wanted:
            tensors = {key: np.array(t.numpy()) for key, t in self.weights[name][3].items()}
            x, out = self.values[shape.source], self.values[shape.to].copy()
            args = self._args(name, tensors, x, out, np.array(self.gain.numpy()))
            written = "x" if shape.op is linear_add else "out"
            self.wanted[name] = run_reference(shape.op, args)[written].astype(np.float32)
        want = self.wanted[name]
        return float(np.linalg.norm(found[0].astype(np.float32) - want) / np.linalg.norm(want))

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
    parser.add_argument("--weights", choices=tuple(BYTES), default="bf16")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seconds", type=float, default=60)
    args = parser.parse_args()
    start, kind, bench = time.monotonic(), args.weights, Bench(args.weights)
    result: dict[str, Any] = {"device": bench.device.name, "weights": kind, "alone": {}, "chain": {}}
    tiles = {name: tiles_of(kind, name, replace(bench.target, nvrtc=True)) for name in SHAPES}
    bench.store.prepare(
        [
            command.spec
            for name in SHAPES
            for choice in (*tiles[name], None)
            for command in bench.commands(name, 0, choice, early=True)
            if isinstance(command, Launch)
        ]
    )
    best: dict[str, list[tuple[float, Choice]]] = {}
    for name in SHAPES:
        result["alone"][f"{name} today"] = today = bench.time({name: None}, early=False)
        print(f"{name}: floor {floor(kind, name):.2f}, today {today[0]:.2f}", flush=True)
        for choice in tiles[name]:
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
        bytes_us = sum(floor(kind, name) for name in names)
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
