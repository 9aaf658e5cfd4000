"""From a checkpoint on disk to an engine that is ready: plan memory, load weights, get kernels, record steps."""

import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple

from openinfer.graph import Buckets, NoTrace, Readback, Shape, StepGraphs, StepPace, StepTrace, Watch
from openinfer.graph.runner import HostPack, Model, Runner, WeightsDesk, readback_bytes, segments, step_keys
from openinfer.kernels import (
    Call,
    CpuPack,
    CublasLt,
    CudaDriver,
    LaunchPack,
    NullPack,
    Pack,
    RankLost,
    Spec,
    Store,
    Target,
    cublas_available,
    predictions,
    usable_cores,
)
from openinfer.kernels.authoring import Adapter
from openinfer.kvpool import Group, Pool, make_eviction
from openinfer.kvpool.tiers import Layout
from openinfer.recipes.engine import gguf
from openinfer.recipes.engine.adapters import read_modules
from openinfer.recipes.engine.blueprint import Blueprint, M
from openinfer.recipes.engine.config_fields import end_token
from openinfer.recipes.engine.devices import devices_of, open_device
from openinfer.recipes.engine.engine import Engine, Served
from openinfer.recipes.engine.errors import SetupError
from openinfer.recipes.engine.followers import Followers, NoFollowers
from openinfer.recipes.engine.following import Following
from openinfer.recipes.engine.limits import CACHE_FORMS, LONE_STEPS, Limits, Room, decide, fit
from openinfer.recipes.engine.offload import Cache, check_offload, open_tiers
from openinfer.recipes.engine.options import O, Options
from openinfer.recipes.engine.ranks import Ranks
from openinfer.recipes.engine.recipe import Recipe, Source, named
from openinfer.sampler.constraint import Masks
from openinfer.scheduler import make_policy
from openinfer.tensor import (
    Arena,
    Checkpoint,
    Device,
    DeviceClock,
    DummyCheckpoint,
    LoadReport,
    ProgressBar,
    Stream,
    format_bytes,
    uint8,
)

if TYPE_CHECKING:
    from openinfer.kvpool.publisher import EventPublisher

    OpenPublisher = Callable[[Sequence[Group]], EventPublisher]

log = logging.getLogger("openinfer.engine")

STEPS_IN_FLIGHT = 2


@dataclass(frozen=True, slots=True)
class StartPlan:
    """The result of tracing every segment on the null device, which needs no GPU.

    fixed_bytes: bytes of the arena without the cache. model: on the null device. limits: what it is for. specs: the
    kernels. scratch_bytes, zeroed_bytes: the workspace. steps: the calls of every step by its shape. peer_widths: bytes
    of rows that ranks push to each other."""

    fixed_bytes: int
    model: Model
    limits: Limits
    specs: list[Spec] = field(default_factory=list)
    scratch_bytes: int = 0
    zeroed_bytes: int = 0
    steps: Mapping[Shape, list[Call]] = field(default_factory=dict)
    peer_widths: Collection[int] = ()


class Built(NamedTuple):
    """An engine that is ready, and its blueprint."""

    engine: Engine
    blueprint: Blueprint[Any]


def build(recipe: Recipe[O], model_dir: str | Path, **flags: Any) -> Built:
    """The engine for a checkpoint directory. `flags` are the fields of the recipe's options.

    Raises UnsupportedModel, CheckpointError or SetupError for errors that the user can mend.
    """
    options, path = recipe.options(**flags), Path(model_dir)
    options.check(recipe.name)
    check_offload(options)
    open_publisher = _publisher(options)
    # CUPTI must be attached before the CUDA context exists.
    trace = StepTrace(Path(options.trace) if options.trace else None)
    devices = devices_of(options)
    followers: Followers | NoFollowers = NoFollowers()
    if len(devices) > 1:
        Source.read(path)  # a folder that is no checkpoint is refused before processes start
        followers = Followers(recipe, path, options, devices)
    own = dataclasses.replace(options, device=devices[0])
    try:
        return Builder(recipe, path, own, followers, trace, open_publisher).engine()
    except BaseException as error:
        followers.close()
        if isinstance(error, RankLost):
            raise SetupError(followers.reason or str(error)) from error
        raise


