"""continue_final_message: the answer goes on where the last message ends."""

from typing import Any

import pytest

from openinfer.frontend.chat import DeepSeekV4Renderer
from openinfer.frontend.http import Tokenizer

ASK = {"role": "user", "content": "Count."}


@pytest.fixture(scope="module")
def live(start: Any) -> Any:
    return start(app={"reasoning_parser": "qwen3"})


def prompt(live: Any, **body: Any) -> str:
    """The prompt's text."""
    ids = live.post("/tokenize", **body).json()["tokens"]
    text: str = live.post("/detokenize", tokens=ids).json()["prompt"]
    return text


@pytest.mark.parametrize("final", ["One, two", "One, two ", "One\n\n", "1 < 2 & {{ x }}"])
def test_the_prompt_ends_as_the_message_does(live: Any, final: str) -> None:
    messages = [ASK, {"role": "assistant", "content": final}]
    text = prompt(live, messages=messages, continue_final_message=True, add_generation_prompt=False)
    assert text.endswith(final)
    assert text.count("<|im_start|>assistant") == 1
    whole = prompt(live, messages=messages, add_generation_prompt=False)
    assert whole.startswith(text.rstrip())
    assert len(whole) > len(text.rstrip())  # the end of the turn was cut off
    assert prompt(live, messages=messages).count("<|im_start|>assistant") == 2


def test_chat_takes_it_too(live: Any) -> None:
    messages = [ASK, {"role": "assistant", "content": "One, two"}]
    body = {"messages": messages, "continue_final_message": True}
    usage = live.post("/v1/chat/completions", **body, max_tokens=1).json()["usage"]
    assert usage["prompt_tokens"] == live.post("/tokenize", **body).json()["count"]


def test_a_thought_that_is_open_goes_on_as_reasoning(start: Any, tokenizer: Tokenizer) -> None:
    words = tokenizer._core.encode("more</think>done", add_special_tokens=False).ids
    live = start({"script": words, "eos_token_ids": []}, app={"reasoning_parser": "qwen3"})
    for final, reasoning, content in (
        ("<think>I", "more", "done"),
        ("<think>I</think>So", None, "more</think>done"),
    ):
        body = {"messages": [ASK, {"role": "assistant", "content": final}], "continue_final_message": True}
        message = live.post("/v1/chat/completions", **body, max_tokens=len(words)).json()["choices"][0][
            "message"
        ]
        assert (message.get("reasoning"), message["content"]) == (reasoning, content)


@pytest.mark.parametrize(
    ("messages", "fields", "words"),
    [
        ([ASK], {}, "last message of the assistant"),
        ([ASK, {"role": "assistant", "content": ""}], {}, "with content"),
        ([ASK, {"role": "assistant", "content": "x"}], {"add_generation_prompt": True}, "exclude"),
        (
            [ASK, {"role": "assistant", "content": "x", "tool_calls": [{"function": {"name": "f"}}]}],
            {},
            "tool calls",
        ),
    ],
)
def test_what_cannot_be_continued_is_refused(
    live: Any, messages: list[dict[str, Any]], fields: dict[str, Any], words: str
) -> None:
    answer = live.post("/v1/chat/completions", messages=messages, continue_final_message=True, **fields)
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == "continue_final_message"


def test_a_template_that_hides_the_message_says_so(start: Any, tokenizer: Tokenizer) -> None:
    from openinfer.frontend.http import ChatTemplate

    live = start(app={"template": ChatTemplate("{{ messages[0].content }}", tokenizer.special_tokens)})
    messages = [ASK, {"role": "assistant", "content": "x"}]
    answer = live.post("/v1/chat/completions", messages=messages, continue_final_message=True)
    assert answer.status_code == 400
    assert "cannot be continued" in answer.json()["error"]["message"]


def test_a_coded_renderer_takes_it_too(start: Any) -> None:
    live = start(app={"template": DeepSeekV4Renderer()})
    messages = [ASK, {"role": "assistant", "content": "One, two"}]
    assert prompt(live, messages=messages, continue_final_message=True).endswith("One, two")


def test_anthropics_prefill_is_continued(live: Any) -> None:
    messages = [ASK, {"role": "assistant", "content": "One, two"}]
    counted = live.post("/v1/messages/count_tokens", messages=messages, max_tokens=1).json()["input_tokens"]
    assert counted == live.post("/tokenize", messages=messages, continue_final_message=True).json()["count"]
    usage = live.post("/v1/messages", messages=messages, max_tokens=1).json()["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == counted
