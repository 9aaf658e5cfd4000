"""Publish a pool's events over ZeroMQ, in the frames and maps that vLLM publishes and routers read.

    config = EventsConfig.parse('{"enable_kv_cache_events": true, "endpoint": "tcp://127.0.0.1:5557"}')
    publisher = EventPublisher(config, pool.groups)
    ...
    publisher.publish(pool.take_events())   # after each step

A message has three frames: the topic, its number (8 bytes, big endian, from 0), and msgpack of
`[seconds, [event, ...], data_parallel_rank]`. An event is a map with "type". Routers match blocks only by unsigned
64-bit integers, so a block's hash is the last eight bytes of its name. Events carry the token ids of prompts: publish
them to the routers alone. Needs `openinfer-kvpool[events]`.
"""

import json
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from .errors import InvalidConfig
from .events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch
from .group import Group

try:
    import msgspec
    import zmq
except ImportError as error:
    raise ImportError(
        f"{error.name} is missing; events need it: pip install 'openinfer-kvpool[events]'", name=error.name
    ) from None

END = (-1).to_bytes(8, "big", signed=True)
"""The number of the message that ends a replay."""
REPLAY_WAIT_MS = 2000
"""Milliseconds that a subscriber may read nothing of its replay. Other replays wait for it."""
_THIS_HOST = ("*", "0.0.0.0", "127.0.0.1", "localhost", "[::")
_BOUND = (*(f"tcp://{host}" for host in _THIS_HOST), "ipc://", "inproc://")


