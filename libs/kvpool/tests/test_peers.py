"""Engines that share blocks: what comes from a peer, what is refused, and what a peer that dies costs."""

import importlib.util
import json
import mmap
import random
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from openinfer.kvpool import Group, InvalidConfig, PeerRefused, Pool, hash_blocks
from openinfer.kvpool.tiers import SharedRecords, Sharing, Tiers, TransferConfig, parse_addresses
from openinfer.kvpool.tiers.peers import client, lane, nixl, shared
from openinfer.kvpool.tiers.peers.lending import Lending
from openinfer.kvpool.tiers.peers.link import Link, greet
from openinfer.kvpool.tiers.peers.transport import Record, runs
from openinfer.tensor import Device, Stream, Tensor

PAGES = Group("pages", 4, 8, 64)
STATES = Group("state", 4, 6, 4096 + 64, snapshots=True)
ABOUT = {"model": "m", "version": "1"}
TOKENS = list(range(100, 117))  # four pages and a token
NIXL = pytest.mark.skipif(importlib.util.find_spec("nixl_cu13") is None, reason="nixl-cu13 is not installed")
FAST = ["shared", "TcpConnector", pytest.param("NixlConnector", marks=NIXL)]
SLOW = [
    "TcpConnector",
    pytest.param("shared", marks=pytest.mark.slow),
    pytest.param("NixlConnector", marks=[NIXL, pytest.mark.slow]),
]


@pytest.fixture(params=SLOW)
def connector(request, monkeypatch):
    """shared: both engines are on one host, as they are here. Else they take each other for engines of two hosts."""
    if request.param == "shared":
        return "TcpConnector"
    monkeypatch.setattr(Link, "within_host", False)
    return request.param


def config(connector="TcpConnector", **fields):
    return TransferConfig(connector, kv_port=0, **fields)


class Engine:
    """A pool whose blocks are shared. Computing a page writes its first token into it."""

    def __init__(self, config, addresses=(), about=ABOUT, groups=(PAGES,), host=64 * 4096):
        self.sharing = Sharing(config, groups, about, addresses)
        self.tiers = Tiers(groups, host, sharing=self.sharing, load_timeout_s=10.0)
        self.pool = Pool(groups, loader=self.tiers, saver=self.tiers)
        device = Device("cpu")
        self.cache = [Tensor.empty((g.num_blocks, g.block_bytes), "uint8", device) for g in groups]
        self.tiers.attach([[tensor] for tensor in self.cache], Stream(device))
        until = time.monotonic() + 5
        while not self.tiers._host.has_room and time.monotonic() < until:
            time.sleep(0.001)

    def serve(self, tokens, salt=b"", load=True):
        """Tokens that were cached or loaded. Checks that blocks hold what was computed."""
        with self.pool.acquire(tokens, salt) as lease:
            if load and lease.load():
                self.wait_for(lease)
            until = time.monotonic() + 10
            while lease.reserve(len(tokens)) is None:  # loads that were given up have blocks until they end
                assert time.monotonic() < until
                self.pool.poll(0.1)
            for copy in lease.copies:
                self.cache[copy.group].numpy()[copy.target] = self.cache[copy.group].numpy()[copy.source]
            for index, block in enumerate(lease.block_table()):
                page = self.cache[0].numpy()[block]
                if index < lease.num_cached // 4:
                    assert set(page.tolist()) == {tokens[index * 4]}
                else:
                    page[:] = tokens[index * 4]
            for group in range(1, len(self.cache)):
                state = self.cache[group].numpy()[lease.block_table(group)[0]]
                assert not lease.num_cached or set(state.tolist()) == {tokens[lease.num_cached - 1]}
                for boundary in range(lease.num_cached + 4, len(tokens), 4):
                    state[:] = tokens[boundary - 1]
                    (copy,) = lease.snapshot(boundary)
                    self.cache[group].numpy()[copy.target] = state
            lease.commit(tokens, len(tokens))
            return lease.num_cached

    def wait_for(self, lease):
        until = time.monotonic() + 10
        while lease not in self.pool.poll(1.0):
            assert time.monotonic() < until

    def export(self, lease, tokens, salt=b""):
        found = self.sharing.export(lease, self.pool, self.tiers, tokens, salt, None)
        until = time.monotonic() + 5
        while not self.sharing.exported(lease) and time.monotonic() < until:
            self.tiers.collect()
        assert self.sharing.exported(lease)
        return found

    def ask(self, tokens, address=None, salt=b"", wait_s=10.0):
        """The problem of a question about a prompt; None if no peer is asked."""
        if not self.sharing.peers.ask(1, self.pool.missing(tokens, salt), address):
            return None
        until = time.monotonic() + wait_s
        while time.monotonic() < until:
            for answer in self.sharing.peers.answers(0.1):
                return answer.problem
        raise AssertionError("no answer came")

    def close(self):
        self.pool.check_integrity()
        self.tiers.close()


