"""Prefill and decode on engines of their own: the tokens of one engine, whatever happens to the other."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import random
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from module_files import module_at

from openinfer.cli import recipes
from openinfer.frontend.contract import (
    Failed,
    Finished,
    KVTransfer,
    Rejected,
    ResetPrefixCache,
    UpdateWeights,
)
from openinfer.kvpool import InvalidConfig
from openinfer.recipes.engine.errors import SetupError
from openinfer.recipes.engine.startup import build

GOLDENS = Path(__file__).parent / "goldens"
RNG = random.Random(5)
PROMPTS = [[RNG.randrange(10, 480) for _ in range(length)] for length in (300, 137, 80)]
SAMPLED = {"temperature": 0.9, "seed": 7}
OWN: dict[str, dict[str, Any]] = {
    "qwen3-tiny": {},
    "qwen3_5-tiny": {},
    "deepseek_v4-tiny": {"activation_quantization": "off"},
}
NIXL = pytest.param(
    "NixlConnector",
    marks=pytest.mark.skipif(
        importlib.util.find_spec("nixl_cu13") is None, reason="nixl-cu13 is not installed"
    ),
)
DECODE = KVTransfer(do_remote_decode=True)


SECRET = tempfile.NamedTemporaryFile("w")  # noqa: SIM115 (it goes with the module)
SECRET.write("a secret that no request knows")
SECRET.flush()
ALLOWED = ["127.0.0.1:*"]


def config(connector: str = "TcpConnector", lease_s: float = 30.0, **fields: Any) -> str:
    extra = {"secret_file": SECRET.name, "kv_lease_duration": lease_s}
    own = {
        "kv_connector": connector,
        "kv_port": 0,
        "kv_buffer_size": 64e6,
        "kv_connector_extra_config": extra,
    }
    return json.dumps(own | fields)


def finish(*runs: Any) -> None:
    until = time.monotonic() + 60
    while any(run.open for run in runs):
        assert time.monotonic() < until
        for run in runs:
            run.step(0.01)
    for run in runs:
        run.engine.check()


Make = Callable[..., Any]


@pytest.fixture
def engines(session: Any) -> Make:
    """Engines of a golden checkpoint that share."""

    def make(model: str = "qwen3-tiny", path: Path | None = None, **flags: Any) -> Any:
        given = {"max_model_len": 320, "max_num_seqs": 4, **OWN[model], **flags}
        if "kv_transfer_config" in given:
            given.setdefault("kv_peer", ALLOWED)
        return session(path or GOLDENS / model, **given)

    return make


def prefill(run: Any, prompt: list[int], **sampling: Any) -> KVTransfer:
    """What a prefill engine's answer says."""
    number = run.submit(prompt, 1, kv_transfer=DECODE, **sampling)
    finish(run)
    (terminal,) = run.outcomes[number].terminals
    assert isinstance(terminal, Finished)
    assert terminal.kv_transfer is not None
    return terminal.kv_transfer


def decode(run: Any, prompt: list[int], given: KVTransfer, **sampling: Any) -> Any:
    number = run.submit(prompt, 6, kv_transfer=given, ignore_eos=True, **sampling)
    finish(run)
    return run.outcomes[number]


