"""The document says what the server does."""

from collections.abc import Iterator
from typing import Any

import pytest

from openinfer.frontend.http.body import REFUSED


@pytest.fixture(scope="module")
def live(start: Any) -> Any:
    return start(engine={"max_adapters": 1}, app={"plan": b"{}", "weight_updates": True})


@pytest.fixture(scope="module")
def document(live: Any) -> Any:
    return live.http.get("/openapi.json").json()


def test_every_path_is_served_by_its_method_only(live: Any, document: Any) -> None:
    assert len(document["paths"]) == 32
    for path, operations in document["paths"].items():
        (method,) = operations
        other = "GET" if method == "post" else "POST"
        url = path.replace("{name}", "fake")
        assert live.http.request(other, url).status_code == 405
        status = live.http.request(method.upper(), url).status_code
        needs_a_body = method == "post" and path not in ("/sleep", "/wake_up")
        assert status == (400 if needs_a_body else 200)
        assert str(status) in operations[method]["responses"]


def test_all_references_lead_somewhere(document: Any) -> None:
    def walk(node: Any) -> None:
        if isinstance(node, dict):
            if "$ref" in node:
                assert node["$ref"].removeprefix("#/components/schemas/") in document["components"]["schemas"]
            for value in node.values():
                walk(value)
        elif isinstance(node, list):
            for value in node:
                walk(value)

    walk(document)


def test_fields_and_what_is_refused(live: Any, document: Any) -> None:
    chat = document["components"]["schemas"]["ChatBody"]["properties"]
    assert chat["temperature"]["anyOf"][0] == {"type": "number", "minimum": 0, "maximum": 2}
    assert chat["model"]["enum"] == ["fake", None]
    for name, values in REFUSED.items():
        assert chat[name]["enum"] == list(values)
        for value in values:
            body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, name: value}
            assert live.post("/v1/chat/completions", **body).status_code == 200


def test_answers_have_the_documented_fields(live: Any, document: Any) -> None:
    schemas = document["components"]["schemas"]
    message = [{"role": "user", "content": "x"}]
    for name, choice, answer in (
        ("CompletionResponse", "_Completion", live.post("/v1/completions", prompt=[5], max_tokens=1)),
        ("ChatResponse", "_Choice", live.post("/v1/chat/completions", messages=message, max_tokens=1)),
    ):
        parts = [(schemas[name], answer.json()), (schemas[choice], answer.json()["choices"][0])]
        for schema, part in parts:
            assert set(schema["required"]) <= set(part) <= set(schema["properties"])


def test_a_wrong_method_is_told_the_right_one(live: Any) -> None:
    refused = live.http.put("/v1/completions")
    assert (refused.status_code, refused.headers["allow"]) == (405, "POST")
    assert refused.json()["error"]["type"] == "invalid_request_error"


def test_examples_are_answered(live: Any, document: Any) -> None:
    for path, operations in document["paths"].items():
        if "post" in operations:
            example = operations["post"]["requestBody"]["content"]["application/json"]["example"]
            assert live.post(path, **example).status_code == 200, path


@pytest.mark.parametrize("name", [
    "cache_salt", "frequency_penalty", "logprobs", "max_completion_tokens", "max_output_tokens", "max_tokens",
    "messages", "min_p", "min_tokens", "n", "presence_penalty", "repetition_penalty", "seed", "stop", "top_logprobs",
    "stop_sequences", "temperature", "top_k", "top_p",
])  # fmt: skip
def test_bounds_are_those_of_the_server(start: Any, document: Any, name: str) -> None:
    """At the bound it is taken, a step beyond it is refused by name; on every endpoint that has the field."""
    live = start({"features": ["penalties"], "max_model_len": 2**16})
    message = [{"role": "user", "content": "x"}]
    bases = {
        "CompletionBody": ("/v1/completions", {"prompt": [5], "max_tokens": 1}),
        "ChatBody": ("/v1/chat/completions", {"messages": message, "max_tokens": 1, "logprobs": True}),
        "ResponsesBody": ("/v1/responses", {"input": "x", "max_output_tokens": 1}),
        "MessagesBody": ("/v1/messages", {"messages": message, "max_tokens": 1}),
    }
    tried = 0
    for body, (path, base) in bases.items():
        field = document["components"]["schemas"][body]["properties"].get(name, {})
        for option in field.get("anyOf", [field]):
            for good, bad in edges(option):
                answer = live.post(
                    path, **{**base, **({"max_tokens": 300} if name == "min_tokens" else {}), name: bad}
                )
                assert answer.status_code == 400, (path, bad, answer.text)
                assert name.removesuffix("_sequences") in answer.text
                if good is not None:
                    answer = live.post(path, **{**base, name: good})
                    assert answer.status_code == 200, (path, good, answer.text)
                tried += 1
    assert tried


def edges(option: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """(the last value that is taken, the first that is not) of each bound; None for a good one that costs too much."""
    kind = option.get("type")
    step = 1 if kind == "integer" else 1e-6
    if kind in ("integer", "number"):
        for word, sign in (("minimum", -1), ("maximum", 1)):
            if word in option:
                good = option[word]
                yield (good if abs(good) < 200 else None), good + sign * step
        if "exclusiveMinimum" in option:
            yield option["exclusiveMinimum"] + step, option["exclusiveMinimum"]
    if kind == "string" and "minLength" in option:
        yield "x" * option["minLength"], ""
    if kind == "string" and "maxLength" in option:
        yield "x" * option["maxLength"], "x" * (option["maxLength"] + 1)
    if kind == "array" and "maxItems" in option:
        yield ["x"] * option["maxItems"], ["x"] * (option["maxItems"] + 1)
    if kind == "array" and "minItems" in option:
        yield None, []


def test_keys_are_described_where_they_are_wanted(start: Any, document: Any) -> None:
    assert (document["security"], document["components"]["securitySchemes"]) == ([], {})
    guarded = start(app={"api_key": "k"})
    described = guarded.http.get("/openapi.json", headers={"authorization": "Bearer k"}).json()
    schemes = described["components"]["securitySchemes"]
    assert schemes["bearer"] == {"type": "http", "scheme": "bearer"}
    assert described["security"] == [{"bearer": []}, {"key": []}]
    assert described["paths"]["/health"]["get"]["security"] == []
    assert "security" not in described["paths"]["/v1/completions"]["post"]
