"""The document says what the server does."""

from typing import Any

import pytest

from openinfer.frontend.http.body import REFUSED


@pytest.fixture(scope="module")
def live(start: Any) -> Any:
    return start()


@pytest.fixture(scope="module")
def document(live: Any) -> Any:
    return live.http.get("/openapi.json").json()


def test_every_path_is_served_by_its_method_only(live: Any, document: Any) -> None:
    assert len(document["paths"]) == 15
    for path, operations in document["paths"].items():
        (method,) = operations
        other = "GET" if method == "post" else "POST"
        url = path.replace("{name}", "fake")
        assert live.http.request(other, url).status_code == 405
        status = live.http.request(method.upper(), url).status_code
        assert status == (400 if method == "post" else 200)
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
    assert chat["temperature"]["anyOf"][0] == {"type": "number"}
    for name, values in REFUSED.items():
        assert chat[name]["enum"] == list(values)
        for value in values:
            body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, name: value}
            assert live.post("/v1/chat/completions", **body).status_code == 200


def test_answers_have_the_documented_fields(live: Any, document: Any) -> None:
    answer = live.post("/v1/completions", prompt=[5], max_tokens=1).json()
    schema = document["components"]["schemas"]["CompletionResponse"]
    assert set(schema["required"]) <= set(answer) <= set(schema["properties"])


def test_a_wrong_method_is_told_the_right_one(live: Any) -> None:
    refused = live.http.put("/v1/completions")
    assert (refused.status_code, refused.headers["allow"]) == (405, "POST")
    assert refused.json()["error"]["type"] == "invalid_request_error"