@pytest.fixture
def engines(connector):
    made = []

    def make(*addresses, **fields):
        kwargs = {name: fields.pop(name) for name in ("about", "groups", "host") if name in fields}
        made.append(Engine(config(connector, **fields), addresses, **kwargs))
        return made[-1]

    yield make
    for engine in reversed(made):
        engine.close()


@pytest.mark.parametrize("connector", FAST, indirect=True)
@pytest.mark.parametrize("groups", [(PAGES,), (PAGES, STATES)], ids=["pages", "hybrid"])
def test_a_peer_brings_what_another_engine_computed(engines, groups):
    first = engines(groups=groups, host=1 << 22)
    assert first.serve(TOKENS) == 0
    tokens, last = first.export("lease", TOKENS)
    assert tokens == 16
    assert [len(names) for names in last] == [1] * len(groups)
    second = engines(groups=groups, host=1 << 22)
    assert second.ask(TOKENS, first.sharing.address) == ""
    assert second.serve(TOKENS) == 16
    assert second.tiers.stats.from_peer == 3 + len(groups)
    assert first.sharing.lending.lent == 3 + len(groups)


def test_a_peer_that_every_question_goes_to(engines):
    first = engines()
    first.serve(TOKENS)
    second = engines(first.sharing.address)
    assert second.ask(TOKENS) == ""
    assert second.serve(TOKENS, load=True) == 0  # the blocks are on the first engine's device alone
    first.export("lease", TOKENS)
    third = engines(first.sharing.address)
    assert third.ask(TOKENS) == ""
    assert third.serve(TOKENS) == 16
    assert third.ask(TOKENS) == ""  # nothing is missing, and so nothing is found


def test_a_prefix_leaves_a_token_to_compute(engines):
    first = engines()
    first.serve(TOKENS[:16])
    hashes = hash_blocks(TOKENS[:16], 4)
    assert first.sharing.export("lease", first.pool, first.tiers, TOKENS[:16], b"", hashes) == (
        12,
        [[hashes[2].hex()]],
    )


def test_another_salt_finds_nothing(engines):
    first = engines()
    first.serve(TOKENS)
    first.export("lease", TOKENS)
    second = engines(first.sharing.address)
    assert second.ask(TOKENS, salt=b"other") == ""
    assert second.serve(TOKENS, b"other") == 0


@pytest.mark.parametrize("connector", FAST, indirect=True)
def test_many_blocks_come_in_several_messages(engines):
    groups, tokens = (Group("pages", 4, 202, 64),), [7] * 801
    first = engines(groups=groups, host=256 * 4096)
    first.serve(tokens)
    assert first.export("lease", tokens)[0] == 800
    second = engines(groups=groups, host=256 * 4096)
    assert second.ask(tokens, first.sharing.address) == ""
    assert second.serve(tokens) == 800


@pytest.mark.parametrize("other", [{"model": "m", "version": "2"}, {**ABOUT, "dtype": "float32"}])
def test_engines_of_another_model_or_version_share_nothing(engines, other):
    first = engines()
    first.serve(TOKENS)
    first.export("lease", TOKENS)
    second = engines(about=other)
    (name,) = {key for key in ABOUT | other if ABOUT.get(key) != other.get(key)}
    problem = second.ask(TOKENS, first.sharing.address)
    assert f"of another model or version; these differ: {name}" in problem
    assert second.serve(TOKENS) == 0


