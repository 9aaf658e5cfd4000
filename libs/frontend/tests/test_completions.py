"""/v1/completions over a socket: shapes, streaming, stops, logprobs, usage."""

import json
from typing import Any

import httpx
import pytest

PROMPT = [47, 76, 332]


@pytest.fixture(scope="module")
def live(start: Any) -> Any:
    return start()


def events(response: httpx.Response) -> list[dict[str, Any]]:
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


def streamed(live: Any, **body: Any) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """The choices in order, and the usage if the last event brought it."""
    response = live.post("/v1/completions", stream=True, stream_options={"include_usage": True}, **body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, last = events(response)
    assert last["choices"] == []
    assert len({chunk["id"] for chunk in [*chunks, last]}) == 1
    return [chunk["choices"][0] for chunk in chunks], last["usage"]


def test_whole_answer(live: Any, tokenizer: Any) -> None:
    answer = live.post("/v1/completions", model="fake", prompt=PROMPT, max_tokens=5)
    body = answer.json()
    assert answer.status_code == 200
    assert body["id"].startswith("cmpl-")
    assert (body["object"], body["model"]) == ("text_completion", "fake")
    assert body["choices"] == [
        {
            "index": 0,
            "text": tokenizer.decode([333, 334, 335, 336, 337], True),
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
        }
    ]
    assert body["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 5,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def test_the_default_is_16_tokens(live: Any) -> None:
    assert live.post("/v1/completions", prompt=PROMPT).json()["usage"]["completion_tokens"] == 16


def test_the_default_shrinks_to_what_fits(start: Any) -> None:
    small = start({"max_model_len": 10})
    usage = small.post("/v1/completions", prompt=PROMPT).json()["usage"]
    assert usage["completion_tokens"] == 7


def test_text_prompts_and_batches(live: Any, tokenizer: Any) -> None:
    ids = tokenizer._core.encode("Hello, world!").ids
    for prompt in ("Hello, world!", ["Hello, world!"], [ids], ids):
        body = live.post("/v1/completions", prompt=prompt, max_tokens=1, return_token_ids=True).json()
        assert body["choices"][0]["prompt_token_ids"] == ids
    body = live.post("/v1/completions", prompt=[[5], [300]], n=2, max_tokens=2, return_token_ids=True).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert [choice["token_ids"] for choice in body["choices"]] == [[6, 7], [6, 7], [301, 302], [301, 302]]
    assert body["usage"]["prompt_tokens"] == 2
    assert body["usage"]["completion_tokens"] == 8


def test_stream_equals_whole(start: Any) -> None:
    live = start({"step_delay_s": 0.0005})
    asked = {"prompt": [90], "max_tokens": 300, "ignore_eos": True, "return_token_ids": True, "logprobs": 1}
    whole = live.post("/v1/completions", **asked).json()
    choices, usage = streamed(live, **asked)
    assert "".join(choice["text"] for choice in choices) == whole["choices"][0]["text"]
    assert [token_id for choice in choices for token_id in choice["token_ids"]] == whole["choices"][0][
        "token_ids"
    ]
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["length"]
    assert len(choices) > 10
    assert choices[0]["prompt_token_ids"] == [90]
    assert "prompt_token_ids" not in choices[1]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        parts = [part for choice in choices if choice["logprobs"] for part in choice["logprobs"][name]]
        assert parts == whole["choices"][0]["logprobs"][name]
    assert usage is not None
    assert usage["completion_tokens"] == whole["usage"]["completion_tokens"] == 300


def test_without_include_usage_there_is_none(live: Any) -> None:
    chunks = events(live.post("/v1/completions", prompt=PROMPT, stream=True))
    assert all("usage" not in chunk and chunk["choices"] for chunk in chunks)


def test_cached_tokens_are_reported(live: Any) -> None:
    prompt = list(range(300, 340))
    live.post("/v1/completions", prompt=prompt, max_tokens=1)
    usage = live.post("/v1/completions", prompt=prompt, max_tokens=1).json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 32}


@pytest.fixture(scope="module")
def speaker(start: Any, tokenizer: Any) -> Any:
    """Says this, then EOS, whatever the prompt."""
    return start({"script": [*tokenizer._core.encode("one two three four").ids, 2]})


def test_eos_ends_and_is_left_out_of_the_text(speaker: Any) -> None:
    choice = speaker.post("/v1/completions", prompt=[9], max_tokens=100, return_token_ids=True).json()[
        "choices"
    ][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (
        "one two three four",
        "stop",
        None,
    )
    assert choice["token_ids"][-1] == 2


def test_eos_text_is_shown_when_asked(speaker: Any) -> None:
    body = {"prompt": [9], "max_tokens": 100, "skip_special_tokens": False}
    shown = speaker.post("/v1/completions", **body, include_stop_str_in_output=True).json()["choices"][0]
    hidden = speaker.post("/v1/completions", **body).json()["choices"][0]
    assert shown["text"] == "one two three four<|im_end|>"
    assert hidden["text"] == "one two three four"


def test_ignore_eos_and_min_tokens(speaker: Any) -> None:
    body = speaker.post("/v1/completions", prompt=[9], max_tokens=60, ignore_eos=True).json()
    assert body["usage"]["completion_tokens"] == 60
    body = speaker.post("/v1/completions", prompt=[9], max_tokens=60, min_tokens=20).json()
    assert body["usage"]["completion_tokens"] > 20
    assert body["choices"][0]["finish_reason"] == "stop"


def test_stop_token_ids(live: Any) -> None:
    choice = live.post(
        "/v1/completions", prompt=[300], max_tokens=50, stop_token_ids=[304], return_token_ids=True
    ).json()["choices"][0]
    assert choice["token_ids"] == [301, 302, 303, 304]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", 304)


@pytest.mark.parametrize("include", [False, True])
def test_more_stop_token_ids_than_an_engine_looks_for(live: Any, tokenizer: Any, include: bool) -> None:
    many = [*range(500, 560), 304, 308]
    body = {
        "prompt": [300], "max_tokens": 50, "stop_token_ids": many, "return_token_ids": True, "logprobs": 1,
        "include_stop_str_in_output": include,
    }  # fmt: skip
    choice = live.post("/v1/completions", **body).json()["choices"][0]
    assert choice["token_ids"] == [301, 302, 303, 304]
    assert choice["text"] == tokenizer.decode([301, 302, 303, 304][: 4 if include else 3], True)
    assert len(choice["logprobs"]["tokens"]) == 4
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", 304)
    choice = live.post("/v1/completions", **body, min_tokens=6).json()["choices"][0]
    assert (choice["token_ids"][-1], choice["stop_reason"]) == (308, 308)
    choices, usage = streamed(live, **{**body, "max_tokens": 3})
    assert choices[-1]["finish_reason"] == "length"
    assert usage["completion_tokens"] == 3


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("stop", "include", "text", "reason"),
    [
        ("three", False, "one two ", "three"),
        ("three", True, "one two three", "three"),
        (["w", "one two t"], False, "one t", "w"),
        ("two three f", False, "one ", "two three f"),
        (["nothing", "never"], False, "one two three four", None),
    ],
)
def test_stop_strings(
    speaker: Any, stream: bool, stop: str | list[str], include: bool, text: str, reason: str | None
) -> None:
    asked = {"prompt": [9], "max_tokens": 100, "stop": stop, "include_stop_str_in_output": include}
    if stream:
        choices, usage = streamed(speaker, **asked)
        assert "".join(choice["text"] for choice in choices) == text
        end = choices[-1]
    else:
        body = speaker.post("/v1/completions", **asked).json()
        end, usage = body["choices"][0], body["usage"]
        assert end["text"] == text
    assert (end["finish_reason"], end["stop_reason"]) == ("stop", reason)
    assert usage is not None
    assert usage["completion_tokens"] <= 18


def test_a_stop_string_ends_the_engine_s_work(start: Any, tokenizer: Any) -> None:
    endless = start({"script": tokenizer._core.encode("a b c ").ids, "step_delay_s": 0.001})
    body = endless.post("/v1/completions", prompt=[9], max_tokens=4000, stop="b c a", ignore_eos=True).json()
    assert body["choices"][0]["text"] == "a "
    _until(lambda: endless.driver.stats().running == 0)
    assert endless.driver.stats().generation_tokens < 200


def test_stop_strings_wait_for_min_tokens(speaker: Any) -> None:
    body = speaker.post("/v1/completions", prompt=[9], max_tokens=60, stop="o", min_tokens=12).json()
    assert body["usage"]["completion_tokens"] >= 12
    assert body["choices"][0]["text"].startswith("one two")


def test_logprobs_shape(live: Any, tokenizer: Any) -> None:
    choice = live.post("/v1/completions", prompt=[299], max_tokens=2, logprobs=2).json()["choices"][0]
    words = [tokenizer.token_text(token_id) for token_id in range(300, 304)]
    assert choice["logprobs"] == {
        "tokens": words[:2],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{words[0]: -0.5, words[1]: -1.5}, {words[1]: -0.5, words[2]: -1.5}],
        "text_offset": [0, len(words[0])],
    }
    bare = live.post("/v1/completions", prompt=[299], max_tokens=1, logprobs=0).json()["choices"][0]
    assert bare["logprobs"]["top_logprobs"] == [None]