@pytest.mark.parametrize(
    ("model", "connector"),
    [
        ("qwen3-tiny", "TcpConnector"),
        ("qwen3_5-tiny", "TcpConnector"),
        pytest.param("deepseek_v4-tiny", "TcpConnector", marks=pytest.mark.slow),
        pytest.param("qwen3_5-tiny", *NIXL.values, marks=NIXL.marks),
    ],
)
def test_the_tokens_of_one_engine(engines: Make, model: str, connector: str) -> None:
    plain = engines(model)
    first = engines(model, kv_transfer_config=config(connector, kv_role="kv_producer"))
    second = engines(model, kv_transfer_config=config(connector, kv_role="kv_consumer"))
    for prompt in PROMPTS[:2]:
        for sampling in ({}, SAMPLED):
            number = plain.submit(prompt, 6, ignore_eos=True, **sampling)
            plain.finish()
            given = prefill(first, prompt, **sampling)
            assert given.remote_num_tokens == (len(prompt) - 1) // 16 * 16 or model != "qwen3-tiny"
            outcome = decode(second, prompt, given, **sampling)
            assert outcome.tokens == plain.outcomes[number].tokens
            assert outcome.cached == given.remote_num_tokens
    assert outcome.cached >= 64
    assert second.engine.stats().offload_blocks["from_peer"] > 0
    assert second.engine.stats().offload_blocks["failed"] == 0
    until = time.monotonic() + 5
    while len(first.engine._transfers.sharing.lending) and time.monotonic() < until:
        time.sleep(0.01)
    assert len(first.engine._transfers.sharing.lending) == 0  # the decode engine has said that it is done


def test_blocks_leave_while_the_rest_of_a_prompt_is_computed(engines: Make) -> None:
    plain, prompt = engines(), PROMPTS[0]
    want = plain.submit(prompt, 6, ignore_eos=True)
    plain.finish()
    first, second = (engines(kv_transfer_config=config(), max_num_batched_tokens=64) for _ in range(2))
    number, left = first.submit(prompt, 1, kv_transfer=DECODE), set()
    while first.open:
        first.step(0.01)
        left.add(first.engine.stats().offload_blocks["saved"])
    assert {4, 8, 12, 16, 18} <= left  # chunks of four blocks
    assert max(left) == 18  # none twice
    outcome = decode(second, prompt, first.outcomes[number].terminals[0].kv_transfer)
    assert (outcome.tokens, outcome.cached) == (plain.outcomes[want].tokens, 288)