def test_a_lease_keeps_blocks_until_it_ends(engines, caplog):
    first = engines(host=5 * 4096)
    first.serve(TOKENS)
    first.export("lease", TOKENS)
    first.serve([1] * 17)
    assert first.export("more", [1] * 17) == (0, [])  # there is room for one block more
    assert "host memory has room for 1 of 4 blocks" in caplog.text
    assert first.tiers.stats.dropped == 3
    second = engines()
    second.sharing.peers.keep(first.sharing.address, "lease")
    assert second.ask(TOKENS, first.sharing.address) == ""
    assert second.serve(TOKENS) == 16
    second.sharing.peers.end(first.sharing.address, "lease")
    until = time.monotonic() + 5
    while len(first.sharing.lending) > 1 and time.monotonic() < until:
        time.sleep(0.01)
    assert len(first.sharing.lending) == 1


def test_a_lease_that_no_peer_ends_expires(engines):
    first = engines(kv_connector_extra_config={"kv_lease_duration": 0.05})
    first.serve(TOKENS)
    first.export("lease", TOKENS)
    until = time.monotonic() + 5
    while len(first.sharing.lending) and time.monotonic() < until:
        time.sleep(0.01)
    assert (len(first.sharing.lending), first.sharing.lending.expired) == (0, 1)
    second = engines()  # the blocks stay until their room is needed
    assert second.ask(TOKENS, first.sharing.address) == ""
    assert second.serve(TOKENS) == 16


def test_a_prompt_without_room_keeps_no_record(engines):
    first = engines(host=3 * 4096)
    first.serve(TOKENS)
    assert first.export("lease", TOKENS) == (0, [])
    assert len(first.sharing.lending) == 0
    tokens, _ = first.export("short", TOKENS[:9])
    assert tokens == 8


def test_leases_begin_anew_when_they_are_kept():
    now = [0.0]
    lending = Lending(None, 30.0, clock=lambda: now[0])
    lending.grant("a", ())
    lending.grant("b", ())
    now[0] = 20.0
    lending.keep(["a", "unknown"])
    now[0] = 40.0
    lending.expire()
    assert len(lending) == 1
    assert lending.landed("a")
    now[0] = 50.0
    lending.expire()
    assert (len(lending), lending.expired) == (0, 2)


def test_a_reset_ends_leases_and_forgets_what_peers_have(engines):
    first = engines()
    first.serve(TOKENS)
    first.export("lease", TOKENS)
    second = engines()
    assert second.ask(TOKENS, first.sharing.address) == ""
    assert second.pool.reset_prefix_cache()
    assert second.serve(TOKENS) == 0
    assert first.pool.reset_prefix_cache()
    assert len(first.sharing.lending) == 0
    third = engines()
    assert third.ask(TOKENS, first.sharing.address) == ""
    assert third.serve(TOKENS) == 0


@pytest.mark.parametrize("connector", FAST, indirect=True)
def test_a_connection_that_was_closed_is_made_again(engines):
    first, second = engines(), engines()
    first.serve(TOKENS)
    first.export("lease", TOKENS)
    for _ in range(2):
        assert second.ask(TOKENS, first.sharing.address) == ""
        for link in list(first.sharing._server._links):
            link.close()
        assert second.serve(TOKENS) == 16
        second.pool.reset_prefix_cache()


def test_ipv6():
    try:
        engine = Engine(config(kv_ip="::1"))
    except InvalidConfig:
        pytest.skip("this host has no IPv6")
    other = Engine(config())
    assert other.ask(TOKENS, engine.sharing.address) == ""
    other.close()
    engine.close()


def test_blocks_that_left_meanwhile_are_computed(engines):
    first = engines()
    first.serve(TOKENS)
    first.export("lease", TOKENS)
    second = engines()
    assert second.ask(TOKENS, first.sharing.address) == ""
    first.pool.reset_prefix_cache()
    assert second.serve(TOKENS) == 0
    assert second.tiers.stats.failed == 4


