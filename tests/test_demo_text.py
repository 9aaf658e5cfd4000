"""The text that the demo models learn (tools/demo_models): what it says is right, and evaluation is kept apart."""

from __future__ import annotations

import importlib
import itertools
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import pytest
import tokenizers

from openinfer.cli.bench import eval_cases
from openinfer.frontend.chat import TOOL_FORMATS, Content, OutputParser, ToolCall, default_formats

ROOT = Path(__file__).parents[1]
FAMILIES = ("qwen3", "qwen3_5", "deepseek_v4")


@pytest.fixture(scope="module")
def maker() -> Iterator[dict[str, ModuleType]]:
    """The generator's modules. They are scripts, so they are found by their folder."""
    folder, before = str(ROOT / "tools" / "demo_models"), set(sys.modules)
    sys.path.insert(0, folder)
    try:
        yield {name: importlib.import_module(name) for name in ("corpus", "families", "make_cases", "facts")}
    finally:
        sys.path.remove(folder)
        for name in set(sys.modules) - before:
            if str(getattr(sys.modules[name], "__file__", "")).startswith(folder):
                del sys.modules[name]


def parsed(family: str, chat: Any, text: str) -> tuple[str, list[tuple[str, str]]]:
    """What a server would make of an answer."""
    name, _ = default_formats(family)
    assert name is not None
    parser = OutputParser(
        reasoning=True,
        tools=TOOL_FORMATS[name] if chat.tools else None,
        schemas={tool["function"]["name"]: tool["function"]["parameters"] for tool in chat.tools},
        in_reasoning=chat.thinking and family != "qwen3",
    )
    parts = [*parser.push(text), *parser.flush()]
    content = "".join(part.text for part in parts if isinstance(part, Content))
    return content, [(part.name, part.arguments) for part in parts if isinstance(part, ToolCall)]


@pytest.mark.parametrize("name", FAMILIES)
def test_every_answer_passes_its_own_check(maker: dict[str, ModuleType], name: str) -> None:
    """Through the family's template and the server's parser; so the checks, templates and parsers agree."""
    family = maker["families"].FAMILIES[name]
    render = family.renderer()
    tokenizer = tokenizers.Tokenizer.from_file(str(ROOT / "demo" / name / "tokenizer.json"))
    kinds: Counter[str] = Counter()
    for chat in itertools.islice(maker["corpus"].chats(3), 400):
        prompt, answer = maker["families"].prompt_and_answer(family, render, chat)
        assert tokenizer.decode(tokenizer.encode(answer).ids, skip_special_tokens=False) == answer
        assert len(tokenizer.encode(prompt + answer).ids) <= maker["corpus"].LENGTHS[-1]
        content, calls = parsed(name, chat, answer.removesuffix(family.end.strip()))
        assert eval_cases.passed(chat.check, content, calls), (chat.check, answer)
        if chat.check.get("contains"):
            assert not eval_cases.passed(chat.check, content[:3], calls)
        kinds[chat.kind] += 1
    assert len(kinds) == len(maker["corpus"].MIX)


def test_some_tools_are_simpler_than_the_generators(maker: dict[str, ModuleType]) -> None:
    """Without optional parameters that no call takes; what the chat needs is never lost."""
    lost: Counter[str] = Counter()
    corpus, rng = maker["corpus"], Random(0)
    for chat in itertools.islice(corpus.chats(5), 3000):
        simpler = corpus.simpler(rng, chat)
        assert simpler.messages == chat.messages
        needed = {
            name
            for said in chat.messages
            for call in said.get("tool_calls", ())
            for name in call["function"]["arguments"]
        }
        for before, after in zip(chat.tools, simpler.tools, strict=True):
            form, less = before["function"]["parameters"], after["function"]["parameters"]
            gone = set(form["properties"]) - set(less["properties"])
            assert not gone & ({*form["required"]} | needed)
            lost["some" if gone else "none"] += 1
    assert lost["some"] > 50