@dataclass(frozen=True, slots=True)
class EventsConfig:
    """The keys of vLLM's `--kv-events-config`. Raises InvalidConfig.

    endpoint: bound where it names this host (`tcp://*:5557`, loopback, `ipc://`), else connected to. replay_endpoint:
    where subscribers ask for messages that they missed. buffer_steps: messages kept for that. hwm: messages that wait
    for a slow subscriber, then it loses some and sees a gap in the numbers. topic: the first frame; vllm-router wants
    it empty. publisher: "zmq", or "null" for none. max_queue_size is taken and has no effect: messages are sent at
    once. data_parallel_rank: of the engine among the replicas of one server; each message has it.
    """

    enable_kv_cache_events: bool = False
    publisher: str = "zmq"
    endpoint: str = "tcp://127.0.0.1:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""
    data_parallel_rank: int = 0

    def __post_init__(self) -> None:
        for name, kind in (("enable_kv_cache_events", bool), ("endpoint", str), ("topic", str)):
            if not isinstance(getattr(self, name), kind):
                raise InvalidConfig(f"{name} is {getattr(self, name)!r}; it must be a {kind.__name__}")
        if self.publisher not in ("zmq", "null"):
            raise InvalidConfig(f"publisher is {self.publisher!r}; zmq and null are possible")
        for name in ("buffer_steps", "hwm", "max_queue_size", "data_parallel_rank"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 31:
                raise InvalidConfig(f"{name} is {value!r}; it must be an integer from 0 to {(1 << 31) - 1}")
        for name in ("endpoint", "replay_endpoint"):
            value = getattr(self, name)
            if value is not None and "://" not in str(value):
                raise InvalidConfig(f"{name} is {value!r}; it must be like tcp://127.0.0.1:5557")
            port = str(value).rpartition(":")[2]
            if port.isdecimal() and (len(port) > 5 or int(port) > 65535):
                # ZeroMQ takes what is left of it in 16 bits.
                raise InvalidConfig(f"{name} is {value!r}; ports are 0 to 65535")

    @classmethod
    def parse(cls, text: str) -> "EventsConfig":
        """From JSON: an object with some of the keys."""
        try:
            given = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InvalidConfig(f"this is no JSON ({error}): {text[:100]!r}") from None
        known = [field.name for field in fields(cls)]
        if not isinstance(given, dict) or set(given) - set(known):
            raise InvalidConfig(f"{text[:200]!r} must be an object with keys among {', '.join(known)}")
        return cls(**given)

    def split(self, count: int) -> "list[EventsConfig]":
        """The configurations of `count` replicas of a server. A replica adds its rank to each port, as vLLM does;
        an address without a port gets `_dp` and the rank. Raises InvalidConfig where ports overlap."""
        found = [
            replace(
                self,
                endpoint=_of_rank(self.endpoint, rank),
                replay_endpoint=self.replay_endpoint and _of_rank(self.replay_endpoint, rank),
                data_parallel_rank=rank,
            )
            for rank in range(count)
        ]
        taken = [
            end.rpartition(":")[2] for one in found for end in (one.endpoint, one.replay_endpoint) if end
        ]
        if len(set(taken)) < len(taken):
            raise InvalidConfig(
                f"endpoint {self.endpoint} and replay_endpoint {self.replay_endpoint} need {count} ports each, one for "
                "each replica; give ports further apart"
            )
        return found

    @property
    def publishes(self) -> bool:
        """Whether anyone asked for events."""
        return self.enable_kv_cache_events and self.publisher == "zmq"


class EventPublisher:
    """Sends a pool's events. `publish` is for one thread and never blocks; replays run in a thread of their own.

    groups: of the pool, for the kind of each group's blocks. The first message begins with AllBlocksCleared, for
    routers that remember an engine before. Raises InvalidConfig for an address that cannot be had.
    """

    def __init__(self, config: EventsConfig, groups: Sequence[Group]) -> None:
        self._kinds = [_kind(group) for group in groups]
        self._topic, self._rank = config.topic.encode(), config.data_parallel_rank
        self._encode = msgspec.msgpack.Encoder().encode
        self._sent: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._number = 0
        self._context: zmq.Context[Any] = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._pub.setsockopt(zmq.SNDHWM, config.hwm)
        self._pub.setsockopt(zmq.LINGER, 0)
        self._replays: threading.Thread | None = None
        try:
            _open(self._pub, config.endpoint)
            if config.replay_endpoint is not None:
                router = self._context.socket(zmq.ROUTER)
                router.setsockopt(zmq.LINGER, 0)
                # Else it drops what a slow subscriber has no room for.
                router.setsockopt(zmq.ROUTER_MANDATORY, 1)
                router.setsockopt(zmq.SNDTIMEO, REPLAY_WAIT_MS)
                _open(router, config.replay_endpoint)
                self._replays = threading.Thread(target=self._replay, args=(router,), daemon=True)
                self._replays.start()
        except InvalidConfig:
            self._context.destroy(linger=0)
            raise

    def publish(self, batch: EventBatch | None) -> None:
        """Send what `Pool.take_events` gave; None sends nothing."""
        if batch is None:
            return
        events = [self._map(event) for event in batch.events]
        if not self._number:
            events.insert(0, {"type": "AllBlocksCleared"})
        rank = self._rank if batch.data_parallel_rank is None else batch.data_parallel_rank
        payload = self._encode([batch.ts, events, rank])
        number, self._number = self._number, self._number + 1
        self._sent.append((number, payload))
        self._pub.send_multipart((self._topic, number.to_bytes(8, "big"), payload), zmq.DONTWAIT)

    def close(self) -> None:
        """Close the sockets; messages under way are dropped."""
        self._pub.close(linger=0)
        self._context.term()  # ends the wait for requests of replays, and waits until their socket is closed
        if self._replays is not None:
            self._replays.join(5)

    def _map(self, event: BlockStored | BlockRemoved | AllBlocksCleared) -> dict[str, Any]:
        found = {"type": type(event).__name__} | {f.name: getattr(event, f.name) for f in fields(event)}
        if not isinstance(event, AllBlocksCleared):
            found["block_hashes"] = [_number(name) for name in event.block_hashes]
        if isinstance(event, BlockStored):
            parent, salt = event.parent_block_hash, found.pop("salt")
            first = [salt.decode("utf-8", "replace")] if salt and parent is None else None
            found["parent_block_hash"] = None if parent is None else _number(parent)
            found["extra_keys"] = [first, *[None] * (len(event.block_hashes) - 1)] if first else None
            found |= self._kinds[event.group_idx]
        return found

    def _replay(self, router: zmq.Socket[Any]) -> None:
        """Answer requests, 8 bytes each: every kept message from that number on, then END."""
        while True:
            try:
                client, *delimiter, start = router.recv_multipart()
                if len(start) != 8 or delimiter not in ([], [b""]):
                    continue  # not a request of this protocol; there is nothing to answer
                first = int.from_bytes(start, "big")
                for number, payload in self._sent.copy():
                    if number >= first:
                        router.send_multipart((client, *delimiter, number.to_bytes(8, "big"), payload))
                router.send_multipart((client, *delimiter, END, b""))
            except zmq.ContextTerminated:
                router.close(linger=0)
                return
            except zmq.ZMQError:
                continue  # the subscriber has gone, or reads nothing; without END it knows that it lacks some


def _of_rank(endpoint: str, rank: int) -> str:
    if not endpoint.startswith("tcp://"):
        return f"{endpoint}_dp{rank}" if rank else endpoint
    host, _, port = endpoint.rpartition(":")
    if not port.isdecimal():
        raise InvalidConfig(f"{endpoint} has no port to count from; give one, like tcp://127.0.0.1:5557")
    return f"{host}:{int(port) + rank}"


def _open(socket: zmq.Socket[Any], endpoint: str) -> None:
    try:
        socket.bind(endpoint) if endpoint.startswith(_BOUND) else socket.connect(endpoint)
    except zmq.ZMQError as error:
        raise InvalidConfig(f"KV events cannot have {endpoint}: {error}; give another endpoint") from None


def _number(name: bytes) -> int:
    return int.from_bytes(name[-8:], "big")


def _kind(group: Group) -> dict[str, Any]:
    """The kind of a group's blocks, in the words that routers know. Their window counts the token itself."""
    if group.snapshots:
        return {"kv_cache_spec_kind": "mamba", "kv_cache_spec_sliding_window": None}
    if group.window is not None:
        return {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": group.window + 1}
    return {"kv_cache_spec_kind": "full_attention", "kv_cache_spec_sliding_window": None}
