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
from openinfer.kvpool import Group, Pool
from openinfer.recipes.qwen3_5.batch import Buffers, row_fields
from openinfer.recipes.qwen3_5.buckets import Buckets
from openinfer.recipes.qwen3_5.config import Config
from openinfer.recipes.qwen3_5.engine import Qwen35Engine
from openinfer.recipes.qwen3_5.model import Model
from openinfer.recipes.qwen3_5.ops.gated_delta_net import STATE_CHUNK
from openinfer.recipes.qwen3_5.runner import Runner, readback_bytes
from openinfer.recipes.qwen3_5.sizes import Options, Room, Sizes, decide_sizes, fit, room_for
from openinfer.recipes.qwen3_5.weights import Format, Weights, validate
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

log = logging.getLogger("openinfer.qwen3_5")

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


def build(model_dir: str, **flags: Any) -> Qwen35Engine:
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
        form = Format.of(checkpoint, config)
        validate(checkpoint, Weights.allocate(config, Arena(Device("null"), None), sizes.dtype, form))
        buckets = Buckets.up_to(sizes.max_rows, sizes.max_tokens)
        target = Target.of(device, cublas=cublas_available()) if device.kind == "cuda" else None
        with ThreadPoolExecutor(2) as worker:
            worker.submit(device.activate)  # a context takes as long as the plan
            with _phase("plan"):
                plan = make_plan(config, form, sizes, buckets, target)
                room = room_for(config, sizes, options, device, plan.fixed_bytes)
                sizes = fit(sizes, options, room)
            with _phase("memory"):
                groups = pool_groups(config, sizes, room)
                state_bytes = sum(group.num_blocks * group.block_bytes for group in groups)
                arena = Arena(device, plan.fixed_bytes + state_bytes + (1 << 20))
                stream = Stream(device)
                model = lay_out(config, form, sizes, arena, stream, room)
            weights = worker.submit(_load, checkpoint, model, device)  # until the end any bytes will do
            predicted = worker.submit(predictions, plan.steps, target)
            store = Store(target.arch) if target else None
            pack = _pack(device, target, stream, store, arena, plan)
            graphs = StepGraphs(device, stream, capture=not options.enforce_eager)
            readback = Readback(device, readback_bytes(sizes.max_rows, sizes.max_tokens), STEPS_IN_FLIGHT)
            pace = StepPace(predicted.result())
            runner = Runner(model, pack, stream, graphs, buckets, readback, sizes.boundaries, pace, trace)
            with _phase("steps"):
                record(runner)
            with _phase("rest of the weights"):
                log.info("weights: %.2f GB at %.2f GB/s", *weights.result())
    if store is not None:
        store.seal()
    pool = Pool(groups, prefix_cache=options.enable_prefix_caching)
    log.info(
        "%s on %s, %s: %d rows, %d tokens a step, %d tokens a sequence, %d tokens of cache, %d states, "
        "%d recorded steps",
        path.name, device, sizes.dtype, sizes.max_rows, sizes.max_tokens, sizes.max_model_len,
        pool.capacity_tokens, room.states - 1, len(graphs),
    )  # fmt: skip
    engine = Qwen35Engine(
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
    form, buckets = Format.published(config), Buckets.up_to(sizes.max_rows, sizes.max_tokens)
    return make_plan(config, form, sizes, buckets, target).specs


def lay_out(config: Config, form: Format, sizes: Sizes, arena: Arena, stream: Stream, room: Room) -> Model:
    """All memory of the model, in `arena`: weights (uninitialised), rotary table, batch state, buffers, cache and
    recurrent states."""
    weights = Weights.allocate(config, arena, sizes.dtype, form)
    cos_sin = arena.alloc((sizes.max_model_len, 2, len(config.inv_freq)), float32, "cos_sin")
    if arena.device.kind != "null":
        cos_sin.copy_from(config.rope_table(sizes.max_model_len), stream)
    most = sizes.boundaries.most(sizes.max_tokens)
    fields = row_fields(sizes.max_rows, sizes.max_tokens, sizes.max_blocks, most, config.vocab_size)
    rows = Rows(arena, fields, stream)
    buffers = Buffers.allocate(config, weights, arena, sizes.dtype, sizes.max_tokens, sizes.max_rows)
    page = (config.num_full, 2, config.num_kv_heads, sizes.block_size, config.head_dim)
    kv = arena.alloc((room.pages, *page), sizes.dtype, "kv cache")
    recurrent = (config.num_linear, config.value_heads, config.key_dim, config.value_dim)
    state = arena.alloc((room.states, *recurrent), float32, "recurrent states")
    ring = (config.num_linear, config.conv_kernel, config.conv_size)
    conv_state = arena.alloc((room.states, *ring), sizes.dtype, "convolution states")
    if arena.device.kind == "cuda":  # kernels may multiply what nobody wrote by zero, so it must be finite
        for memory in (kv, state, conv_state):
            memory.zero_(stream)
    return Model(config, weights, kv, state, conv_state, cos_sin, rows, buffers, most)


def pool_groups(config: Config, sizes: Sizes, room: Room) -> list[Group]:
    """The pool's: pages of the full layers, and blocks of state with snapshots that are joined at page boundaries."""
    itemsize = sizes.dtype.itemsize
    page_bytes = config.kv_bytes_per_token(itemsize) * sizes.block_size
    return [
        Group("kv", sizes.block_size, room.pages, page_bytes),
        Group("state", STATE_CHUNK, room.states, config.state_bytes(itemsize), snapshots=True),
    ]


def make_plan(config: Config, form: Format, sizes: Sizes, buckets: Buckets, target: Target | None) -> Plan:
    """Trace every segment on the null device. One layer of each kind is traced: layers differ in addresses only."""
    null, room = Device("null"), Room(1, 1)
    arena = Arena(null, None)
    model = lay_out(config, form, sizes, arena, Stream(null), room)
    fixed = arena.used - config.kv_bytes_per_token(sizes.dtype.itemsize) * sizes.block_size
    fixed -= config.state_bytes(sizes.dtype.itemsize)
    if target is None:
        return Plan(fixed, [], 0, 0)
    pack, kinds = NullPack(target), {type(layer.mixer): layer for layer in model.weights.layers}
    counts = Counter(type(layer.mixer) for layer in model.weights.layers)
    layers = Repeated(pack, ((layer, counts[kind]) for kind, layer in kinds.items()))
    short = dataclasses.replace(model, weights=dataclasses.replace(model.weights, layers=layers))
    apply_writes(pack, words=model.rows.words, writes=model.rows.writes)
    samples = {rows: pack.traced(partial(short.sample, pack, rows)) for rows in buckets.sample_rows()}
    steps = {
        shape: pack.traced(partial(short.forward, pack, *shape)) + samples[shape[1]]
        for shape in buckets.segments()
    }
    for offset in range(0, short.buffers.score_ranks.shape[0], sizes.max_rows):
        short.score(pack, offset)
    scratch, zeroed = pack.workspace_bytes(zeroed=False), pack.workspace_bytes(zeroed=True)
    return Plan(fixed + scratch + zeroed + 1024, pack.specs(), scratch, zeroed, steps)


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
        for memory in (model.kv, model.state, model.conv_state):
            memory[0].zero_(runner.stream)
        runner.stream.synchronize()


def record(runner: Runner) -> None:
    """Record every step, and wait until the device has them."""
    warm_up(runner)
    runner.record()
    runner.stream.synchronize()


def _pack(
    device: Device, target: Target | None, stream: Stream, store: Store | None, arena: Arena, plan: Plan
) -> Pack:
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
