"""kv_transfer_params: what a proxy for prefill and decode sends, and what it gets."""

from typing import Any

import pytest

PROMPT = [299, 300, 301]
DECODE = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
          "remote_host": None, "remote_port": None}  # fmt: skip
PREFILL = {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": 5600, "remote_block_ids": [[1, 2]],
           "remote_request_id": "a", "key_of_another_version": 1}  # fmt: skip
CHAT = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def live(start: Any) -> Any:
    return start(engine={"features": ["kv_transfer", "prompt_logprobs"]})


@pytest.fixture(scope="module")
def plain(start: Any) -> Any:
    return start()


def test_an_answer_says_where_the_kv_is(live: Any) -> None:
    body = {"max_tokens": 1, "kv_transfer_params": DECODE}
    completion = live.post("/v1/completions", prompt=PROMPT, **body).json()
    assert completion["kv_transfer_params"]["do_remote_prefill"] is True
    assert completion["kv_transfer_params"]["remote_num_tokens"] == 3
    chat = live.post("/v1/chat/completions", messages=CHAT, **body).json()
    assert chat["kv_transfer_params"]["do_remote_prefill"] is True


@pytest.mark.parametrize("stream", [False, True])
def test_kv_of_another_engine_changes_no_answer(live: Any, stream: bool) -> None:
    body = {"prompt": PROMPT, "max_tokens": 2, "stream": stream, "n": 2}
    without = live.post("/v1/completions", **body)
    given = live.post("/v1/completions", kv_transfer_params=PREFILL, **body)
    assert given.status_code == 200
    assert "kv_transfer_params" not in given.text
    if not stream:
        assert given.json()["choices"] == without.json()["choices"]


@pytest.mark.parametrize("nothing", [None, {}, {"do_remote_decode": False, "do_remote_prefill": None}])
def test_a_field_that_asks_for_nothing_is_taken_everywhere(plain: Any, nothing: Any) -> None:
    answer = plain.post("/v1/completions", prompt=PROMPT, max_tokens=1, kv_transfer_params=nothing)
    assert answer.status_code == 200
    assert "kv_transfer_params" not in answer.json()


@pytest.mark.parametrize(
    ("given", "more", "words"),
    [
        (DECODE | PREFILL | {"do_remote_decode": True}, {}, "both do_remote_decode and do_remote_prefill"),
        ({"do_remote_prefill": True}, {}, "needs remote_host and remote_port"),
        (PREFILL | {"remote_port": 65536}, {}, "needs remote_host and remote_port"),
        (DECODE, {"stream": True}, "not possible with stream: true"),
        (DECODE, {"n": 2}, "not possible with n: 2"),
        (DECODE, {"prompt_logprobs": 0}, "not possible with prompt_logprobs"),
        (PREFILL, {"prompt": [[1], [2]]}, "of one prompt, and 2 are given"),
        ({"do_remote_decode": "x"}, {}, "kv_transfer_params.do_remote_decode: expected"),
        *[
            (PREFILL | {name: value}, {}, f"kv_transfer_params.{name}")
            for name in ("remote_port", "remote_num_tokens", "tp_size")
            for value in (10**30, 2**63, -1)
        ],
        (PREFILL | {"remote_block_ids": [[10**30]]}, {}, "kv_transfer_params.remote_block_ids"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(
    live: Any, given: dict[str, Any], more: dict[str, Any], words: str
) -> None:
    body = {"prompt": PROMPT, "max_tokens": 1, **more}
    answer = live.post("/v1/completions", kv_transfer_params=given, **body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "kv_transfer_params"
    assert words in answer.json()["error"]["message"]


def test_an_engine_that_shares_nothing_says_so(plain: Any) -> None:
    answer = plain.post("/v1/completions", prompt=PROMPT, max_tokens=1, kv_transfer_params=DECODE)
    assert answer.status_code == 400
    assert "start it with --kv-transfer-config" in answer.json()["error"]["message"]
