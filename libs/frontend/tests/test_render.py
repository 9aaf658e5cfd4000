"""Rendering without generating, the load, and what is said of routes that other servers have."""

from typing import Any

import pytest

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def live(start: Any) -> Any:
    return start({"features": ["logit_bias"]})


def test_a_chat_is_rendered_as_it_would_be_answered(live: Any) -> None:
    asked = {"messages": HI, "max_tokens": 3, "temperature": 0.5, "stop": ["x"], "logit_bias": {"5": 1}}
    rendered = live.post("/v1/chat/completions/render", **asked).json()
    answer = live.post("/v1/chat/completions", **asked, return_token_ids=True).json()
    assert rendered["token_ids"] == answer["prompt_token_ids"]
    assert rendered["model"] == "fake"
    assert (
        rendered["sampling_params"]
        | {"temperature": 0.5, "max_tokens": 3, "n": 1, "stop": ["x"], "logit_bias": {"5": 1.0}}
        == rendered["sampling_params"]
    )
    assert live.post("/v1/chat/completions/render", messages=[]).status_code == 400
    counted = [
        line for line in live.http.get("/metrics").text.splitlines() if "request_params_n_count" in line
    ]
    assert counted[0].endswith(" 1.0")  # the answer's own


def test_prompts_and_items_are_rendered(live: Any) -> None:
    both = live.post("/v1/completions/render", prompt=[[5, 6], [7]], max_tokens=2).json()
    assert [one["token_ids"] for one in both] == [[5, 6], [7]]
    assert len({one["request_id"] for one in both}) == 2
    items = live.post("/v1/responses/render", input="hi").json()
    assert items["token_ids"] == live.post("/v1/chat/completions/render", messages=HI).json()["token_ids"]


def test_load_and_ping(live: Any) -> None:
    assert live.http.get("/load").json() == live.http.get("/v1/load").json() == {"server_load": 0}
    assert live.http.get("/ping").status_code == 200


@pytest.mark.parametrize(
    ("path", "word"),
    [
        ("/v1/embeddings", "generates text"),
        ("/v1/score", "generates text"),
        ("/rerank/", "generates text"),
        ("/inference/v1/generate", "/v1/completions"),
        ("/v1/responses/resp_1", "not stored"),
    ],
)
def test_routes_of_other_servers_are_404_with_a_hint(live: Any, path: str, word: str) -> None:
    for answer in (live.post(path, input="x"), live.http.get(path)):
        assert answer.status_code == 404
        assert word in answer.json()["error"]["message"]
    assert ";" not in live.http.get("/nowhere").json()["error"]["message"]
