"""The bounds that users of vLLM know, one row each: what is just inside is taken, what is outside a 400 by name."""

import re
from typing import Any

import msgspec
import pytest

from openinfer.frontend.errors import APIError
from openinfer.frontend.http.openai.completions import CompletionBody
from openinfer.frontend.http.params import SamplingDefaults, make_plan

P = {"prompt": [5], "max_tokens": 4}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
FEATURES = {"features": ["penalties", "logit_bias", "allowed_token_ids", "bad_words"]}


@pytest.fixture(scope="module")
def live(start: Any) -> Any:
    return start(FEATURES)


@pytest.mark.parametrize(
    ("field", "inside", "outside"),
    [
        ("frequency_penalty", [-2, 2], [-2.01, 2.01]),
        ("presence_penalty", [-2, 2], [-2.01, 2.01]),
        ("temperature", [0, 2], [-0.1, 2.1]),
        ("top_p", [0.01, 1], [0, 1.01]),
        ("top_k", [-1, 0, 1, 10**6], [-2]),
        ("min_p", [0, 1], [-0.1, 1.1]),
        ("max_tokens", [1], [0, -1]),
        ("min_tokens", [0, 4], [-1, 5]),
        ("seed", [-(2**63), 2**63 - 1], [2**63, -(2**63) - 1]),
        ("n", [1, 128], [0, 129, -1]),
        ("stop", ["x", ["a"] * 32], ["", [""], ["a"] * 33]),
        ("stop_token_ids", [[0], [1023]], [[1024], [-1]]),
        ("logit_bias", [{"0": -100}, {"1023": 100}], [{"1024": 1}, {"-1": 1}, {"5": 100.1}, {"x": 1}]),
        ("allowed_token_ids", [[5]], [[], [1024]]),
        ("cache_salt", ["s", "x" * 128], ["a@b", "a/b", "a\\b", "a\0b", "x" * 129]),
        ("priority", [0], ["high"]),
    ],
)
def test_bounds(live: Any, field: str, inside: list[Any], outside: list[Any]) -> None:
    for path, base in (("/v1/completions", P), ("/v1/chat/completions", CHAT)):
        for value in inside:
            answer = live.http.post(path, json=base | {field: value})
            assert answer.status_code == 200, (path, value, answer.text)
        for value in outside:
            answer = live.http.post(path, json=base | {field: value})
            assert answer.status_code == 400, (path, value, answer.text)
            error = answer.json()["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert error["type"] == "invalid_request_error"
            assert error["param"] == field, (path, value, error)
            assert field in error["message"]


@pytest.mark.parametrize(
    ("path", "fields", "status"),
    [
        ("/v1/completions", {"logprobs": 20}, 200),
        ("/v1/completions", {"logprobs": 21}, 400),
        ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 20}, 200),
        ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 21}, 400),
        ("/v1/chat/completions", {"top_logprobs": 1}, 400),
        ("/v1/completions", {"stream_options": {"include_usage": True}}, 200),
        ("/v1/completions", {"stream": True, "stream_options": {"include_usage": True}}, 200),
        ("/v1/completions", {"prompt": []}, 400),
        ("/v1/completions", {"prompt": [[]]}, 400),
        ("/v1/completions", {"prompt": ""}, 400),
        ("/v1/completions", {"prompt": [5] * 4092}, 200),
        ("/v1/completions", {"prompt": [5] * 4093}, 400),  # with 4 tokens to come, more than 4096
        ("/v1/completions", {"best_of": 2}, 400),
        ("/v1/completions", {"use_beam_search": True}, 400),
        ("/v1/completions", {"suffix": "x"}, 400),
        ("/v1/completions", {"some_field_nobody_knows": 1}, 200),
        ("/v1/chat/completions", {"messages": []}, 400),
        ("/v1/chat/completions", {"max_completion_tokens": 2}, 200),
    ],
)
def test_rules(live: Any, path: str, fields: dict[str, Any], status: int) -> None:
    base = P if path == "/v1/completions" else CHAT
    answer = live.http.post(path, json=base | fields)
    assert answer.status_code == status, answer.text[:500]


@pytest.mark.parametrize(
    "raw",
    [
        b"[]",
        b"5",
        b'"x"',
        b"null",
        b"",
        b"{",
        b'{"prompt": NaN}',
        b'{"prompt": [5], "temperature": 1e999}',
        b"\xff",
    ],
)
@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/tokenize"]
)
def test_what_is_no_object_is_400(live: Any, path: str, raw: bytes) -> None:
    assert live.http.post(path, content=raw).status_code == 400


def test_max_completion_tokens_wins(live: Any) -> None:
    body = CHAT | {"max_tokens": 9, "max_completion_tokens": 2, "ignore_eos": True}
    assert live.http.post("/v1/chat/completions", json=body).json()["usage"]["completion_tokens"] == 2


