"""KV events of whole engines: what a router that follows them expects is what the next request finds."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from openinfer.cli import recipes
from openinfer.cli.bench.server import free_port
from openinfer.frontend.contract import ResetPrefixCache
from openinfer.kvpool import InvalidConfig
from openinfer.kvpool.tiers.layout import align_up
from openinfer.kvpool.tiers.record import file_bytes
from openinfer.recipes.engine.errors import SetupError
from openinfer.recipes.engine.startup import build

GOLDENS = Path(__file__).parent / "goldens"


def config(address: str) -> str:
    return json.dumps({"enable_kv_cache_events": True, "endpoint": "ipc://" + address,
                       "replay_endpoint": f"ipc://{address}.replay"})  # fmt: skip


def replay(address: str) -> list[dict[str, Any]]:
    """All events that the engine published."""
    found: list[dict[str, Any]] = []
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.connect(f"ipc://{address}.replay")
        client.send_multipart([b"", bytes(8)])
        while True:
            assert client.poll(5000), "no END within 5 s"
            *_, payload = client.recv_multipart()
            if not payload:
                return found
            found += msgspec.msgpack.decode(payload)[1]


def expected_hit(events: list[dict[str, Any]], tokens: list[int]) -> int:
    """Tokens of a prompt that a router expects in the cache, by group 0; the last token is always computed."""
    blocks: dict[tuple[int | None, tuple[int, ...]], int] = {}
    for event in events:
        if event["type"] == "AllBlocksCleared":
            blocks.clear()
        elif event["group_idx"] == 0 and event["type"] == "BlockStored":
            parent, size = event["parent_block_hash"], event["block_size"]
            for index, name in enumerate(event["block_hashes"]):
                blocks[parent, tuple(event["token_ids"][index * size : (index + 1) * size])] = name
                parent = name
        elif event["group_idx"] == 0:
            gone = set(event["block_hashes"])
            blocks = {key: name for key, name in blocks.items() if name not in gone}
    size = next(e["block_size"] for e in events if e["type"] == "BlockStored" and e["group_idx"] == 0)
    parent, found = None, 0
    while found + size < len(tokens):
        parent = blocks.get((parent, tuple(tokens[found : found + size])))
        if parent is None:
            break
        found += size
    return found


def test_a_router_that_follows_expects_what_is_found(session, tmp_path):
    """Under pressure: the cache holds a part of the prompts."""
    address = str(tmp_path / "kv")
    run = session(GOLDENS / "qwen3-tiny", kv_events_config=config(address), kv_cache_memory_bytes=3 << 20,
                  max_model_len=256)  # fmt: skip
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 480) for _ in range(rng.randrange(40, 200))] for _ in range(12)]
    expected = []
    for turn in range(40):
        prompt = rng.choice(prompts)
        events = replay(address) if turn else []
        expected.append(expected_hit(events, prompt) if events else 0)
        run.submit(prompt, 4, ignore_eos=True)
        run.finish()
    found = [run.outcomes[n].cached for n in range(40)]
    assert found == expected
    assert 0 < sum(map(bool, found)) < 40
    assert any(event["type"] == "BlockRemoved" for event in replay(address)), "the cache is too large"
    run.engine.control(ResetPrefixCache())
    assert replay(address)[-1] == {"type": "AllBlocksCleared"}
    assert expected_hit(replay(address), prompts[0]) == 0


@pytest.mark.parametrize(("name", "kinds"), [
    ("qwen3_5-tiny", ["full_attention", "mamba"]),
    ("deepseek_v4-tiny", ["full_attention", "sliding_window"]),
])  # fmt: skip
def test_the_groups_of_hybrids_are_labelled(session, tmp_path, name, kinds):
    address = str(tmp_path / "kv")
    run = session(GOLDENS / name, kv_events_config=config(address), max_model_len=1024)
    run.submit([3 + n % 500 for n in range(597)], 2, ignore_eos=True)
    run.finish()
    stored = [event for event in replay(address) if event["type"] == "BlockStored"]
    assert sorted({event["kv_cache_spec_kind"] for event in stored}) == kinds
    for event in stored:
        whole = len(event["block_hashes"]) * event["block_size"]
        assert len(event["token_ids"]) == (0 if event["kv_cache_spec_kind"] == "mamba" else whole)


def test_routers_know_which_blocks_are_in_which_tier(session, tmp_path):
    """Follows the events by medium, and counts what the engine has there."""
    flags = {"kv_offload_gb": 0.006, "kv_offload_dir": str(tmp_path / "disk"), "kv_offload_disk_gb": 0.2}
    run = session(GOLDENS / "qwen3_5-tiny", kv_events_config=config(str(tmp_path / "kv")), max_num_seqs=2,
                  max_model_len=320, kv_cache_memory_bytes=6 << 20, **flags)  # fmt: skip
    rng = random.Random(1)
    prompts = [[rng.randrange(3, 480) for _ in range(280)] for _ in range(4)]
    for prompt in [*prompts, *prompts[:2]]:
        run.submit(prompt, 4, ignore_eos=True)
        run.finish()
    media: dict[str, set[tuple[int, int]]] = {"GPU": set(), "CPU": set(), "DISK": set()}
    chains: dict[int, tuple[int | None, tuple[int, ...]]] = {}
    for event in replay(str(tmp_path / "kv"))[1:]:
        group, names = event["group_idx"], event["block_hashes"]
        if event["type"] == "BlockRemoved":
            assert {(group, one) for one in names} <= media[event["medium"]]
            media[event["medium"]] -= {(group, one) for one in names}
            continue
        media[event["medium"]] |= {(group, one) for one in names}
        if event["kv_cache_spec_kind"] == "full_attention":
            size, parent = event["block_size"], event["parent_block_hash"]
            for index, one in enumerate(names):
                tokens = tuple(event["token_ids"][index * size : (index + 1) * size])
                assert len(tokens) == size
                assert chains.setdefault(one, (parent, tokens)) == (parent, tokens), (
                    "the same in every medium"
                )
                parent = one
    pool, stats = run.engine.pool, run.engine.stats()
    assert media["GPU"] == {(group, int.from_bytes(one[-8:], "big")) for group in range(pool.num_groups)
                            for one, _ in pool.cached(group)}  # fmt: skip
    sizes = [align_up(group.block_bytes) for group in pool.groups]
    assert sum(sizes[group] for group, _ in media["CPU"]) == stats.offload_bytes["host"] > 0
    assert sum(file_bytes(sizes[group]) for group, _ in media["DISK"]) <= stats.offload_bytes["disk"]
    assert media["DISK"]


def test_an_engine_that_closes_gives_its_address_back(caplog):
    port = free_port()
    path = GOLDENS / "qwen3-tiny"
    text = json.dumps({"enable_kv_cache_events": True, "endpoint": f"tcp://127.0.0.1:{port}"})
    flags = {"device": "cpu", "kv_cache_memory_bytes": 8 << 20, "max_model_len": 64, "kv_events_config": text}
    first = build(recipes.find(path), path, **flags).engine
    caplog.clear()
    with caplog.at_level("INFO"), pytest.raises(InvalidConfig, match="Address already in use"):
        build(recipes.find(path), path, **flags)
    assert [record for record in caplog.records if "weights" in record.getMessage()] == []
    first.close()
    build(recipes.find(path), path, **flags).engine.close()


@pytest.mark.parametrize(
    ("flags", "error", "problem"),
    [
        ({"kv_events_config": "{nothing"}, InvalidConfig, "this is no JSON"),
        (
            {"kv_events_config": '{"enable_kv_cache_events": true}', "enable_prefix_caching": False},
            SetupError,
            "publishes cached prefixes",
        ),
    ],
)
def test_a_wrong_flag_is_refused_before_anything_is_loaded(flags, error, problem):
    path = GOLDENS / "qwen3-tiny"
    with pytest.raises(error, match=problem):
        build(recipes.find(path), path, device="cpu", **flags)
