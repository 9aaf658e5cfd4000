"""From a checkpoint on disk to an engine that is ready: plan memory, load weights, get kernels, record steps."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from openinfer.graph import Readback, Rows, StepGraphs, StepPace, StepTrace
from openinfer.kernels import (
    Call,
    CpuPack,
    CublasLt,
    CudaDriver,
    KernelSpec,
    LaunchPack,
    NullPack,
    Pack,
    Repeated,
    Store,
    Target,
    apply_writes,
    cublas_available,
    predictions,
)
from openinfer.kvpool import Pool
from openinfer.recipes.deepseek_v4.batch import Buffers, row_fields
from openinfer.recipes.deepseek_v4.buckets import Buckets
from openinfer.recipes.deepseek_v4.cache import Cache, eviction, groups
from openinfer.recipes.deepseek_v4.config import Config, rope_table
from openinfer.recipes.deepseek_v4.engine import DeepseekV4Engine
from openinfer.recipes.deepseek_v4.model import Model
from openinfer.recipes.deepseek_v4.ops.common import PAGE
from openinfer.recipes.deepseek_v4.places import Format
from openinfer.recipes.deepseek_v4.runner import Runner, readback_bytes
from openinfer.recipes.deepseek_v4.sizes import Options, Room, Sizes, decide_sizes, fit, room_for
from openinfer.recipes.deepseek_v4.weights import Layer, Weights, validate
from openinfer.scheduler import Policy, make_policy
from openinfer.tensor import (
    Arena,
    Checkpoint,
    CudaError,
    Device,
    DriverNotFound,
    ProgressBar,
    Stream,
    float32,
    uint8,
)

log = logging.getLogger("openinfer.deepseek_v4")

STEPS_IN_FLIGHT = 2


@dataclass(frozen=True, slots=True)
class Plan:
    """What a trace of every segment on the null device says: bytes of the arena without the cache, the kernels, the
    workspace, and the calls of every step by its shape. Made without a GPU."""

    fixed_bytes: int
    specs: list[KernelSpec]
    scratch_bytes: int
    zeroed_bytes: int
    steps: Mapping[tuple[int, int, int], list[Call]] = field(default_factory=dict)


def build(model_dir: str, **flags: Any) -> DeepseekV4Engine:
    """The engine for a checkpoint directory; what the EngineSpec names. `flags` are Options' fields.

    Raises UnsupportedModel, CheckpointError or SetupError (all ValueErrors) for what the user can mend.
    """
    options, path = Options(**flags), Path(model_dir)
    trace = _trace(options)  # before there is a context
    with _phase("configuration and checkpoint header"):
        config = Config.load(path)
        device = _device(options.device)
        sizes = decide_sizes(config, options, device)
        policy = _policy(options, sizes)
        checkpoint = Checkpoint(path)
    with checkpoint:
        form = Format.of(checkpoint)
        validate(checkpoint, config, form)
        buckets = Buckets.up_to(sizes.max_rows, sizes.max_tokens)
        target = Target.of(device, cublas=cublas_available()) if device.kind == "cuda" else None
        with ThreadPoolExecutor(2) as worker:
            worker.submit(device.activate)  # a context takes as long as the plan
            with _phase("plan"):
                plan = make_plan(config, form, sizes, buckets, target)
                room = room_for(config, sizes, options, device, plan.fixed_bytes)
                sizes = fit(sizes, options, room)
            with _phase("memory"):
                kept = groups(config, sizes.dtype.itemsize, *room)
                cache_bytes = sum(g.num_blocks * g.block_bytes for g in kept)
                arena = Arena(device, plan.fixed_bytes + cache_bytes + (1 << 20))
                stream = Stream(device)
                model = lay_out(config, form, sizes, arena, stream, room)
            weights = worker.submit(_load, checkpoint, model, device)  # until the end any bytes will do
            predicted = worker.submit(predictions, plan.steps, target)
            store = Store(target.arch) if target else None
            pack = make_pack(device, target, stream, store, arena, plan)
            graphs = StepGraphs(device, stream, capture=not options.enforce_eager)
            readback = Readback(device, readback_bytes(sizes.max_rows, sizes.max_tokens), STEPS_IN_FLIGHT)
            pace = StepPace(predicted.result())
            runner = Runner(model, pack, stream, graphs, buckets, readback, pace, trace)
            with _phase("steps"):
                record(runner)
            with _phase("rest of the weights"):
                log.info("weights: %.2f GB at %.2f GB/s", *weights.result())
    if store is not None:
        store.seal()
    pool = Pool(kept, prefix_cache=options.enable_prefix_caching, eviction=eviction)
    log.info(
        "%s on %s, %s, activations %s: %d rows, %d tokens a step, %d tokens a sequence, %d pages of %d tokens for "
        "windows and %d for entries, %d recorded steps",
        path.name, device, sizes.dtype, "rounded" if sizes.quantized else "not rounded", sizes.max_rows,
        sizes.max_tokens, sizes.max_model_len, room.window - 1, PAGE, room.entries - 1, len(graphs),
    )  # fmt: skip
    engine = DeepseekV4Engine(
        config, runner, pool, policy, store,
        name=path.name, max_rows=sizes.max_rows, max_model_len=sizes.max_model_len,
        max_queued=options.max_num_queued_reqs,
    )  # fmt: skip
    if "grammar" not in engine.info.features:
        log.info("no structured output: pip install 'openinfer-recipes[grammar]'")
    return engine


def kernel_specs(model_dir: str, target: Target, **flags: Any) -> list[KernelSpec]:
    """The kernels that an engine with these flags runs on a GPU of the target's kind. Needs no GPU."""
    return specs_of(Config.load(Path(model_dir)), target, **flags)


