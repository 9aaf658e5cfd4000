"""What a peer costs that dies, is silent, or says something strange: its blocks, which are computed, and no more."""

import resource
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress

import numpy as np
import pytest
from sharing_engine import ABOUT, TOKENS, SharingEngine, transfer, two_engines

from openinfer.kvpool import Group
from openinfer.kvpool.tiers import SharedRecords
from openinfer.kvpool.tiers.peers import server
from openinfer.kvpool.tiers.peers import transport as shared
from openinfer.kvpool.tiers.peers.link import Link, greet

pytestmark = pytest.mark.attack


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
        assert "took more than" in problem or "no answer" in problem


def test_a_silent_peer_is_called_silent_and_left_for_a_time(monkeypatch):
    monkeypatch.setattr("openinfer.kvpool.tiers.peers.sharing.TIMEOUT_S", 0.2)
    monkeypatch.setattr("openinfer.kvpool.tiers.peers.lane.RETRY_S", 0.1)
    engine = SharingEngine(transfer())
    with socket.create_server(("127.0.0.1", 0)) as silent:
        engine.ask(TOKENS, silent.getsockname())
        (peer,) = engine.sharing.peers._peers.values()
        until = time.monotonic() + 5
        while not peer.outage.why and time.monotonic() < until:
            time.sleep(0.01)
        assert peer.outage.why.endswith("it took more than 0.2 s")
        assert peer.outage.until > time.monotonic() + 1.0
        assert engine.ask(TOKENS, silent.getsockname()) == peer.outage.why
    engine.close()