def test_n_streams_interleave(live: Any) -> None:
    choices, usage = streamed(live, prompt=[5], n=3, max_tokens=4, seed=2**63 - 1)
    for index in range(3):
        mine = [choice for choice in choices if choice["index"] == index]
        assert mine[-1]["finish_reason"] == "length"
    assert usage is not None
    assert usage["completion_tokens"] == 12


def test_ids_only_without_a_tokenizer(start: Any) -> None:
    bare = start(app={"tokenizer": None, "template": None})
    body = bare.post("/v1/completions", prompt=[5], max_tokens=2, return_token_ids=True, logprobs=0).json()
    assert body["choices"][0]["token_ids"] == [6, 7]
    assert body["choices"][0]["text"] == ""
    assert body["choices"][0]["logprobs"]["tokens"] == ["token_id:6", "token_id:7"]
    own = bare.post("/v1/completions", prompt=[5], max_tokens=2).json()["choices"][0]
    assert own["token_ids"] == [6, 7]  # there is no text, so ids are what a client gets
    parts, _ = streamed(bare, prompt=[5], max_tokens=3)
    assert [token for part in parts for token in part["token_ids"]] == [6, 7, 8]
    for path, fields, param in (
        ("/v1/completions", {"prompt": "text"}, "prompt"),
        ("/v1/completions", {"prompt": [5], "stop": "x"}, "stop"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}, "messages"),
    ):
        refused = bare.post(path, **fields)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == param


def _until(condition: Any, timeout_s: float = 10.0) -> None:
    import time

    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("echo", [False, True])
def test_a_token_within_a_character_begins_where_that_does(
    start: Any, tokenizer: Any, stream: bool, echo: bool
) -> None:
    text = "a 👩‍🚀 é 日本"
    ids = tokenizer.encode_short(text)
    assert len(ids) > len(text)
    live = start({"script": [*ids, 2], "eos_token_ids": [2], "features": ["prompt_logprobs"]})
    prompt = "🙂 b" if echo else "x"
    body = {"prompt": prompt, "max_tokens": 99, "logprobs": 0, "echo": echo, "stream": stream}
    answer = live.post("/v1/completions", **body)
    assert answer.status_code == 200, answer.text
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    chunks = [json.loads(line) for line in lines] if stream else [answer.json()]
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["logprobs"]]
    offsets = [offset for choice in choices for offset in choice["logprobs"]["text_offset"]]
    said = prompt * echo + text
    everything = [*tokenizer.encode_short(prompt * echo), *ids]
    before = [
        tokenizer.decode(everything[:place], False).rstrip("\ufffd") for place in range(len(everything) + 1)
    ]
    assert all(said.startswith(words) for words in before)
    assert offsets == list(map(len, before))
