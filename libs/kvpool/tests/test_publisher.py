"""What subscribers get of a pool's events, over real sockets."""

from __future__ import annotations

import random
import time

import msgspec
import pytest
import zmq

from openinfer.kvpool import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    Group,
    InvalidConfig,
    Pool,
    hash_blocks,
)
from openinfer.kvpool.publisher import EventPublisher, EventsConfig

GROUPS = [Group("kv", 4, 33), Group("window", 4, 33, window=7), Group("state", 8, 9, snapshots=True)]


@pytest.fixture
def context():
    """Makes sockets, and closes them at the end: one that is only dropped is a warning."""
    made = zmq.Context()
    kept = []

    class Sockets:
        def socket(self, kind):
            kept.append(made.socket(kind))
            return kept[-1]

    yield Sockets()
    made.destroy(linger=0)


@pytest.fixture
def opened(tmp_path):
    """opened(**keys): a publisher and its two addresses."""
    made = []

    def make(**keys):
        addresses = [f"ipc://{tmp_path}/{len(made)}.{name}" for name in ("events", "replay")]
        config = EventsConfig(True, endpoint=addresses[0], replay_endpoint=addresses[1], **keys)
        made.append(EventPublisher(config, GROUPS))
        return made[-1], *addresses

    yield make
    for publisher in made:
        publisher.close()


def subscribed(context, address, topic=b"", hwm=1000):
    """A socket whose subscription the publisher has: PUB drops what comes before."""
    socket = context.socket(zmq.SUB)
    socket.set_hwm(hwm)
    socket.connect(address)
    socket.subscribe(topic)
    time.sleep(0.05)
    return socket


def received(socket):
    assert socket.poll(5000), "no message within 5 s"
    topic, number, payload = socket.recv_multipart()
    return topic, int.from_bytes(number, "big"), msgspec.msgpack.decode(payload)


def replayed(context, address, start, delimiter=(b"",)):
    """The messages that a replay gives, by number."""
    socket = context.socket(zmq.DEALER)
    socket.connect(address)
    socket.send_multipart([*delimiter, start.to_bytes(8, "big")])
    found = {}
    while True:
        assert socket.poll(5000), "no END within 5 s"
        *_, number, payload = socket.recv_multipart()
        if int.from_bytes(number, "big", signed=True) == -1:
            assert payload == b""
            return found
        found[int.from_bytes(number, "big")] = msgspec.msgpack.decode(payload)


def low(name):
    """What is published of a name."""
    return int.from_bytes(name[-8:], "big")


def test_frames_and_maps_are_those_that_routers_read(context, opened):
    publisher, events, _ = opened(topic="kv@pod@model")
    socket = subscribed(context, events, b"kv@")
    names = hash_blocks(list(range(8)), 4)
    stored = BlockStored(names, None, list(range(8)), 4, salt=b"tenant")
    removed = BlockRemoved(names[1:], group_idx=1)
    publisher.publish(EventBatch(12.5, [stored, removed]))
    topic, number, (seconds, (cleared, first, second), rank) = received(socket)
    assert (topic, number, seconds, rank) == (b"kv@pod@model", 0, 12.5, 0)
    assert cleared == {"type": "AllBlocksCleared"}, "a new engine has none of the old one's blocks"
    assert first == {
        "type": "BlockStored",
        "block_hashes": [low(name) for name in names],
        "parent_block_hash": None,
        "token_ids": list(range(8)),
        "block_size": 4,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [["tenant"], None],
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
        "kv_cache_spec_sliding_window": None,
    }
    assert second == {
        "type": "BlockRemoved",
        "block_hashes": [low(names[1])],
        "medium": "GPU",
        "group_idx": 1,
    }
    child = BlockStored(names[1:], names[0], list(range(4, 8)), 4, group_idx=1, salt=b"tenant")
    state = BlockStored(names[1:], None, [], 8, group_idx=2)
    publisher.publish(EventBatch(13.0, [child, state, AllBlocksCleared()], data_parallel_rank=3))
    _, number, (_, (first, second, third), rank) = received(socket)
    assert (number, rank) == (1, 3)
    assert (first["parent_block_hash"], first["extra_keys"]) == (low(names[0]), None)
    assert (first["kv_cache_spec_kind"], first["kv_cache_spec_sliding_window"]) == ("sliding_window", 8)
    assert (second["kv_cache_spec_kind"], second["group_idx"]) == ("mamba", 2)
    assert third == {"type": "AllBlocksCleared"}
    publisher.publish(None)
    assert not socket.poll(50)


