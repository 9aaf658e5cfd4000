"""Many transfers between two engines with little host memory, late bytes, short leases and resets.

Every token is that of one engine, in float32. A control sends the wrong records.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from openinfer.frontend.contract import Finished, KVTransfer
from openinfer.kvpool.tiers.peers import lane
from openinfer.kvpool.tiers.peers.link import Link
from openinfer.kvpool.tiers.peers.transport import Shared, Tcp

pytestmark = pytest.mark.slow

GOLDENS = Path(__file__).parent / "goldens"
DECODE = KVTransfer(do_remote_decode=True)
TOKENS = 4
LENGTHS = (33, 137, 150)
ROOM = {"qwen3-tiny": 5.3e6, "qwen3_5-tiny": 12e6}
"""Bytes of host memory: about two of the longest prompts."""
CACHE = {"qwen3-tiny": 5 << 20, "qwen3_5-tiny": 8 << 20}
"""Bytes of the cache: fewer than that, so that prompts are fetched again."""


def prompts(rng: random.Random) -> list[list[int]]:
    """Families of prompts that begin alike."""
    found = []
    for _ in range(3):
        stem = [rng.randrange(10, 480) for _ in range(100)]
        found += [
            stem[: length // 2] + [rng.randrange(10, 480) for _ in range(length - length // 2)]
            for length in LENGTHS
        ]
    return found


def slow(monkeypatch: pytest.MonkeyPatch, rng: random.Random) -> None:
    """Bytes come late on both sides, and in another order than requests."""
    for kind in (Shared, Tcp):
        for name in ("send", "receive"):
            act = getattr(kind, name)

            def later(self: Any, *args: Any, act: Callable[..., None] = act) -> None:
                time.sleep(rng.choice([0.0, 0.0, 0.002, 0.02]))
                act(self, *args)

            monkeypatch.setattr(kind, name, later)
    monkeypatch.setattr(lane, "RETRY_S", 0.01)


class Pair:
    """A prefill and a decode engine, and one that computes all itself."""

    def __init__(self, session: Any, model: str, rng: random.Random, secret: Path) -> None:
        secret.write_text("a secret that no request knows")
        flags = {"max_model_len": 320, "max_num_seqs": 4}
        config = {
            "kv_connector": "TcpConnector", "kv_port": 0, "kv_buffer_size": ROOM[model],
            "kv_connector_extra_config": {"kv_lease_duration": 0.3, "secret_file": str(secret)},
        }  # fmt: skip
        shares = {
            "kv_transfer_config": json.dumps(config), "kv_peer": ["127.0.0.1:*"],
            "kv_cache_memory_bytes": CACHE[model],
        }  # fmt: skip
        self.plain = session(GOLDENS / model, **flags)
        self.prefill, self.decode = (session(GOLDENS / model, **flags, **shares) for _ in range(2))
        self.rng, self.asked = rng, list[tuple[int, int]]()

    def want(self, prompt: list[int]) -> list[int]:
        number = self.plain.submit(prompt, TOKENS, ignore_eos=True)
        self.plain.finish()
        return list(self.plain.outcomes[number].tokens)

    def turn(self, which: int, prompt: list[int]) -> None:
        """A request goes to both engines, while earlier ones run and other things happen."""
        number = self.prefill.submit(prompt, 1, kv_transfer=DECODE)
        until = time.monotonic() + 30
        while not self.prefill.outcomes[number].terminals:
            assert time.monotonic() < until
            self.prefill.step(0.001)
            self.decode.step(0.0)
        (terminal,) = self.prefill.outcomes[number].terminals
        assert isinstance(terminal, Finished)
        given = terminal.kv_transfer
        self.asked.append((self.decode.submit(prompt, TOKENS, kv_transfer=given, ignore_eos=True), which))
        for _ in range(self.rng.randrange(6)):
            self.decode.step(0.001)
        if self.rng.random() < 0.5:
            self.finish()
            self.decode.engine.pool.reset_prefix_cache()
        chance = self.rng.random()
        if chance < 0.05:
            self.decode.engine.abort(self.asked[-1][0])
        elif chance < 0.10:
            self.rng.choice([self.prefill, self.decode]).engine.pool.reset_prefix_cache()  # if none is in use
        elif chance < 0.15:
            for link in list(self.prefill.engine._transfers.sharing._server._links):
                link.close()

    def finish(self) -> None:
        until = time.monotonic() + 60
        while self.decode.open or self.prefill.open:
            assert time.monotonic() < until
            self.decode.step(0.005)
            self.prefill.step(0.0)

    def wrong(self, wants: dict[int, list[int]]) -> int:
        """Requests whose tokens are not those of one engine."""
        found = 0
        for number, which in self.asked:
            tokens = list(self.decode.outcomes[number].tokens)
            (terminal,) = self.decode.outcomes[number].terminals
            aborted = isinstance(terminal, Finished) and terminal.reason == "abort"
            found += tokens != wants[which][: len(tokens)] or (not aborted and len(tokens) < TOKENS)
        return found


def transfers(pair: Pair, count: int) -> tuple[int, int]:
    """(requests with wrong tokens, blocks that came from the peer)."""
    texts = prompts(random.Random(9))
    wants = {which: pair.want(text) for which, text in enumerate(texts)}
    for _ in range(count):
        which = pair.rng.randrange(len(texts))
        pair.turn(which, texts[which])
    pair.finish()
    return pair.wrong(wants), pair.decode.engine.stats().offload_blocks["from_peer"]


@pytest.mark.parametrize(
    ("model", "way", "count"),
    [
        ("qwen3-tiny", "shared", 150),
        ("qwen3-tiny", "tcp", 150),
        ("qwen3_5-tiny", "tcp", 60),
    ],
)
def test_tokens_of_many_transfers(
    session: Any,
    model: str,
    way: str,
    count: int,
    late: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = random.Random(count)
    slow(monkeypatch, rng)
    if way == "tcp":
        monkeypatch.setattr(Link, "within_host", False)
    wrong, came = transfers(Pair(session, model, rng, tmp_path / "secret"), count)
    assert wrong == 0
    assert came > 2 * count


def test_records_in_another_order_give_wrong_tokens(
    session: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: the prefill engine names the places of its records in the wrong order."""

    def send(self: Shared, link: Link, records: Any) -> None:
        link.say(at=[record.ptr - self._start for record in reversed(records)])
        link.hear()
        link.say(kept=True)

    monkeypatch.setattr(Shared, "send", send)
    wrong, came = transfers(Pair(session, "qwen3-tiny", random.Random(3), tmp_path / "secret"), 20)
    assert came > 20
    assert wrong > 0
