"""Compile every kernel of every recipe: `python scripts/compile_kernels.py [--arch 90] [--every N]`. Needs no GPU.

The kernels are those that engines of every published size run on an H200 with cuBLASLt. The script uses the installed
Triton and NVRTC, and starts with an empty cache. It fails with the compiler's message where a kernel does not compile,
or needs more shared memory than the architecture has.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from openinfer.kernels import CompileError, Store, Target
from openinfer.kernels.op.target import shared_bytes
from openinfer.kernels.store.cubins import triton_version

ROOT = Path(__file__).resolve().parents[1]
RECIPES = ("qwen3", "qwen3_5", "deepseek_v3", "deepseek_v4")


def main() -> int:
    """Compile; 0 if every kernel did."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arch", type=int, default=90, help="compute capability as an int (90)")
    parser.add_argument("--every", type=int, default=1, help="every Nth kernel, beginning by the day (1)")
    args = parser.parse_args()
    arch = args.arch
    sys.path.insert(0, str(ROOT / "recipes"))
    published_specs = importlib.import_module("hatch_build").published_specs
    target = Target(arch, 132, cublas=True, gpu="NVIDIA H200" if arch == 90 else "")
    targets = (target, replace(target, nvrtc=True))
    specs = list(dict.fromkeys(s for recipe in RECIPES for t in targets for s in published_specs(recipe, t)))
    specs = specs[datetime.date.today().toordinal() % args.every :: args.every]
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="openinfer-cubins-") as cache:
        store = Store(arch, cache=Path(cache), folders=[])
        try:
            store.prepare(specs)
        except CompileError as error:
            print(error)
            return 1
        too_large = [spec for spec in specs if store.get(spec).shared > shared_bytes(arch)]
    for spec in too_large:
        print(f"{spec} needs more shared memory than sm_{arch} has")
    print(
        f"Triton {triton_version()}, sm_{arch}: {len(specs)} kernels compiled in {time.monotonic() - start:.0f} s"
    )
    return 1 if too_large else 0


if __name__ == "__main__":
    sys.exit(main())
