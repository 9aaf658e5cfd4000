"""The simulator's tiers beside a real engine's: over the same agents, the same parts of prompts are found."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from openinfer.kvpool import Pool
from openinfer.scheduler import make_policy
from openinfer.scheduler.sim import LinearCost, Request, SimTiers, TierSpeeds, simulate

GOLDENS = Path(__file__).parent / "goldens"
AGENTS, REQUESTS, OUTPUT = 5, 24, 6
BYTES = {"qwen3-tiny": (3 << 20, 5_000_000), "qwen3_5-tiny": (12 << 20, 20_000_000)}
"""Of the device's cache and of host memory."""
FAST = TierSpeeds(50e9, 10e9, 10e9)


def served(session: Any, model: str, flags: dict[str, Any]) -> tuple[list[Request], list[int], Any]:
    """What agents ask an engine one after the other, the tokens that it found of each prompt, and the engine."""
    run = session(
        GOLDENS / model, max_model_len=320, max_num_seqs=2, kv_cache_memory_bytes=BYTES[model][0], **flags
    )
    rng = random.Random(5)
    said = [[rng.randrange(3, 480) for _ in range(60)] for _ in range(AGENTS)]
    asked: list[Request] = []
    for _ in range(REQUESTS):
        agent = rng.randrange(AGENTS)
        said[agent] += [rng.randrange(3, 480) for _ in range(30)]
        number = run.submit(said[agent], OUTPUT, ignore_eos=True)
        run.finish()
        output = run.outcomes[number].tokens
        asked.append(Request(0.0, list(said[agent]), output, OUTPUT, len(asked) - 1 if asked else None))
        said[agent] += output
    return asked, [run.outcomes[number].cached for number in range(len(asked))], run.engine


@pytest.mark.parametrize("model", BYTES)
@pytest.mark.parametrize("disk_bytes", [0, 64_000_000], ids=["host memory", "and a disk"])
def test_the_simulator_finds_what_the_engine_finds(
    session: Any, tmp_path: Path, disk_bytes: int, model: str
) -> None:
    flags: dict[str, Any] = {"kv_offload_gb": BYTES[model][1] / 1e9}
    if disk_bytes:
        flags |= {"kv_offload_dir": str(tmp_path), "kv_offload_disk_gb": disk_bytes / 1e9}
    asked, found, engine = served(session, model, flags)
    groups, states = engine.pool.groups, engine.runner.model.states
    simulated = SimTiers(groups, BYTES[model][1], disk_bytes, FAST)
    pool = Pool(groups, loader=simulated, saver=simulated)
    report = simulate(
        asked,
        make_policy("fcfs", max_batched_tokens=512),
        pool,
        LinearCost(),
        max_rows=2,
        max_model_len=320,
        tiers=simulated,
        snapshots=states.snapshots,
    )
    predicted = [record.num_cached for record in report.records]
    total = sum(len(request.prompt) for request in asked)
    assert sum(found) > 0.5 * total
    assert sum(predicted) / total == pytest.approx(sum(found) / total, abs=0.03)
