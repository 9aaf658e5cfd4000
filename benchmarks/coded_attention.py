"""Attention of decode steps: microseconds a layer, norms, rotation and the write into the cache included.

    python benchmarks/coded_attention.py [--cache fp8|bf16] [--rows 1 8 32] [--context 1024] [--json FILE]

The heads are those of Qwen3-4B. Four layers lie in each page, and pages in random order. A graph has three turns over
the layers. The kernels' results are compared in libs/kernels/tests.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from openinfer.graph import StepGraphs
from openinfer.kernels import Command, CudaDriver, Launch, LaunchPack, Store, Target, norm_rope_attend
from openinfer.kernels.attention.kv_cache import KvLayout
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

LAYERS, TURNS, REPEATS = 4, 3, 11
HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 16
BANDWIDTH = 4.59e6
"""Bytes a microsecond that a read of an H200's memory reaches."""


class Bench:
    """A cache with room for the most rows, filled with plausible bytes."""

    def __init__(self, cache: str, rows: int, context: int) -> None:
        self.device = Device("cuda")
        self.device.activate()
        self.stream, self.context = Stream(self.device), context
        self.target = replace(Target.of(self.device, cublas=False), nvrtc=True)
        self.store, self.rng = Store(self.device.arch), np.random.default_rng(0)
        layout = KvLayout(
            LAYERS, KV_HEADS, PAGE, DIM, np.dtype(float8_e4m3fn if cache == "fp8" else bfloat16)
        )
        self.pages, self.read = rows * context // PAGE + 1, layout.page_bytes / LAYERS / PAGE
        self.arena = Arena(self.device, self.pages * layout.page_bytes + (512 << 20))
        self.cache = layout.allocate(self.arena, self.stream, self.pages)
        some = 256 * layout.page_bytes
        values = self.rng.integers(0, 64, some, np.uint8)  # no code is NaN, and no scale is large
        for at in range(0, self.pages * layout.page_bytes, some):
            size = min(some, self.pages * layout.page_bytes - at)
            Tensor(self.cache.pages.ptr + at, (size,), np.dtype(uint8), self.device).copy_from(values[:size])
        scratch, zeroed = self.arena.alloc((128 << 20,), uint8), self.arena.alloc((4 << 20,), uint8)
        zeroed.zero_(self.stream)
        self.pack = LaunchPack(
            self.target, CudaDriver(self.device, self.stream, self.store, None), scratch, zeroed
        )

    def _put(self, values: Any, dtype: Any) -> Tensor:
        values = np.asarray(values).astype(dtype)
        tensor = self.arena.alloc(values.shape, dtype)
        tensor.copy_from(values)
        return tensor

    def _submit(self, layers: Sequence[Sequence[Command]]) -> None:
        for layer in layers:
            self.pack.submit("attention", layer)

    def time(self, rows: int) -> dict[str, Any]:
        """Microseconds a layer, those of the cache's bytes, and the kernels' names."""
        pages = 1 + self.rng.permutation(self.pages - 1)[: rows * self.context // PAGE].reshape(rows, -1)
        normal, last = self.rng.standard_normal, self.context - 1
        args: dict[str, Any] = {
            "out": self.arena.alloc((rows, HEADS * DIM), bfloat16),
            "qkv": self._put(normal((rows, (HEADS + 2 * KV_HEADS) * DIM)), bfloat16),
            "q_norm": self._put(np.ones(DIM), bfloat16),
            "k_norm": self._put(np.ones(DIM), bfloat16),
            "cos_sin": self._put(np.ones((self.context, 2, DIM // 2)), float32),
            "positions": self._put(np.full(rows, last), int32),
            "token_slots": self._put(np.arange(rows), int32),
            "slots": self._put(np.arange(rows), int32),
            "q_starts": self._put(np.arange(rows + 1), int32),
            "seq_lens": self._put(np.full(rows, last), int32),
            "alive": self._put(np.ones(rows), int32),
            "block_tables": self._put(pages, int32),
        }
        args |= {"eps": 1e-6, "scale": DIM**-0.5, "window": 0, "max_q_len": 1}
        layers = [
            norm_rope_attend.plan(self.target, args | self.cache.layer(layer)) for layer in range(LAYERS)
        ]
        launches = [command for command in layers[0] if isinstance(command, Launch)]
        self.store.prepare([launch.spec for launch in launches])
        self.pack.submit("attention", layers[0])  # loads the kernels, which no capture may do
        graphs = StepGraphs(self.device, self.stream, capture=True)
        graphs.record("turns", lambda: self._submit(layers * TURNS))
        begin, end, found = Event(self.device, timing=True), Event(self.device, timing=True), []
        for _ in range(REPEATS):
            begin.record(self.stream)
            graphs.launch("turns")
            end.record(self.stream)
            self.stream.synchronize()
            found.append(round(1e6 * end.elapsed_s(begin) / LAYERS / TURNS, 2))
        graphs.close()
        floor = rows * self.context * self.read / BANDWIDTH
        kernels = [launch.spec.function for launch in launches]
        return {
            "us": statistics.median(found),
            "floor": round(floor, 2),
            "kernels": kernels,
            "repeats": found,
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cache", choices=("fp8", "bf16"), default="fp8")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128, 256])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    bench = Bench(args.cache, max(args.rows), args.context)
    result: dict[str, Any] = {"device": bench.device.name, "cache": args.cache, "context": args.context}
    for rows in args.rows:
        result[str(rows)] = found = bench.time(rows)
        print(
            f"{rows} rows: {found['us']} us, {found['floor']} by bytes, {', '.join(found['kernels'])}",
            flush=True,
        )
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
