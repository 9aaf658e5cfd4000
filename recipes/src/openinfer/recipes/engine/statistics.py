"""The engine's statistics, put together from those of its parts."""

from copy import copy
from dataclasses import asdict

from openinfer.frontend.contract import Drafts, EngineStats, StepTimes
from openinfer.graph.runner import Runner, Sampling
from openinfer.kernels import Store
from openinfer.recipes.engine.offload import Cache
from openinfer.scheduler import Stats
from openinfer.tensor import DriverCounts


def snapshot(
    counted: EngineStats,
    loop: Stats,
    cache: Cache,
    runner: Runner,
    store: Store | None,
    at_ready: DriverCounts,
) -> EngineStats:
    """A copy of `counted`, which the engine counts itself, with the counters of the parts. at_ready: of the
    driver, when the engine was ready."""
    stats, pace, pool, tiers = copy(counted), runner.pace, cache.pool, cache.tiers
    stats.running, stats.waiting = loop.running, loop.waiting
    stats.steps, stats.preemptions = loop.steps, loop.preemptions
    stats.kv_used_tokens = pool.used_tokens
    stats.prefix_query_tokens, stats.prefix_hit_tokens = pool.stats.query_tokens, pool.stats.hit_tokens
    stats.prefix_loaded_tokens = pool.stats.loaded_tokens
    if tiers is not None:
        stats.offload_bytes = {"host": tiers.host_bytes, "disk": tiers.disk_bytes}
        stats.offload_blocks = asdict(tiers.stats)
        if tiers.sharing is not None and tiers.sharing.lending is not None:
            stats.offload_blocks["lent"] = tiers.sharing.lending.lent
    counts = runner.drafting.counts
    stats.drafts, stats.draft_tokens = counts.drafts, counts.draft_tokens
    stats.accepted_draft_tokens = counts.accepted_tokens
    stats.accepted_by_position = list(counts.by_position)
    stats.compiles_after_ready = store.misses_after_seal if store else 0
    if runner.stream.device.kind == "cuda":
        now = DriverCounts.now()
        stats.allocations_after_ready = now.allocations - at_ready.allocations
        stats.host_waits_after_ready = now.waits - at_ready.waits - runner.readback.waits
    stats.outlier_steps = pace.num_outliers
    stats.slow_findings = runner.watch.num_findings
    stats.step_times = [
        StepTimes(name, t.steps, t.predicted_s, t.measured_s)
        for name, t in pace.account(whole=not loop.running)
    ]
    return stats


def drafts_of(sampling: Sampling) -> Drafts | None:
    """The drafts of a request that has ended; None if it had none."""
    counts = sampling.drafted
    return Drafts(counts.drafts, counts.draft_tokens, list(counts.by_position)) if counts.drafts else None