def test_many_at_once_and_some_abort(engines: Make) -> None:
    plain = engines()
    first = engines(kv_transfer_config=config())
    second = engines(kv_transfer_config=config(), max_num_seqs=2, kv_cache_memory_bytes=4 << 20)
    rng, want = random.Random(1), []
    for prompt in PROMPTS:
        number = plain.submit(prompt, 6, ignore_eos=True)
        plain.finish()
        want.append(plain.outcomes[number].tokens)
    asked = []
    for turn in range(24):
        given = prefill(first, PROMPTS[turn % 3])
        number = second.submit(PROMPTS[turn % 3], 6, kv_transfer=given, ignore_eos=True)
        asked.append((number, turn % 3))
        if rng.random() < 0.3:
            second.engine.abort(number)
        if rng.random() < 0.3:
            second.engine.pool.reset_prefix_cache()
        for _ in range(rng.randrange(4)):
            second.step()
    finish(second)
    for number, which in asked:
        (terminal,) = second.outcomes[number].terminals
        found = second.outcomes[number].tokens
        assert found == want[which][: len(found)]
        assert terminal.reason == "abort" or len(found) == 6


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize(
    "loss",
    [
        "dead",
        "other",
        pytest.param("cleared", marks=pytest.mark.slow),
        pytest.param("expired", marks=pytest.mark.slow),
    ],
)
def test_blocks_that_do_not_come(engines: Make, tmp_path: Path, loss: str, policy: str) -> None:
    plain, prompt = engines(), PROMPTS[0]
    number = plain.submit(prompt, 6, ignore_eos=True)
    plain.finish()
    path = None
    if loss == "other":  # a checkpoint of the same shapes with other weights
        path = tmp_path / "other"
        shutil.copytree(GOLDENS / "qwen3-tiny", path)
        weights = path / "model.safetensors"
        data = bytearray(weights.read_bytes())
        data[len(data) // 2 + 7] ^= 1
        weights.write_bytes(data)
    lease_s = 0.01 if loss == "expired" else 30.0
    first = engines(path=path, kv_transfer_config=config(lease_s=lease_s))
    second = engines(kv_transfer_config=config(kv_load_failure_policy=policy))
    given = prefill(first, prompt)
    match loss:
        case "dead":
            first.engine._transfers.sharing.close()
        case "cleared":
            first.engine.control(ResetPrefixCache())
        case "expired":  # and the room is needed for another prompt
            sharing = first.engine._transfers.sharing
            until = time.monotonic() + 5
            while len(sharing.lending) and time.monotonic() < until:
                time.sleep(0.01)
            assert sharing.lending.expired == 1
            first.engine._cache.tiers._host.clear()
    outcome = decode(second, prompt, given)
    (terminal,) = outcome.terminals
    if policy == "recompute":
        assert isinstance(terminal, Finished)
        assert (outcome.tokens, outcome.cached) == (plain.outcomes[number].tokens, 0)
    else:
        assert isinstance(terminal, Failed)
        assert terminal.message.startswith("0 of 288 tokens came from the prefill engine: ")
        assert len(outcome.tokens) <= 1  # of the step that was launched with it
        if loss == "other":
            assert "these differ: weights" in terminal.message
    again = second.submit(prompt, 6, ignore_eos=True)
    finish(second)
    assert second.outcomes[again].tokens == plain.outcomes[number].tokens


def test_some_blocks_are_not_all(engines: Make) -> None:
    """With the policy "fail", as many as the prefill engine has promised must come."""
    first, second = (
        engines(kv_transfer_config=config()),
        engines(kv_transfer_config=config(kv_load_failure_policy="fail")),
    )
    given = msgspec.structs.replace(prefill(first, PROMPTS[0]), remote_num_tokens=299)
    (terminal,) = decode(second, PROMPTS[0], given).terminals
    assert isinstance(terminal, Failed)
    assert terminal.message.startswith("288 of 299 tokens came from the prefill engine: ")


def test_engines_share_again_after_both_took_the_same_weights(engines: Make, tmp_path: Path) -> None:
    """The name of a version says nothing: equal bytes share, others do not."""
    copies = [tmp_path / name for name in ("one", "two", "other")]
    for path in copies:
        shutil.copytree(GOLDENS / "qwen3-tiny", path)
    data = bytearray((copies[2] / "model.safetensors").read_bytes())
    data[len(data) // 2] ^= 0x80
    (copies[2] / "model.safetensors").write_bytes(data)
    first, second = (engines(kv_transfer_config=config()) for _ in range(2))
    for path, came in ((copies[1], 288), (copies[2], 0)):
        first.engine.control(UpdateWeights(str(copies[0]), "step 7"))
        second.engine.control(UpdateWeights(str(path), "step 7" if came == 0 else "another name"))
        assert decode(second, PROMPTS[0], prefill(first, PROMPTS[0])).cached == came


def test_a_lost_peer_does_not_fail_a_request_that_is_aborted(engines: Make) -> None:
    run = engines(kv_transfer_config=config(kv_load_failure_policy="fail"))
    given = KVTransfer(do_remote_prefill=True, remote_host="127.0.0.1", remote_port=1, remote_num_tokens=288)
    number = run.submit(PROMPTS[0], 6, kv_transfer=given)
    run.engine.abort(number)
    finish(run)
    assert run.outcomes[number].terminals == [Finished(number, "abort")]


def test_a_peer_is_asked_for_every_prefix(engines: Make) -> None:
    open_to_all = config(kv_connector_extra_config={})
    first = engines(kv_transfer_config=open_to_all, kv_offload_gb=0.05, kv_cache_memory_bytes=3 << 19)
    prompts = [[one] * 5 + PROMPTS[0][5:] for one in range(10, 14)]
    for prompt in prompts * 2:
        first.submit(prompt, 6, ignore_eos=True)
        finish(first)  # evicted prefixes are in host memory now
    host, port = first.engine._transfers.sharing.address
    second = engines(kv_peer=[f"{host}:{port}"])
    numbers = [second.submit(prompt, 6, ignore_eos=True) for prompt in prompts]
    finish(second)
    assert [second.outcomes[n].tokens for n in numbers] == [first.outcomes[n].tokens for n in range(4)]
    assert max(second.outcomes[n].cached for n in numbers) >= 128
    assert second.engine.stats().offload_blocks["from_peer"] > 0


@pytest.mark.slow
def test_engines_of_several_ranks_share_with_their_like(engines: Make) -> None:
    plain, prompt = engines(), PROMPTS[0]
    number = plain.submit(prompt, 6, ignore_eos=True)
    plain.finish()
    first, second = (engines(kv_transfer_config=config(), tensor_parallel_size=2) for _ in range(2))
    other = engines(kv_transfer_config=config(kv_load_failure_policy="fail"))
    given = prefill(first, prompt)
    outcome = decode(second, prompt, given)
    assert (outcome.tokens, outcome.cached) == (plain.outcomes[number].tokens, 288)
    (terminal,) = decode(other, prompt, prefill(first, prompt)).terminals
    assert isinstance(terminal, Failed)
    assert "these differ: ranks" in terminal.message


def test_a_peer_that_is_not_there_costs_no_request(engines: Make) -> None:
    plain, run = engines(), engines(kv_peer=["127.0.0.1:1"])
    for engine in (plain, run):
        engine.submit(PROMPTS[2], 6, ignore_eos=True)
        finish(engine)
    assert run.outcomes[0].tokens == plain.outcomes[0].tokens


@pytest.mark.attack
@pytest.mark.parametrize(
    ("flags", "given", "words"),
    [
        ({}, DECODE, "start it with --kv-transfer-config"),
        (
            {"kv_transfer_config": config(kv_role="kv_consumer")},
            DECODE,
            "do_remote_decode needs an engine that peers may ask",
        ),
        (
            {"kv_transfer_config": config()},
            KVTransfer(do_remote_prefill=True, remote_host="192.0.2.1", remote_port=1),
            "remote_host '192.0.2.1', remote_port 1 is no peer that --kv-peer allows",
        ),
        (
            {"kv_transfer_config": config(), "kv_peer": ["127.0.0.1:2"]},
            KVTransfer(do_remote_prefill=True, remote_host="127.0.0.1", remote_port=1),
            "no peer that --kv-peer allows",
        ),
        (
            {"kv_transfer_config": config(kv_connector_extra_config={})},
            KVTransfer(do_remote_prefill=True, remote_host="127.0.0.1", remote_port=1),
            "only where kv_connector_extra_config has a secret_file",
        ),
    ],
)
def test_transfers_that_an_engine_cannot_make(
    engines: Make, flags: dict[str, Any], given: KVTransfer, words: str
) -> None:
    run = engines(**flags)
    number = run.submit(PROMPTS[2], 6, kv_transfer=given)
    finish(run)
    (terminal,) = run.outcomes[number].terminals
    assert isinstance(terminal, Rejected)
    assert words in terminal.reason


def test_scores_need_the_whole_prompt_computed(engines: Make) -> None:
    run = engines(kv_transfer_config=config())
    number = run.submit(PROMPTS[2], 1, kv_transfer=DECODE, prompt_logprobs=0)
    finish(run)
    assert "not possible with prompt_logprobs" in run.outcomes[number].terminals[0].reason


@pytest.mark.parametrize(
    ("flags", "error", "words"),
    [
        (
            {"kv_transfer_config": config(), "enable_prefix_caching": False},
            SetupError,
            "shares cached prefixes",
        ),
        ({"kv_peer": ["a:1"], "enable_prefix_caching": False}, SetupError, "--kv-peer shares cached"),
        ({"kv_peer": ["a"]}, InvalidConfig, "give HOST:PORT"),
        ({"kv_transfer_config": "{}"}, InvalidConfig, "must be an object with kv_connector"),
    ],
)
def test_flags_that_cannot_be(flags: dict[str, Any], error: type[Exception], words: str) -> None:
    path = GOLDENS / "qwen3-tiny"
    with pytest.raises(error, match=words):
        build(recipes.find(path), path, device="cpu", **flags)


def test_answers_have_the_keys_of_vllm(engines: Make) -> None:
    run = engines(kv_transfer_config=config(engine_id="here"))
    given = msgspec.to_builtins(prefill(run, PROMPTS[2]))
    assert re.fullmatch("here-0-[0-9a-f]{16}", given["remote_request_id"])
    (names,) = given.pop("remote_block_ids")
    assert len(names) == 1
    assert {key: given[key] for key in given if key not in ("remote_request_id", "remote_port")} == {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "remote_engine_id": "here",
        "remote_host": "127.0.0.1",
        "remote_num_tokens": 64,
        "tp_size": 1,
    }


@pytest.mark.attack
@pytest.mark.parametrize("secret", [True, False])
def test_a_request_cannot_fill_the_cache_from_a_peer_of_its_own(server: Any, secret: bool) -> None:
    """Its blocks would be other users' answers."""
    own = config() if secret else config(kv_connector_extra_config={})
    live = server(GOLDENS / "qwen3-tiny", "--kv-transfer-config", own, "--kv-peer", "127.0.0.1:1")
    with socket.create_server(("127.0.0.1", 0)) as liar:
        liar.settimeout(0.0)
        given = {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": liar.getsockname()[1]}
        body = {"prompt": PROMPTS[1], "max_tokens": 2, "kv_transfer_params": given}
        answer = httpx.post(f"{live.url}/v1/completions", json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "unsupported"
        assert ("--kv-peer" if secret else "secret_file") in answer.json()["error"]["message"]
        with pytest.raises(BlockingIOError):
            liar.accept()


def test_a_proxy_sends_requests_to_both_servers(server: Any) -> None:
    path = Path(__file__).parents[1] / "examples" / "prefill_decode" / "proxy.py"
    proxy = module_at(path)
    with ThreadPoolExecutor(2) as pool:
        ports = ["--kv-transfer-config", config(), "--kv-peer", *ALLOWED]
        prefiller, decoder = pool.map(lambda _: server(GOLDENS / "qwen3-tiny", *ports), range(2))
    body = {
        "prompt": PROMPTS[1],
        "max_tokens": 6,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    want = httpx.post(f"{prefiller.url}/v1/completions", json=body).json()["choices"][0]["token_ids"]

    async def ask(prefill: str, **more: Any) -> httpx.Response:
        async with httpx.AsyncClient(timeout=30) as client:
            app = proxy.make_app(client, [prefill], [decoder.url])
            through = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://proxy")
            async with through:
                return await through.post("/v1/completions", json=body | more)

    answer = asyncio.run(ask(prefiller.url)).json()
    assert answer["choices"][0]["token_ids"] == want
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 128
    metrics = httpx.get(f"{decoder.url}/metrics").text
    assert re.search(r'openinfer:kv_offload_blocks_total\{.*event="from_peer".*\} 8.0', metrics)
    streamed = asyncio.run(ask(prefiller.url, stream=True, n=2)).text
    assert streamed.endswith("data: [DONE]\n\n")

    async def models() -> httpx.Response:
        async with httpx.AsyncClient() as client:
            app = proxy.make_app(client, [prefiller.url], [decoder.url])
            async with httpx.AsyncClient(
                transport=httpx.ASGITransport(app), base_url="http://proxy"
            ) as through:
                return await through.get("/v1/models")

    assert asyncio.run(models()).json()["data"][0]["id"] == "qwen3-tiny"
    alone = asyncio.run(ask("http://127.0.0.1:1")).json()  # no prefill server
    assert alone["choices"][0]["token_ids"] == want
    assert asyncio.run(ask(prefiller.url, temperature=-1)).status_code == 400
    chat = {"messages": [{"role": "user", "content": "Hello"}], "max_completion_tokens": 5, "stream": True}
    assert proxy.prefill_body(chat) == {
        "messages": chat["messages"], "max_completion_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}
    }  # fmt: skip
