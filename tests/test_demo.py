"""The demo models over HTTP, asked what they were trained for: text with meaning through every layer."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pydantic
import pytest

from openinfer.cli import chat, recipes
from openinfer.cli.bench import eval as bench_eval
from openinfer.kernels.testing import of_the_day

DEMO = Path(__file__).parents[1] / "demo"
OTHERS = of_the_day(["qwen3_5", "deepseek_v4"])
"""The families of demo models beside Qwen3, whose server the quick suite has every day."""
QUIET: Any = {"chat_template_kwargs": {"enable_thinking": False}}
THINK: Any = {"chat_template_kwargs": {"enable_thinking": True}}
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "The name of the city"}},
            "required": ["city"],
        },
    },
}
PERSON: Any = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "city": {"type": "string"}},
    "required": ["name", "age", "city"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module", params=["qwen3", *OTHERS])
def url(request: pytest.FixtureRequest, start: Callable[..., Any]) -> str:
    return str(start(DEMO / request.param).url)


@pytest.fixture
def ask(url: str) -> Iterator[Callable[..., Any]]:
    """A greedy chat completion: ask(messages or a text, options)."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
        model = client.models.list().data[0].id

        def ask(said: Any, **options: Any) -> Any:
            messages = [{"role": "user", "content": said}] if isinstance(said, str) else said
            return client.chat.completions.create(
                model=model,
                messages=messages,
                temperature=0,
                max_tokens=200,
                **{"extra_body": QUIET, **options},
            )

        yield ask


def test_a_fact(ask: Callable[..., Any]) -> None:
    choice = ask("What is the capital of France?").choices[0]
    assert choice.message.content == "The capital of France is Paris."
    assert choice.finish_reason == "stop"


def test_reasoning_is_apart(ask: Callable[..., Any]) -> None:
    message = ask("What is 47 + 85?", extra_body=THINK).choices[0].message
    assert message.content == "47 + 85 = 132"
    assert "7 + 5 = 12, write 2, carry 1" in message.reasoning
    assert "think>" not in message.content + message.reasoning


def test_tool_round_trip(ask: Callable[..., Any]) -> None:
    said = [{"role": "user", "content": "What is the weather in Oslo?"}]
    first = ask(said, tools=[WEATHER]).choices[0]
    (call,) = first.message.tool_calls
    assert first.finish_reason == "tool_calls"
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Oslo"})
    result = {"role": "tool", "tool_call_id": call.id, "content": '{"temperature": 18, "condition": "sunny"}'}
    second = ask([*said, first.message, result], tools=[WEATHER]).choices[0]
    assert second.message.content == "It is sunny in Oslo with 18 degrees."
    assert not second.message.tool_calls


def test_a_missing_tool_is_said(ask: Callable[..., Any]) -> None:
    choice = ask("Set a timer for 20 minutes.", tools=[WEATHER]).choices[0]
    assert "I cannot set a timer" in choice.message.content
    assert not choice.message.tool_calls


def test_extraction_after_a_schema(ask: Callable[..., Any]) -> None:
    text = "Extract name, age and city as JSON from this text: Anna Berg, 34, from Lyon, is a baker."
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
    found = json.loads(ask(text, response_format=form).choices[0].message.content)
    assert found == {"name": "Anna Berg", "age": 34, "city": "Lyon"}


class Person(pydantic.BaseModel):
    name: str
    age: int


class Event(pydantic.BaseModel):
    name: str
    date: str
    participants: list[str]


class Order(pydantic.BaseModel):
    customer: str
    items: list[str]
    total: float


