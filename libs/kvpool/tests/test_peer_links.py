"""The way from one engine to another: shared memory or a connection, secrets and the protocol."""

import mmap
import socket
import threading

import pytest

from openinfer.kvpool import InvalidConfig, PeerRefused
from openinfer.kvpool.tiers.peers import shared
from openinfer.kvpool.tiers.peers.link import Link, greet
from openinfer.kvpool.tiers.peers.transport import Record, runs
from openinfer.kvpool.tiers.testing import TOKENS, SharingEngine, transfer, two_engines


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
        SharingEngine(transfer(kv_connector_extra_config={"secret_file": str(path)}))
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
    engine = SharingEngine(transfer(kv_role="kv_consumer"))
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
