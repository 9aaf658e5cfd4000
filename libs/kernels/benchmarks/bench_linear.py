"""Measure every kernel that a linear layer may use on this GPU, and write the table that `tuning.choose` reads.

    python bench_linear.py --model 4b --tokens 1 16 64 256 4096          print
    python bench_linear.py --model 4b --write                            and merge the best into the package's table

Times are of a CUDA graph of many calls that rotate among copies of the weights, so that the L2 cache does not serve
them; a candidate must agree with the untuned choice. For gate_up_silu the gate is part of the time. The norm is not.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import re
import sys
from collections.abc import Callable, Iterator

import numpy as np

from openinfer.kernels import (
    CublasLt,
    CudaDriver,
    KernelsError,
    Launch,
    LaunchPack,
    Store,
    Target,
    cublas_available,
)
from openinfer.kernels.launch import Command
from openinfer.kernels.products import gated_matmul, matmul
from openinfer.kernels.tuning import TABLES, Choice, depth, rule, shared_bytes
from openinfer.tensor import Device, Event, Stream, Tensor, bfloat16, check, driver, float32

MODELS = {  # hidden, query heads, intermediate
    "0.6b": (1024, 16, 3072),
    "1.7b": (2048, 16, 6144),
    "4b": (2560, 32, 9728),
    "8b": (4096, 32, 12288),
    "14b": (5120, 40, 17408),
    "32b": (5120, 64, 25600),
}
VOCABULARY, KV_HEADS, HEAD_DIM = 151936, 8, 128
HYBRIDS = {  # of Qwen3.5: hidden, rows of a linear layer's input, of a full layer's, value columns, intermediate
    "3.5-0.8b": (1024, 8224, 5120, 2048, 3584),
    "3.5-4b": (2560, 12352, 10240, 4096, 9216),
    "3.5-9b": (4096, 12352, 10240, 4096, 12288),
}
HYBRID_VOCABULARY = 248320
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
COPIES_BYTES = 256 << 20
TOLERANCE = 1e-2

FIELDS = {
    "gemv": ("kind", "bn", "bk", "warps", "stages"),
    "small": ("kind", "bm", "bn", "bk", "split", "warps", "stages"),
    "tma": ("kind", "bm", "bn", "bk", "warps", "stages"),
    "pointer": ("kind", "bm", "bn", "bk", "warps", "stages"),
    "cublas": ("kind",),
}


def layers(model: str) -> dict[tuple[str, int, int], None]:
    """(op, rows of the weight, columns) of a model's linear layers."""
    if model in HYBRIDS:
        hidden, linear, full, value, inter = HYBRIDS[model]
        return dict.fromkeys(
            [
                ("norm_linear", linear, hidden),
                ("norm_linear", full, hidden),
                ("linear_add", hidden, value),
                ("gate_up_silu", 2 * inter, hidden),
                ("linear_add", hidden, inter),
                ("logits", HYBRID_VOCABULARY, hidden),
            ]
        )
    hidden, heads, inter = MODELS[model]
    return dict.fromkeys(
        [
            ("norm_linear", (heads + 2 * KV_HEADS) * HEAD_DIM, hidden),
            ("linear_add", hidden, heads * HEAD_DIM),
            ("gate_up_silu", 2 * inter, hidden),
            ("linear_add", hidden, inter),
            ("logits", VOCABULARY, hidden),
        ]
    )


