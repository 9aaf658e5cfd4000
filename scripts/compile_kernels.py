"""Compile every kernel of every recipe: `python scripts/compile_kernels.py [--arch 90] [--every N]`. Needs no GPU.

The kernels are those that engines of every published size run on an H200 with cuBLASLt. The script uses the installed
Triton and NVRTC, and starts with an empty cache. It fails with the compiler's message where a kernel does not compile,
where one needs more shared memory than the architecture has, and for a fence that a kernel does not say it has: it
costs a microsecond, and comes from an atomic without sem="relaxed". --json has registers, stack and fences of each.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import re
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import triton

from openinfer.kernels import CompileError, Spec, Store, Target
from openinfer.kernels.op.target import shared_bytes
from openinfer.kernels.store.cubins import triton_version

ROOT = Path(__file__).resolve().parents[1]
RECIPES = ("qwen3", "qwen3_5", "deepseek_v3", "deepseek_v4")
COUNTERS = {"arrived", "counter", "state"}
"""Arguments in which the programs of a launch count each other. By one of these a kernel says that it has a fence."""
TOKENS = {"cluster_product": "ROWS", "int4_cluster": "TOKENS"}
"""Kernels whose clusters send the sums of up to 16 tokens, and hand on more by one fence; their constant for tokens."""
MEMBAR = 0x992
"""The low 12 bits of a fence in machine code. Bits 76 and 77 are its scope: below 2 it is within a block, and cheap."""


class Code(NamedTuple):
    """What machine code has: registers of a thread, bytes of its stack, where registers are spilled, and fences that
    other blocks see."""

    registers: int
    stack: int
    fences: int

    @classmethod
    def of(cls, cubin: bytes) -> Code:
        """Read a cubin that has one kernel."""
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(cubin)
            file.flush()
            command = [str(tool), "-res-usage", file.name]
            said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        registers, stack = (int(re.findall(rf"{name}:(\d+)", said)[-1]) for name in ("REG", "STACK"))
        fences = 0
        for text in instructions(cubin):
            low, high = np.frombuffer(text, "<u8").reshape(-1, 2).T
            fences += int(np.sum((low & 0xFFF == MEMBAR) & (high >> 12 & 3 >= 2)))
        return cls(registers, stack, fences)


def instructions(cubin: bytes) -> Iterator[bytes]:
    """The sections of machine code in a cubin, an ELF file of 64 bits: 16 bytes an instruction."""
    (headers,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names = struct.unpack_from("<3H", cubin, 58)
    sections = [struct.unpack_from("<2I4Q", cubin, headers + n * size) for n in range(count)]
    for name, _, _, _, offset, nbytes in sections:
        if cubin.startswith(b".text.", sections[names][4] + name):
            yield cubin[offset : offset + nbytes]


def undeclared(spec: Spec, code: Code) -> bool:
    """Whether a kernel has a fence and does not say so."""
    if COUNTERS & {name for name, _ in spec.signature}:
        return False
    tokens: int = dict(spec.constants).get(TOKENS.get(spec.function, ""), 0)
    return code.fences > (tokens > 16)


def main() -> int:
    """Compile; 0 if every kernel did."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arch", type=int, default=90, help="compute capability as an int (90)")
    parser.add_argument("--every", type=int, default=1, help="every Nth kernel, beginning by the day (1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what the machine code has there")
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
        codes = {spec: Code.of(store.get(spec).cubin) for spec in specs}
    if args.json:
        args.json.write_text(
            json.dumps({str(spec): code._asdict() for spec, code in codes.items()}, indent=1)
        )
    for spec in too_large:
        print(f"{spec} needs more shared memory than sm_{arch} has")
    fenced = [spec for spec, code in codes.items() if undeclared(spec, code)]
    for spec in fenced:
        print(f"{spec} has a fence, but none of {', '.join(sorted(COUNTERS))} among its arguments")
    spilled = sum(code.stack > 0 for code in codes.values())
    print(
        f"Triton {triton_version()}, sm_{arch}: {len(specs)} kernels compiled in {time.monotonic() - start:.0f} s; "
        f"{spilled} have a stack, {sum(code.fences > 0 for code in codes.values())} a fence"
    )
    return 1 if too_large or fenced else 0


if __name__ == "__main__":
    sys.exit(main())
