"""echo, and the log-probabilities of prompts: OpenAI's lists, vLLM's field, streams, and what is refused."""

import json
from typing import Any

import pytest

from openinfer.frontend.client import _gather
from openinfer.frontend.contract import PromptLogprobs, StepOutputs, TokenLogprobs
from openinfer.frontend.engine_loop import _split
from openinfer.frontend.wire import first_id

ENGINE = {"features": ["prompt_logprobs"]}
PROMPT = [299, 300, 301]


@pytest.fixture(scope="module")
def live(start: Any) -> Any:
    return start(engine=ENGINE)


@pytest.fixture(scope="module")
def plain(start: Any) -> Any:
    return start()


def pieces(live: Any, **body: Any) -> list[dict[str, Any]]:
    lines = live.post("/v1/completions", stream=True, **body).text.split("\n\n")
    assert lines[-2] == "data: [DONE]"
    return [choice for line in lines[:-2] for choice in json.loads(line[6:])["choices"]]


def test_echo_puts_the_prompt_before_the_text(plain: Any, tokenizer: Any) -> None:
    for prompt in ("Hello there", PROMPT):
        body = {"prompt": prompt, "max_tokens": 2}
        bare = plain.post("/v1/completions", **body).json()
        echoed = plain.post("/v1/completions", echo=True, **body).json()
        text = prompt if isinstance(prompt, str) else tokenizer.decode(prompt, skip_special_tokens=False)
        assert echoed["choices"][0]["text"] == text + bare["choices"][0]["text"]
        assert echoed["usage"]["completion_tokens"] == bare["usage"]["completion_tokens"] == 2


def test_echo_with_logprobs_has_the_prompts_too(live: Any, tokenizer: Any) -> None:
    body = live.post("/v1/completions", prompt=PROMPT, max_tokens=2, echo=True, logprobs=1).json()
    found = body["choices"][0]["logprobs"]
    words = [tokenizer.token_text(token) for token in (*PROMPT, 302, 303)]
    assert found["tokens"] == words
    assert found["token_logprobs"] == [None, -0.5, -0.5, -0.5, -0.5]
    assert found["top_logprobs"] == [None, *({word: -0.5} for word in words[1:])]
    assert found["text_offset"] == [sum(map(len, words[:place])) for place in range(5)]
    assert body["choices"][0]["text"] == "".join(words)
    assert "prompt_logprobs" not in body["choices"][0]