def candidates(target: Target, op: str, m: int, n: int, k: int) -> Iterator[Choice]:
    """What may be worth a measurement; the untuned choice first."""
    yield rule(target, op, m, n, k)
    if target.cublas:
        yield Choice("cublas")
    if m == 1:
        for bn, bk, warps, stages in (
            (2, 1024, 4, 3), (4, 512, 4, 3), (4, 1024, 8, 3), (8, 256, 4, 4), (8, 512, 4, 3), (8, 512, 4, 4),
            (8, 512, 8, 4), (16, 256, 4, 4), (16, 512, 8, 3),
        ):  # fmt: skip
            yield Choice("gemv", 1, bn, depth(k, bk), 1, warps, stages)
    if m <= 128:
        bm = max(16, 1 << (m - 1).bit_length())
        for bn, bk, warps, stages in (
            (32, 128, 4, 4), (64, 64, 4, 5), (64, 128, 4, 3), (64, 128, 4, 4), (64, 256, 4, 3), (128, 64, 4, 4),
            (128, 64, 4, 5), (128, 128, 8, 3), (128, 128, 4, 3), (128, 128, 4, 4),
        ):  # fmt: skip
            for split in (1, 2, 3, 4, 5, 6, 8):
                tiles = -(-n // bn) // (2 if op == "gate_up_silu" else 1)
                if split == 1 or (tiles * split <= 6 * target.num_sms and k // depth(k, bk) >= 2 * split):
                    yield Choice("small", bm, bn, depth(k, bk), split, warps, stages)
    if m > 16:
        kind = "tma" if target.arch >= 90 else "pointer"
        for bm, bn, bk, warps, stages in (
            (64, 64, 128, 4, 4), (64, 128, 64, 4, 4), (64, 128, 64, 4, 5), (64, 128, 128, 4, 3), (64, 256, 64, 4, 4),
            (128, 128, 64, 4, 4), (128, 128, 64, 8, 3), (128, 128, 64, 8, 4), (128, 256, 64, 8, 3),
            (256, 128, 64, 8, 3),
        ):  # fmt: skip
            if bm < 2 * m and not (m >= 1024 and bm * bn < 128 * 128):
                yield Choice(kind, bm, bn, depth(k, bk), 1, warps, stages)


class Bench:
    """The device and what runs on it."""

    def __init__(self) -> None:
        self.device = Device("cuda", 0)
        self.device.activate()
        self.stream = Stream(self.device)
        lt = CublasLt() if cublas_available() else None
        self.target = Target.of(self.device, cublas=lt is not None)
        self.store = Store(self.device.arch)
        scratch, zeroed = (Tensor.empty((size,), "uint8", self.device) for size in (1 << 30, 1 << 20))
        zeroed.zero_(self.stream)
        self.pack = LaunchPack(
            self.target, CudaDriver(self.device, self.stream, self.store, lt), scratch, zeroed
        )

    def fill(self, tensor: Tensor, scale: float, rng: np.random.Generator) -> None:
        """Random values, by one block of them copied until the tensor is full."""
        block = (rng.standard_normal(min(tensor.numel, 1 << 20)) * scale).astype(tensor.dtype)
        flat = tensor.reshape(-1)
        for start in range(0, tensor.numel, block.size):
            part = flat[start : start + block.size]
            part.copy_from(block[: part.numel], self.stream)
        self.stream.synchronize()

    def seconds(self, calls: list[Callable[[], None]]) -> float:
        """Device time of one call: the median of replays of a graph of them."""
        cu = driver()
        for call in calls:
            call()
        self.stream.synchronize()
        repeat = max(1, 48 // len(calls))
        check(cu.cuStreamBeginCapture(self.stream.handle, cu.CUstreamCaptureMode(1)), "cuStreamBeginCapture")
        for _ in range(repeat):
            for call in calls:
                call()
        graph = check(cu.cuStreamEndCapture(self.stream.handle), "cuStreamEndCapture")
        executable = check(cu.cuGraphInstantiate(graph, 0), "cuGraphInstantiate")
        start, end, times = Event(self.device, timing=True), Event(self.device, timing=True), []
        for _ in range(6):
            start.record(self.stream)
            check(cu.cuGraphLaunch(executable, self.stream.handle), "cuGraphLaunch")
            end.record(self.stream)
            end.synchronize()
            times.append(end.elapsed_s(start))
        check(cu.cuGraphExecDestroy(executable), "cuGraphExecDestroy")
        check(cu.cuGraphDestroy(graph), "cuGraphDestroy")
        return sorted(times[1:])[2] / (repeat * len(calls))


class Layer:
    """One linear layer's tensors on the device."""

    def __init__(self, bench: Bench, op: str, n: int, k: int, most: int) -> None:
        self.bench, self.op = bench, op
        self.gated = op == "gate_up_silu"
        width = n // 2 if self.gated else n
        rng = np.random.default_rng(n + k)
        copies = max(1, min(12, math.ceil(COPIES_BYTES / (n * k * 2))))
        self.weights = [Tensor.empty((n, k), bfloat16, bench.device) for _ in range(copies)]
        for weight in self.weights:
            bench.fill(weight, k**-0.5, rng)
        self.x = Tensor.empty((most, k), bfloat16, bench.device)
        bench.fill(self.x, 1.0, rng)
        self.out = Tensor.empty((most, width), float32 if op == "logits" else bfloat16, bench.device)

    def commands(self, choice: Choice, m: int, weight: Tensor) -> list[Command]:
        x, out = self.x[:m], self.out[:m]
        if self.gated:
            return list(gated_matmul(choice, self.bench.target, out, x, weight))
        return [matmul(choice, self.bench.target, out, x, weight, add=self.op == "linear_add")]

    def result(self, choice: Choice, m: int) -> np.ndarray:
        """What the choice writes (onto zeros), a sample of rows."""
        self.out.zero_(self.bench.stream)
        self.bench.pack.submit(str(choice), self.commands(choice, m, self.weights[0]))
        self.bench.stream.synchronize()
        return self.out[: min(m, 16)].numpy().astype(np.float32)

    def measure(self, choice: Choice, m: int, want: np.ndarray) -> float | None:
        """Seconds a call, or None if the choice does not run or is wrong."""
        try:
            specs = [c.spec for c in self.commands(choice, m, self.weights[0]) if isinstance(c, Launch)]
            if any(self.bench.store.get(s).shared > shared_bytes(self.bench.target.arch) for s in specs):
                return None
            got = self.result(choice, m)
        except KernelsError as e:
            print(f"    {choice}: {str(e)[:100]}")
            return None
        error = np.linalg.norm(got - want) / np.linalg.norm(want)
        if not error < TOLERANCE:
            print(f"    WRONG {choice}: error {error:.1e}")
            return None
        pack = self.bench.pack
        calls = [functools.partial(pack.submit, "bench", self.commands(choice, m, w)) for w in self.weights]
        return self.bench.seconds(calls)


def entry(choice: Choice) -> dict[str, object]:
    return {name: getattr(choice, name) for name in FIELDS[choice.kind]}


def tune(bench: Bench, op: str, n: int, k: int, tokens: list[int]) -> dict[str, dict[str, object]]:
    """Measure one layer; returns its part of the table."""
    print(
        f"\n{op} {n} x {k}: us a call | untuned, cuBLASLt, best own kernel | GB/s, TFLOP/s of the best",
        flush=True,
    )
    layer, best_by_m = Layer(bench, op, n, k, max(tokens)), {}
    for m in tokens:
        choices = list(dict.fromkeys(candidates(bench.target, op, m, n, k)))
        specs = [
            c.spec
            for choice in choices
            for c in layer.commands(choice, m, layer.weights[0])
            if isinstance(c, Launch)
        ]
        try:
            bench.store.prepare(specs)
        except KernelsError as e:
            print(f"    some candidates do not compile: {str(e)[:200]}")
        want = layer.result(choices[0], m)
        times = {c: t for c in choices if (t := layer.measure(c, m, want)) is not None}
        best = min(times, key=times.__getitem__)
        own = min((c for c in times if c.kind != "cublas"), key=times.__getitem__)
        seconds = times[best]
        moved = 2 * (n * k + m * k) + layer.out[:m].nbytes
        cublas = times.get(Choice("cublas"), float("nan"))
        print(
            f"  M {m:5} | {times[choices[0]] * 1e6:8.1f} {cublas * 1e6:8.1f} {times[own] * 1e6:8.1f} | "
            f"{moved / seconds / 1e9:5.0f} {2 * m * n * k / seconds / 1e12:5.0f} | {entry(best)}",
            flush=True,
        )
        best_by_m[str(m)] = entry(best)
    return best_by_m


def write(gpu: str, table: dict[str, dict[str, dict[str, dict[str, object]]]]) -> None:
    """Merge into the package's table of this GPU, an entry a line."""
    path = TABLES / (re.sub(r"[^a-z0-9]+", "_", gpu.lower()) + ".json")
    merged = json.loads(path.read_text()) if path.exists() else {}
    for op, shapes in table.items():
        merged.setdefault(op, {}).update(shapes)
    text = json.dumps(merged, indent=2)
    text = re.sub(r"\{\s+(\"kind\"[^{}]*?)\s+\}", lambda m: "{" + re.sub(r"\s+", " ", m[1]) + "}", text)
    path.write_text(text + "\n")
    print(f"wrote {path}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", choices=[*MODELS, *HYBRIDS], action="append", help="sizes of Qwen3 and Qwen3.5; default 4b"
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--write", action="store_true", help="merge the best into the package's table")
    parser.add_argument("--json", help="write this run's table to a file")
    options = parser.parse_args()
    bench = Bench()
    print(
        f"{bench.device.name}, sm_{bench.target.arch}, {bench.target.num_sms} SMs, cuBLASLt {bench.target.cublas}"
    )
    table: dict[str, dict[str, dict[str, dict[str, object]]]] = {}
    wanted = dict.fromkeys(layer for model in options.model or ["4b"] for layer in layers(model))
    for op, n, k in wanted:
        tokens = [m for m in options.tokens if op != "logits" or m <= 512]
        table.setdefault(op, {})[f"{n}x{k}"] = tune(bench, op, n, k, tokens)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(dataclasses.asdict(bench.target) | {"table": table}, file, indent=2)
    if options.write:
        write(bench.target.gpu, table)


if __name__ == "__main__":
    sys.exit(main())
