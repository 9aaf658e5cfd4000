"""Time one rank's steps of a whole DeepSeek-V4 on one GPU, all layers, without the collectives between ranks.

    python benchmarks/deepseek_rank.py --ranks 2 4 8 --ledger FOLDER
    openinfer explain DIR --ranks 4 --decode 8,4096 --ledger FOLDER/ranks-4.json

A rank's part of V4-Flash (79, 41 and 22 GB of 2, 4 and 8) fits one GPU. Weights, cache and batch are random but valid;
the router sends tokens to experts of all ranks, as it would. A step is replayed as a graph; times are medians.
`collectives` adds the time of the exchanges between ranks. None runs here: the times are those of NCCL 2.28 inside
graphs on H200s of one host (ALL_REDUCE_US), where a gather counts as an all-reduce of half the bytes. `--ledger`:
every op of these steps at the rank's shapes, in the form of `openinfer bench ops`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from openinfer.cli.bench.ops import ledger_entries as entries_of
from openinfer.cli.explain.ledger import Machine
from openinfer.cli.explain.segments import step_segments
from openinfer.graph import Readback, Shape, StepGraphs
from openinfer.graph.runner import Runner, readback_bytes, segments
from openinfer.kernels import (
    H200,
    CpuPack,
    CudaDriver,
    NullPack,
    Op,
    Pack,
    Store,
    Target,
    Workload,
    cublas_available,
)
from openinfer.recipes.deepseek_v4 import RECIPE
from openinfer.recipes.deepseek_v4.blueprint import window_pages
from openinfer.recipes.deepseek_v4.model import Model
from openinfer.recipes.deepseek_v4.ops import PAGE
from openinfer.recipes.deepseek_v4.published import SIZES, config_json
from openinfer.recipes.engine import Source
from openinfer.recipes.engine.limits import decide
from openinfer.recipes.engine.ranks import Ranks
from openinfer.recipes.engine.startup import buckets_for, make_pack, make_start_plan
from openinfer.tensor import Arena, Device, Event, Stream, Tensor, float32, int32

ALL_REDUCE_US = {
    "bytes": (8 << 10, 128 << 10, 2 << 20, 8 << 20, 64 << 20),
    2: (12, 13, 31, 47, 247), 4: (16, 17, 32, 60, 322), 8: (21, 24, 38, 72, 366),
}  # fmt: skip
STEPS = (
    (1, 4096, 0),
    (8, 4096, 0),
    (32, 4096, 0),
    (128, 4096, 0),
    (0, 0, 4096),
    (0, 0, 1024),
    (0, 0, 2048),
    (4, 1088, 1024),
    (16, 1088, 1024),
    (32, 1088, 1024),
)
"""Rows that decode, their context, tokens of a prompt beside them."""
CODES = np.array([*range(0x08, 0x38), *range(0x88, 0xB8)], np.uint8)
"""Bytes that are float8 numbers up to 1 in size, and any two FP4 ones."""
BLOCK = 64 << 20
WINDOW = 3
"""Pages of the window that a row needs."""
SCALES = {"fn": 0.01, "base": 0.1, "bias": 0.0, "router": 0.02}
"""Scales of random float32 tensors, by name. With them the streams mix little, and no expert attracts all tokens."""


def tensors(value: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors in nested dataclasses and tuples, by the name of their field."""
    items = value if isinstance(value, tuple) else ()
    fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
    for item in items:
        yield from tensors(item)
    for name, inner in ((f.name, getattr(value, f.name)) for f in fields):
        if isinstance(inner, Tensor):
            yield name, inner
        elif name not in ("loads", "conversions", "pads"):
            yield from tensors(inner)


