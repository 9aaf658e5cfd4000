"""Measure the kernels of DeepSeek-V4's attention side on this GPU, choices beside each other, at the sizes of V4-Flash.

    python recipes/benchmarks/bench_deepseek_attention.py                    everything
    python recipes/benchmarks/bench_deepseek_attention.py --only decode      cases whose name contains one of these
    python recipes/benchmarks/bench_deepseek_attention.py --chosen           without the variants

Times are medians of a CUDA graph of calls on one layer after another, so that the L2 cache does not serve them.
`floor`: the op's cost at 4.59 TB/s and 780 TFLOP/s. A variant that fails is reported, and the others go on.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from openinfer.kernels import GPUS, H200, Command, Cost, Launch, Op, Workload
from openinfer.kernels.tuner import DeviceMeter as Bench
from openinfer.recipes.deepseek_v4 import sparse
from openinfer.recipes.deepseek_v4.ops.compress import compress
from openinfer.recipes.deepseek_v4.ops.index_topk import index_topk
from openinfer.recipes.deepseek_v4.ops.queries import q_kv_write
from openinfer.recipes.deepseek_v4.ops.sparse_attend import sparse_attend
from openinfer.tensor import Tensor, bfloat16, float32, int32

BANDWIDTH, FLOPS = GPUS[H200.gpu].measured.bytes_per_s, GPUS[H200.gpu].measured.flops_per_s
HEADS, DIM, ROTARY, LOW_RANK, INDEX_DIM, TOPK, PAGE = 64, 512, 64, 1024, 128, 512, 128
LAYERS = 6
DECODE, PROMPT, CONTEXT = (1, 8, 32, 128), 4096, 4096
PER_PAGE = {"SWA": 0, "CSA": 32, "HCA": 1}

Variant = tuple[str, Callable[[int], list[Command]]]
"""A name, and the commands of a call on the n-th layer."""


class Report:
    """Prints lines and keeps them for the JSON."""

    def __init__(self, bench: Bench, only: str, chosen: bool) -> None:
        self.bench, self.words, self.chosen = bench, only.split(","), chosen
        self.results: list[dict[str, object]] = []

    def add(self, case: str, variant: str, seconds: float, cost: Cost | None) -> None:
        line = f"{case:26} {variant:40} {seconds * 1e6:9.2f} us"
        entry: dict[str, object] = {"case": case, "variant": variant, "us": seconds * 1e6}
        if cost is not None:
            floor = cost.floor_s(BANDWIDTH, FLOPS)
            line += f"  {cost.bytes / 1e6:8.2f} MB {cost.bytes / seconds / 1e9:6.0f} GB/s"
            line += f" {cost.flops / seconds / 1e12:6.1f} TFLOP/s  floor {floor * 1e6:7.1f} us = {floor / seconds:4.0%}"
            entry |= {"bytes": cost.bytes, "flops": cost.flops, "floor_us": floor * 1e6}
        self.results.append(entry)
        print(line, flush=True)

    def time(self, case: str, variants: list[Variant], cost: Cost, layers: int) -> None:
        """Time variants of a call; the kernels of the first also by themselves, on what they find in scratch memory."""
        if not any(word in case for word in self.words):
            return
        variants = variants[:1] if self.chosen else variants
        specs = [c.spec for _, commands in variants for c in commands(0) if isinstance(c, Launch)]
        self._guarded(case, "compiling", lambda: self.bench.store.prepare(specs) and None)
        for number, (name, commands) in enumerate(variants):
            self._guarded(
                case, name, functools.partial(self._time, case, name, commands, cost, layers, number == 0)
            )

    def _time(self, case: str, name: str, commands: Any, cost: Cost, layers: int, parts: bool) -> None:
        made = [commands(n) for n in range(layers)]
        submit = self.bench.pack.submit
        self.add(case, name, self.bench.seconds([functools.partial(submit, name, c) for c in made]), cost)
        for i in range(len(made[0]) if parts and 1 < len(made[0]) <= 4 else 0):
            alone = [functools.partial(submit, name, [c[i]]) for c in made]
            self.add(case, f"  of it {made[0][i].spec.function}", self.bench.seconds(alone), None)

    def _guarded(self, case: str, variant: str, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as e:
            print(f"{case:26} {variant:40} FAILED {type(e).__name__}: {str(e)[:300]}", flush=True)
            self.results.append(
                {"case": case, "variant": variant, "error": f"{type(e).__name__}: {e}"[:1000]}
            )


class Batch:
    """Rows of `length` tokens at the end of CONTEXT tokens, and memory for LAYERS layers of them. `groups` of such
    rows: where there are few, calls go from group to group."""

    def __init__(self, bench: Bench, rows: int, length: int) -> None:
        self.bench, self.rows, self.length, self.rng = bench, rows, length, np.random.default_rng(1)
        self.tokens, self.groups = rows * length, max(1, 32 // (rows * length))
        pages, slots = CONTEXT // PAGE, 1 + rows * self.groups
        self.raw_pages = 1 + (slots - 1) * (2 if length == 1 else pages)
        self.made_pages = 1 + (slots - 1) * pages
        raw = np.zeros((slots, pages + 1), np.int32)
        own = 2 if length == 1 else pages
        raw[1:, pages - own : pages] = 1 + self.rng.permutation((slots - 1) * own).reshape(slots - 1, own)
        made = np.zeros((slots, pages + 1), np.int32)
        made[1:, :pages] = 1 + self.rng.permutation((slots - 1) * pages).reshape(slots - 1, pages)
        self.kv_tables, self.entry_tables = self.upload(raw), self.upload(made)
        self.positions = self.upload(np.tile(np.arange(CONTEXT - length, CONTEXT), rows))
        slot = [np.arange(1 + g * rows, 1 + (g + 1) * rows) for g in range(self.groups)]
        self.slots = [self.upload(s) for s in slot]
        self.token_slots = [self.upload(np.repeat(s, length)) for s in slot]
        self.of_rows = {
            "q_starts": self.upload(np.arange(rows + 1) * length),
            "seq_lens": self.upload(np.full(slots, CONTEXT - length)),
            "alive": self.upload(np.ones(slots)),
        }
        turn = np.arange(CONTEXT)[:, None] * 10000.0 ** (-np.arange(ROTARY // 2) / (ROTARY // 2))
        self.cos_sin = self.upload(np.stack([np.cos(turn), np.sin(turn)], axis=1), float32)
        self.workload = Workload.decode(rows, CONTEXT) if length == 1 else Workload.prefill(length)
        self.calls = LAYERS * self.groups

    def upload(self, array: np.ndarray, dtype: Any = int32) -> Tensor:
        array = np.ascontiguousarray(array.astype(dtype))
        tensor = Tensor.empty(array.shape, dtype, self.bench.device)
        tensor.copy_from(array, self.bench.stream)
        self.bench.stream.synchronize()
        return tensor

    def random(self, *shape: int, dtype: Any = bfloat16, scale: float = 1.0) -> Tensor:
        tensor = Tensor.empty(shape, dtype, self.bench.device)
        self.bench.fill(tensor, scale, self.rng)
        return tensor

    def of(self, n: int) -> dict[str, Any]:
        """The arguments that describe the tokens of the n-th call."""
        return {
            "positions": self.positions,
            "token_slots": self.token_slots[n // LAYERS % self.groups],
            "cos_sin": self.cos_sin,
        }

    def chosen(self) -> Tensor:
        """Entries that an indexer might choose."""
        selected = np.full((self.tokens, TOPK), -1)
        for t, p in enumerate(np.tile(np.arange(CONTEXT - self.length, CONTEXT), self.rows)):
            sees = (p + 1) // 4
            selected[t, : min(TOPK, sees)] = np.sort(self.rng.permutation(sees)[:TOPK])
        return self.upload(selected)


def attend(batch: Batch, kind: str) -> tuple[list[Variant], Cost]:
    """sparse_attend of a layer kind, and its tunings."""
    per_page = PER_PAGE[kind]
    kv = batch.random(batch.raw_pages, LAYERS, PAGE, DIM)
    made = batch.random(batch.made_pages, LAYERS, per_page, DIM) if per_page else None
    fixed = {
        "out": batch.random(batch.tokens, HEADS * DIM),
        "q": batch.random(batch.tokens, HEADS, DIM),
        "selected": batch.chosen() if kind == "CSA" else None,
        "sinks": batch.random(HEADS, dtype=float32),
        "kv_tables": batch.kv_tables,
        "entry_tables": batch.entry_tables,
        "scale": DIM**-0.5,
        "eps": 1e-6,
        "window": PAGE,
    }

    def call(n: int) -> sparse.Attention:
        layer = {"kv": kv[:, n % LAYERS], "entries": made[:, n % LAYERS] if made is not None else None}
        return sparse.Attention(**fixed, **layer, **batch.of(n))

    def commands(tuning: sparse.AttendTuning | sparse.HopperTuning, n: int) -> list[Command]:
        return list(call(n).launches(tuning))

    target, one = batch.bench.target, call(0)
    first = one.tuning(target)
    general = sparse.attend_tuning(
        target, batch.tokens, HEADS, one.window + one.most, selected=one.selected is not None
    )
    tunings = {
        f"as chosen: {first.block} x {first.splits} stages {first.stages}": first,
        "in Triton": general,
    }
    splits = [1] if batch.length > 1 else sorted({1, 2, 3, 4, 5, 10, first.splits})
    for block, stages in (32, 4), (64, 2):
        for cut in splits:
            if cut <= max(1, 160 // batch.tokens):
                tuning = sparse.HopperTuning(block, stages, cut)
                tunings[f"{block} x {cut} stages {stages}"] = tuning
    variants: list[Variant] = [(name, functools.partial(commands, t)) for name, t in tunings.items()]
    args = vars_of(call(0))
    return variants, sparse_attend.cost(batch.workload, **args)


def vars_of(call: Any) -> dict[str, Any]:
    return {f.name: getattr(call, f.name) for f in dataclasses.fields(call)}


INDEX: list[dict[str, int]] = [
    {"select_warps": 4}, {"warps": 8}, {"block": 64}, {"stages": 2},
]  # fmt: skip


def index(batch: Batch) -> tuple[list[Variant], Cost]:
    """index_topk, and its tunings."""
    keys = batch.random(batch.made_pages, LAYERS, 32, INDEX_DIM)
    fixed = {
        "selected": Tensor.empty((batch.tokens, TOPK), int32, batch.bench.device),
        "q": batch.random(batch.tokens, 64, INDEX_DIM),
        "weights": batch.random(batch.tokens, 64, dtype=float32),
        "block_tables": batch.entry_tables,
        "scale": 0.01,
        "quantized": True,
    }

    def call(n: int, **change: Any) -> sparse.Index:
        return sparse.Index(**fixed | change, keys=keys[:, n % LAYERS], **batch.of(n))

    def commands(change: Mapping[str, int], n: int) -> list[Command]:
        one = call(n)
        return list(one.launches(dataclasses.replace(one.tuning(batch.bench.target), **change)))

    variants: list[Variant] = [("as chosen", functools.partial(commands, {}))]
    variants.append(
        (
            "not quantized",
            lambda n: list(call(n, quantized=False).launches(call(n).tuning(batch.bench.target))),
        )
    )
    for change in INDEX:
        variants.append(
            (" ".join(f"{k} {v}" for k, v in change.items()), functools.partial(commands, change))
        )
    return variants, index_topk.cost(batch.workload, **vars_of(call(0)))


def planned(batch: Batch, op: Op[Any], args: Callable[[int], dict[str, Any]]) -> tuple[list[Variant], Cost]:
    """An op with the kernels that its own plan chooses, and its cost."""
    target = batch.bench.target
    return [("as chosen", lambda n: op.plan(target, args(n)))], op.cost(batch.workload, **args(0))


def entries(batch: Batch, window: int, dim: int, rounding: str) -> tuple[list[Variant], Cost]:
    """A compressor."""
    kinds, columns = (3, 2 * dim) if window == 4 else (1, dim)
    state = batch.random(batch.raw_pages, LAYERS, kinds, 3, dim, dtype=float32)
    made = batch.random(batch.made_pages, LAYERS, PAGE // window, dim)
    fixed = {
        "az": batch.random(batch.tokens, 2 * columns, dtype=float32),
        "ape": batch.random(window, columns, dtype=float32),
        "norm_weight": batch.random(dim, dtype=float32),
        "cos_sin": batch.cos_sin,
        **batch.of_rows,
        "state_tables": batch.kv_tables,
        "entry_tables": batch.entry_tables,
        "eps": 1e-6,
        "rounding": rounding,
        "max_q_len": batch.length,
    }

    def args(n: int) -> dict[str, Any]:
        slots = batch.slots[n // LAYERS % batch.groups]
        return {**fixed, "state": state[:, n % LAYERS], "entries": made[:, n % LAYERS], "slots": slots}

    return planned(batch, compress, args)


def written(batch: Batch) -> tuple[list[Variant], Cost]:
    """q_kv_write."""
    kv = batch.random(batch.raw_pages, LAYERS, PAGE, DIM)
    fixed = {
        "qr": batch.random(batch.tokens, LOW_RANK),
        "qkv": batch.random(batch.tokens, LOW_RANK + DIM),
        "q_norm": batch.random(LOW_RANK, dtype=float32),
        "kv_norm": batch.random(DIM, dtype=float32),
        "block_tables": batch.kv_tables,
        "eps": 1e-6,
        "quantized": True,
    }
    return planned(batch, q_kv_write, lambda n: {**fixed, **batch.of(n), "kv": kv[:, n % LAYERS]})


def parts(batch: Batch) -> Iterator[tuple[str, Callable[[], tuple[list[Variant], Cost]]]]:
    yield "attend CSA", functools.partial(attend, batch, "CSA")
    yield "attend HCA", functools.partial(attend, batch, "HCA")
    yield "attend SWA", functools.partial(attend, batch, "SWA")
    yield "index", functools.partial(index, batch)
    yield "compress CSA", functools.partial(entries, batch, 4, DIM, "q8")
    yield "compress index", functools.partial(entries, batch, 4, INDEX_DIM, "hadamard_q4")
    yield "compress HCA", functools.partial(entries, batch, 128, DIM, "q8")
    yield "q_kv_write", functools.partial(written, batch)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", default="", help="cases whose name contains one of these, comma between them"
    )
    parser.add_argument("--chosen", action="store_true", help="no variants")
    parser.add_argument("--json", help="write the results to a file")
    options = parser.parse_args()
    bench = Bench()
    print(f"{bench.device.name}, sm_{bench.target.arch}, {bench.target.num_sms} SMs")
    report = Report(bench, options.only, options.chosen)
    for step, rows, length in [
        *((f"decode {rows}", rows, 1) for rows in DECODE),
        (f"prompt {PROMPT}", 1, PROMPT),
    ]:
        batch = Batch(bench, rows, length)
        for name, make in parts(batch):
            case = f"{name} {step}"
            if any(word in case for word in report.words):
                variants, cost = make()
                report.time(case, variants, cost, batch.calls if math.prod((rows, length)) < PROMPT else 2)
    if options.json:
        text = json.dumps(dataclasses.asdict(bench.target) | {"results": report.results}, indent=2)
        Path(options.json).write_text(text + "\n")


if __name__ == "__main__":
    main()
