"""Prefix hits of the hybrid: states that were kept at a boundary, together with the pages up to it."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from openinfer.graph import Field, Rows
from openinfer.kvpool import Group, Pool
from openinfer.recipes.qwen3_5.states import STATES, States
from openinfer.scheduler import Row, Seq, Step
from openinfer.tensor import Arena, Device, Stream

TINY = Path(__file__).parent / "goldens" / "qwen3_5-tiny"


def chats(count: int, shared: int, seed: int = 0) -> list[list[int]]:
    """Prompts that begin with the same `shared` tokens and go on by themselves."""
    rng = random.Random(seed)
    system = [rng.randrange(3, 480) for _ in range(shared)]
    return [system + [rng.randrange(3, 480) for _ in range(rng.randrange(70, 100))] for _ in range(count)]


def run_one_by_one(run, prompts):
    for prompt in prompts:
        run.submit(prompt, 4, ignore_eos=True)
        run.finish()
    return [run.outcomes[n].tokens for n in range(len(prompts))]


def test_a_shared_system_prompt_hits_from_the_second_request_on(session):
    """Twenty chats over a system prompt of 700 tokens; what they say is what they say without the cache."""
    prompts = chats(20, 700)
    run = session(TINY, max_model_len=1024)
    tokens = run_one_by_one(run, prompts)
    assert [run.outcomes[n].cached for n in range(20)] == [0] + [512] * 19
    stats = run.engine.stats()
    assert stats.prefix_hit_tokens == 19 * 512
    assert stats.prefix_hit_tokens / stats.prefix_query_tokens > 0.6
    alone = session(TINY, max_model_len=1024, enable_prefix_caching=False)
    assert run_one_by_one(alone, prompts[:4]) == tokens[:4]


@pytest.mark.parametrize(("shared", "found"), [(70, 64), (200, 128), (300, 256), (63, 0)])
def test_short_shared_prefixes_hit_too(session, shared, found):
    prompts = chats(3, shared)
    run = session(TINY, max_model_len=512)
    tokens = run_one_by_one(run, prompts)
    assert [run.outcomes[n].cached for n in range(3)] == [0, found, found]
    alone = session(TINY, max_model_len=512, enable_prefix_caching=False)
    assert run_one_by_one(alone, prompts) == tokens


@pytest.mark.parametrize("budget", [33, 64, 100, 512])
def test_the_same_prompt_again_starts_at_its_last_chunk(session, budget):
    """However it was cut into steps; and whether it is sent again at once or while the first still runs."""
    (prompt,) = chats(1, 260)
    run = session(TINY, max_model_len=512, max_num_batched_tokens=budget)
    for _ in range(3):
        run.submit(prompt, 24, ignore_eos=True)
        for _ in range(20):
            run.step()
    run.finish()
    assert len({tuple(outcome.tokens) for outcome in run.outcomes.values()}) == 1
    run.submit(prompt, 24, ignore_eos=True)
    run.finish()
    assert run.outcomes[3].cached == (len(prompt) - 1) // 64 * 64
    assert run.outcomes[3].tokens == run.outcomes[0].tokens


def test_a_lost_snapshot_is_noticed(session):
    """Negative control: with the cached states changed, a request that starts from them says something else."""
    (prompt,) = chats(1, 260)
    run = session(TINY, max_model_len=512)
    run.submit(prompt, 24, ignore_eos=True)
    run.finish()
    model = run.engine.runner.model
    model.state.numpy()[:] *= np.float32(0.5)
    run.submit(prompt, 24, ignore_eos=True)
    run.finish()
    assert run.outcomes[1].cached
    assert run.outcomes[1].tokens != run.outcomes[0].tokens


def test_snapshots_give_way_to_running_sequences(session):
    """A pool with hardly more states than rows: sequences are served, kept states are evicted, tokens are the same."""
    prompts = chats(12, 70)
    wide = session(TINY, max_model_len=512, enable_prefix_caching=False)
    run = session(TINY, max_model_len=512, max_num_seqs=4, kv_cache_memory_bytes=10 << 20)
    pool = run.engine.pool
    assert pool.groups[STATES].num_blocks <= 9
    for engine in (wide, run):
        for prompt in prompts:
            engine.submit(prompt, 8, ignore_eos=True)
        engine.finish()
    for n in range(12):
        assert run.outcomes[n].tokens == wide.outcomes[n].tokens
    assert pool.stats.evicted > 0
    assert any(run.outcomes[n].cached for n in range(12))


def test_reset_forgets_states_and_pages(session):
    from openinfer.frontend.contract import ResetPrefixCache

    (prompt,) = chats(1, 200)
    run = session(TINY, max_model_len=512)
    run_one_by_one(run, [prompt])
    run.engine.control(ResetPrefixCache())
    run.submit(prompt, 4, ignore_eos=True)
    run.finish()
    assert run.outcomes[1].cached == 0
    assert run.outcomes[1].tokens == run.outcomes[0].tokens


@pytest.mark.parametrize(("start", "count", "taken"), [(60, 4, 1), (63, 1, 0)])
def test_a_chunk_of_one_token_leaves_no_snapshot(start, count, taken):
    """A GPU's kernel for rows of one token writes none, so none may be found."""
    pool = Pool([Group("kv", 16, 20, 16), Group("state", 64, 8, 16, snapshots=True)], prefix_cache=True)
    seq = Seq(1, list(range(3, 203)), 4, owner=None)
    seq.slot, seq.target, seq.lease = 1, 200, pool.acquire(seq.tokens, b"")
    assert seq.lease.reserve(64) is not None
    fields = [Field("snapshot_ends", (2 * 9,)), Field("snapshot_blocks", (2 * 9,))]
    rows = Rows(Arena(Device("cpu"), 1 << 20), fields, Stream(Device("cpu")))
    states = States(512, max_tokens=512)
    assert states.max_snapshots <= 9
    states.chunks(rows, Step(0, [Row(seq, count, False, start)], True, 0, (), [], []), 2)
    words = [delta.values for delta in rows.uploads(Stream(Device("cpu")))]
    assert sum(int((values == 64).sum()) for values in words) == taken
    seq.lease.release()
    rows.close()
