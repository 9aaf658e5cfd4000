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

import numpy as np

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
from openinfer.recipes.engine.errors import SetupError
from openinfer.recipes.qwen3.config import Config
from openinfer.recipes.qwen3.engine import Qwen3Engine
from openinfer.recipes.qwen3.model import Buffers, Model, row_fields
from openinfer.recipes.qwen3.runner import Buckets, Runner, readback_bytes
from openinfer.recipes.qwen3.weights import Weights, validate
from openinfer.scheduler import Policy, make_policy
from openinfer.tensor import (
    Arena,
    Checkpoint,
    CudaError,
    Device,
    DriverNotFound,
    ProgressBar,
    Stream,
    bfloat16,
    dtypes,
    float32,
    load_tensors,
    uint8,
)

log = logging.getLogger("openinfer.qwen3")

OUTSIDE_BYTES = 1 << 30
"""Device memory that is not in the arena: the context, cubins, cuBLASLt, graph executables."""
CPU_KV_BYTES = 2 << 30
STEPS_IN_FLIGHT = 2


@dataclass(frozen=True, slots=True)
class Options:
    """The recipe's flags. Zero or None: chosen at start-up, and said in the log."""

    device: str = "auto"
    dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    max_num_queued_reqs: int = 1024
    gpu_memory_utilization: float = 0.9
    kv_cache_memory_bytes: int | None = None
    block_size: int = 16
    enforce_eager: bool = False
    enable_prefix_caching: bool = True
    scheduling_policy: str | Policy = "fcfs"
    trace: str | None = None
    batch_invariant: bool = False

    def on(self, target: Target) -> Target:
        """The target as these flags want it. cuBLASLt's kernels depend on the number of tokens."""
        if not self.batch_invariant:
            return target
        return dataclasses.replace(target, batch_invariant=True, cublas=False)


