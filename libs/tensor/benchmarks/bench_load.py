"""Checkpoint to device, in GB/s: a synthetic checkpoint of bfloat16 matrices, read from the page cache.

python benchmarks/bench_load.py [--device cuda] [--gb 4] [--dir DIR] [--rounds 3]
"""

from __future__ import annotations

import argparse
import json
import struct
import tempfile
from pathlib import Path

import numpy as np

from openinfer.tensor import Arena, Checkpoint, Device, Stream, TensorLoad, load_tensors

ROWS, COLUMNS = 4096, 2560


def write_checkpoint(path: Path, num_bytes: int) -> None:
    size = ROWS * COLUMNS * 2
    count = max(1, num_bytes // size)
    header = {
        f"layers.{i}.weight": {
            "dtype": "BF16",
            "shape": [ROWS, COLUMNS],
            "data_offsets": [i * size, (i + 1) * size],
        }
        for i in range(count)
    }
    raw = json.dumps(header).encode()
    block = np.random.default_rng(0).integers(0, 256, size, np.uint8).tobytes()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        for _ in range(count):
            file.write(block)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", type=Device.parse)
    parser.add_argument("--gb", default=1.0, type=float)
    parser.add_argument("--dir", help="where to put the checkpoint; a temporary directory otherwise")
    parser.add_argument("--rounds", default=3, type=int)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.dir) as directory:
        write_checkpoint(Path(directory) / "model.safetensors", int(args.gb * 1e9))
        with Checkpoint(directory) as ckpt, Stream(args.device) as stream:
            with Arena(args.device, ckpt.total_bytes + 256 * len(ckpt)) as arena:
                loads = [TensorLoad(n, arena.alloc(ckpt.info(n).shape, "bfloat16", n)) for n in ckpt]
            for _ in range(args.rounds):
                report = load_tensors(ckpt, loads, stream)
                print(
                    f"{report.bytes / 1e9:.2f} GB in {report.seconds:.3f} s: {report.gbytes_per_s:.2f} GB/s"
                )


if __name__ == "__main__":
    main()