def build_named(recipe: Sequence[str], model_dir: str, **flags: Any) -> Engine:
    """The engine of a recipe by its `known_as`, as `build` makes it. The engine's process calls this."""
    return build(named(recipe), model_dir, **flags).engine


@dataclass(slots=True)
class Builder(Generic[O]):
    """Builds one rank of an engine: `engine` for rank 0, `following` for a rank above it.

    followers: those of rank 0; a rank above it has NoFollowers. The fields below are set phase by phase.
    """

    recipe: Recipe[O]
    path: Path
    options: O
    followers: Followers | NoFollowers
    trace: StepTrace = field(default_factory=NoTrace)
    open_publisher: "OpenPublisher | None" = None
    device: Device = field(init=False)
    blueprint: Blueprint[Any] = field(init=False)
    limits: Limits = field(init=False)
    target: Target | None = field(init=False, default=None)
    store: Store | None = field(init=False, default=None)
    plan: StartPlan = field(init=False)
    cache: Cache = field(init=False)
    runner: Runner = field(init=False)
    loaded: Sequence[Adapter] = field(init=False)
    desk: WeightsDesk = field(init=False)

    def engine(self) -> Built:
        """The engine, with its tiers attached."""
        self._build()
        limits, pool, tiers, path = self.limits, self.cache.pool, self.cache.tiers, self.path
        end = (one for one in end_token(path) if one < self.blueprint.config.vocab_size)
        ends = tuple(dict.fromkeys((*self.blueprint.config.eos_token_ids, *end)))
        policy = self.options.scheduling_policy  # or what the caller of build() made
        if isinstance(policy, str):
            policy = make_policy(policy, max_batched_tokens=limits.max_tokens)
        engine = Engine(
            self.runner, self.cache, policy, self.desk,
            Served(
                path.name, ends, limits.max_rows, limits.max_model_len, self.options.max_num_queued_reqs,
                self.loaded,
            ),
            self.followers, self.store,
        )  # fmt: skip
        self.followers.begin()
        if tiers is not None:  # after everything else, because it goes on to lock memory
            cache, others = self.blueprint.cache(self.runner.model), self.followers.others(tiers.pieces)
            tiers.attach(cache, self.runner.stream, others)
        log.info(
            "%s on %s, %s: %d rows, %d tokens a step, %d tokens a sequence, %d tokens of cache in %s (%s), "
            "%d recorded steps",
            path.name, self.device, limits.dtype, limits.max_rows, limits.max_tokens, limits.max_model_len,
            engine.info.kv_capacity_tokens, limits.cache.dtype,
            ", ".join(f"{group.num_blocks - 1} blocks of {group.name}" for group in pool.groups),
            len(self.runner.graphs),
        )  # fmt: skip
        if "grammar" not in engine.info.features:
            log.info("no structured output: pip install 'openinfer-recipes[grammar]'")
        return Built(engine, self.blueprint)

    def following(self) -> Following:
        """The commands of a rank above 0, with all steps recorded."""
        self._build()
        cache, alike = self.blueprint.cache(self.runner.model), self.blueprint.cache_is_alike
        layout = Layout(self.cache.pool.groups, cache, 0 if alike else self.followers.ranks.rank)
        return Following(self.runner, self.desk, self.followers.ranks, layout, saves=not alike)

    def _build(self) -> None:
        with self._opened() as checkpoint, ThreadPoolExecutor(3) as worker:
            blocks = self._plan(worker)
            self._load_and_record(worker, checkpoint, blocks)
        if self.store is not None:
            self.store.seal()

    @contextmanager
    def _opened(self) -> Iterator[Checkpoint]:
        """The checkpoint as long as weights are read from it; a rank's part of the model, and the engine's sizes."""
        options, ranks = self.options, self.followers.ranks
        with _phase("configuration and checkpoint header"):
            source, self.device = Source.read(self.path), open_device(options.device)
            dummy = options.load_format == "dummy"
            checkpoint = DummyCheckpoint(self.path) if dummy else gguf.opened(self.path, self.recipe.gguf())
        with checkpoint:
            source = dataclasses.replace(source, checkpoint=None if dummy else checkpoint)
            blueprint = self.recipe.blueprint(source, options, ranks=ranks.size, rank=ranks.rank)
            limits = decide(options, self.device, blueprint)
            blueprint.validate(checkpoint, limits)
            if dummy and any(name.endswith(".g_idx") for name in checkpoint.names):
                raise SetupError(
                    "--load-format dummy: a GPTQ checkpoint orders its columns (g_idx), and random values are no "
                    "order; take a config.json of AWQ or compressed-tensors"
                )
            self.blueprint, self.limits = blueprint, limits
            yield checkpoint

    def _plan(self, worker: ThreadPoolExecutor) -> list[int]:
        """Decide on kernels, memory and the cache. Returns the blocks of each group."""
        blueprint, options, device, ranks = self.blueprint, self.options, self.device, self.followers.ranks
        buckets, target, store = buckets_for(blueprint, self.limits), None, None
        if device.kind == "cuda":
            target = options_target(options, Target.of(device, cublas=cublas_available(), nvrtc=True))
            target, store = dataclasses.replace(target, rank=ranks.rank), Store(target.arch)
        activated = worker.submit(device.activate)  # a context takes as long as the plan
        with _phase("plan"):
            plan = make_start_plan(blueprint, self.limits, buckets, target)
            if target is not None and store is not None and not store.can_prepare_cuda(plan.specs):
                target = dataclasses.replace(target, nvrtc=False)
                plan = make_start_plan(blueprint, self.limits, buckets, target)
            activated.result()
            if target is not None:
                plan = with_room(plan, blueprint, options, target, device.total_memory, ranks.least)
                ranks.open(device, Stream(device), plan.peer_widths)
            room = Room.on(device, options, plan.fixed_bytes)
            blocks = ranks.least(blueprint.share(plan.limits, room))
            self.target, self.store, self.plan = target, store, plan
            self.cache = self._cache(blueprint.groups(plan.limits, blocks))
            self.limits = fit(plan.limits, options, self.cache.pool.capacity_tokens)
        return blocks

    def _cache(self, groups: Sequence[Group]) -> Cache:
        options, events = self.options, self.open_publisher is not None
        eviction = options.eviction_policy  # or what the caller of build() gave
        if isinstance(eviction, str):
            eviction = self.blueprint.eviction if eviction == "auto" else make_eviction(eviction)
        parts = 1 if self.blueprint.cache_is_alike else self.followers.ranks.size
        tiers = open_tiers(
            options, groups, eviction, self.path, self.limits, self.device, parts, events=events
        )
        pool = Pool(
            groups, prefix_cache=options.enable_prefix_caching, eviction=eviction, events=events,
            loader=tiers, saver=tiers,
        )  # fmt: skip
        # Before the weights, because an address that is taken is refused here.
        publisher = self.open_publisher(pool.groups) if self.open_publisher is not None else None
        return Cache(pool, tiers, publisher)

    def _load_and_record(self, worker: ThreadPoolExecutor, checkpoint: Checkpoint, blocks: list[int]) -> None:
        """Take the memory, and load the weights while kernels are made and steps are recorded."""
        blueprint, options, limits, device = self.blueprint, self.options, self.limits, self.device
        plan, target, ranks, followers = self.plan, self.target, self.followers.ranks, self.followers
        with _phase("memory"):
            cache = sum(group.num_blocks * group.block_bytes for group in self.cache.pool.groups)
            size, stream = plan.fixed_bytes + cache + (1 << 20), Stream(device, CudaDriver.PRIORITY)
            arena = Arena(device, size, mapped=options.enable_sleep_mode)
            model = blueprint.lay_out(arena, stream, limits, blocks)
        self.loaded = read_modules(options, model.batch.adapters) if ranks.rank == 0 else ()
        ranks.stage(model.batch.adapters)
        # Recording depends on no weight's value.
        weights = worker.submit(self._load, model, checkpoint)
        tiers = self.cache.tiers
        sharing = tiers.sharing if tiers is not None else None
        digests = worker.submit(_digests, checkpoint, options) if sharing is not None else None
        predicted = worker.submit(predictions, plan.steps, target, ranks.size)
        cores = max(1, usable_cores() // ranks.size)
        cpu = CpuPack(ranks.shared, batch_invariant=options.batch_invariant, threads=cores)
        pack: Pack = HostPack(cpu, self.trace, repeats=not options.enforce_eager)
        if target is not None and self.store is not None:
            pack = make_pack(device, target, stream, self.store, arena, plan, ranks)
        buckets = buckets_for(blueprint, limits)
        graphs = StepGraphs(device, stream, capture=not options.enforce_eager)
        results = readback_bytes(limits.max_rows, limits.step_tokens, limits.max_drafts)
        words = 0 if self.cache.tiers is None else model.batch.sampled.result.numel
        readback, pace = Readback(device, results, STEPS_IN_FLIGHT, words), StepPace(predicted.result())
        self.runner = Runner(
            model, pack, stream, graphs, buckets, readback, pace,
            Watch(self.trace, DeviceClock.of(device), device), followers.leader,
            options.drafting(buckets, pace, blueprint.config.vocab_size),
            Masks(limits.max_rows, blueprint.config.vocab_size, buckets.max_drafts),
        )  # fmt: skip
        with _phase("steps"):
            self.runner.record()
        with _phase("rest of the weights"):
            report = weights.result()
            speed = format_bytes(1e9 * report.gbytes_per_s)
            log.info("weights: %s at %s/s", format_bytes(report.bytes), speed)
            if sharing is not None and digests is not None:
                sharing.add(weights=digests.result())
            ranks.serve()
        self.desk = WeightsDesk(
            lambda checkpoint: blueprint.validate(checkpoint, limits), functools.partial(blueprint.load, model), arena,
            stream, [tensor for group in blueprint.cache(model) for tensor in group], report.filled, ranks=followers,
            progress=functools.partial(self._progress, "updating weights"),
            digests=tiers is not None and tiers.keeps_after_reset,
        )  # fmt: skip

    def _load(self, model: Model, checkpoint: Checkpoint) -> LoadReport:
        """Load weights on their own stream, because the engine's is being captured."""
        with Stream(self.device) as stream:
            return self.blueprint.load(model, checkpoint, stream, self._progress("loading weights"))

    def _progress(self, what: str) -> Callable[[int, int], None]:
        """A bar. Only rank 0 shows one, because all ranks load as much."""
        return ProgressBar(what) if self.followers.ranks.rank == 0 else lambda done, total: None


def buckets_for(blueprint: Blueprint[Any], limits: Limits) -> Buckets:
    """The shapes that an engine of these limits records."""
    decode_rows = blueprint.decode_rows(limits.max_rows)
    sizes = limits.max_drafts, limits.lone_tokens
    return Buckets.up_to(limits.max_rows, limits.max_tokens, decode_rows, *sizes)


def options_target(options: Options, target: Target) -> Target:
    """The target as the flags want it. cuBLASLt's kernels depend on the number of tokens. Raises SetupError."""
    cache = CACHE_FORMS[options.kv_cache_dtype]
    if cache is not None and target.arch < cache.arch:
        raise SetupError(
            f"--kv-cache-dtype {options.kv_cache_dtype} needs a GPU of sm_{cache.arch} or newer, and this is "
            f"sm_{target.arch}; leave it out"
        )
    if not options.batch_invariant:
        return target
    return dataclasses.replace(target, batch_invariant=True, cublas=False)


def make_start_plan(
    blueprint: Blueprint[M], limits: Limits, buckets: Buckets, target: Target | None
) -> StartPlan:
    """Trace every segment on the null device. Without a target only the memory is planned."""
    null, smallest = Device("null"), blueprint.groups(limits)
    arena = Arena(null, None)
    model = blueprint.lay_out(arena, Stream(null), limits, [1] * len(smallest))
    fixed = arena.used - sum(group.block_bytes for group in smallest)
    if target is None:
        return StartPlan(fixed, model, limits)
    pack = NullPack(target)
    traced = blueprint.traced(model, pack)
    calls = {key: pack.traced(work) for key, work in segments(traced, pack, buckets).items()}
    steps = {s: [call for key in step_keys(s) for call in calls.get(key, [])] for s in buckets.segments()}
    scratch, zeroed = pack.workspace_bytes(zeroed=False), pack.workspace_bytes(zeroed=True)
    fixed += scratch + zeroed + 1024
    return StartPlan(fixed, model, limits, pack.specs(), scratch, zeroed, steps, pack.peer_widths())


def with_room(
    plan: StartPlan, blueprint: Blueprint[M], options: Options, target: Target, memory_bytes: float,
    least: Callable[[Sequence[int]], Sequence[int]] = list,
) -> StartPlan:  # fmt: skip
    """The plan, on GPUs of `memory_bytes`, without the longest lone steps as long as they leave too little for the
    cache (limits.LONE_STEPS). least: Ranks.least, for all ranks to do the same."""
    while (limits := plan.limits).lone_tokens:
        tokens = capacity(blueprint, limits, Room.alone(memory_bytes, options, plan.fixed_bytes))
        enough = min(LONE_STEPS * limits.step_tokens, limits.max_rows * limits.max_model_len)
        if least([tokens >= enough])[0]:
            break
        log.info("no steps of %d tokens: the cache would have only %d tokens", limits.step_tokens, tokens)
        limits = dataclasses.replace(limits, lone_tokens=limits.lone_tokens[:-1])
        plan = make_start_plan(blueprint, limits, buckets_for(blueprint, limits), target)
    return plan


def capacity(blueprint: Blueprint[Any], limits: Limits, room: Room) -> int:
    """Tokens of a cache in this room; 0 where it is too small for one sequence."""
    try:
        return Pool(blueprint.groups(limits, blueprint.share(limits, room))).capacity_tokens
    except SetupError:
        return 0


def kernel_specs(recipe: Recipe[O], source: Source, options: O, target: Target) -> list[Spec]:
    """The kernels that an engine with these flags runs on a GPU of the target's kind. Needs no GPU."""
    blueprint = recipe.blueprint(source, options, ranks=options.tensor_parallel_size)
    limits = decide(options, Device("cuda"), blueprint)
    target = options_target(options, target)
    return make_start_plan(blueprint, limits, buckets_for(blueprint, limits), target).specs


def make_pack(
    device: Device, target: Target, stream: Stream, store: Store, arena: Arena, plan: StartPlan, ranks: Ranks
) -> Pack:
    """The pack that ops of a GPU run on, with the plan's kernels and its workspace from `arena`."""
    with _phase("kernels"):
        bar = ProgressBar("compiling", things="kernels")
        log.info("kernels: %d, of which %d were compiled now", *store.prepare(plan.specs, bar))
    scratch = arena.alloc((plan.scratch_bytes,), uint8, "scratch") if plan.scratch_bytes else None
    zeroed = arena.alloc((plan.zeroed_bytes,), uint8, "semaphores") if plan.zeroed_bytes else None
    if zeroed is not None:
        zeroed.zero_(stream)
    with _phase("libraries"):
        cublas = CublasLt() if target.cublas else None
    return LaunchPack(target, CudaDriver(device, stream, store, cublas, ranks.gpus), scratch, zeroed)


def _digests(checkpoint: Checkpoint, options: Options) -> list[str]:
    """Of the weights, and of those of a head that drafts: blocks hold its keys and values too."""
    found, folder = [checkpoint.digest().hex()], options.head_folder
    if folder is not None:
        with Checkpoint(folder) as head:
            found.append(head.digest().hex())
    return found


def _publisher(options: Options) -> "OpenPublisher | None":
    """Opens the publisher of KV events; None if nobody asked for events. Raises InvalidConfig, SetupError."""
    if options.kv_events_config is None:
        return None
    try:
        from openinfer.kvpool.publisher import EventPublisher, EventsConfig
    except ImportError as error:
        raise SetupError(f"--kv-events-config: {error}") from None
    config = EventsConfig.parse(options.kv_events_config)
    if config.publishes and not options.enable_prefix_caching:
        raise SetupError("--kv-events-config publishes cached prefixes; leave out --no-enable-prefix-caching")
    return functools.partial(EventPublisher, config) if config.publishes else None


@contextmanager
def _phase(name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    log.info("%s: %.2f s", name, time.perf_counter() - start)
