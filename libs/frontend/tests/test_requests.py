"""What is refused, and how: the table of bounds, bodies, keys, models; and the small endpoints."""

import socket
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from openinfer.frontend import APIError
from openinfer.frontend.http import SamplingDefaults, Tokenizer
from openinfer.frontend.http.body import _decode
from openinfer.frontend.http.openai.chat_body import ChatBody
from openinfer.frontend.http.openai.completions import CompletionBody
from openinfer.frontend.http.params import make_plan
from openinfer.frontend.testing import FakeEngine
from openinfer.sampler import SamplingParams

DATA = Path(__file__).parent / "data"

P = {"prompt": [5]}


@pytest.fixture(scope="module")
def live(start: Any) -> Any:
    return start()


@pytest.mark.parametrize(
    ("fields", "param", "word"),
    [
        ({}, "prompt", "missing"),
        ({"prompt": []}, "prompt", "empty"),
        ({"prompt": [[]]}, "prompt", "empty"),
        ({"prompt": ""}, "prompt", "empty"),
        ({"prompt": {}}, "prompt", "expected"),
        ({"prompt": [1, "a"]}, "prompt", "token ids"),
        ({"prompt": ["a", [1]]}, "prompt", "only strings or only lists"),
        ({"prompt": [True]}, "prompt", "token ids"),
        ({"prompt": [1, 1024]}, "prompt", "1024"),
        ({"prompt": [-1]}, "prompt", "-1"),
        ({"prompt": [[5], [5000]]}, "prompt", "prompt[1]"),
        ({"prompt": [[5]] * 1025}, "prompt", "1025"),
        ({"prompt": [[5]] * 512, "n": 3}, "prompt", "too many sequences"),
        ({**P, "max_tokens": 0}, "max_tokens", "at least 1"),
        ({**P, "max_tokens": -3}, "max_tokens", "-3"),
        ({**P, "max_tokens": "many"}, "max_tokens", "expected int"),
        ({**P, "max_tokens": 1.5}, "max_tokens", "expected int"),
        ({**P, "max_tokens": True}, "max_tokens", "expected int"),
        ({**P, "max_tokens": 4096}, "max_tokens", "4096"),
        ({"prompt": [5] * 5000}, "prompt", "maximum context length is 4096 tokens"),
        ({**P, "min_tokens": 17}, "min_tokens", "17"),
        ({**P, "min_tokens": -1}, "min_tokens", "-1"),
        ({**P, "temperature": -0.1}, "temperature", "-0.1"),
        ({**P, "temperature": 2.1}, "temperature", "2.1"),
        ({**P, "temperature": "hot"}, "temperature", "expected float"),
        ({**P, "top_p": 0}, "top_p", "0"),
        ({**P, "top_p": 1.1}, "top_p", "1.1"),
        ({**P, "top_k": -2}, "top_k", "-2"),
        ({**P, "min_p": 1.1}, "min_p", "1.1"),
        ({**P, "seed": 2**63}, "seed", "64 bits"),
        ({**P, "n": 0}, "n", "1 to 128"),
        ({**P, "n": 129}, "n", "1 to 128"),
        ({**P, "logprobs": 21}, "logprobs", "20"),
        ({**P, "logprobs": True}, "logprobs", "expected int"),
        ({**P, "stop": ["a"] * 33}, "stop", "at most 32"),
        ({**P, "stop": [""]}, "stop", "empty"),
        ({**P, "stop": ""}, "stop", "empty"),
        ({**P, "stop": [1]}, "stop", "expected str"),
        ({**P, "stop_token_ids": [1024]}, "stop_token_ids", "1024"),
        ({**P, "stop_token_ids": [5] * 1025}, "stop_token_ids", "1024"),
        ({**P, "cache_salt": "a/b"}, "cache_salt", "cache_salt"),
        ({**P, "cache_salt": "a" * 129}, "cache_salt", "128"),
        ({**P, "stream": "yes"}, "stream", "expected bool"),
        ({**P, "stream": True, "stream_options": {"include_usage": 3}}, "stream_options", "expected bool"),
        ({**P, "best_of": 2}, "best_of", "not supported"),
        ({**P, "suffix": "x"}, "suffix", "not supported"),
        ({**P, "use_beam_search": True}, "use_beam_search", "not supported"),
        ({**P, "prompt_logprobs": 0}, "prompt_logprobs", "not supported"),
        ({**P, "prompt_embeds": "x"}, "prompt_embeds", "not supported"),
        ({**P, "logit_bias": {"5": 1}}, "logit_bias", "not supported"),
        ({**P, "frequency_penalty": 0.1}, "frequency_penalty", "not supported"),
        ({**P, "presence_penalty": False}, "presence_penalty", "expected float"),
        ({**P, "repetition_penalty": 1.1}, "repetition_penalty", "not supported"),
        ({**P, "allowed_token_ids": [5]}, "allowed_token_ids", "not supported"),
        ({**P, "bad_words": ["x"]}, "bad_words", "not supported"),
        ({**P, "bad_words": ["x" * 257]}, "bad_words", "256"),
        ({**P, "guided_json": {}}, "guided_json", "not supported"),
        ({**P, "structured_outputs": {"regex": "a"}}, "structured_outputs", "not supported"),
        ({**P, "truncate_prompt_tokens": 5}, "truncate_prompt_tokens", "not supported"),
        ({**P, "priority": 1}, None, "priority 1"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_refusals_name_the_field(
    live: Any, fields: dict[str, Any], param: str | None, word: str, stream: bool
) -> None:
    if "stream_options" not in fields:
        fields = {"stream": stream, **fields}
    refused = live.post("/v1/completions", **fields)
    error = refused.json()["error"]
    assert refused.status_code == 400
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert word in error["message"]


def test_too_long_names_both_numbers(live: Any) -> None:
    error = live.post("/v1/completions", prompt=[5] * 4000, max_tokens=200).json()["error"]
    assert "4000" in error["message"]
    assert "200" in error["message"]
    assert "4096" in error["message"]
    assert error["code"] == "context_length_exceeded"


def test_the_edge_of_the_context_is_served(live: Any) -> None:
    assert live.post("/v1/completions", prompt=[5] * 4094, max_tokens=2).status_code == 200


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[1]", b'"x"', b"null", b"3", b"\xff", b'{"prompt": NaN}', b"[" * 9000]
)
def test_bodies_that_are_no_object(live: Any, body: bytes) -> None:
    refused = live.http.post("/v1/completions", content=body)
    assert refused.status_code == 400
    assert refused.json()["error"]["message"].startswith("the body")


def test_nesting_is_refused_not_fatal(live: Any) -> None:
    body = b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    assert live.http.post("/v1/completions", content=body).status_code == 400


def test_the_body_is_capped_with_and_without_a_length(live: Any) -> None:
    with socket.create_connection(("127.0.0.1", live.port)) as raw:
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n")
        assert b" 413 " in raw.recv(100)
    # On a connection of its own: the server closes one whose body it did not read.
    url = f"http://127.0.0.1:{live.port}/v1/completions"
    refused = httpx.post(url, content=(b" " * (1 << 20) for _ in range(33)), timeout=60)
    assert refused.status_code == 413
    assert refused.json()["error"]["code"] == "body_too_large"


def test_unknown_models_paths_and_methods(live: Any) -> None:
    error = live.post("/v1/completions", model="gpt-x", prompt=[5])
    assert (error.status_code, error.json()["error"]["code"]) == (404, "model_not_found")
    assert error.json()["error"]["param"] == "model"
    assert live.http.get("/nope").status_code == 404
    assert "error" in live.http.get("/nope").json()
    assert live.http.get("/v1/completions").status_code == 405


def test_served_names(start: Any) -> None:
    named = start(app={"model_names": ["big", "small"]})
    assert [model["id"] for model in named.http.get("/v1/models").json()["data"]] == ["big", "small"]
    assert named.post("/v1/completions", prompt=[5]).json()["model"] == "big"
    assert named.post("/v1/completions", model="small", prompt=[5]).json()["model"] == "small"
    assert named.post("/v1/completions", model="fake", prompt=[5]).status_code == 404


def test_models_version_health_ready(live: Any) -> None:
    (model,) = live.http.get("/v1/models").json()["data"]
    assert (model["id"], model["max_model_len"], model["object"]) == ("fake", 4096, "model")
    assert live.http.get("/version").json()["contract_version"] == 1
    for path in ("/health", "/ready"):
        assert live.http.get(path).status_code == 200


def test_the_api_key_guards_all_but_the_probes(start: Any) -> None:
    guarded = start(app={"api_key": "sésame"})
    good = {"authorization": b"Bearer s\xc3\xa9same"}
    for path in ("/health", "/ready"):
        assert guarded.http.get(path).status_code == 200
    for path in ("/v1/models", "/metrics", "/version", "/nope", "//health", "/health/"):
        for headers in ({}, {"authorization": "Bearer no"}, {"authorization": "Basic s"}):
            refused = guarded.http.get(f"http://127.0.0.1:{guarded.port}{path}", headers=headers)
            assert refused.status_code == 401, path
            assert refused.json()["error"]["code"] == "invalid_api_key"
    assert guarded.http.get("/v1/models", headers=good).status_code == 200


def test_sampling_defaults_apply_unless_asked_otherwise(start: Any) -> None:
    from openinfer.frontend.contract import Request
    from openinfer.frontend.http import SamplingDefaults

    live = start(app={"defaults": SamplingDefaults(temperature=0.6, top_k=20, top_p=0.95)})
    seen: list[Request] = []
    submit = live.driver.submit
    live.driver.submit = lambda request, sink: (seen.append(request), submit(request, sink))
    live.post("/v1/completions", prompt=[5])
    live.post("/v1/completions", prompt=[5], temperature=0, top_k=-1, seed=3, n=2, user="me", cache_salt="s")
    assert (seen[0].sampling.temperature, seen[0].sampling.top_k, seen[0].sampling.top_p) == (0.6, 20, 0.95)
    assert (seen[1].sampling.temperature, seen[1].sampling.top_k, seen[1].sampling.top_p) == (0.0, 0, 0.95)
    assert [request.sampling.seed for request in seen] == [None, 3, 4]
    assert (seen[1].tenant, seen[1].cache_salt) == ("me", "s")


def test_traceparent_is_passed_on(live: Any) -> None:
    seen = []
    submit = live.driver.submit
    live.driver.submit = lambda request, sink: (seen.append(request.trace_parent), submit(request, sink))
    live.http.post("/v1/completions", json=P, headers={"traceparent": "00-ab-cd-01"})
    live.driver.submit = submit
    assert seen == ["00-ab-cd-01"]


def test_metrics_carry_the_names_dashboards_read(start: Any) -> None:
    live = start({"step_delay_s": 0.01})
    live.post("/v1/completions", prompt=list(range(300, 340)), max_tokens=3)
    live.post("/v1/completions", prompt=list(range(300, 340)), max_tokens=3, stream=True)
    live.post("/v1/completions", prompt=[5], priority=1)
    response: httpx.Response = live.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    values = {}
    for line in response.text.splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            values[name] = float(value)
    label = '{engine="0",model_name="fake"}'
    plain = '{model_name="fake",engine="0"}'
    found = lambda name: values.get(name + label, values.get(name + plain))  # noqa: E731
    assert found("vllm:num_requests_running") == 0
    assert found("vllm:kv_cache_usage_perc") == 0
    assert found("vllm:prompt_tokens_total") == 80
    assert found("vllm:generation_tokens_total") == 6
    assert found("vllm:prefix_cache_hits_total") == 32
    assert found("openinfer:compiles_after_ready_total") == 0
    assert found("openinfer:allocations_after_ready_total") == 0
    assert found("openinfer:host_waits_after_ready_total") == 0
    for histogram, count in (
        ("time_to_first_token_seconds", 2),
        ("e2e_request_latency_seconds", 2),
        ("request_queue_time_seconds", 2),
        ("request_prefill_time_seconds", 2),
        ("request_decode_time_seconds", 2),
        ("request_time_per_output_token_seconds", 2),
        ("request_prompt_tokens", 2),
        ("request_generation_tokens", 2),
        ("request_params_n", 3),
        ("request_max_num_generation_tokens", 3),
        ("request_prefill_kv_computed_tokens", 2),
    ):
        assert found(f"vllm:{histogram}_count") == count, histogram
    assert found("vllm:request_prefill_kv_computed_tokens_sum") == 80 - 32
    assert found("vllm:request_max_num_generation_tokens_sum") == 6
    # Deliveries, not tokens: a late frontend reads several steps together.
    assert 2 <= found("vllm:inter_token_latency_seconds_count") <= 4
    assert any(
        name.startswith("vllm:request_success_total") and 'finished_reason="length"' in name and value == 2
        for name, value in values.items()
    )
    assert any(
        name.startswith("vllm:admission_rejections_total") and 'reason="unsupported"' in name
        for name in values
    )
    assert any(name.startswith("vllm:cache_config_info") and 'block_size="16"' in name for name in values)
    assert any('le="0.003"' in name for name in values if "inter_token" in name)


@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.slow), 5])
def test_no_value_of_any_field_is_a_server_error(live: Any, step: int) -> None:
    """All values of each field; or every fifth, others for the next field."""
    raw = [
        "null", "true", "-1", "0", "1.5", "1e300", "1e9999", str(2**70), '""', '"x"', '"\\ud800"',
        '"\\u0000"',
    ]  # fmt: skip
    raw += ["[]", "[null]", "[1]", '["\\ud800"]', "[[1]]", "[{}]", "{}", '{"x": 1}', '{"x": {"y": []}}']
    message = '[{"role": "user", "content": "hi"}]'
    for path, body, fields in (
        ("/v1/completions", '"prompt": [5], "max_tokens": 1', CompletionBody.__struct_fields__),
        ("/v1/chat/completions", f'"messages": {message}, "max_tokens": 1', ChatBody.__struct_fields__),
    ):
        for number, field in enumerate((*fields, "tools", "response_format", "logit_bias")):
            for value in raw[number % step :: step]:
                answer = live.http.post(path, content=f'{{{body}, "{field}": {value}}}')
                assert answer.status_code in (200, 400, 404), (field, value, answer.text)
    for number, field in enumerate(("role", "content", "name", "tool_calls")):
        for value in raw[number % step :: step]:
            message = f'{{"role": "user", "content": "hi", "{field}": {value}}}'
            answer = live.http.post(
                "/v1/chat/completions", content=f'{{"messages": [{message}], "max_tokens": 1}}'
            )
            assert answer.status_code in (200, 400), (field, value, answer.text)


