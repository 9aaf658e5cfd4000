"""Measure attend on this GPU: decode, ragged decode, prompts and mixed steps, for both layouts of the cache.

    python bench_attend.py                         the kernels as they are chosen
    python bench_attend.py --tune --json out.json  and others beside them: tiles, stages, splits

Times are of a CUDA graph of calls on one layer after another, so that the L2 cache does not serve them. GB/s and
TFLOP/s are of the op's floor: what must be read and multiplied. A candidate must agree with the choice as it is.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
from collections.abc import Iterator

import numpy as np

from openinfer.kernels import KernelsError, Workload, attend
from openinfer.kernels.attention import Call, Choice, Tile, choose, launches
from openinfer.kernels.tuner import DeviceMeter as Bench
from openinfer.kernels.tuning import shared_bytes
from openinfer.tensor import Tensor, bfloat16, int32

KV_HEADS, DIM, MAX_MODEL_LEN = 8, 128, 40960
CACHE_BYTES = 40 << 30
MAX_LAYERS = 36
TOLERANCE = 1e-2

SHORT_TILES = [
    Tile(16, bn, w, s)
    for bn, w, s in [(64, 4, 3), (64, 4, 5), (64, 4, 7), (32, 4, 7), (128, 8, 5), (128, 4, 3)]
]
LONG_TILES = [
    Tile(bm, bn, w, s)
    for bm, bn, w, s in [
        (64, 64, 4, 3),
        (64, 64, 4, 5),
        (128, 64, 8, 3),
        (128, 64, 8, 5),
        (128, 128, 8, 3),
        (64, 128, 4, 3),
    ]
]
SPLITS = (1, 2, 3, 4, 8, 16, 24, 33, 49, 64)


@dataclasses.dataclass(frozen=True)
class Case:
    """A step: new tokens a row, tokens cached before them."""

    name: str
    lengths: tuple[int, ...]
    before: tuple[int, ...]

    @property
    def workload(self) -> Workload:
        ends = [n + b for n, b in zip(self.lengths, self.before, strict=True)]
        pairs = sum(e * (e + 1) // 2 - b * (b + 1) // 2 for e, b in zip(ends, self.before, strict=True))
        return Workload(sum(self.lengths), len(self.lengths), sum(ends), pairs)


def cases() -> Iterator[Case]:
    for context in (1024, 4096, 16384):
        for rows in (1, 8, 32, 128, 256):
            yield Case(f"decode {rows} x {context}", (1,) * rows, (context - 1,) * rows)
    rng = np.random.default_rng(0)
    ragged = tuple(int(n) for n in np.minimum(rng.exponential(3000, 128) + 50, 32000))
    yield Case("decode 128 ragged", (1,) * 128, ragged)
    yield Case("decode 31 x 1000, 1 x 32000", (1,) * 32, (32000,) + (1000,) * 31)
    for tokens in (128, 1024, 4096, 16384):
        yield Case(f"prompt {tokens}", (tokens,), (0,))
    yield Case("chunk 2048 after 14336", (2048,), (14336,))
    yield Case("chunk 1984 + 64 rows x 4096", (1984,) + (1,) * 64, (0,) + (4095,) * 64)


def cache(bench: Bench, pages: int, page_size: int, page_first: bool) -> list[Tensor]:
    """The layers of a cache of random numbers."""
    page = 2 * KV_HEADS * page_size * DIM
    layers = max(1, min(MAX_LAYERS, CACHE_BYTES // (2 * pages * page)))
    shape = (layers, pages) if not page_first else (pages, layers)
    whole = Tensor.empty((*shape, 2, KV_HEADS, page_size, DIM), bfloat16, bench.device)
    first = whole.reshape(-1)[: min(whole.numel, 1 << 20)]
    bench.fill(first, 1.0, np.random.default_rng(1))
    done = first.nbytes
    while done < whole.nbytes:  # doubling
        part = min(done, whole.nbytes - done)
        bench.stream.copy_async(whole.ptr + done, whole.ptr, part, "d2d")
        done += part
    bench.stream.synchronize()
    return [whole[:, n] if page_first else whole[n] for n in range(layers)]


class Step:
    """A case's tensors on the device."""

    def __init__(self, bench: Bench, case: Case, heads: int, page_size: int, page_first: bool) -> None:
        self.bench, self.case = bench, case
        rows, tokens = len(case.lengths), sum(case.lengths)
        rng = np.random.default_rng(2)
        counts = [-(-(n + b) // page_size) for n, b in zip(case.lengths, case.before, strict=True)]
        order = iter(rng.permutation(sum(counts)))
        tables = np.zeros((rows, MAX_MODEL_LEN // page_size), np.int32)
        for row, count in enumerate(counts):
            tables[row, :count] = [next(order) for _ in range(count)]
        self.layers = cache(bench, sum(counts), page_size, page_first)
        arrays = {
            "slots": np.arange(rows),
            "q_starts": np.concatenate([[0], np.cumsum(case.lengths)]),
            "seq_lens": np.array(case.before),
            "alive": np.ones(rows),
            "block_tables": tables,
        }
        self.out = Tensor.empty((tokens, heads * DIM), bfloat16, bench.device)
        query = Tensor.empty((tokens, heads, DIM), bfloat16, bench.device)
        bench.fill(query, 1.0, rng)
        self.tensors = {"out": self.out, "q": query, "kv": self.layers[0]}
        for name, array in arrays.items():
            self.tensors[name] = Tensor.empty(array.shape, int32, bench.device)
            self.tensors[name].copy_from(array.astype(np.int32))
        self.call = self.on(self.layers[0])
        cost = attend.cost(case.workload, **self.tensors, scale=0.0, window=0, max_q_len=0)
        self.bytes, self.flops = cost.bytes, cost.flops

    def on(self, layer: Tensor) -> Call:
        return Call.of({**self.tensors, "kv": layer}, DIM**-0.5, 0)

    def commands(self, choice: Choice, layer: Tensor | None = None):
        return launches(self.call if layer is None else self.on(layer), choice, max(self.case.lengths))

    def candidates(self, tune: bool) -> list[Choice]:
        """The choice as it is, and those that change one thing of it."""
        plain = choose(self.bench.target, self.call)
        if not tune:
            return [plain]
        found = [plain]
        if 1 in self.case.lengths:
            found += [dataclasses.replace(plain, short=tile) for tile in SHORT_TILES]
            splits = [s for s in SPLITS if s * self.call.rows <= 600]
            found += [dataclasses.replace(plain, splits=s, part_size=p) for s in splits for p in (64, 512)]
        if max(self.case.lengths) > 1:
            found += [dataclasses.replace(plain, long=tile) for tile in LONG_TILES]
        return list(dict.fromkeys(found))

    def result(self, choice: Choice) -> np.ndarray:
        self.out.zero_(self.bench.stream)
        self.bench.pack.submit("attend", self.commands(choice))
        self.bench.stream.synchronize()
        return np.concatenate([self.out[:64].numpy(), self.out[-64:].numpy()]).astype(np.float32)

    def measure(self, choice: Choice, want: np.ndarray) -> float | None:
        """Seconds a call, or None if the choice does not run or is wrong."""
        try:
            specs = [c.spec for c in self.commands(choice)]
            if any(self.bench.store.get(s).shared > shared_bytes(self.bench.target.arch) for s in specs):
                return None
            got = self.result(choice)
        except KernelsError as e:
            print(f"    {choice}: {str(e)[:100]}")
            return None
        error = np.linalg.norm(got - want) / np.linalg.norm(want)
        if not error < TOLERANCE:
            print(f"    WRONG {choice}: error {error:.1e}")
            return None
        submit = self.bench.pack.submit
        return self.bench.seconds(
            [functools.partial(submit, "attend", self.commands(choice, kv)) for kv in self.layers]
        )


def measure(
    bench: Bench, case: Case, heads: int, page_size: int, page_first: bool, tune: bool
) -> dict[str, object]:
    """Measure one case, print a line, and return it for the JSON."""
    step = Step(bench, case, heads, page_size, page_first)
    choices = step.candidates(tune)
    try:
        bench.store.prepare([c.spec for choice in choices for c in step.commands(choice)])
    except KernelsError as e:
        print(f"    some candidates do not compile: {str(e)[:200]}")
    want = step.result(choices[0])
    times = {c: t for c in choices if (t := step.measure(c, want)) is not None}
    plain, best = times[choices[0]], min(times, key=times.__getitem__)
    layout = "page-first" if page_first else "layer-first"
    line = f"{case.name:30} {layout:11} {page_size:3} | {plain * 1e6:9.1f} us {step.bytes / plain / 1e9:5.0f} GB/s"
    line += f" {step.flops / plain / 1e12:4.0f} TFLOP/s"
    if times[best] < 0.98 * plain:
        line += f" | {times[best] * 1e6:9.1f} us {best}"
    print(line, flush=True)
    results = [{"us": t * 1e6, **dataclasses.asdict(c)} for c, t in sorted(times.items(), key=lambda x: x[1])]
    shape = {"heads": heads, "page_size": page_size, "page_first": page_first, "layers": len(step.layers)}
    return {
        "case": case.name,
        **shape,
        "us": plain * 1e6,
        "bytes": step.bytes,
        "flops": step.flops,
        "results": results,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--heads", type=int, default=32, help="query heads; 8 key heads")
    parser.add_argument("--page-size", type=int, nargs="+", default=[16])
    parser.add_argument("--layout", choices=["page-first", "layer-first", "both"], default="both")
    parser.add_argument("--case", default="", help="only the cases whose name contains this")
    parser.add_argument("--tune", action="store_true", help="measure other tiles and splits too")
    parser.add_argument("--json", help="write the results to a file")
    options = parser.parse_args()
    bench = Bench()
    print(
        f"{bench.device.name}, sm_{bench.target.arch}, {bench.target.num_sms} SMs, {options.heads} query heads"
    )
    layouts = {"page-first": [True], "layer-first": [False], "both": [True, False]}[options.layout]
    results = [
        measure(bench, case, options.heads, page_size, page_first, options.tune)
        for case in cases()
        if options.case in case.name
        for page_size in options.page_size
        for page_first in layouts
    ]
    if options.json:
        with open(options.json, "w") as file:
            json.dump(dataclasses.asdict(bench.target) | {"results": results}, file, indent=2)


if __name__ == "__main__":
    sys.exit(main())