def test_a_replay_gives_what_is_kept_from_a_number_on(context, opened):
    publisher, _, replay = opened(buffer_steps=5)
    for step in range(8):
        publisher.publish(EventBatch(float(step), [AllBlocksCleared()]))
    assert list(replayed(context, replay, 0)) == [3, 4, 5, 6, 7]
    assert list(replayed(context, replay, 6)) == [6, 7]
    assert list(replayed(context, replay, 99)) == []
    assert replayed(context, replay, 7, delimiter=())[7][0] == 7.0, "a DEALER without a delimiter"
    wrong = context.socket(zmq.DEALER)
    wrong.connect(replay)
    for frames in ([b"", b"short"], [b"x" * 100], [b"a", b"b", b"c"]):
        wrong.send_multipart(frames)
    assert list(replayed(context, replay, 7)) == [7], "bad requests get no answer and disturb no other"
    assert not wrong.poll(50)


def test_a_replay_waits_for_a_slow_subscriber_and_not_for_one_that_reads_nothing(
    context, opened, monkeypatch
):
    monkeypatch.setattr("openinfer.kvpool.publisher.REPLAY_WAIT_MS", 100)
    publisher, _, replay = opened()
    tokens = list(range(400))
    for _ in range(4000):  # more than both sockets hold
        publisher.publish(EventBatch(0.0, [BlockStored([b"x" * 32], None, tokens, 400)]))
    for _ in range(2):
        silent = context.socket(zmq.DEALER)
        silent.connect(replay)
        silent.send_multipart([b"", bytes(8)])
    slow = context.socket(zmq.DEALER)
    slow.connect(replay)
    slow.send_multipart([b"", bytes(8)])
    assert slow.poll(5000)
    time.sleep(0.05)
    found = 0
    while int.from_bytes(slow.recv_multipart()[1], "big", signed=True) != -1:
        found += 1
        assert slow.poll(5000), f"no END after {found} messages"
    assert found == 4000


def test_a_subscriber_that_does_not_read_delays_nobody(context, opened):
    publisher, events, replay = opened(hwm=2, buffer_steps=3)
    socket = subscribed(context, events, hwm=1)
    tokens = list(range(4000))
    batch = EventBatch(0.0, [BlockStored(hash_blocks(tokens, 4), None, tokens, 4)])
    for _ in range(3000):
        publisher.publish(batch)
    numbers = []
    while socket.poll(200):
        numbers.append(received(socket)[1])
    assert len(numbers) < 3000
    assert numbers == sorted(numbers), "what it lost shows as a gap"
    assert list(replayed(context, replay, 0)) == [2997, 2998, 2999]


