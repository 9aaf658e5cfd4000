"""The way from one engine to another: shared memory or a connection, secrets and the protocol."""

import fcntl
import mmap
import os
import socket
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from sharing_engine import ABOUT, PAGES, TOKENS, SharingEngine, transfer, two_engines

from openinfer.kvpool import InvalidConfig, PeerRefused
from openinfer.kvpool.tiers import SharedRecords, Sharing
from openinfer.kvpool.tiers.peers import transport as shared
from openinfer.kvpool.tiers.peers.config import PeerRange
from openinfer.kvpool.tiers.peers.link import Link, greet
from openinfer.kvpool.tiers.peers.transport import TransferRecord, runs
from openinfer.tensor.handover import Giver, sealed_file


@pytest.mark.parametrize("why", ["another user", "no socket"])
def test_engines_that_cannot_share_memory_use_the_next_transport(why, monkeypatch, caplog):
    first, second = two_engines()
    if why == "another user":
        monkeypatch.setattr(os, "getuid", lambda: 12345)
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
    rooms = [TransferRecord(ptr, memory) for ptr in (16, 0, 8, 32, 40)]
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


@pytest.fixture
def secret(tmp_path: Path) -> dict[str, str]:
    """kv_connector_extra_config with a secret."""
    path = tmp_path / "secret"
    path.write_text("s" * 32)
    return {"secret_file": str(path)}


def test_a_request_may_name_only_peers_that_are_allowed(secret):
    """And only where peers prove that they know a secret."""
    for extra, words in (({}, "has a secret_file"), (secret, "no peer that --kv-peer allows")):
        config = transfer(kv_role="kv_consumer", kv_connector_extra_config=extra)
        sharing = Sharing(config, [PAGES], ABOUT, [("127.0.0.1", 5000)], [PeerRange("192.0.2.0/24", 0)])
        for address in [("127.0.0.1", 5000), ("192.0.2.1", 9)]:
            with suppress(*[] if extra else [InvalidConfig]):
                sharing.check(address)
        for address in [("127.0.0.1", 5001), ("localhost", 5000), ("192.0.3.1", 9)]:
            with pytest.raises(InvalidConfig, match=words):
                sharing.check(address)
        sharing.close()


def test_a_consumer_lends_nothing():
    engine = SharingEngine(transfer(kv_role="kv_consumer"))
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
        greet(left, b"secret", {}, server=False)
    thread.join()
    left.close()
    right.close()


@pytest.mark.attack
@pytest.mark.parametrize("from_where", ["another address", "the same addresses"])
def test_who_hands_proofs_on_gains_nothing(secret, from_where, monkeypatch):
    """A process without the secret between an engine and the server that it wants to read from."""
    server, victim = (SharingEngine(transfer(kv_connector_extra_config=secret)) for _ in range(2))
    server.serve(TOKENS)
    server.export("lease", TOKENS)
    trap, believed, got = socket.create_server(("127.0.0.1", 0)), [], []
    if from_where == "the same addresses":  # as one that can write packets of any address
        monkeypatch.setattr(Link, "ends", "equal")

    def relay():
        to_victim = Link(trap.accept()[0], 5.0)
        to_server = Link(socket.create_connection(server.sharing.address), 5.0)
        with suppress(OSError):
            to_victim.say(**to_server.hear())
            to_server.say(**to_victim.hear())
            to_server.say(**to_victim.hear())
            believed.append(to_server.hear()["proof"])
            to_victim.say(proof=believed[0])
            for words in ({"op": "read", "wants": [[0, "00"]]}, {"op": "transport", "transport": "tcp"}):
                to_server.say(**words)
                to_server.hear()  # the card, before a tag is asked for
                got.append(to_server.hear())
        to_victim.close()
        to_server.close()

    thread = threading.Thread(target=relay)
    thread.start()
    assert victim.ask(TOKENS, trap.getsockname()) != ""
    thread.join()
    assert bool(believed[0]) == (from_where == "the same addresses")
    assert got == []
    trap.close()
    victim.close()
    server.close()


def known(key=b"k", timeout_s=5.0):
    """Two ends that trust each other."""
    ends = [Link(one, timeout_s) for one in socket.socketpair()]
    for end, server in zip(ends, (True, False), strict=True):
        end.server = server
        end.trust(key, "x")
    return ends