def test_a_peer_that_is_not_there_is_told_once(engines, caplog):
    engine = engines()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = taken.getsockname()
    for _ in range(2):
        assert "Connection refused" in engine.ask(TOKENS, address)
        assert engine.serve(TOKENS, load=False) == 0
        engine.pool.reset_prefix_cache()
    assert caplog.text.count("tokens are computed") == 1


def test_a_peer_that_was_there_is_told_once(caplog):
    """By the lane that asks and those that read."""
    first, second = two_engines()
    assert second.ask(TOKENS, first.sharing.address) == ""
    address = first.sharing.address
    first.close()
    assert second.serve(TOKENS) == 0
    assert "Connection refused" in second.ask([9] * 17, address)
    assert caplog.text.count("tokens are computed") == 1
    second.close()


def test_a_peer_that_says_nothing_is_not_waited_for(engines, monkeypatch):
    monkeypatch.setattr("openinfer.kvpool.tiers.peers.sharing.TIMEOUT_S", 0.2)
    engine = engines()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        problem = engine.ask(TOKENS, silent.getsockname())
        assert "timed out" in problem or "no answer" in problem


def test_a_silent_peer_is_called_silent(monkeypatch):
    monkeypatch.setattr("openinfer.kvpool.tiers.peers.sharing.TIMEOUT_S", 0.2)
    engine = Engine(config())
    with socket.create_server(("127.0.0.1", 0)) as silent:
        engine.ask(TOKENS, silent.getsockname())
        (peer,) = engine.sharing.peers._peers.values()
        until = time.monotonic() + 5
        while not peer.outage.why and time.monotonic() < until:
            time.sleep(0.01)
        assert peer.outage.why.endswith("it was silent for 0.2 s")
    engine.close()


