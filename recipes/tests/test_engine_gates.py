"""Gates: a request waits at them in one order, and nothing is kept of one that is over."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from openinfer.frontend.contract import Finished, KVTransfer, Rejected, Request, TokenTable
from openinfer.recipes.engine.engine import Engine
from openinfer.recipes.engine.startup import build
from openinfer.recipes.qwen3 import RECIPE
from openinfer.sampler import SamplingParams
from openinfer.sampler.form import Grammar

TINY = Path(__file__).parents[2] / "tests" / "goldens" / "qwen3-tiny"

pytestmark = pytest.mark.skipif(not TINY.exists(), reason="the checkpoint is in the checkout only")


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = build(
        RECIPE, TINY, device="cpu", max_num_seqs=2, max_num_batched_tokens=32, max_model_len=64,
        kv_cache_memory_bytes=4_000_000, max_num_queued_reqs=2, kv_offload_gb=0.01,
        kv_transfer_config='{"kv_connector": "TcpConnector", "kv_role": "kv_both", "kv_port": 0}',
    ).engine  # fmt: skip
    yield made
    made.close()


def request(number: int, **fields: Any) -> Request:
    params = SamplingParams(temperature=0.0)
    return Request(
        id=number, prompt_token_ids=[1, 2, 3], sampling=params, max_tokens=2, arrival=0.0, **fields
    )


def terminals(engine: Engine, count: int) -> list[Any]:
    found: list[Any] = []
    while len(found) < count:
        updates = engine.step(0.1).updates
        found += [one for one in updates if isinstance(one, Finished | Rejected)]
    return found


def test_the_order_of_the_gates(engine: Engine) -> None:
    """A malformed grammar asks no peer, and a sequence that holds an adapter's place waits for nothing but a row."""
    names = [type(gate).__name__ for gate in engine.gates]
    assert names == ["Grammars", "Transfers", "AdapterPlaces", "Queue"]


def test_a_request_passes_every_gate_once(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    passed: list[str] = []
    for gate in engine.gates:

        def take(seq: Any, gate: Any = gate, inner: Any = gate.take) -> bool:
            passed.append(type(gate).__name__)
            return bool(inner(seq))

        monkeypatch.setattr(gate, "take", take)
    engine.control(TokenTable([b"%d" % n for n in range(engine.info.vocab_size)], []))
    engine.submit(request(1, grammar=Grammar("regex", "[0-9]+")))
    assert passed == ["Grammars"]  # it is being compiled
    (terminal,) = terminals(engine, 1)
    assert isinstance(terminal, Finished)
    assert passed == ["Grammars", "Transfers", "AdapterPlaces", "Queue"]


@pytest.mark.attack
def test_nothing_is_kept_of_requests_that_are_over(engine: Engine) -> None:
    engine.control(TokenTable([b"%d" % n for n in range(engine.info.vocab_size)], []))
    decode = KVTransfer(do_remote_decode=True)
    long = msgspec.structs.replace(request(9, kv_transfer=decode), prompt_token_ids=list(range(1, 90)))
    engine.submit(request(1, kv_transfer=decode, grammar=Grammar("regex", "(")))  # malformed
    engine.submit(request(2, kv_transfer=decode, adapter="none"))  # unknown adapter
    engine.submit(long)
    engine.submit(request(3, kv_transfer=decode))
    engine.submit(request(4, kv_transfer=decode, grammar=Grammar("regex", "[0-9]+")))
    engine.abort(4)
    engine.submit(request(5, kv_transfer=decode))
    engine.submit(request(6, kv_transfer=decode))
    engine.submit(request(7, kv_transfer=decode))  # one too many
    codes = {one.id: getattr(one, "code", "") for one in terminals(engine, 8)}
    assert codes[1] == "grammar"
    assert codes[9] == "too_long"
    assert codes[7] == "queue_full"
    for gate in engine.gates:
        assert len(gate) == 0
        kept = {name: value for name, value in vars(gate).items() if isinstance(value, dict | set) and value}
        assert kept == {}, type(gate).__name__


def test_an_id_that_is_under_way_is_refused(engine: Engine) -> None:
    engine.submit(request(1))
    engine.submit(request(1))
    refused, finished = terminals(engine, 2)
    assert isinstance(refused, Rejected)
    assert "submitted before" in refused.reason
    assert isinstance(finished, Finished)