@dataclass(frozen=True, slots=True)
class Sizes:
    """The limits of an engine, all decided."""

    max_model_len: int
    max_rows: int
    max_tokens: int
    block_size: int
    dtype: np.dtype[Any]

    @property
    def max_blocks(self) -> int:
        return -(-self.max_model_len // self.block_size)


@dataclass(frozen=True, slots=True)
class Plan:
    """What a trace of every segment on the null device says: bytes of the arena without the cache, the kernels, the
    workspace, and the calls of every step by its shape. Made without a GPU."""

    fixed_bytes: int
    specs: list[KernelSpec]
    scratch_bytes: int
    zeroed_bytes: int
    steps: Mapping[tuple[int, int, int], list[Call]] = field(default_factory=dict)


def build(model_dir: str, **flags: Any) -> Qwen3Engine:
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
        validate(checkpoint, config, Weights.allocate(config, Arena(Device("null"), None), sizes.dtype))
        buckets = Buckets.up_to(sizes.max_rows, sizes.max_tokens)
        on_gpu = device.kind == "cuda"
        target = options.on(Target.of(device, cublas=cublas_available())) if on_gpu else None
        with ThreadPoolExecutor(2) as worker:
            worker.submit(device.activate)  # a context takes as long as the plan
            with _phase("plan"):
                plan = make_plan(config, sizes, buckets, target)
                num_pages = _num_pages(config, sizes, options, device, plan)
                sizes = _fit(sizes, options, num_pages)
            with _phase("memory"):
                page_bytes = config.kv_bytes_per_token(sizes.dtype.itemsize) * sizes.block_size
                arena = Arena(device, plan.fixed_bytes + num_pages * page_bytes + (1 << 20))
                stream = Stream(device)
                model = lay_out(config, sizes, arena, stream, num_pages)
            weights = worker.submit(_load, checkpoint, model, device)  # until the end any bytes will do
            predicted = worker.submit(predictions, plan.steps, target)
            store = Store(target.arch) if target else None
            pack = _pack(device, target, stream, store, arena, plan)
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
    pool = Pool(
        [Group("kv", sizes.block_size, num_pages, page_bytes)], prefix_cache=options.enable_prefix_caching
    )
    log.info(
        "%s on %s, %s: %d rows, %d tokens a step, %d tokens a sequence, %d tokens of cache, %d recorded steps",
        path.name, device, sizes.dtype, sizes.max_rows, sizes.max_tokens, sizes.max_model_len,
        pool.capacity_tokens, len(graphs),
    )  # fmt: skip
    engine = Qwen3Engine(
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
    options = Options(**flags)
    sizes = decide_sizes(config, options, Device("cuda"))
    return make_plan(config, sizes, Buckets.up_to(sizes.max_rows, sizes.max_tokens), options.on(target)).specs


def lay_out(config: Config, sizes: Sizes, arena: Arena, stream: Stream, num_pages: int) -> Model:
    """All memory of the model, in `arena`: weights (uninitialised), rotary table, batch state, buffers, cache."""
    weights = Weights.allocate(config, arena, sizes.dtype)
    cos_sin = arena.alloc((sizes.max_model_len, 2, config.head_dim // 2), float32, "cos_sin")
    if arena.device.kind != "null":
        cos_sin.copy_from(config.rope_table(sizes.max_model_len), stream)
    fields = row_fields(sizes.max_rows, sizes.max_tokens, sizes.max_blocks, config.vocab_size)
    rows = Rows(arena, fields, stream)
    buffers = Buffers.allocate(config, arena, sizes.dtype, sizes.max_tokens, sizes.max_rows)
    shape = (num_pages, config.num_layers, 2, config.num_kv_heads, sizes.block_size, config.head_dim)
    kv = arena.alloc(shape, sizes.dtype, "kv cache")
    if arena.device.kind == "cuda":
        kv.zero_(
            stream
        )  # a kernel may multiply what lies past a sequence's end by zero, so it must be finite
    return Model(config, weights, kv, cos_sin, rows, buffers)


def make_plan(config: Config, sizes: Sizes, buckets: Buckets, target: Target | None) -> Plan:
    """Trace every segment on the null device. One layer of each kind is traced: layers differ in addresses only."""
    null = Device("null")
    arena = Arena(null, None)
    model = lay_out(config, sizes, arena, Stream(null), 1)
    page = config.kv_bytes_per_token(sizes.dtype.itemsize) * sizes.block_size
    if target is None:
        return Plan(arena.used - page, [], 0, 0)
    pack, windows = NullPack(target), Counter(config.windows)
    kinds = Repeated(pack, zip(model.weights.layers, windows.values(), strict=False))
    short = dataclasses.replace(
        model,
        config=dataclasses.replace(config, num_layers=len(windows), windows=tuple(windows)),
        weights=dataclasses.replace(model.weights, layers=kinds),
    )
    apply_writes(pack, words=model.rows.words, writes=model.rows.writes)
    samples = {rows: pack.traced(partial(short.sample, pack, rows)) for rows in buckets.sample_rows()}
    steps = {
        shape: pack.traced(partial(short.forward, pack, *shape)) + samples[shape[1]]
        for shape in buckets.segments()
    }
    for offset in range(0, short.buffers.score_ranks.shape[0], sizes.max_rows):
        short.score(pack, offset)
    scratch, zeroed = pack.workspace_bytes(zeroed=False), pack.workspace_bytes(zeroed=True)
    return Plan(arena.used - page + scratch + zeroed + 1024, pack.specs(), scratch, zeroed, steps)


def _load(checkpoint: Checkpoint, model: Model, device: Device) -> tuple[float, float]:
    """Load the weights, on a stream of their own (the engine's is being captured): GB, and GB/s."""
    loads, bar = model.weights.loads(model.config), ProgressBar("loading weights")
    with Stream(device) as stream:
        report = load_tensors(checkpoint, loads, stream, bar)
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
        model.kv[0].zero_(runner.stream)
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


def decide_sizes(config: Config, options: Options, device: Device) -> Sizes:
    """Check the flags against the model and the device, and fill in what they leave open."""
    if device.kind == "null":
        raise SetupError("--device null plans and runs nothing; use cpu or cuda")
    default = bfloat16 if device.kind == "cuda" else float32
    dtype = default if options.dtype == "auto" else dtypes.of(options.dtype)
    if dtype not in (bfloat16, float32) or (device.kind == "cuda" and dtype != bfloat16):
        raise SetupError(
            f"--dtype {options.dtype} is not possible on {device}: cuda runs bfloat16, cpu float32 or bfloat16"
        )
    if options.block_size not in (16, 32, 64):
        raise SetupError(f"--block-size {options.block_size}: 16, 32 and 64 are possible")
    if options.max_num_seqs < 1 or options.max_num_queued_reqs < 1:
        raise SetupError("--max-num-seqs and --max-num-queued-reqs must be at least 1")
    if not 0 < options.gpu_memory_utilization <= 1:
        raise SetupError(f"--gpu-memory-utilization {options.gpu_memory_utilization}: it must be in (0, 1]")
    limit = config.max_position_embeddings
    wanted = limit if options.max_model_len is None else options.max_model_len
    if not 2 <= wanted <= limit:
        raise SetupError(f"--max-model-len {wanted}: this model has positions for 2 to {limit} tokens")
    tokens = options.max_num_batched_tokens or max(
        2048 if device.kind == "cuda" else 512, options.max_num_seqs
    )
    if tokens < options.max_num_seqs:
        raise SetupError(
            f"--max-num-batched-tokens {tokens} must be at least --max-num-seqs {options.max_num_seqs}"
        )
    return Sizes(wanted, options.max_num_seqs, tokens, options.block_size, dtype)


def _num_pages(config: Config, sizes: Sizes, options: Options, device: Device, plan: Plan) -> int:
    """Pages of cache that the memory leaves room for, the padding page included."""
    page = config.kv_bytes_per_token(sizes.dtype.itemsize) * sizes.block_size
    if options.kv_cache_memory_bytes is not None:
        room = options.kv_cache_memory_bytes
    elif device.kind == "cpu":
        room = CPU_KV_BYTES
    else:
        taken = device.total_memory - device.free_memory
        room = (
            int(device.total_memory * options.gpu_memory_utilization)
            - taken
            - OUTSIDE_BYTES
            - plan.fixed_bytes
        )
    # More than every row at full length is never used.
    pages = min(room // page, sizes.max_rows * sizes.max_blocks + 1)
    if pages < 3:
        raise SetupError(
            f"no room for the KV cache: {room / 1e9:.2f} GB are left on {device} beside "
            f"{plan.fixed_bytes / 1e9:.2f} GB of weights and buffers; lower --max-num-seqs or "
            "--max-num-batched-tokens, or raise --gpu-memory-utilization or --kv-cache-memory-bytes"
        )
    return pages


def _fit(sizes: Sizes, options: Options, num_pages: int) -> Sizes:
    """A sequence must fit the cache: shorten the default length, refuse a chosen one."""
    room = (num_pages - 1) * sizes.block_size
    if room >= sizes.max_model_len:
        return sizes
    if options.max_model_len is not None:
        raise SetupError(
            f"--max-model-len {options.max_model_len} needs as many tokens of KV cache; there is room for {room}"
        )
    log.warning(
        "max-model-len is lowered from %d to %d: the KV cache holds no more", sizes.max_model_len, room
    )
    return dataclasses.replace(sizes, max_model_len=room)


@contextmanager
def _phase(name: str) -> Iterator[None]:
    """One log line a phase, with its seconds."""
    start = time.perf_counter()
    yield
    log.info("%s: %.2f s", name, time.perf_counter() - start)