@pytest.fixture
def liar():
    """Makes peers that promise every block and have none. answers: what they do instead, by the exchange; it is called
    with the link, its socket and the words."""
    made = []

    def make(transports=("tcp",), about=ABOUT, **answers):
        listener = socket.create_server(("127.0.0.1", 0))
        made.append(listener)

        def serve(connected):
            link = Link(connected, 60.0)
            with suppress(OSError):
                if "greet" in answers:
                    answers["greet"](link, connected, None)
                greet(link, b"", {"about": about, "transports": list(transports)}, server=True)
                while True:
                    words = link.hear(1 << 20)
                    if words["op"] in answers:
                        answers[words["op"]](link, connected, words)
                    elif words["op"] == "ask":
                        link.say(has=["1" * (len(names) // 64) for names in words["names"]])
                    elif words["op"] == "transport":
                        link.say(transport={})
                    elif words["op"] == "read":
                        link.say(found=[False] * len(words["wants"]))
            link.close()

        def accept():
            with suppress(OSError):
                while True:
                    threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        return listener.getsockname()

    yield make
    for listener in made:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def drip(link, connected, words):
    """A byte in a tenth of the time that an exchange may take, for ever."""
    if words and words["op"] == "read":
        link.say(found=[True] * len(words["wants"]))
    else:
        connected.sendall((4000).to_bytes(4, "big"))
    while True:
        connected.sendall(b" ")
        time.sleep(0.05)


@pytest.mark.parametrize("connector", ["TcpConnector"], indirect=True)  # what liars have
@pytest.mark.parametrize("exchange", ["greet", "ask", "transport", "read"])
def test_a_peer_that_drips_is_left_for_a_time(exchange, liar, engines, monkeypatch, caplog):
    """No exchange takes longer than it may, however often a byte comes; the second prompt waits for nothing."""
    monkeypatch.setattr("openinfer.kvpool.tiers.peers.sharing.TIMEOUT_S", 1.0)
    monkeypatch.setattr(
        "openinfer.kvpool.tiers.peers.lane.SLOW", 9.0
    )  # on a busy machine other exchanges may be
    engine, address = engines(), liar(**{exchange: drip})
    asked = engine.ask(TOKENS, address)
    assert (asked == "") == (exchange in ("transport", "read"))
    assert engine.serve(TOKENS) == 0
    (peer,) = engine.sharing.peers._peers.values()
    assert until_true(lambda: "took more than 1 s" in peer.outage.why)
    assert peer.outage.until > time.monotonic() + 2.0
    assert "it took more than 1 s" in engine.ask([9] * 17, address)
    assert caplog.text.count("tokens are computed") == 1


def test_a_peer_that_is_slow_is_left_for_a_time(liar, engines, monkeypatch, caplog):
    """It answers in time, again and again: each prompt would wait for it."""
    monkeypatch.setattr("openinfer.kvpool.tiers.peers.sharing.TIMEOUT_S", 1.0)

    def slowly(link, connected, words):
        time.sleep(0.4)
        link.say(has=["1" * (len(names) // 64) for names in words["names"]])

    engine, address = engines(), liar(ask=slowly)
    assert engine.ask(TOKENS, address) == ""
    assert "is slow: an exchange took" in engine.ask([9] * 17, address)
    assert "is slow" in caplog.text


NONSENSE = [
    None,
    True,
    [],
    {},
    "x",
    -1,
    10**30,
    1e300,
    float("nan"),
    [None],
    [[]],
    {"agent": []},
    "\ud800",
    ["\0"] * 9,
]


@pytest.mark.parametrize("exchange", ["ask", "transport", "read", "places", "card"])
def test_no_word_of_a_peer_ends_a_thread(exchange, liar, engines, monkeypatch):
    monkeypatch.setattr("openinfer.kvpool.tiers.peers.sharing.TIMEOUT_S", 0.5)
    monkeypatch.setattr("openinfer.kvpool.tiers.peers.lane.RETRY_S", 0.0)
    monkeypatch.setattr("openinfer.kvpool.tiers.peers.lane.RETRY_TIMES", 0.0)
    ended = []
    monkeypatch.setattr(threading, "excepthook", lambda args: ended.append(args))
    for value in NONSENSE:
        answers = {
            "ask": {"ask": lambda link, _, words: link.say(has=value)},  # noqa: B023
            "transport": {"transport": lambda link, _, words: link.say(transport=value)},  # noqa: B023
            "read": {"read": lambda link, _, words: link.say(found=value)},  # noqa: B023
            "places": {"read": lambda link, _, words: (link.say(found=[True] * 4), link.say(at=value))},  # noqa: B023
            "card": {},
        }[exchange]
        transports = value if exchange == "card" and isinstance(value, list) else ["shared", "tcp"]
        about = value if exchange == "card" else ABOUT
        engine = engines()
        address = liar(transports, about, **answers)
        engine.ask(TOKENS, address)
        assert engine.serve(TOKENS) == 0, value
        assert all(lane.runs for peer in engine.sharing.peers._peers.values() for lane in peer._lanes)
        engine.pool.reset_prefix_cache()
    assert ended == []


@pytest.mark.parametrize("op", ["ask", "read", "transport", "keep", "end", None])
def test_no_word_of_a_peer_ends_a_server(op, engines, monkeypatch):
    ended = []
    monkeypatch.setattr(threading, "excepthook", lambda args: ended.append(args))
    engine = engines()
    for value in NONSENSE:
        link = Link(socket.create_connection(engine.sharing.address), 5.0)
        greet(link, b"", {}, server=False)
        field = {
            "ask": "names",
            "read": "wants",
            "transport": "transport",
            "keep": "leases",
            "end": "lease",
            None: "op",
        }
        link.say(**{"op": op, field[op]: value})
        with suppress(OSError):
            link.say(op="ask", names=[])
            link.hear()
        link.close()
    first, second = two_engines()
    assert first.ask(TOKENS, second.sharing.address) == ""
    second.close()
    first.close()
    assert ended == []
    assert engine.sharing._server._acceptor.is_alive()


def test_strangers_take_no_link_of_a_peer(engines, monkeypatch):
    """They are left when the time of their greeting is over, whatever they send, and have a share of the links."""
    monkeypatch.setattr(server, "MAX_LINKS", 64)
    engine, peer = engines(), engines()
    engine.serve(TOKENS)
    engine.export("lease", TOKENS)
    links = engine.sharing._server._links
    strangers = [socket.create_connection(engine.sharing.address) for _ in range(100)]
    assert peer.ask(TOKENS, engine.sharing.address) == ""
    assert len(engine.sharing._server._strangers) <= 16
    assert until_true(lambda: len(links) <= 17)
    monkeypatch.setattr(server, "GREETING_S", 0.3)
    late = socket.create_connection(engine.sharing.address)
    late.sendall((1000).to_bytes(4, "big"))
    with pytest.raises(OSError, match=r"Broken pipe|reset"):  # noqa: PT012
        for _ in range(100):
            late.sendall(b"x")
            time.sleep(0.05)
    assert peer.serve(TOKENS) == 16
    for one in (*strangers, late):
        one.close()


def test_known_peers_are_bounded_too(engines, monkeypatch):
    monkeypatch.setattr(server, "MAX_LINKS", 8)
    engine, links = engines(), []
    for _ in range(6):
        links.append(Link(socket.create_connection(engine.sharing.address), 5.0))
        greet(links[-1], b"", {}, server=False)
        assert until_true(lambda: not engine.sharing._server._strangers)  # else the next may be known first
    one = Link(socket.create_connection(engine.sharing.address), 5.0)
    greet(one, b"", {}, server=False)
    with pytest.raises(OSError, match="closed"):
        one.hear()
    for link in (*links, one):
        link.close()


def test_a_server_outlives_a_lack_of_descriptors(engines, caplog):
    """Peers are answered afterwards, and leases expire meanwhile."""
    engine, other = engines(kv_connector_extra_config={"kv_lease_duration": 0.3}), engines()
    engine.serve(TOKENS)
    engine.export("lease", TOKENS)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as client:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            client.connect(engine.sharing.address)
            assert until_true(lambda: not len(engine.sharing.lending))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert other.ask(TOKENS, engine.sharing.address) == ""
    assert other.serve(TOKENS) == 16
    assert caplog.text.count("KV peers: a connection cannot be taken") == 1


def until_true(done):
    """Whether it is so within 10 s."""
    until = time.monotonic() + 10
    while not done() and time.monotonic() < until:
        time.sleep(0.01)
    return done()


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
    broken, engine = Broken(count), SharingEngine(transfer())
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
    engine = SharingEngine(transfer())
    with socket.create_connection(engine.sharing.address, 5.0) as stranger:
        stranger.sendall(talk)
        with suppress(OSError):  # the server may have left already
            stranger.shutdown(socket.SHUT_WR)
            while stranger.recv(4096):
                pass
    engine.serve(TOKENS)
    engine.export("lease", TOKENS)
    other = SharingEngine(transfer())
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
    engine = SharingEngine(transfer())
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
        shares.lend(SharedRecords.new(4096))
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
    strange, engine = Strange(place), SharingEngine(transfer())
    assert engine.ask(TOKENS, strange.address) == ""
    assert engine.serve(TOKENS) == 0
    strange.thread.join()
    assert engine.tiers.stats.failed == 4
    engine.close()


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


def test_records_differ():
    """The control of the checks of content: a block that holds something else is noticed."""
    first = SharingEngine(transfer())
    first.serve(TOKENS)
    first.cache[0].numpy()[:] = np.uint8(3)
    first.export("lease", TOKENS)
    second = SharingEngine(transfer())
    assert second.ask(TOKENS, first.sharing.address) == ""
    with pytest.raises(AssertionError):
        second.serve(TOKENS)
    second.tiers.close()
    first.close()


PEER = """
import sys, time
from openinfer.kvpool import Group
from sharing_engine import SharingEngine, transfer
groups = (Group("pages", 4, 18, 16 << 20),)
engine = SharingEngine(transfer(sys.argv[1]), groups=groups, host=17 * (16 << 20))
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
    command = [sys.executable, "-c", PEER, connector]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as peer:
        assert peer.stdout is not None
        address = ("127.0.0.1", int(peer.stdout.readline()))
        engine = SharingEngine(
            transfer(connector), groups=(Group("pages", 4, 18, 16 << 20),), host=17 * (16 << 20)
        )
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
