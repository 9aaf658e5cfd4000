"""Measure the kernels for rows of many tokens against each other on this GPU, after checking each of them.

    python bench_attend_long.py                            every variant
    python bench_attend_long.py --variant hopper --json out.json

A variant runs in a process of its own with a time limit, so that one that hangs or fails spoils nothing else. First its
results are compared with the numpy reference, token by token, on small steps of each kind; then it is timed as
bench_attend.py does. TFLOP/s count what a causal mask leaves.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import subprocess
import sys

import numpy as np
from bench_attend import DIM, KV_HEADS, Case, Step

from openinfer.kernels import CpuPack, KernelsError, Store, attend
from openinfer.kernels.attention import Call, Choice, HopperTile, Tile, choose, launches
from openinfer.kernels.tuner import DeviceMeter as Bench
from openinfer.tensor import Tensor, bfloat16, int32

TOLERANCE = 2e-2
"""Relative error of a token: weights and result are rounded to 8 bits."""

VARIANTS: dict[str, Tile | HopperTile] = {
    "triton": Tile(128, 64, 8, 5),
    "hopper": HopperTile(128, 2, in_turn=False, resident=True),
    "hopper in turn": HopperTile(128, 2, in_turn=True, resident=True),
    "hopper 3 stages": HopperTile(128, 3, in_turn=False, resident=True),
    "hopper 3 stages in turn": HopperTile(128, 3, in_turn=True, resident=True),
    "hopper a program a tile": HopperTile(128, 2, in_turn=False, resident=False),
    "hopper bn 64": HopperTile(64, 4, in_turn=True, resident=True),
}

CASES = [
    Case("prompt 1024", (1024,), (0,)),
    Case("prompt 4096", (4096,), (0,)),
    Case("prompt 16384", (16384,), (0,)),
    Case("8 prompts of 1024", (1024,) * 8, (0,) * 8),
    Case("chunk 2048 after 14336", (2048,), (14336,)),
    Case("chunk 1984 + 64 rows x 4096", (1984,) + (1,) * 64, (0,) + (4095,) * 64),
]


@dataclasses.dataclass(frozen=True)
class Check:
    """A small step: tokens and cached tokens a row, rows that are dead, tokens of padding."""

    lengths: tuple[int, ...]
    before: tuple[int, ...]
    dead: tuple[int, ...] = ()
    padding: int = 0
    heads: int = 32
    kv_heads: int = 8
    page_size: int = 16
    window: int = 0


CHECKS = [
    Check((40,), (0,)),
    Check((128,), (0,), kv_heads=1, heads=4),
    Check((700,), (0,), padding=68),
    Check((300,), (500,), padding=20),
    Check((1, 300, 0, 1, 65, 1, 130), (800, 100, 7, 64, 0, 3, 256), dead=(3, 6), padding=40),
    Check((300, 200), (0, 77), heads=40),
    Check((300, 200), (0, 77), heads=16, page_size=64),
    Check((290, 100), (50, 600), window=100, page_size=128),
    Check((290, 100), (50, 600), window=300),
]


def check(bench: Bench, case: Check, tile: Tile | HopperTile) -> float:
    """The largest relative error of a token. What was never written in the cache is infinite; NaN counts as wrong."""
    rng = np.random.default_rng(5)
    rows, tokens = len(case.lengths), sum(case.lengths) + case.padding
    width = max(-(-(n + b) // case.page_size) for n, b in zip(case.lengths, case.before, strict=True))
    slots = rng.permutation(rows + 3)[:rows].astype(np.int32)
    tables = np.zeros((rows + 3, width), np.int32)
    tables[slots] = 1 + rng.permutation(rows * width).reshape(rows, width)
    cache = np.full((1 + rows * width, 3, 2, case.kv_heads, case.page_size, DIM), np.inf, bfloat16)
    seq_lens, alive = np.zeros(rows + 3, np.int32), np.zeros(rows + 3, np.int32)
    for row, slot in enumerate(slots):
        seq_lens[slot], alive[slot] = case.before[row], row not in case.dead
        for i in range(case.before[row] + case.lengths[row]):
            page = cache[tables[slot, i // case.page_size], 1]
            page[:, :, i % case.page_size] = rng.standard_normal((2, case.kv_heads, DIM))
    arrays = {
        "out": np.full((tokens, case.heads * DIM), np.nan, bfloat16),
        "q": (2 * rng.standard_normal((tokens, case.heads, DIM))).astype(bfloat16),
        "kv": cache,
        "slots": slots,
        "q_starts": np.concatenate([[0], np.cumsum(case.lengths)]).astype(np.int32),
        "seq_lens": seq_lens,
        "alive": alive,
        "block_tables": tables,
    }
    numbers = {"scale": DIM**-0.5, "window": case.window}
    want = {name: Tensor.from_numpy(array.copy()) for name, array in arrays.items()}
    attend(CpuPack(), **{**want, "kv": want["kv"][:, 1]}, **numbers, max_q_len=max(case.lengths))
    given = {}
    for name, array in arrays.items():
        given[name] = Tensor.empty(
            array.shape, array.dtype if array.dtype != np.int32 else int32, bench.device
        )
        given[name].copy_from(array, bench.stream)
    call = Call.of({**given, "kv": given["kv"][:, 1]}, **numbers)
    choice = dataclasses.replace(choose(bench.target, call), long=tile)
    bench.pack.submit("attend", launches(call, choice, max(case.lengths)))
    bench.stream.synchronize()
    got, right = given["out"].numpy().astype(np.float32), want["out"].numpy().astype(np.float32)
    size = np.linalg.norm(right, axis=1)
    error = np.linalg.norm(got - right, axis=1) / np.where(size > 0, size, 1)
    return float(np.nan_to_num(error, nan=np.inf).max())


def child(name: str) -> None:
    """Check and measure one variant; a JSON line for the parent after each step."""
    tile, bench = VARIANTS[name], Bench()
    errors = [check(bench, case, tile) for case in CHECKS]
    print(json.dumps({"errors": errors}), flush=True)
    for case in CASES:
        step = Step(bench, case, 32, 16, page_first=True)
        choice: Choice = dataclasses.replace(choose(bench.target, step.call), long=tile)
        calls = [
            functools.partial(bench.pack.submit, "attend", step.commands(choice, kv)) for kv in step.layers
        ]
        us = bench.seconds(calls) * 1e6
        print(json.dumps({"case": case.name, "us": us, "tflops": step.flops / us / 1e6}), flush=True)


def run(name: str, limit_s: float) -> dict[str, object]:
    """What the process of a variant said until it ended or its time was up."""
    command = [sys.executable, __file__, "--child", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
        output, failure = done.stdout, done.stderr[-1500:] if done.returncode else ""
    except subprocess.TimeoutExpired as e:
        output, failure = (e.stdout or b"").decode(), f"stopped after {limit_s} s"
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    errors = next((line["errors"] for line in lines if "errors" in line), [])
    times = {line["case"]: line for line in lines if "case" in line}
    right = bool(errors) and max(errors) < TOLERANCE
    print(f"{name:26} {'right' if right else 'WRONG'} {' '.join(f'{e:.1e}' for e in errors)}", flush=True)
    for line in times.values():
        print(f"    {line['case']:30} {line['us']:9.1f} us {line['tflops']:4.0f} TFLOP/s", flush=True)
    if failure:
        print(f"    {failure}", flush=True)
    return {"variant": name, "errors": errors, "right": right, "times": times, "failure": failure}


def prepare(names: list[str]) -> None:
    """Compile everything side by side, before a process waits for one kernel."""
    bench, specs = Bench(), {}
    for name in names:
        for case in [*CHECKS, *CASES]:
            page_size, kv_heads = getattr(case, "page_size", 16), getattr(case, "kv_heads", KV_HEADS)
            heads, tokens, rows = getattr(case, "heads", 32), sum(case.lengths), len(case.lengths)
            kv = Tensor(256, (2, 2, kv_heads, page_size, DIM), bfloat16, bench.device)
            shapes = {"slots": (rows,), "q_starts": (rows + 1,), "block_tables": (rows, 8)}
            given = {
                n: Tensor(256, shapes.get(n, (rows,)), int32, bench.device)
                for n in (*shapes, "seq_lens", "alive")
            }
            given["q"] = Tensor(256, (tokens, heads, DIM), bfloat16, bench.device)
            given["out"] = Tensor(256, (tokens, heads * DIM), bfloat16, bench.device)
            order = ("out", "q", "kv", "slots", "q_starts", "seq_lens", "alive", "block_tables")
            call = Call.of({n: {**given, "kv": kv}[n] for n in order}, 1.0, 0)
            choice = dataclasses.replace(choose(bench.target, call), long=VARIANTS[name])
            specs.update(dict.fromkeys(c.spec for c in launches(call, choice, max(case.lengths))))
    try:
        Store(bench.target.arch).prepare(specs)
    except KernelsError as e:
        print(f"some do not compile: {str(e)[:2000]}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--variant", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--limit", type=float, default=60, help="seconds a variant may take")
    parser.add_argument("--json", help="write the results to a file")
    parser.add_argument("--child", choices=VARIANTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child)
        return
    prepare(options.variant)
    results = [run(name, options.limit) for name in options.variant]
    if options.json:
        with open(options.json, "w") as file:
            json.dump(results, file, indent=2)


if __name__ == "__main__":
    sys.exit(main())