def test_a_router_that_follows_knows_what_the_pool_finds(context, opened):
    """Against a pool under pressure: the blocks that a mirror finds by tokens are those of the next lease."""
    publisher, _, replay = opened(buffer_steps=100_000)
    rng = random.Random(0)
    pool = Pool([Group("kv", 4, 24)], events=True)
    prompts = [[n % 3] * rng.randrange(4, 20) + rng.choices(range(9), k=12) for n in range(12)]
    for _ in range(300):
        tokens = rng.choice(prompts)
        with pool.acquire(tokens) as lease:
            if lease.reserve(len(tokens)) is not None:
                lease.commit(tokens, len(tokens))
        if rng.random() < 0.02:
            pool.reset_prefix_cache()
        publisher.publish(pool.take_events())
    mirror: dict[tuple[int | None, tuple[int, ...]], int] = {}
    for _, events, _ in replayed(context, replay, 0).values():
        for event in events:
            match event["type"]:
                case "BlockStored":
                    parent, size = event["parent_block_hash"], event["block_size"]
                    for index, name in enumerate(event["block_hashes"]):
                        mirror[parent, tuple(event["token_ids"][index * size : (index + 1) * size])] = name
                        parent = name
                case "BlockRemoved":
                    gone = set(event["block_hashes"])
                    mirror = {key: name for key, name in mirror.items() if name not in gone}
                case "AllBlocksCleared":
                    mirror.clear()
    found = []
    for tokens in prompts:
        parent, cached = None, 0
        while cached + 4 < len(tokens) and (
            parent := mirror.get((parent, tuple(tokens[cached : cached + 4])))
        ):
            cached += 4
        with pool.acquire(tokens) as lease:
            assert lease.num_cached == cached
        found.append(cached)
    assert sum(found) > 0, "the pool kept some"


def test_an_address_that_cannot_be_had_is_named(context, tmp_path):
    port = context.socket(zmq.SUB).bind_to_random_port("tcp://127.0.0.1")
    with pytest.raises(InvalidConfig, match=r"Address already in use.*give another endpoint"):
        EventPublisher(EventsConfig(True, endpoint=f"tcp://127.0.0.1:{port}"), GROUPS)
    with pytest.raises(InvalidConfig, match="KV events cannot have"):
        EventPublisher(EventsConfig(True, endpoint=f"ipc://{tmp_path}/no/such/folder"), GROUPS)


def test_an_address_elsewhere_is_connected_to(context, tmp_path):
    """llm-d's subscriber binds, and engines connect to it."""
    socket = context.socket(zmq.SUB)
    port = socket.bind_to_random_port("tcp://127.0.0.2")
    socket.subscribe(b"")
    publisher = EventPublisher(EventsConfig(True, endpoint=f"tcp://127.0.0.2:{port}"), GROUPS)
    for _ in range(100):  # what comes before the connection is dropped
        publisher.publish(EventBatch(1.0, [AllBlocksCleared()]))
        if socket.poll(50):
            break
    assert received(socket)[2][0] == 1.0
    publisher.close()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "this is no JSON"),
        ("[]", "must be an object with keys among enable_kv_cache_events"),
        ('{"topics": "x"}', "must be an object with keys among"),
        ('{"publisher": "kafka"}', "zmq and null are possible"),
        ('{"endpoint": "5557"}', "must be like tcp://"),
        ('{"endpoint": "tcp://*:99999"}', "ports are 0 to 65535"),
        ('{"endpoint": null}', "endpoint is None; it must be a str"),
        ('{"replay_endpoint": 5}', "replay_endpoint is 5"),
        ('{"enable_kv_cache_events": 1}', "it must be a bool"),
        ("[" * 100_000, "this is no JSON"),
        ('{"endpoint": "tcp://*:' + "9" * 5000 + '"}', "ports are 0 to 65535"),
        ('{"hwm": -1}', "from 0 to 2147483647"),
        ('{"hwm": 99999999999}', "from 0 to 2147483647"),
        ('{"buffer_steps": true}', "from 0 to 2147483647"),
        ('{"buffer_steps": 99999999999999999999}', "from 0 to 2147483647"),
        ('{"buffer_steps": ' + "9" * 5000 + "}", "this is no JSON"),
        ('{"topic": 3}', "it must be a str"),
    ],
)
def test_a_wrong_configuration_is_refused(text, problem):
    with pytest.raises(InvalidConfig, match=problem):
        EventsConfig.parse(text)


def test_events_are_off_unless_asked_for():
    assert not EventsConfig.parse("{}").publishes
    assert not EventsConfig.parse('{"enable_kv_cache_events": true, "publisher": "null"}').publishes
    assert EventsConfig.parse('{"enable_kv_cache_events": true, "max_queue_size": 5}').publishes
