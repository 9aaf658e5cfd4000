"""The products of a decode step of 2 to 128 tokens with weights of codes: microseconds a layer in a graph.

    python benchmarks/packed_clusters.py [--weights int4|fp8] [--tokens 8 16 32 64] [--json FILE]

The shapes and weights are those of ring.py: 36 layers of different weights of Qwen3-4B, and norms. Ways: clusters,
and Triton's kernels. First results are compared with a
reference and repeated. FP8 has scales of blocks, and the kernels that make codes are in its times.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from ring import SHAPES, WIDTHS, Bench, floor

from openinfer.kernels import Launch
from openinfer.tensor import Arena, bfloat16

WAYS = {"clusters": True, "Triton": False}
"""Whether kernels of CUDA C++ are taken."""


class Tokens(Bench):
    """The products of some tokens."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.tokens = Arena(self.device, 128 << 20)

    def use(self, m: int) -> None:
        self.at = {name: self.tokens.alloc((m, width), bfloat16) for name, width in WIDTHS.items()}
        self.values = {
            name: self.rng.standard_normal((m, width)).astype(bfloat16) for name, width in WIDTHS.items()
        }
        self.wanted = {}
        self.reset()

    def take(self, way: str) -> None:
        self.target = replace(self.target, nvrtc=WAYS[way])
        commands = [c for name in SHAPES for c in self.commands(name, 0, None, early=True)]
        self.store.prepare([c.spec for c in commands if isinstance(c, Launch)])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--weights", choices=("int4", "fp8"), default="int4")
    parser.add_argument("--tokens", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    bench = Tokens(args.weights)
    result: dict[str, Any] = {"device": bench.device.name, "weights": bench.kind}
    for m in args.tokens:
        bench.use(m)
        for way in WAYS:
            bench.take(way)
            found: dict[str, Any] = {}
            for name in SHAPES:
                error = bench.check(name, None)
                found[name] = {"us": bench.time({name: None}, early=True)[0], "error": error}
            found["all"] = bench.time(dict.fromkeys(SHAPES), early=True)[0]
            result[f"{m} {way}"] = found
            print(f"{m} tokens, {way}: {found}", flush=True)
            if args.json:
                args.json.write_text(json.dumps(result, indent=1) + "\n")
    print({name: round(floor(bench.kind, name), 2) for name in SHAPES}, "by their bytes")


if __name__ == "__main__":
    main()
