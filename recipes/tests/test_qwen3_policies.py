"""The engine's scheduling policy: by flag, by object, and what it changes."""

import argparse
import time
from pathlib import Path

import pytest

from openinfer.frontend.contract import Finished, Rejected, Request, Scheduled
from openinfer.recipes.engine.startup import build
from openinfer.recipes.qwen3 import RECIPE
from openinfer.sampler import SamplingParams
from openinfer.scheduler import Priority

TINY = Path(__file__).parents[2] / "tests" / "goldens" / "qwen3-tiny"

pytestmark = pytest.mark.skipif(not TINY.exists(), reason="the checkpoint is in the checkout only")


def updates(policy, priorities):
    """What becomes of requests with these priorities, one row at a time."""
    engine = build(
        RECIPE,
        TINY,
        device="cpu",
        max_num_seqs=1,
        max_num_batched_tokens=16,
        kv_cache_memory_bytes=16 << 20,
        scheduling_policy=policy,
    ).engine
    try:
        for number, priority in enumerate(priorities):
            sampling = SamplingParams(temperature=0.0)
            engine.submit(
                Request(
                    id=number,
                    prompt_token_ids=[5, 6, 7],
                    sampling=sampling,
                    max_tokens=2,
                    arrival=time.monotonic(),
                    priority=priority,
                )
            )
        seen = []
        while sum(isinstance(update, (Finished, Rejected)) for update in seen) < len(priorities):
            seen += engine.step(wait=1.0).updates
        return engine.info.features, seen
    finally:
        engine.close()


@pytest.mark.parametrize("policy", ["priority", "priority,ageing_s=5", Priority(16)], ids=str)
def test_a_policy_by_priority_serves_the_urgent_first(policy):
    features, seen = updates(policy, [3, 1, 2])
    assert "priority" in features
    assert [update.id for update in seen if isinstance(update, Scheduled)] == [1, 2, 0]


def test_a_priority_that_would_not_count_is_refused():
    features, seen = updates("fcfs", [0, 1])
    assert "priority" not in features
    [rejected] = [update for update in seen if isinstance(update, Rejected)]
    assert (rejected.id, rejected.code) == (1, "unsupported")
    assert "--scheduling-policy priority" in rejected.reason


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [("lottery", "no policy is called 'lottery'; there are deadline"), ("fcfs,ageing_s=3", "cannot be made")],
)
def test_an_unknown_policy_is_refused_before_anything_is_loaded(spec, complaint):
    with pytest.raises(ValueError, match=complaint):
        build(RECIPE, TINY, device="cpu", scheduling_policy=spec)


def test_the_flag_reaches_the_engine():
    parser = argparse.ArgumentParser()
    RECIPE.add_arguments(parser)
    args = parser.parse_args(["--scheduling-policy", "fair-share"])
    assert RECIPE.engine_spec(TINY, args).kwargs["scheduling_policy"] == "fair-share"
    assert RECIPE.engine_spec(TINY, parser.parse_args([])).kwargs["scheduling_policy"] == "fcfs"
