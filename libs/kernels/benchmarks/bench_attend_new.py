"""Measure the kernels for a decode step's attention against each other on this GPU, after checking each of them.

    python bench_attend_new.py                            every variant
    python bench_attend_new.py --variant triton hopper --json out.json

A variant runs in a process of its own with a time limit, so that one that hangs or fails spoils nothing else. First its
results are compared with the numpy reference on small steps of each kind; then it is timed in a CUDA graph of calls on
one layer after another, so that the L2 cache does not serve them. GB/s count the cached keys and values once.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import subprocess
import sys

import numpy as np
from bench_attend import CACHE_BYTES, DIM, KV_HEADS, MAX_LAYERS
from bench_linear import Bench

from openinfer.kernels import CpuPack, KernelsError, Store, norm_rope_attend
from openinfer.kernels.attention import Call, HopperRing, choose, new_tokens
from openinfer.kernels.launch import Launch
from openinfer.tensor import Tensor, bfloat16, float32, int32

TOLERANCE = 2e-2
"""Relative error of a token: weights and result are rounded to 8 bits."""

POSITIONS = 40960

VARIANTS: dict[str, HopperRing | None] = {
    "triton": None,
    "hopper": HopperRing(64, 3, 1024),
    "hopper, parts of 512": HopperRing(64, 3, 512),
    "hopper, parts of 4096": HopperRing(64, 3, 4096),
    "hopper, blocks of 32": HopperRing(32, 6, 1024),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """Cached keys before each row's token; rows without a token, dead rows, tokens of padding."""

    name: str
    before: tuple[int, ...]
    empty: tuple[int, ...] = ()
    dead: tuple[int, ...] = ()
    heads: int = 32
    kv_heads: int = KV_HEADS
    page_size: int = 16
    window: int = 0


def _drawn(rows: int, most: int, least: int = 0) -> tuple[int, ...]:
    return tuple(int(n) for n in np.random.default_rng(rows).integers(least, most, rows))


CASES = [
    *(Case(f"{rows} x 1024", (1023,) * rows) for rows in (1, 8, 32, 64, 128)),
    Case("256 x 512", (511,) * 256),
    Case("128 x 4096", (4095,) * 128),
    Case("128 of 100..4000", _drawn(128, 4000, 100)),
]

CHECKS = [
    Case("one row", (300,)),
    Case("nothing cached", (0, 1, 63, 64, 65)),
    Case("long row", (2500, 5, 1030)),
    Case("all kinds", _drawn(40, 700), empty=(3, 4, 39), dead=(0, 17)),
    Case("many", _drawn(300, 150), dead=(299,)),
    Case("window", _drawn(9, 900), window=100),
    Case("group of 5, pages of 64", _drawn(5, 700), heads=40, page_size=64),
    Case("group of 1, pages of 128", _drawn(5, 700), heads=8, page_size=128),
]