def test_scripts_that_need_torch_call_what_there_is() -> None:
    texts = [path.read_text() for path in (ROOT / "tools" / "demo_models").glob("*.py")]
    names = {name for text in texts for name in re.findall(r"\beval_cases\.(\w+)", text)}
    assert {name for name in names if not hasattr(eval_cases, name)} == set()
    assert "load_cases" in names


def test_shares_change_the_mix(maker: dict[str, ModuleType]) -> None:
    corpus = maker["corpus"]
    few = {kind.__name__: 0 for kind in corpus.MIX} | {"refusal": 1}
    assert {chat.kind for chat in itertools.islice(corpus.chats(6, few), 20)} == {"refusal"}
    folder = ROOT / "demo" / "qwen3"
    plain, refusals = (corpus.examples("qwen3", folder, 6, 20, shares) for shares in ({}, few))
    assert [ids.tolist() for ids, _ in plain] != [ids.tolist() for ids, _ in refusals]


def test_training_text_has_no_held_out_question(maker: dict[str, ModuleType]) -> None:
    cases = eval_cases.load_cases(ROOT / "demo" / "eval.jsonl")
    held_out = {json.dumps(case.messages[-1]) for case in cases if case.kind in ("extraction", "tool_call")}
    seen = {json.dumps(chat.messages[-2]) for chat in itertools.islice(maker["corpus"].chats(4), 3000)}
    assert len(held_out) > 100
    assert not held_out & seen


def test_the_evaluation_set_is_what_its_generator_writes(
    maker: dict[str, ModuleType], tmp_path: Path
) -> None:
    maker["make_cases"].main(tmp_path / "eval.jsonl")
    assert (tmp_path / "eval.jsonl").read_bytes() == (ROOT / "demo" / "eval.jsonl").read_bytes()


def test_facts_have_one_answer_a_question(maker: dict[str, ModuleType]) -> None:
    answers: dict[str, set[str]] = {}
    for fact in maker["facts"].FACTS:
        for question in fact.questions:
            answers.setdefault(question, set()).add(fact.answer)
    assert len(maker["facts"].FACTS) > 300
    assert [question for question, found in answers.items() if len(found) > 1] == []


@pytest.mark.parametrize(
    ("check", "content", "calls", "right"),
    [
        ({"contains": ["Paris"]}, "It is Paris.", [], True),
        ({"contains": ["Paris", "London"]}, "It is Paris.", [], False),
        ({"last_number": 12}, "3 * 4 = 12", [], True),
        ({"last_number": 12}, "12 is 3 * 4", [], False),
        ({"last_number": -3}, "4 - 7 = -3", [], True),
        ({"json": {"a": 1, "b": "x"}}, '{"b": "x", "a": 1}', [], True),
        ({"json": {"a": 1}}, '{"a": true}', [], False),
        ({"json": {"a": 1}}, "a is 1", [], False),
        ({"calls": []}, "No.", [], True),
        ({"calls": []}, "", [("f", "{}")], False),
        ({"calls": [{"name": "f", "arguments": {"x": 1}}]}, "", [("f", '{"x": 1}')], True),
        ({"calls": [{"name": "f", "arguments": {"x": 1}}]}, "", [("f", '{"x": "1"}')], False),
    ],
)
def test_checks(check: dict[str, Any], content: str, calls: list[tuple[str, str]], right: bool) -> None:
    assert eval_cases.passed(check, content, calls) is right


@pytest.mark.parametrize(
    "line", ["{", '{"kind": "a", "messages": []}', '{"kind": "a", "messages": [], "check": {"is": 1}}']
)
def test_a_case_that_is_none_is_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "cases.jsonl").write_text(line)
    with pytest.raises(eval_cases.CaseError, match=r"line 1"):
        eval_cases.load_cases(tmp_path / "cases.jsonl")
    with pytest.raises(eval_cases.CaseError, match="cannot be read"):
        eval_cases.load_cases(tmp_path / "none.jsonl")