ABLE = {"features": ["penalties", "logit_bias", "allowed_token_ids", "bad_words"]}


def sampling(**fields: Any) -> SamplingParams:
    """What an engine with every feature is asked."""
    body = _decode(msgspec.json.encode(fields), CompletionBody)
    defaults = SamplingDefaults(repetition_penalty=1.5)
    return make_plan(body, None, defaults, FakeEngine(**ABLE).info, Tokenizer.load(DATA)).sampling  # type: ignore[arg-type]


def test_what_the_sampler_is_asked() -> None:
    asked = sampling(
        frequency_penalty=0.5,
        presence_penalty=-0.5,
        logit_bias={"7": -100},
        allowed_token_ids=[7, 8],
        bad_words=["a"],
    )
    assert (asked.frequency_penalty, asked.presence_penalty, asked.repetition_penalty) == (0.5, -0.5, 1.5)
    assert asked.logit_bias == ((7, -100.0),)
    assert asked.allowed_token_ids == (7, 8)
    tokenizer = Tokenizer.load(DATA)
    assert asked.bad_words_token_ids == tuple(tuple(tokenizer.encode_short(text)) for text in ("a", " a"))
    assert sampling(repetition_penalty=1).repetition_penalty == 1


@pytest.mark.parametrize(
    ("fields", "param", "word"),
    [
        ({"frequency_penalty": 2.1}, "frequency_penalty", "2.1"),
        ({"repetition_penalty": 0}, "repetition_penalty", "0"),
        ({"logit_bias": {"1024": 1}}, "logit_bias", "below 1024"),
        ({"logit_bias": {"-1": 1}}, "logit_bias", "below 1024"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "below 1024"),
        ({"logit_bias": {"5": 101}}, "logit_bias", "100"),
        ({"logit_bias": {str(i): 1 for i in range(301)}}, "logit_bias", "300"),
        ({"allowed_token_ids": []}, "allowed_token_ids", "at least one"),
        ({"allowed_token_ids": [1024]}, "allowed_token_ids", "below 1024"),
        ({"bad_words": ["x"] * 65}, "bad_words", "64"),
        ({"allowed_token_ids": [5] * 4097}, "allowed_token_ids", "4096"),
        (
            {"allowed_token_ids": ["a"] * 1_000_000},
            "allowed_token_ids",
            "4096",
        ),  # counted before they are read
        ({"bad_words": ["x y " * 64]}, "bad_words", "32"),
    ],
)
def test_bounds_of_what_the_sampler_is_asked(fields: dict[str, Any], param: str, word: str) -> None:
    with pytest.raises(APIError, match=word) as caught:
        sampling(**fields)
    assert caught.value.param == param