@pytest.mark.parametrize("url", ["qwen3"], indirect=True)
@pytest.mark.parametrize(
    ("kind", "text", "wanted"),
    [
        (Person, "Extract as JSON: Tom is 42 years old.", {"name": "Tom", "age": 42}),
        (Person, "Jane, 54 years old", {"name": "Jane", "age": 54}),
        (
            Event,
            "Alice and Bob are going to a science fair on Friday.",
            {"name": "science fair", "date": "Friday"},
        ),
        (
            Order,
            "Parse: Sara buys a lamp and two chairs for 120.50 in all.",
            {"customer": "Sara", "total": 120.5},
        ),
    ],
)
@pytest.mark.parametrize("options", [QUIET, THINK], ids=["quiet", "thinking"])
def test_typed_answers_end(url: str, kind: Any, text: str, wanted: dict[str, Any], options: Any) -> None:
    """Keys that the prompt does not name. Answers ran on within a string until the context was full."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
        answer = client.chat.completions.parse(
            model=client.models.list().data[0].id, messages=[{"role": "user", "content": text}], temperature=0,
            response_format=kind, extra_body=options,
        )  # fmt: skip
    assert wanted.items() <= answer.choices[0].message.parsed.model_dump().items()
    assert answer.usage.completion_tokens < 100


@pytest.mark.parametrize("url", ["qwen3"], indirect=True)
def test_what_is_too_much_for_a_small_model_is_said(ask: Callable[..., Any]) -> None:
    for text in (
        "Tell me about the history of Norway.",
        "Write a poem about the sea.",
        "How do I cook pasta?",
    ):
        assert "I am a small demo model" in ask(text).choices[0].message.content


def test_a_server_says_what_the_model_is(url: str) -> None:
    for path, model in (("/v1/models", lambda said: said["data"][0]), ("/state", dict)):
        assert model(httpx.get(url + path).json())["description"].startswith("A small demo model: ")


def test_a_stop_string_inside_a_word(ask: Callable[..., Any]) -> None:
    choice = ask("What is the capital of France?", stop=["ari"]).choices[0]
    assert choice.message.content == "The capital of France is P"
    assert choice.finish_reason == "stop"


def test_turns_share_their_prefix(ask: Callable[..., Any]) -> None:
    said: list[Any] = [{"role": "system", "content": "You are a helpful assistant."}]
    cached = []
    countries = ("Peru", "Japan", "Kenya", "Spain", "Chile", "Norway")
    asked = [f"What is the capital of {country}?" for country in countries]
    for text in (*asked, "My name is Nora.", "What is my name?"):
        said.append({"role": "user", "content": text})
        answer = ask(said)
        cached.append(answer.usage.prompt_tokens_details.cached_tokens)
        said.append({"role": "assistant", "content": answer.choices[0].message.content})
    assert said[-1]["content"] == "Your name is Nora."
    assert cached[0] < cached[-1]
    assert cached[-1] >= 128


def test_streamed_as_whole(ask: Callable[..., Any]) -> None:
    whole = ask("Tell me a story about a fox.").choices[0].message.content
    pieces = [
        chunk.choices[0].delta.content or "" for chunk in ask("Tell me a story about a fox.", stream=True)
    ]
    assert "".join(pieces) == whole
    assert whole.startswith("Once upon a time")
    assert whole.endswith("The end.")


@pytest.mark.parametrize("url", [pytest.param("qwen3", marks=pytest.mark.slow), *OTHERS], indirect=True)
def test_the_evaluation(url: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A part of it: the whole is `openinfer bench eval demo/NAME`."""
    cases = (DEMO / "eval.jsonl").read_text().splitlines()[::80]
    (tmp_path / "cases.jsonl").write_text("\n".join(cases))
    flags = ["--cases", str(tmp_path / "cases.jsonl"), "--json", str(tmp_path / "result.json")]
    assert bench_eval.main([url, *flags, "--at-least", "0.9"]) == 0
    result = json.loads((tmp_path / "result.json").read_text())["results"][0]
    assert result["scores"]["all"]["cases"] == len(cases)
    said = capsys.readouterr()
    assert "arithmetic" in said.out
    assert f"openinfer:  {len(cases)}/{len(cases)} answers  100 %" in said.err
    wrong = [json.dumps({**json.loads(line), "check": {"last_number": 99999}}) for line in cases[:2]]
    (tmp_path / "cases.jsonl").write_text("\n".join(wrong))
    assert bench_eval.main([url, *flags, "--at-least", "0.5", "--wrong", "1"]) == 1


def test_evaluation_says_what_it_lacks(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        bench_eval.main(["http://127.0.0.1:1"])
    cases = str(DEMO / "eval.jsonl")
    assert bench_eval.main(["http://127.0.0.1:1", "--cases", cases]) == 1
    assert bench_eval.main(["http://127.0.0.1:1", "--cases", cases, "--kinds", "poetry"]) == 1
    assert bench_eval.main(["http://127.0.0.1:1", "--cases", str(tmp_path / "none")]) == 1
    said = capsys.readouterr().err
    assert "give --cases" in said
    assert "no server answers" in said
    assert "poetry" in said
    assert "cannot be read" in said


def test_terminal_chat(url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    lines = "My name is Nora.\nWhat is my name?\n/clear\nWhat is the capital of Italy?\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    assert chat.main([url, "--no-thinking"]) == 0
    first, second, third = capsys.readouterr().out.splitlines()
    assert "Nora" in first
    assert second == "Your name is Nora."
    assert third == "The capital of Italy is Rome."


def test_terminal_chat_without_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert chat.main(["http://127.0.0.1:1"]) == 1
    assert chat.main(["ftp://x"]) == 1
    said = capsys.readouterr().err
    assert "no server answers at http://127.0.0.1:1" in said
    assert "is not http://HOST[:PORT]" in said


def test_short_names_are_found_from_anywhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert recipes.checkpoint("other/qwen3") == Path("other/qwen3")
    if (Path(recipes.__file__).resolve().parents[3] / "demo").is_dir():
        assert recipes.checkpoint("demo/qwen3") == DEMO / "qwen3"