class Broken:
    """A peer that promises every block, and dies after `count` bytes of the first, which has 64."""

    def __init__(self, count):
        self.count, self.listener = count, socket.create_server(("127.0.0.1", 0))
        self.address = self.listener.getsockname()
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def meet(self):
        link = Link(self.listener.accept()[0], 5.0)
        greet(link, b"", {"about": ABOUT, "transports": ["tcp"]}, server=True)
        return link

    def run(self):
        questions = self.meet()
        questions.say(has=["1" * (len(names) // 64) for names in questions.hear()["names"]])
        link = self.meet()
        assert link.hear() == {"op": "transport", "transport": "tcp"}
        link.say(transport={})
        link.say(found=[True] * len(link.hear()["wants"]))
        link.give([memoryview(bytes(self.count))])
        link.close()
        questions.close()
        self.listener.close()


@pytest.mark.parametrize("count", [0, 10, 60])
def test_a_peer_that_dies_in_a_transfer_costs_its_blocks_alone(count):
    broken, engine = Broken(count), Engine(config())
    assert engine.ask(TOKENS, broken.address) == ""
    assert engine.serve(TOKENS) == 0
    broken.thread.join()
    assert engine.tiers.stats.failed == 4
    assert engine.tiers.stats.from_peer == 0
    assert engine.pool.num_free == engine.pool.num_total
    assert engine.serve(TOKENS) == 16  # its own
    engine.close()


@pytest.mark.parametrize(
    "talk",
    [b"GET / HTTP/1.1\r\n\r\n", b"\xff\xff\xff\xff", b"\x00\x00\x00\x02[]", b"\x00\x00\x00\x02{}", b"",
     b"\x00\x01\x00\x00" + b"[" * 65536],
)  # fmt: skip
def test_a_server_survives_what_it_cannot_read(talk):
    engine = Engine(config())
    with socket.create_connection(engine.sharing.address, 5.0) as stranger:
        stranger.sendall(talk)
        with suppress(OSError):  # the server may have left already
            stranger.shutdown(socket.SHUT_WR)
            while stranger.recv(4096):
                pass
    engine.serve(TOKENS)
    engine.export("lease", TOKENS)
    other = Engine(config())
    assert other.ask(TOKENS, engine.sharing.address) == ""
    assert other.serve(TOKENS) == 16
    other.close()
    engine.close()


@pytest.mark.parametrize(
    "words", [{"op": "ask"}, {"op": "read", "wants": [[0, "x"]]}, {"op": "read", "wants": [[9, "00"]]},
              {"op": "read", "wants": [[float("inf"), ""]]},
              {"op": "read", "wants": [[0, "00"]] * 1025}, {"op": "transport", "transport": "pigeons"},
              {"op": "drop tables"}, {}]
)  # fmt: skip
def test_a_peer_that_asks_nonsense_is_left(words):
    engine = Engine(config())
    link = Link(socket.create_connection(engine.sharing.address), 5.0)
    greet(link, b"", {}, server=False)
    link.say(op="transport", transport="tcp")
    assert link.hear() == {"transport": {}}
    link.say(**words)
    with pytest.raises(OSError, match="closed"):
        link.hear()
    link.close()
    engine.close()


class Strange(Broken):
    """A peer that says something strange instead of the places of its records."""

    def run(self):
        questions = self.meet()
        questions.say(has=["1" * (len(names) // 64) for names in questions.hear()["names"]])
        link = self.meet()
        link.hear()
        shares = shared.Shared()
        shares.lend(SharedRecords.of_one(4096))
        link.say(transport=shares.card())
        wants = link.hear()["wants"]
        link.say(found=[True] * len(wants))
        link.say(at=[self.count] * len(wants))
        with suppress(OSError):
            link.hear()
        link.close()
        questions.close()
        self.listener.close()
        shares.close()

    def meet(self):
        link = Link(self.listener.accept()[0], 5.0)
        greet(link, b"", {"about": ABOUT, "transports": ["shared"]}, server=True)
        return link


@pytest.mark.parametrize("place", [0.5, 1 << 70, -1, float("nan"), None])
def test_a_peer_that_names_strange_places_costs_its_blocks_alone(place):
    strange, engine = Strange(place), Engine(config())
    assert engine.ask(TOKENS, strange.address) == ""
    assert engine.serve(TOKENS) == 0
    strange.thread.join()
    assert engine.tiers.stats.failed == 4
    engine.close()


def two_engines(**fields):
    """One with a prompt to fetch, and another one of the same host."""
    first, second = Engine(config(**fields)), Engine(config(**fields))
    first.serve(TOKENS)
    first.export("lease", TOKENS)
    return first, second


@pytest.mark.parametrize("why", ["another user", "no socket"])
def test_engines_that_cannot_share_memory_use_the_next_transport(why, monkeypatch, caplog):
    first, second = two_engines()
    if why == "another user":
        monkeypatch.setattr(shared.os, "getuid", lambda: 12345)
    else:
        monkeypatch.setattr(shared.Shared, "card", lambda self: {"socket": "none"})
    assert second.ask(TOKENS, first.sharing.address) == ""
    assert second.serve(TOKENS) == 16
    assert "is not reached by shared" in caplog.text
    second.close()
    first.close()


@pytest.mark.parametrize(("shares", "way"), [(True, "shared"), (False, "tcp")])
def test_engines_of_one_host_share_memory_unless_they_must_not(shares, way, caplog):
    caplog.set_level("INFO", "openinfer.kvpool")
    first, second = two_engines(kv_connector_extra_config={"share_memory": shares})
    assert second.ask(TOKENS, first.sharing.address) == ""
    assert second.serve(TOKENS) == 16
    assert f"is reached by {way}" in caplog.text
    second.close()
    first.close()


def test_a_peer_cannot_write_to_the_memory_that_it_maps():
    first, second = two_engines()
    transport = second.sharing._shared
    memory = transport.meet(first.sharing._shared.card())
    assert not memory.flags.writeable
    with pytest.raises(PermissionError):
        mmap.mmap(first.sharing._shared._file, 0)
    second.close()
    first.sharing.close()
    first.close()  # again


@pytest.mark.parametrize("fault", ["let go", "elsewhere"])
def test_records_that_were_not_kept_are_not_used(fault, monkeypatch):
    """Either the sender dropped its records during the copy, or it names a place outside its memory."""
    first, second = two_engines()

    def send(self, link, records):
        link.say(at=[1 << 40 if fault == "elsewhere" else record.ptr - self._start for record in records])
        assert link.hear() == {"copied": True}
        link.close()

    monkeypatch.setattr(shared.Shared, "send", send)
    assert second.ask(TOKENS, first.sharing.address) == ""
    assert second.serve(TOKENS) == 0
    assert second.tiers.stats.failed == 4
    second.close()
    first.close()


def test_neighbours_travel_as_one():
    memory = memoryview(bytes(8))
    rooms = [Record(ptr, memory) for ptr in (16, 0, 8, 32, 40)]
    assert runs(rooms, [116, 100, 108, 132, 200]) == [(0, 100, 24), (32, 132, 8), (40, 200, 8)]
    with pytest.raises(ValueError, match="zip"):
        runs(rooms, [0])


def test_only_engines_that_know_the_secret_talk(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    first.write_text("a" * 32)
    second.write_text("b" * 32)
    here, same, other = (
        Engine(config(kv_connector_extra_config={"secret_file": str(path)}))
        for path in (first, first, second)
    )
    here.serve(TOKENS)
    here.export("lease", TOKENS)
    assert same.ask(TOKENS, here.sharing.address) == ""
    assert same.serve(TOKENS) == 16
    assert "does not know this engine's secret" in other.ask(TOKENS, here.sharing.address)
    for engine in (same, other, here):
        engine.close()


def test_a_request_may_name_peers_of_this_host_only_without_a_secret(tmp_path):
    engine = Engine(config(kv_role="kv_consumer"))
    engine.sharing.check(("127.0.0.1", 5000))
    with pytest.raises(InvalidConfig, match="must be a loopback address"):
        engine.sharing.check(("192.0.2.1", 5000))
    assert engine.sharing.address is None
    assert engine.export("lease", TOKENS) == (0, [])
    engine.close()


def test_proofs_cannot_be_sent_back():
    left, right = (Link(one, 5.0) for one in socket.socketpair())

    def mirror():
        hello = right.hear()
        right.say(**hello)
        right.say(**right.hear())

    thread = threading.Thread(target=mirror)
    thread.start()
    with pytest.raises(PeerRefused, match="secret"):
        greet(left, b"secret", {}, server=True)
    thread.join()
    left.close()
    right.close()


def test_another_protocol_is_refused():
    left, right = (Link(one, 5.0) for one in socket.socketpair())
    right.say(protocol="openinfer-kv/3", number="0")
    with pytest.raises(PeerRefused, match="it speaks 'openinfer-kv/3', this engine 'openinfer-kv/2'"):
        greet(left, b"", {}, server=True)
    left.close()
    right.close()


def test_questions_that_are_forgotten_are_not_answered():
    first, second = Engine(config()), Engine(config())
    peers = second.sharing.peers
    assert peers.ask(7, [[b"n" * 32]], first.sharing.address)
    peers.forget(7)
    assert peers.answers(0.05) == []
    assert not peers.ask(8, [[b"n" * 32]])  # there is no peer for every question
    second.close()
    first.close()


def test_claims_are_bounded(monkeypatch):
    monkeypatch.setattr(client, "MAX_CLAIMS", 2)
    first, second = two_engines()
    assert second.ask(TOKENS, first.sharing.address) == ""
    assert sum(second.sharing.peers.has(0, name) for name in second.pool.missing(TOKENS)[0]) == 2
    second.close()
    first.close()


def test_the_peer_that_was_asked_longest_ago_makes_room(monkeypatch, caplog):
    """Not one whose lease is kept, nor one that is asked for every prompt."""
    monkeypatch.setattr(client, "MAX_PEERS", 2)
    first, other = two_engines()
    second = Engine(config(), [other.sharing.address])
    peers = second.sharing.peers
    assert second.ask(TOKENS) == ""
    for port in (1, 2, 3):
        assert "refused" in second.ask(TOKENS, ("127.0.0.1", port))
    assert second.ask(TOKENS, first.sharing.address) == ""
    assert len(peers._peers) == 2
    peers.keep(first.sharing.address, "lease")
    assert second.ask(TOKENS, ("127.0.0.1", 4)) is None
    assert "127.0.0.1:4 is not asked, because 2 peers keep blocks for requests" in caplog.text
    assert second.serve(TOKENS) == 16
    for engine in (second, other, first):
        engine.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kv-")]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x", "this is no JSON"),
        ("[]", "must be an object with kv_connector"),
        ('{"kv_role": "kv_both"}', "must be an object with kv_connector"),
        ('{"kv_connector": "LMCacheConnectorV1"}', "NixlConnector, TcpConnector are possible"),
        ('{"kv_connector": "TcpConnector", "kv_roles": 1}', "keys among kv_connector, kv_role"),
        (
            '{"kv_connector": "TcpConnector", "kv_role": "x"}',
            "kv_producer, kv_consumer, kv_both are possible",
        ),
        ('{"kv_connector": "TcpConnector", "kv_buffer_device": "cuda"}', "travel through host memory"),
        ('{"kv_connector": "TcpConnector", "kv_buffer_size": 0}', "give bytes, more than 0"),
        ('{"kv_connector": "TcpConnector", "kv_port": "x"}', "0 to 65535 are possible"),
        ('{"kv_connector": "TcpConnector", "kv_rank": 3}', "kv_rank has no meaning here"),
        ('{"kv_connector": "TcpConnector", "engine_id": ""}', "engine_id is ''"),
        ('{"kv_connector": "TcpConnector", "kv_load_failure_policy": "x"}', "recompute, fail are possible"),
        ('{"kv_connector": "TcpConnector", "kv_connector_extra_config": {"x": 1}}', "x is 1; possible are"),
        (
            '{"kv_connector": "TcpConnector", "kv_connector_extra_config": {"kv_lease_duration": -1}}',
            "kv_lease_duration is -1.0",
        ),
        (
            '{"kv_connector": "TcpConnector", "kv_connector_extra_config": {"share_memory": 1}}',
            "share_memory is 1; possible are",
        ),
        ('{"kv_connector": "TcpConnector", "kv_ip": 7}', "kv_ip is 7; it must be a text"),
        ('{"kv_connector": "TcpConnector", "kv_buffer_size": NaN}', "kv_buffer_size is nan"),
        ('{"kv_connector": "TcpConnector", "kv_buffer_size": Infinity}', "kv_buffer_size is inf"),
        ('{"kv_connector": "TcpConnector", "kv_connector_extra_config": null}', "it must be an object"),
        ('{"kv_connector": "TcpConnector", "kv_connector_extra_config": [1]}', "it must be an object"),
        (
            '{"kv_connector": "TcpConnector", "kv_connector_extra_config": {"kv_lease_duration": NaN}}',
            "kv_lease_duration is nan",
        ),
        (
            '{"kv_connector": "NixlConnector", "kv_connector_extra_config": {"backends": [7]}}',
            "backends is .7.; give a list of names",
        ),
        (
            '{"kv_connector": "NixlConnector", "kv_connector_extra_config": {"backends": []}}',
            "backends is ..; give a list of names",
        ),
        ('{"kv_connector": "TcpConnector", "kv_ip": "192.0.2.1"}', "can be reached from other hosts"),
        ('{"kv_connector": "TcpConnector", "kv_ip": "0.0.0.0"}', "give an address of this host"),
    ],
)
def test_configurations_that_cannot_be_followed(text, words):
    with pytest.raises(InvalidConfig, match="^(?s:.*)" + words):
        TransferConfig.parse(text)


def test_the_keys_of_vllm():
    given = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_load_failure_policy": "fail",
             "kv_rank": None, "kv_parallel_size": 1, "kv_connector_extra_config": {"backends": ["UCX"]}}  # fmt: skip
    parsed = TransferConfig.parse(json.dumps(given))
    assert (parsed.kv_role, parsed.kv_port, parsed.lease_s, parsed.backends) == (
        "kv_both",
        14579,
        30.0,
        ["UCX"],
    )
    assert parsed.secret() == b""
    assert parsed.engine_id != TransferConfig.parse(json.dumps(given)).engine_id


def test_secrets_are_files_with_enough_in_them(tmp_path):
    short = tmp_path / "short"
    short.write_text("abc")
    for path, words in ((short, "give at least 16"), (tmp_path / "none", "cannot be read")):
        with pytest.raises(InvalidConfig, match=words):
            config(kv_connector_extra_config={"secret_file": str(path)}).secret()


def test_addresses():
    assert parse_addresses(["a:1", "[::1]:2"]) == [("a", 1), ("::1", 2)]
    for text in ("a", "a:", ":1", "a:0", "a:65536", "a:x"):
        with pytest.raises(InvalidConfig, match="give HOST:PORT"):
            parse_addresses([text])


def test_an_address_that_is_taken_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(InvalidConfig, match="cannot be had"):
        Sharing(TransferConfig("TcpConnector", kv_port=taken.getsockname()[1]), [PAGES], ABOUT)


def test_a_missing_nixl_names_the_command(monkeypatch):
    monkeypatch.setattr(nixl, "_MODULES", ("nixl_that_is_missing._api",))
    with pytest.raises(InvalidConfig, match="pip install --no-deps nixl-cu13"):
        Sharing(config("NixlConnector"), [PAGES], ABOUT)


def test_records_differ():
    """The control of the checks of content: a block that holds something else is noticed."""
    first = Engine(config())
    first.serve(TOKENS)
    first.cache[0].numpy()[:] = np.uint8(3)
    first.export("lease", TOKENS)
    second = Engine(config())
    assert second.ask(TOKENS, first.sharing.address) == ""
    with pytest.raises(AssertionError):
        second.serve(TOKENS)
    second.tiers.close()
    first.close()


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
                link.close()
        engine.pool.poll(0.0)
        engine.pool.check_integrity()
    return exports


@pytest.mark.parametrize(
    ("seed", "count"), [(0, 150), *(pytest.param(seed, 1500, marks=pytest.mark.slow) for seed in (1, 2, 3))]
)
def test_no_block_and_no_slot_is_lost_in_random_histories(seed, count, monkeypatch):
    monkeypatch.setattr(lane, "RETRY_S", 0.01)
    lease = {"kv_connector_extra_config": {"kv_lease_duration": 0.2}}
    engines = [Engine(config(**lease), host=12 * 4096) for _ in range(3)]
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


PEER = """
import sys, time
sys.path.insert(0, sys.argv[1])
import test_peers as t
groups = (t.Group("pages", 4, 18, 16 << 20),)
engine = t.Engine(t.config(sys.argv[2]), groups=groups, host=17 * (16 << 20))
tokens = [7] * 65
with engine.pool.acquire(tokens) as lease:
    lease.reserve(65)
    engine.cache[0].numpy()[:] = 7
    lease.commit(tokens, 65)
engine.export("lease", tokens)
print(engine.sharing.address[1], flush=True)
time.sleep(60)
"""


@pytest.mark.slow
def test_a_peer_that_is_killed_in_a_transfer_costs_its_blocks_alone(connector):
    """256 MB are on their way when the other process is killed."""
    command = [sys.executable, "-c", PEER, str(Path(__file__).parent), connector]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as peer:
        assert peer.stdout is not None
        address = ("127.0.0.1", int(peer.stdout.readline()))
        engine = Engine(config(connector), groups=(Group("pages", 4, 18, 16 << 20),), host=17 * (16 << 20))
        tokens = [7] * 65
        assert engine.ask(tokens, address) == ""
        with engine.pool.acquire(tokens) as lease:
            assert lease.num_loadable == 64
            assert lease.load()
            time.sleep(0.02)
            peer.kill()
            assert engine.pool.poll(20.0) == [lease]
            for block in list(lease.block_table())[: lease.num_cached // 4]:
                assert set(engine.cache[0].numpy()[block].tolist()) == {7}
            failed = engine.tiers.stats.failed
            assert lease.num_cached < 64
            assert failed > 0
        assert engine.pool.num_free == engine.pool.num_total
        engine.close()