def integers(case: Case, rng: np.random.Generator, width: int) -> dict[str, np.ndarray]:
    """The arrays of ints. Slots are shuffled, pages too; page 0 is the padding."""
    rows = len(case.before)
    lengths = np.array([0 if row in case.empty else 1 for row in range(rows)])
    slots = 1 + rng.permutation(rows + 2)[:rows].astype(np.int32)
    tables, seq_lens, alive = (np.zeros((rows + 3, *s), np.int32) for s in ((width,), (), ()))
    counts = [n // case.page_size + 1 for n in case.before]
    pages = iter(1 + rng.permutation(sum(counts)))
    positions, token_slots = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
    token = 0
    for row, slot in enumerate(slots):
        tables[slot, : counts[row]] = [next(pages) for _ in range(counts[row])]
        seq_lens[slot], alive[slot] = case.before[row], row not in case.dead
        if lengths[row]:
            positions[token], token_slots[token] = case.before[row], slot if row not in case.dead else 0
            token += 1
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return {
        "positions": positions,
        "token_slots": token_slots,
        "slots": slots,
        "q_starts": starts,
        "seq_lens": seq_lens,
        "alive": alive,
        "block_tables": tables,
    }


def command(bench: Bench, given: dict[str, Tensor], ring: HopperRing | None, window: int) -> Launch:
    """The launch of a variant."""
    rows, heads = given["slots"].shape[0], given["out"].shape[1] // DIM
    q = Tensor(256, (rows, heads, DIM), bfloat16, bench.device)
    order = ("out", "q", "kv", "slots", "q_starts", "seq_lens", "alive", "block_tables")
    call = Call.of({name: {**given, "q": q}[name] for name in order}, DIM**-0.5, window)
    choice = dataclasses.replace(choose(bench.target, call), ring=ring)
    new = {name: given[name] for name in ("qkv", "q_norm", "k_norm", "cos_sin")}
    return new_tokens(call, choice, new, 1e-6)


def check(bench: Bench, case: Case, ring: HopperRing | None) -> float:
    """The largest relative error of a token, or of the cache. What was never written in the cache is infinite, and must
    be left so; NaN counts as wrong."""
    rng = np.random.default_rng(5)
    rows = len(case.before)
    width = max(case.before) // case.page_size + 2
    arrays = integers(case, rng, width)
    cache = np.full(
        (2 + arrays["block_tables"].max(), 3, 2, case.kv_heads, case.page_size, DIM), np.inf, bfloat16
    )
    for row, slot in enumerate(arrays["slots"]):
        for i in range(case.before[row]):
            page = cache[arrays["block_tables"][slot, i // case.page_size], 1]
            page[:, :, i % case.page_size] = rng.standard_normal((2, case.kv_heads, DIM))
    angle = np.arange(max(case.before) + 1)[:, None] * 10000.0 ** -np.linspace(0, 1, DIM // 2)
    arrays |= {
        "out": np.full((rows, case.heads * DIM), np.nan, bfloat16),
        "kv": cache,
        "qkv": (3 * rng.standard_normal((rows, (case.heads + 2 * case.kv_heads) * DIM))).astype(bfloat16),
        "q_norm": rng.standard_normal(DIM).astype(bfloat16),
        "k_norm": rng.standard_normal(DIM).astype(bfloat16),
        "cos_sin": np.stack([np.cos(angle), np.sin(angle)], axis=1).astype(float32),
    }
    want = {name: Tensor.from_numpy(array.copy()) for name, array in arrays.items()}
    numbers = {"eps": 1e-6, "scale": DIM**-0.5, "window": case.window, "max_q_len": 1}
    norm_rope_attend(CpuPack(), **{**want, "kv": want["kv"][:, 1]}, **numbers)
    given = {}
    for name, array in arrays.items():
        given[name] = Tensor.empty(array.shape, array.dtype, bench.device)
        given[name].copy_from(array, bench.stream)
    launch = command(bench, {**given, "kv": given["kv"][:, 1]}, ring, case.window)
    for _ in range(2):  # the second finds the scratch as the first left it
        bench.pack.submit("attend", [launch])
    bench.stream.synchronize()
    got, right = (t["out"].numpy().astype(np.float32) for t in (given, want))
    size = np.linalg.norm(right, axis=1)
    error = np.linalg.norm(got - right, axis=1) / np.where(size > 0, size, 1)
    written, reference = (t["kv"].numpy().astype(np.float32) for t in (given, want))
    astray = np.isfinite(reference) != np.isfinite(written)
    astray[0] = False  # page 0: where the reference writes the tokens of dead rows
    both = np.isfinite(reference) & np.isfinite(written)
    both[0] = False
    wrong = np.linalg.norm((written - reference)[both]) / np.linalg.norm(reference[both])
    return float(max(np.nan_to_num(error, nan=np.inf).max(), wrong, astray.any()))


class Step:
    """A case's tensors on the device, with as many layers of cache as fit."""

    def __init__(self, bench: Bench, case: Case) -> None:
        rng = np.random.default_rng(2)
        rows = len(case.before)
        arrays = integers(case, rng, POSITIONS // case.page_size)
        page = 2 * case.kv_heads * case.page_size * DIM
        pages = int(arrays["block_tables"].max()) + 1
        layers = max(1, min(MAX_LAYERS, CACHE_BYTES // (2 * pages * page)))
        cache = Tensor.empty((pages, layers, 2, case.kv_heads, case.page_size, DIM), bfloat16, bench.device)
        bench.fill(cache.reshape(-1)[: 1 << 20], 1.0, rng)
        done = 2 << 20
        while done < cache.nbytes:  # doubling
            part = min(done, cache.nbytes - done)
            bench.stream.copy_async(cache.ptr + done, cache.ptr, part, "d2d")
            done += part
        self.layers = [cache[:, n] for n in range(layers)]
        self.given = {}
        for name, array in arrays.items():
            self.given[name] = Tensor.empty(array.shape, int32, bench.device)
            self.given[name].copy_from(array)
        width = (case.heads + 2 * case.kv_heads) * DIM
        shapes = {"out": (rows, case.heads * DIM), "qkv": (rows, width), "q_norm": (DIM,), "k_norm": (DIM,)}
        for name, shape in shapes.items():
            self.given[name] = Tensor.empty(shape, bfloat16, bench.device)
            bench.fill(self.given[name], 1.0, rng)
        self.given["cos_sin"] = Tensor.empty((POSITIONS, 2, DIM // 2), float32, bench.device)
        bench.fill(self.given["cos_sin"], 1.0, rng)
        self.bytes = sum(case.before) * 2 * case.kv_heads * DIM * 2
        bench.stream.synchronize()


def child(name: str) -> None:
    """Check and measure one variant; a JSON line for the parent after each step."""
    ring, bench = VARIANTS[name], Bench()
    print(json.dumps({"errors": [check(bench, case, ring) for case in CHECKS]}), flush=True)
    for case in CASES:
        step = Step(bench, case)
        calls = [
            functools.partial(
                bench.pack.submit, "attend", [command(bench, {**step.given, "kv": kv}, ring, 0)]
            )
            for kv in step.layers
        ]
        us = bench.seconds(calls) * 1e6
        print(json.dumps({"case": case.name, "us": us, "gb_s": step.bytes / us / 1e3}), flush=True)


def run(name: str, limit_s: float) -> dict[str, object]:
    """What the process of a variant said until it ended or its time was up."""
    line = [sys.executable, __file__, "--child", name]
    try:
        done = subprocess.run(line, capture_output=True, text=True, timeout=limit_s, check=False)
        output, failure = done.stdout, done.stderr[-1500:] if done.returncode else ""
    except subprocess.TimeoutExpired as e:
        output, failure = (e.stdout or b"").decode(), f"stopped after {limit_s} s"
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    errors = next((line["errors"] for line in lines if "errors" in line), [])
    times = {line["case"]: line for line in lines if "case" in line}
    right = bool(errors) and max(errors) < TOLERANCE
    print(f"{name:26} {'right' if right else 'WRONG'} {' '.join(f'{e:.1e}' for e in errors)}", flush=True)
    for entry in times.values():
        print(f"    {entry['case']:20} {entry['us']:9.1f} us {entry['gb_s']:5.0f} GB/s", flush=True)
    if failure:
        print(f"    {failure}", flush=True)
    return {"variant": name, "errors": errors, "right": right, "times": times, "failure": failure}


def prepare(names: list[str]) -> None:
    """Compile everything side by side, before a process waits for one kernel."""
    bench, specs = Bench(), {}
    for name in names:
        for case in [*CHECKS, *CASES]:
            rows, width = len(case.before), (case.heads + 2 * case.kv_heads) * DIM
            tables = POSITIONS // 16 if case in CASES else max(case.before) // case.page_size + 2
            ints = {"slots": (rows,), "q_starts": (rows + 1,), "block_tables": (rows, tables)}
            given = {
                n: Tensor(256, ints.get(n, (rows,)), int32, bench.device)
                for n in (*ints, "seq_lens", "alive")
            }
            halves = {
                "out": (rows, case.heads * DIM),
                "qkv": (rows, width),
                "q_norm": (DIM,),
                "k_norm": (DIM,),
            }
            given |= {n: Tensor(256, shape, bfloat16, bench.device) for n, shape in halves.items()}
            given["cos_sin"] = Tensor(256, (POSITIONS, 2, DIM // 2), float32, bench.device)
            given["kv"] = Tensor(256, (2, 2, case.kv_heads, case.page_size, DIM), bfloat16, bench.device)
            specs[command(bench, given, VARIANTS[name], case.window).spec] = None
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
