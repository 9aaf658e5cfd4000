"""Prefill and decode on two engines of a GPU: the first token's log-probabilities are near those of one engine."""

from __future__ import annotations

import importlib.util
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from openinfer.frontend.contract import KVTransfer

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu")]

DEVICE, DTYPE = "cuda", "bfloat16"
GOLDENS = Path(__file__).parent / "goldens"
RNG = np.random.default_rng(7)
PROMPTS = [RNG.integers(10, 480, length).tolist() for length in (300, 137)]
OWN: dict[str, dict[str, Any]] = {
    "qwen3-tiny": {},
    "qwen3_5-tiny": {},
    "deepseek_v4-tiny": {"activation_quantization": "off"},  # codes beside a tie depend on a prompt's chunks
}
CONNECTORS = ["TcpConnector", *["NixlConnector"] * (importlib.util.find_spec("nixl_cu13") is not None)]


def run(session: Any, prompt: list[int], given: KVTransfer | None, **sampling: Any) -> Any:
    number = session.submit(
        prompt, sampling.pop("max_tokens", 6), kv_transfer=given, ignore_eos=True, **sampling
    )
    until = time.monotonic() + 60
    while session.open:
        assert time.monotonic() < until
        session.step(0.01)
    return session.outcomes[number]


def first(outcome: Any) -> dict[int, float]:
    """The likeliest first tokens."""
    entry = outcome.logprobs[0]
    return dict(zip(entry.top_token_ids, entry.top_logprobs, strict=True))


def error(one: dict[int, float], other: dict[int, float]) -> float:
    """The mean difference of the log-probabilities of tokens that both have; a large one where they have few."""
    both = one.keys() & other.keys()
    if len(both) < len(one) // 2:
        return 9.0
    return float(np.mean([abs(one[token] - other[token]) for token in both]))


@pytest.mark.parametrize("connector", CONNECTORS)
@pytest.mark.parametrize("model", OWN)
def test_log_probabilities_are_near_those_of_one_engine(
    session: Any, model: str, connector: str, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_text("a secret that no request knows")
    config = {
        "kv_connector": connector, "kv_port": 0, "kv_buffer_size": 256e6,
        "kv_connector_extra_config": {"secret_file": str(tmp_path / "secret")},
    }  # fmt: skip
    flags = {"device": DEVICE, "dtype": DTYPE, "max_model_len": 320, "max_num_seqs": 4, **OWN[model]}
    plain = session(GOLDENS / model, **flags)
    prefill, decode = (
        session(GOLDENS / model, kv_transfer_config=json.dumps(config), kv_peer=["127.0.0.1:*"], **flags)
        for _ in range(2)
    )
    until = time.monotonic() + 10
    while not all(
        one.engine._cache.tiers._host.has_room for one in (prefill, decode)
    ):  # memory is locked after ready
        assert time.monotonic() < until
        time.sleep(0.01)
    found = []
    for prompt in PROMPTS:
        want = first(run(plain, prompt, None, logprobs=10))
        outcome = run(prefill, prompt, KVTransfer(do_remote_decode=True), max_tokens=1)
        given = outcome.terminals[0].kv_transfer
        outcome = run(decode, prompt, given, logprobs=10)
        assert outcome.cached == given.remote_num_tokens > 0
        found.append((want, first(outcome)))
    assert max(error(want, got) for want, got in found) < 0.12
    assert error(found[0][0], found[1][1]) > 0.3  # negative control: another prompt
    stats = decode.engine.stats()
    assert stats.offload_blocks["from_peer"] > 0
    assert stats.offload_blocks["failed"] == 0
    assert stats.compiles_after_ready == 0
