"""Random histories of engines that share blocks: no block and no slot of host memory is lost."""

import random
import time

import pytest
from sharing_engine import SharingEngine, transfer

from openinfer.kvpool.tiers.peers import lane


def all_slots_are_back(engine):
    """Every slot of host memory is free, or idle with a whole record."""
    host = engine.tiers._host
    found = sum(map(len, host._free)) + sum(len(index) for index in host._index)
    used = [slot for index in host._index for slot in index.values() if slot.users or not slot.whole]
    idle = sum(map(len, host._idle))
    return found == sum(host.num_slots) and not used and idle == sum(map(len, host._index))


def history(engines, rng, count, cut):
    """Random prompts that begin alike, served, fetched, exported, given up and forgotten. cut: ends conversations."""
    prompts = [[family] * 6 + [family + 20 + one] * 11 for family in (1, 2, 3) for one in (0, 1)]
    exports = 0
    for turn in range(count):
        engine, other = rng.sample(engines, 2)
        tokens = rng.choice(prompts)[: rng.choice((9, 13, 17))]
        action = rng.random()
        if action < 0.5:
            if rng.random() < 0.8:
                engine.ask(tokens, other.sharing.address)
            engine.serve(tokens)
        elif action < 0.75:
            engine.serve(tokens)
            engine.export(f"lease-{turn}", tokens)
            exports += 1
            if rng.random() < 0.7:
                other.sharing.peers.keep(engine.sharing.address, f"lease-{turn}")
                other.sharing.peers.end(engine.sharing.address, f"lease-{turn}")
        elif action < 0.85:  # the sequence is given up while it loads
            engine.ask(tokens, other.sharing.address)
            with engine.pool.acquire(tokens) as lease:
                lease.load()
        elif action < 0.9:
            engine.pool.poll(1.0)
            assert engine.pool.reset_prefix_cache()
        elif cut:
            for link in list(other.sharing._server._links):
                link.end()
        engine.pool.poll(0.0)
        engine.pool.check_integrity()
    return exports


@pytest.mark.parametrize(
    ("seed", "count"), [(0, 150), *(pytest.param(seed, 1500, marks=pytest.mark.slow) for seed in (1, 2, 3))]
)
def test_no_block_and_no_slot_is_lost_in_random_histories(seed, count, monkeypatch):
    monkeypatch.setattr(lane, "RETRY_S", 0.01)
    lease = {"kv_connector_extra_config": {"kv_lease_duration": 0.2}}
    engines = [SharingEngine(transfer(**lease), host=12 * 4096) for _ in range(3)]
    rng = random.Random(seed)
    assert history(engines, rng, count, cut=True) > 10
    assert sum(engine.tiers.stats.from_peer for engine in engines) > 10
    for engine in engines:
        until = time.monotonic() + 10
        while not all_slots_are_back(engine) and time.monotonic() < until:
            engine.pool.poll(0.0)
            engine.tiers.settle()
            time.sleep(0.01)
        assert all_slots_are_back(engine)
        assert engine.pool.num_free == engine.pool.num_total
    for engine in engines:
        engine.close()