def specs_of(config: Config, target: Target, **flags: Any) -> list[KernelSpec]:
    """kernel_specs, of a model by its config."""
    sizes = decide_sizes(config, Options(**flags), Device("cuda"))
    form, buckets = Format(fp4_experts=True), Buckets.up_to(sizes.max_rows, sizes.max_tokens)
    return make_plan(config, form, sizes, buckets, target).specs


def lay_out(config: Config, form: Format, sizes: Sizes, arena: Arena, stream: Stream, room: Room) -> Model:
    """All memory of the model, in `arena`: weights (uninitialised), rotary tables, batch state, buffers, cache."""
    weights = Weights.allocate(config, arena, sizes.dtype, form)
    tables = []
    for frequencies in (config.main_freq, config.compress_freq):
        table = arena.alloc((sizes.max_model_len, 2, len(frequencies)), float32, "cos_sin")
        if arena.device.kind != "null":
            table.copy_from(rope_table(frequencies, sizes.max_model_len), stream)
        tables.append(table)
    fields = row_fields(sizes.max_rows, sizes.max_tokens, sizes.max_blocks, config.vocab_size)
    rows = Rows(arena, fields, stream)
    buffers = Buffers.allocate(config, arena, sizes.dtype, sizes.max_tokens, sizes.max_rows, sizes.quantized)
    cache = Cache.allocate(config, arena, sizes.dtype, *room)
    if arena.device.kind == "cuda":
        cache.zero_(stream)
    return Model(config, weights, cache, tables[0], tables[1], rows, buffers, sizes.quantized)


def make_plan(config: Config, form: Format, sizes: Sizes, buckets: Buckets, target: Target | None) -> Plan:
    """Trace every segment on the null device. One layer of each kind is traced: layers differ in addresses only."""
    null = Device("null")
    arena = Arena(null, None)
    model = lay_out(config, form, sizes, arena, Stream(null), Room(1, 1))
    itemsize = sizes.dtype.itemsize
    fixed = arena.used - config.window_page_bytes(itemsize) - config.entry_page_bytes(itemsize)
    if target is None:
        return Plan(fixed, [], 0, 0)
    pack, kinds = NullPack(target), {_kind(layer): layer for layer in model.weights.layers}
    counts = Counter(_kind(layer) for layer in model.weights.layers)
    layers = Repeated(pack, ((layer, counts[kind]) for kind, layer in kinds.items()))
    model = dataclasses.replace(model, weights=dataclasses.replace(model.weights, layers=layers))
    apply_writes(pack, words=model.rows.words, writes=model.rows.writes)
    samples = {rows: pack.traced(partial(model.sample, pack, rows)) for rows in buckets.sample_rows()}
    steps = {
        shape: pack.traced(partial(model.forward, pack, *shape)) + samples[shape[1]]
        for shape in buckets.segments()
    }
    for offset in range(0, model.buffers.score_ranks.shape[0], sizes.max_rows):
        model.score(pack, offset)
    scratch, zeroed = pack.workspace_bytes(zeroed=False), pack.workspace_bytes(zeroed=True)
    return Plan(fixed + scratch + zeroed + 1024, pack.specs(), scratch, zeroed, steps)


