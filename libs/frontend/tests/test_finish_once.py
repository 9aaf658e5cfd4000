"""Each choice of a stream says once how it ended, however long the others go on."""

import json
from collections import Counter
from typing import Any

import pytest

from openinfer.frontend.contract import TokenLogprobs
from openinfer.frontend.http.openai.completions import likeliest


@pytest.fixture(scope="module")
def live(start: Any) -> Any:
    return start({"max_running": 1, "step_delay_s": 0.001})  # the choices run one after the other


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [[300], [310]], "n": 2}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "n": 4}),
    ],
)
@pytest.mark.parametrize("extra", [{}, {"return_token_ids": True}, {"logprobs": 1}])
def test_finish_reasons_of_several_choices(live: Any, path: str, body: Any, extra: Any) -> None:
    if "messages" in body and "logprobs" in extra:
        extra = {"logprobs": True, "top_logprobs": 1}
    answer = live.post(path, stream=True, max_tokens=20, ignore_eos=True, **body, **extra)
    assert answer.status_code == 200, answer.text
    chunks = [json.loads(line[6:]) for line in answer.text.split("\n\n") if line.startswith("data: {")]
    finished = Counter(
        choice["index"] for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]
    )
    assert finished == {0: 1, 1: 1, 2: 1, 3: 1}
    said = [choice["index"] for chunk in chunks for choice in chunk["choices"]]
    assert said == sorted(said)  # nothing more comes of a choice that has ended


def test_one_choice_of_the_newer_endpoints(live: Any) -> None:
    for path, body, last in (
        ("/v1/responses", {"input": "a", "max_output_tokens": 9}, "response.incomplete"),
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": "a"}], "max_tokens": 9, "model": "fake"},
            "message_delta",
        ),
    ):
        answer = live.post(path, stream=True, **body)
        assert answer.status_code == 200, answer.text
        assert answer.text.count(f"event: {last}\n") == 1


def test_of_two_tokens_with_one_text_the_likelier_is_told() -> None:
    entry = TokenLogprobs(-3.0, [1, 2, 3], [-0.1, -0.2, -0.3])
    texts = {1: "same", 2: "same", 3: "other"}
    assert likeliest(entry, 3, texts.__getitem__) == {"same": -0.1, "other": -0.3}
