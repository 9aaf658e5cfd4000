"""Engines that share blocks: what comes from a peer, and how long it is there."""

import importlib.util
import threading
import time

import pytest
from sharing_engine import ABOUT, PAGES, STATES, TOKENS, SharingEngine, transfer, two_engines

from openinfer.kvpool import Group, InvalidConfig, hash_blocks
from openinfer.kvpool.tiers.peers import client
from openinfer.kvpool.tiers.peers.lending import Lending

NIXL = pytest.mark.skipif(importlib.util.find_spec("nixl_cu13") is None, reason="nixl-cu13 is not installed")
FAST = ["shared", "TcpConnector", pytest.param("NixlConnector", marks=NIXL)]


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


def test_what_is_on_its_way_to_host_memory_is_promised_to_nobody(engines):
    """From the device, or from a disk or peer. A lease has landed once all of it is there, or lost."""
    first = engines()
    first.serve(TOKENS)
    _, ((last,),) = first.sharing.export("lease", first.pool, first.tiers, TOKENS, b"", None)
    lending, host = first.sharing.lending, first.tiers._host
    names = [bytes.fromhex(last), b"n" * 32]
    assert lending.has(0, names) == [False, False]
    assert not lending.landed("lease")
    first.tiers.collect()
    assert lending.has(0, names) == [True, False]
    assert lending.landed("lease")
    slot = host.take(0, b"n" * 32)  # as for a read
    assert lending.grant("read", [(0, b"n" * 32)]) == 1
    assert lending.has(0, names) == [True, False]
    assert not lending.landed("read")
    host.forget(slot)  # it failed
    assert lending.landed("read")
    host.leave(slot)


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
            link.end()
        assert second.serve(TOKENS) == 16
        second.pool.reset_prefix_cache()


def test_ipv6():
    try:
        engine = SharingEngine(transfer(kv_ip="::1"))
    except InvalidConfig:
        pytest.skip("this host has no IPv6")
    other = SharingEngine(transfer())
    assert other.ask(TOKENS, engine.sharing.address) == ""
    other.close()
    engine.close()


def test_questions_that_are_forgotten_are_not_answered():
    first, second = SharingEngine(transfer()), SharingEngine(transfer())
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
    second = SharingEngine(transfer(), [other.sharing.address])
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