@pytest.mark.attack
@pytest.mark.parametrize("fault", ["changed", "again", "sent back", "another key"])
def test_words_that_another_has_written_are_refused(fault):
    (left, left_wire), (right_wire, right) = known(), known(b"l" if fault == "another key" else b"k")
    raw_left, raw_right = left_wire._socket, right_wire._socket
    left.say(op="keep")
    frame = raw_left.recv(4096)
    if fault == "changed":
        frame = frame.replace(b"keep", b"kill")
    if fault == "again":
        raw_right.sendall(frame)
        assert right.hear() == {"op": "keep"}
    (raw_left if fault == "sent back" else raw_right).sendall(frame)
    with pytest.raises(PeerRefused, match="changed on its way"):
        (left if fault == "sent back" else right).hear()
    for link in (left, left_wire, right_wire, right):
        link.close()


@pytest.mark.attack
@pytest.mark.parametrize(("trusted", "length"), [(False, 5000), (True, 100_000)])
def test_no_more_is_taken_in_than_the_exchange_needs(trusted, length, monkeypatch):
    """A length costs its sender four bytes, and the listener nothing."""
    left, right = known() if trusted else [Link(one, 5.0) for one in socket.socketpair()]
    right._socket.sendall(length.to_bytes(4, "big"))
    taken = []
    monkeypatch.setattr(
        Link,
        "fill",
        lambda self, rooms, fill=Link.fill: (taken.append(len(rooms[0])), fill(self, rooms)),
    )
    with pytest.raises(PeerRefused, match=f"a message of {length} bytes came"):
        left.hear()
    assert taken == [4]
    right._socket.sendall((5_000_000).to_bytes(4, "big"))
    right._socket.shutdown(socket.SHUT_WR)
    with pytest.raises(ConnectionResetError if trusted else PeerRefused):
        left.hear(8_000_000)
    assert max(taken) <= 1 << 20  # as bytes come
    left.close()
    right.close()


@pytest.mark.attack
@pytest.mark.parametrize("direction", ["hears", "fills", "gives"])
def test_time_does_not_begin_anew_with_each_piece(direction):
    """The other end moves a byte in a tenth of the time that is allowed, on and on."""
    left, right = known(timeout_s=0.5)
    ended = threading.Event()

    def drip():
        with suppress(OSError):
            if direction == "hears":
                right._socket.sendall((1000).to_bytes(4, "big"))
            while not ended.wait(0.05):
                right._socket.recv(1) if direction == "gives" else right._socket.sendall(b"x")

    thread = threading.Thread(target=drip)
    thread.start()
    talk = {
        "hears": left.hear,
        "fills": lambda: left.fill([memoryview(bytearray(1000))]),
        "gives": lambda: left.give([memoryview(bytes(1 << 24))]),
    }
    with pytest.raises(TimeoutError, match=r"it took more than 0\.5 s"):
        talk[direction]()
    ended.set()
    thread.join()
    left.close()
    right.close()


@pytest.mark.attack
@pytest.mark.parametrize("kind", ["no seals", "a file", "shorter", "another user"])
def test_memory_that_could_become_shorter_is_not_mapped(kind, tmp_path, monkeypatch):
    """To touch what is gone would end the engine by SIGBUS."""
    if kind == "a file":
        file = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    else:
        file = os.memfd_create("lie", os.MFD_ALLOW_SEALING)
    os.ftruncate(file, 1 << 20)
    if kind == "shorter":
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE)
    name = f"lie-{os.getpid()}-{kind}"
    words = "F_SEAL_SHRINK"
    if kind == "another user":
        os.close(file)
        file, words = sealed_file("theirs", 4096), "it belongs to user"
        monkeypatch.setattr(os, "getuid", lambda: 12345)
    giver = Giver("\0" + name, lambda asking: socket.send_fds(asking, [b"m"], [file]), "lie")
    with pytest.raises(PermissionError, match=words):
        shared.Shared().meet({"socket": name})
    giver.close()
    os.close(file)


def test_records_are_sealed():
    records = SharedRecords.new(1 << 20)
    for size in (0, 1 << 22):
        with pytest.raises(PermissionError):
            os.ftruncate(records.file, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(records.file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_another_protocol_is_refused():
    left, right = (Link(one, 5.0) for one in socket.socketpair())
    right.say(protocol="openinfer-kv/4", number="0")
    with pytest.raises(PeerRefused, match="it speaks 'openinfer-kv/4', this engine 'openinfer-kv/3'"):
        greet(left, b"", {}, server=True)
    left.close()
    right.close()