def test_completions_give_16_tokens_unless_asked(live: Any) -> None:
    answer = live.post("/v1/completions", prompt=[5], ignore_eos=True).json()
    assert answer["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        (
            "/v1/completions",
            {"use_beam_search": True},
            "use_beam_search is not supported by this server: use n for",
        ),
        (
            "/v1/completions",
            {"watermarking": True},
            "watermarking is not supported by this server: leave it out",
        ),
        ("/v1/completions", {"logits_processors": ["a"]}, "logits_processors .*: use logit_bias, bad_words"),
        (
            "/v1/completions",
            {"structured_outputs": {"whitespace_pattern": "x"}},
            "structured_outputs.whitespace_pattern is not supported by this server: a regex or grammar",
        ),
        (
            "/v1/chat/completions",
            {"truncate_prompt_tokens": 5},
            "shorten the prompt in the client; /tokenize",
        ),
        (
            "/v1/chat/completions",
            {"return_prompt_text": True},
            "use /v1/chat/completions/render, and /detokenize",
        ),
        ("/v1/chat/completions", {"add_special_tokens": True}, "the chat template writes special tokens"),
        ("/v1/chat/completions", {"tool_choice": "any"}, "'any', allowed are auto, none, required$"),
        (
            "/v1/chat/completions",
            {"tools": [{"type": "web_search", "function": {"name": "f"}}]},
            r"tools\[0\].type: invalid enum value 'web_search', allowed are function$",
        ),
        (
            "/v1/chat/completions",
            {"response_format": {"type": "structural_tag"}},
            "response_format.type: .*allowed are text, json_object, json_schema$",
        ),
        ("/v1/responses", {"previous_response_id": "x"}, "send all items in input"),
        ("/v1/messages", {"messages": None}, "messages"),
    ],
)
def test_a_refusal_says_what_is_allowed_or_to_be_used_instead(
    live: Any, path: str, fields: dict[str, Any], message: str
) -> None:
    base = {"/v1/completions": P, "/v1/chat/completions": CHAT}.get(path, {"input": "hi", "messages": []})
    answer = live.http.post(path, json=base | fields)
    assert answer.status_code == 400, answer.text
    assert re.search(message, answer.json()["error"]["message"])


def test_log_probabilities_are_refused_where_the_engine_has_none(live: Any) -> None:
    service = live.service
    info = msgspec.structs.replace(service.client.info, features=[])
    tokens = service.tokenizer
    with pytest.raises(APIError, match="logprobs is not supported by this engine; leave it out") as refused:
        make_plan(CompletionBody(prompt=[5], logprobs=1), 1, SamplingDefaults(), info, tokens)
    assert (refused.value.param, refused.value.code) == ("logprobs", "unsupported")
    assert make_plan(CompletionBody(prompt=[5]), None, SamplingDefaults(), info, tokens).n == 1


def test_a_field_that_is_missing_is_named(live: Any) -> None:
    error = live.http.post("/v1/load_lora_adapter", json={}).json()["error"]
    assert (error["message"], error["param"]) == ("lora_name is missing", "lora_name")


@pytest.mark.parametrize(
    ("method", "path", "message"),
    [
        ("POST", "/chat/completions", "Not Found; did you mean /v1/chat/completions?"),
        ("POST", "/v1/batches", "Not Found; send each line of a batch as a request of its own"),
        ("GET", "/docs", "Not Found; use /openapi.json"),
        ("GET", "/v1/chat/completions", "Method Not Allowed; this path takes POST"),
        ("GET", "/nothing/like/it", "Not Found"),
    ],
)
def test_a_wrong_route_is_told_the_right_one(live: Any, method: str, path: str, message: str) -> None:
    told = live.http.request(method, path).json()["error"]["message"]
    assert told.startswith(f"{method} {path}: {message}")
    assert told.endswith(message) or ";" in message


def test_a_budget_of_minus_one_is_none(live: Any) -> None:
    for field in ("thinking_token_budget", "thinking_budget", "max_thinking_tokens"):
        assert live.http.post("/v1/chat/completions", json=CHAT | {field: -1}).status_code == 200
        assert live.http.post("/v1/chat/completions", json=CHAT | {field: -2}).status_code == 400


def test_tokens_of_logprobs_as_ids(live: Any, tokenizer: Any) -> None:
    asked = {"return_tokens_as_token_ids": True, "return_token_ids": True}
    body = live.http.post("/v1/completions", json=P | asked | {"logprobs": 1}).json()["choices"][0]
    names = [f"token_id:{token_id}" for token_id in body["token_ids"]]
    assert body["logprobs"]["tokens"] == names
    assert all(name in top for name, top in zip(names, body["logprobs"]["top_logprobs"], strict=True))
    plain = live.http.post("/v1/completions", json=P | {"logprobs": 1}).json()["choices"][0]
    assert plain["logprobs"]["tokens"] == [tokenizer.token_text(one) for one in body["token_ids"]]
    assert plain["logprobs"]["text_offset"] == body["logprobs"]["text_offset"]
    body = live.http.post("/v1/chat/completions", json=CHAT | asked | {"logprobs": True}).json()["choices"][0]
    names = [f"token_id:{token_id}" for token_id in body["token_ids"]]
    assert [entry["token"] for entry in body["logprobs"]["content"]] == names