def fill(model: Model, num_experts: int, stream: Stream, rng: np.random.Generator) -> None:
    """Random weights and cache, such that activations stay of the size that real ones have; and activations, for what
    other ranks would have computed."""
    packed = rng.choice(CODES, BLOCK)
    numbers = (rng.standard_normal(BLOCK // 2, np.float32) * 0.02).view(np.uint32) >> 16
    halves = numbers.astype(np.uint16).view(np.uint8)
    for name, tensor in (*tensors(model.weights), *tensors(model.cache), *tensors(model.buffers)):
        if tensor.dtype == int32:
            tensor.copy_from(rng.integers(0, num_experts, tensor.shape, np.int32), stream)
        elif tensor.dtype == float32:
            draw = rng.random if tensor.ndim == 1 else rng.standard_normal  # gains, and everything else
            tensor.copy_from(draw(tensor.shape, np.float32) * np.float32(SCALES.get(name, 1)), stream)
        elif name == "scales" or name.endswith("_scales"):
            tensor.copy_from(np.full(tensor.shape, 119, np.uint8), stream)  # 2^-8
        else:
            flat = tensor.reshape(-1)
            source = packed if tensor.dtype.itemsize == 1 else halves
            step = source.size // tensor.dtype.itemsize
            for start in range(0, flat.shape[0], step):
                part = flat[start : start + step]
                part.copy_from(source[: part.nbytes].view(part.dtype), stream)
    stream.synchronize()


class Alone:
    """A pack of one rank without the others: it leaves out the collectives."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def recorded(self, enqueue: Callable[[], None]) -> Callable[[], None]:
        return self._inner.recorded(enqueue)

    def run(self, op: Op[Any], args: Any) -> None:
        if op.name == "hc_post":  # the sum is left out, the streams are not
            args = dataclasses.replace(args, ranks=1)
        if getattr(args, "ranks", 1) == 1:
            self._inner.run(op, args)


def runner_of(source: Source, ranks: int, device: Device, rows: int, tokens: int, context: int) -> Runner:
    """The runner that an engine's start would make of a checkpoint, with random weights. Its steps are not recorded."""
    options = RECIPE.options(
        max_num_seqs=rows, max_num_batched_tokens=tokens, max_model_len=max(context, tokens) + PAGE
    )
    blueprint = RECIPE.blueprint(source, options, ranks=ranks)
    limits = decide(options, device, blueprint)
    buckets = buckets_for(blueprint, limits)
    target = Target.of(device, cublas=cublas_available(), nvrtc=True) if device.kind == "cuda" else None
    plan = make_start_plan(blueprint, limits, buckets, target)
    entries = rows * (-(-context // PAGE) + 1) + limits.max_blocks + 2
    pages = (window_pages(rows, tokens, limits.max_model_len) + 1, entries)
    cache = sum(n * group.block_bytes for n, group in zip(pages, blueprint.groups(limits), strict=True))
    arena, stream = Arena(device, plan.fixed_bytes + cache + (1 << 20)), Stream(device, CudaDriver.PRIORITY)
    model = blueprint.lay_out(arena, stream, limits, pages)
    fill(model, blueprint.config.num_experts, stream, np.random.default_rng(0))
    store = Store(target.arch) if target else None
    pack: Pack = CpuPack()
    if target is not None and store is not None:
        pack = make_pack(device, target, stream, store, arena, plan, Ranks())
    readback = Readback(device, readback_bytes(limits.max_rows, limits.max_tokens), 2)
    return Runner(model, Alone(pack), stream, StepGraphs(device, stream, capture=True), buckets, readback)


def place(runner: Runner, rows: int, context: int, prompt: int, rng: np.random.Generator) -> Shape:
    """Make the batch of a step: rows with `context` - 1 tokens in the cache, then one that begins with a prompt, if
    `prompt` is not 0. Returns the step's bucket."""
    state, vocab_size = runner.model.batch.rows, runner.model.batch.logits.shape[1]
    total, count = rows + prompt, rows + bool(prompt)
    bucket = tokens, num_rows, *_ = runner.buckets.choose(total, count)
    pages = -(-max(context, prompt) // PAGE)
    for slot in range(1, count + 1):
        kept = WINDOW if slot <= rows else pages  # further pages of a row that decodes are these again
        windows = [1 + (slot - 1) * WINDOW + page % kept for page in range(pages)]
        state.set("alive", slot, 1)
        state.set("seq_lens", slot, context - 1 if slot <= rows else 0)
        state.set("limits", slot, 1 << 30)
        state.write("window_tables", slot, windows)
        state.write("entry_tables", slot, range(1 + (slot - 1) * pages, 1 + slot * pages))
    starts, slots = np.full(num_rows + 1, total, np.int32), np.zeros(num_rows, np.int32)
    starts[: rows + 1] = range(rows + 1)
    slots[:count] = range(1, count + 1)
    ids = np.full(tokens, -1, np.int32)
    ids[:total] = rng.integers(0, vocab_size, total)
    for name, values in (("slots", slots), ("q_starts", starts), ("prompt", ids), ("emits", slots > 0)):
        state.write(name, 0, np.asarray(values, np.int32))
    runner.upload()
    return Shape(*bucket)


def measured(runner: Runner, step: tuple[int, int, int], repeats: int) -> list[float]:
    """Milliseconds of the step's two segments, replayed."""
    rng = np.random.default_rng(1)
    work = segments(runner.model, runner.pack, runner.buckets)
    runner.graphs.record(("upload",), work["upload",])
    bucket = place(runner, *step, rng)
    keys = ("forward", bucket), ("sample", bucket.rows, 0)
    for key in keys:
        runner.graphs.record(key, runner.pack.recorded(work[key]))
    times = []
    for _ in range(repeats + 2):
        marks = [Event(runner.stream.device, timing=True) for _ in range(3)]
        # The second step waits for no launch, since the first one runs meanwhile.
        for before, after in pairwise(marks):
            place(runner, *step, rng)
            before.record(runner.stream)
            for key in keys:
                runner.graphs.launch(key)
            after.record(runner.stream)
        runner.stream.synchronize()
        times.append(marks[2].elapsed_s(marks[1]) * 1e3)
    return times[2:]


def ledger(runner: Runner, path: Path, gpu: str) -> None:
    """Write what each op of the steps takes, of a rank."""
    rng, seen = np.random.default_rng(2), set[str]()
    results: list[dict[str, Any]] = []
    for rows, context, prompt in STEPS:
        bucket = place(runner, rows, context, prompt, rng)
        runner.model.forward(runner.pack, *bucket)  # buffers hold what they do in such a step
        place(runner, rows, context, prompt, rng)
        for segment in step_segments(runner.model, runner.buckets, rows, context, prompt):
            entries = entries_of(segment, runner.pack, runner.stream, 10, Machine(), seen)
            results += [
                entry
                for entry in entries
                if entry["op"] not in ("all_reduce", "gather_columns", "all_gather", "reduce_scatter")
            ]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"bench": "ops", "gpu": gpu, "results": results}, indent=1) + "\n")


def collectives_ms(runner: Runner, bucket: Shape, ranks: int) -> float:
    """Milliseconds of a step's collectives, by interpolation of ALL_REDUCE_US."""
    pack = NullPack(H200)
    calls = pack.traced(lambda: runner.model.forward(pack, *bucket))
    whole = [call.cost(Workload.prefill(bucket.tokens)).link * ranks / (2 * ranks - 2) for call in calls]
    times = [np.interp(size, ALL_REDUCE_US["bytes"], ALL_REDUCE_US[ranks]) for size in whole if size]
    return float(sum(times)) / 1e3


def main() -> None:
    """Print a line a step and write JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=[*SIZES], default="Flash")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--layers", type=int, help="only the first layers of the model")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--ledger", type=Path, metavar="FOLDER")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    source, device, found = Source(config_json(args.size, layers=args.layers)), Device("cuda", 0), []
    for ranks in args.ranks:
        runner = runner_of(source, ranks, device, 128, 4096, 4096)
        for rows, context, prompt in STEPS:
            times = measured(runner, (rows, context, prompt), args.repeats)
            batch = runner.model.batch
            logits = (batch.logits if batch.part is None else batch.part)[: rows or 1].numpy()
            finite = bool(np.isfinite(np.asarray(logits, np.float32)).all())
            bucket = Shape(*runner.buckets.choose(rows + prompt, rows + bool(prompt)))
            median, between = statistics.median(times), collectives_ms(runner, bucket, ranks)
            name = f"mixed {rows} x {context} + {prompt}" if rows and prompt else ""
            name = name or (f"prompt of {prompt}" if prompt else f"decode {rows} x {context}")
            print(
                f"{ranks} ranks, {name}: {median:.2f} ms, with collectives {median + between:.2f}", flush=True
            )
            if not finite:
                print("  its logits are not finite: these weights are no measure", flush=True)
            found.append(
                {
                    "ranks": ranks,
                    "step": name,
                    "device_ms": median,
                    "collectives_ms": between,
                    "finite": finite,
                    "repeats": times,
                }
            )
        if args.ledger:
            ledger(runner, args.ledger / f"ranks-{ranks}.json", device.name)
        runner.close()
        del runner
    if args.json:
        args.json.write_text(json.dumps({"gpu": device.name, "figures": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