def _kind(layer: Layer) -> tuple[type, bool]:
    """What the ops of a layer depend on: its kind of entries, and whether its experts are chosen by table."""
    return type(layer.attention.entries), layer.mixture.table is None


def _load(checkpoint: Checkpoint, model: Model, device: Device) -> tuple[float, float]:
    """Load the weights, on a stream of their own (the engine's is being captured): GB, and GB/s."""
    with Stream(device) as stream:
        report = model.weights.load(checkpoint, stream, ProgressBar("loading weights"))
    return report.bytes / 1e9, report.gbytes_per_s


def warm_up(runner: Runner) -> None:
    """Run the smallest segment of each kind once, all rows dead: what libraries set up at first use is then set up
    before anything is captured. The weights may not be there yet, so what dead rows left in the cache is cleared."""
    model, pack, buckets = runner.model, runner.pack, runner.buckets
    apply_writes(pack, words=model.rows.words, writes=model.rows.writes)
    if runner.stream.device.kind == "cuda":
        model.forward(pack, buckets.mixed_tokens[0], 1, buckets.mixed_tokens[0])
        model.forward(pack, 1, 1, 1)
        model.sample(pack, 1)
        model.score(pack, 0)
        model.cache.zero_(runner.stream, pages=1)
        runner.stream.synchronize()


def record(runner: Runner) -> None:
    """Record every step, and wait until the device has them."""
    warm_up(runner)
    runner.record()
    runner.stream.synchronize()


def make_pack(
    device: Device, target: Target | None, stream: Stream, store: Store | None, arena: Arena, plan: Plan
) -> Pack:
    """What ops run on, with the kernels and the workspace of the plan (from `arena`): the CPU's without a target."""
    if target is None or store is None:
        return CpuPack()
    with _phase("kernels"):
        bar = ProgressBar("compiling", things="kernels")
        log.info("kernels: %d, of which %d were compiled now", *store.prepare(plan.specs, bar))
    scratch = arena.alloc((plan.scratch_bytes,), uint8, "scratch") if plan.scratch_bytes else None
    zeroed = arena.alloc((plan.zeroed_bytes,), uint8, "semaphores") if plan.zeroed_bytes else None
    if zeroed is not None:
        zeroed.zero_(stream)
    with _phase("libraries"):
        cublas = CublasLt() if target.cublas else None
    driver = CudaDriver(device, stream, store, cublas)
    return LaunchPack(target, driver, scratch, zeroed)


def _trace(options: Options) -> StepTrace | None:
    if not options.trace:
        return None
    trace = StepTrace(Path(options.trace))
    log.info("tracing steps into %s, the device by %s", options.trace, trace.source)
    return trace


def _policy(options: Options, sizes: Sizes) -> Policy:
    """The flag's, or the object that the caller of build() made. Raises InvalidSetup (a ValueError)."""
    if isinstance(options.scheduling_policy, str):
        return make_policy(options.scheduling_policy, max_batched_tokens=sizes.max_tokens)
    return options.scheduling_policy


def _device(name: str) -> Device:
    if name != "auto":
        return Device.parse(name)
    try:
        device = Device("cuda", 0)
        log.info("device: %s, %s", device, device.name)
        return device
    except (DriverNotFound, CudaError) as e:
        log.info("device: cpu (no usable GPU: %s)", e)
        return Device("cpu")


@contextmanager
def _phase(name: str) -> Iterator[None]:
    """One log line a phase, with its seconds."""
    start = time.perf_counter()
    yield
    log.info("%s: %.2f s", name, time.perf_counter() - start)