@pytest.mark.parametrize("logprobs", [None, 0, 2])
def test_the_echo_of_a_stream_is_the_echo_of_the_whole(live: Any, logprobs: int | None) -> None:
    asked = {"prompt": [PROMPT, [90]], "max_tokens": 5, "n": 2, "echo": True, "logprobs": logprobs}
    whole = live.post("/v1/completions", **asked).json()["choices"]
    streamed = pieces(live, **asked)
    assert len(whole) == 4
    for choice in whole:
        parts = [part for part in streamed if part["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        for name in choice["logprobs"] or ():
            said = [value for part in parts if part["logprobs"] for value in part["logprobs"][name]]
            assert said == choice["logprobs"][name]


@pytest.mark.parametrize("stream", [False, True])
def test_nothing_but_the_echo(live: Any, tokenizer: Any, stream: bool) -> None:
    asked = {"prompt": PROMPT, "max_tokens": 0, "echo": True, "logprobs": 0}
    if stream:
        choices = pieces(live, **asked)
    else:
        body = live.post("/v1/completions", **asked).json()
        assert body["usage"]["completion_tokens"] == 0
        choices = body["choices"]
    assert "".join(choice["text"] for choice in choices) == tokenizer.decode(
        PROMPT, skip_special_tokens=False
    )
    assert choices[0]["logprobs"]["token_logprobs"] == [None, -0.5, -0.5]
    assert choices[-1]["finish_reason"] == "length"


def test_prompt_logprobs_as_vllm_words_them(live: Any, tokenizer: Any) -> None:
    choice = live.post("/v1/completions", prompt=PROMPT, max_tokens=1, prompt_logprobs=2).json()["choices"][0]

    def entry(token: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": logprob, "rank": rank, "decoded_token": tokenizer.token_text(token)}

    # The fake engine's own token is the first of its alternatives, and says rank wanted + 1.
    assert choice["prompt_logprobs"] == [
        None,
        {"300": entry(300, -0.5, 3), "301": entry(301, -1.5, 2)},
        {"301": entry(301, -0.5, 3), "302": entry(302, -1.5, 2)},
    ]
    assert choice["logprobs"] is None
    both = {"prompt": PROMPT, "max_tokens": 1, "prompt_logprobs": 2, "echo": True, "logprobs": 1}
    choice = live.post("/v1/completions", **both).json()["choices"][0]
    assert [len(tops) for tops in choice["logprobs"]["top_logprobs"][1:]] == [1, 1, 1]
    assert [len(tops) for tops in choice["prompt_logprobs"][1:]] == [2, 2]


def test_a_chats_prompt_has_them_too(live: Any) -> None:
    message = {"role": "user", "content": "Hello"}
    asked = {"messages": [message], "max_tokens": 1, "prompt_logprobs": 0, "return_token_ids": True}
    body = live.post("/v1/chat/completions", **asked).json()
    ids = body["prompt_token_ids"]
    assert [list(entry) for entry in body["prompt_logprobs"][1:]] == [[str(token)] for token in ids[1:]]
    assert body["prompt_logprobs"][0] is None
    assert "prompt_logprobs" not in live.post("/v1/chat/completions", messages=[message], max_tokens=1).json()


@pytest.mark.parametrize(
    ("server", "fields", "param", "word"),
    [
        ("plain", {"prompt_logprobs": 1}, "prompt_logprobs", "not supported"),
        ("plain", {"echo": True, "logprobs": 1}, "echo", "not supported"),
        ("live", {"prompt_logprobs": 21}, "prompt_logprobs", "20"),
        ("live", {"prompt_logprobs": -1}, "prompt_logprobs", "-1"),
        ("live", {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "stream"),
        ("live", {"prompt_logprobs": True}, "prompt_logprobs", "expected int"),
        ("live", {"echo": 3}, "echo", "expected bool"),
        ("live", {"max_tokens": 0}, "max_tokens", "at least 1"),
        ("live", {"prompt": [5] * 4000, "n": 128, "prompt_logprobs": 20}, "prompt_logprobs", "8388608"),
        ("live", {"prompt": [5] * 4000, "n": 128, "echo": True, "logprobs": 20}, "echo", "8388608"),
    ],
)
def test_what_is_refused(
    request: pytest.FixtureRequest, server: str, fields: dict[str, Any], param: str, word: str
) -> None:
    answer = request.getfixturevalue(server).post("/v1/completions", **{"prompt": [5], **fields})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert word in error["message"]


def test_without_a_tokenizer_there_is_no_echo(start: Any) -> None:
    bare = start(engine=ENGINE, app={"tokenizer": None, "template": None})
    assert bare.post("/v1/completions", prompt=[5], echo=True).json()["error"]["param"] == "echo"
    choice = bare.post("/v1/completions", prompt=[5, 6], max_tokens=1, prompt_logprobs=0).json()["choices"][0]
    assert choice["prompt_logprobs"][1]["6"]["decoded_token"] == "token_id:6"


def test_pieces_find_their_client_and_request() -> None:
    mine, other = first_id(0), first_id(1)
    one, two = TokenLogprobs(-1.0, [], [], 1), TokenLogprobs(-2.0, [], [], 2)
    outputs = StepOutputs(
        request_ids=[other],
        token_ids=[7],
        prompt_logprobs=[
            PromptLogprobs(mine, [one]),
            PromptLogprobs(mine, [two]),
            PromptLogprobs(other, [two]),
        ],
    )
    parts = _split(outputs)
    assert [scored.id for scored in parts[0].prompt_logprobs] == [mine, mine]
    assert (parts[1].token_ids, [scored.id for scored in parts[1].prompt_logprobs]) == ([7], [other])
    deltas: dict[int, Any] = {}
    _gather(parts[0], deltas)
    assert deltas[mine].prompt_logprobs == [one, two]
