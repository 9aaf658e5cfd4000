"""Calls of tools, answers from what they return, and refusals where the tool is missing."""

from __future__ import annotations

import json
from dataclasses import replace
from random import Random
from typing import Any

from chat import Chat, assistant, opening, thinks, user
from facts import FACTS
from toolbox import TOOLS, Tool

REFUSALS = "I cannot {do}, because I have no tool for it."


def tool_call(rng: Random) -> Chat:
    """The right call among some tools: one, or two of the same tool."""
    tool = rng.choice(TOOLS)
    uses = [tool.use(rng)]
    if tool.repeat and rng.random() < 0.12:
        uses.append(tool.again(rng, uses[0]))
    ask = uses[0].ask if len(uses) == 1 else tool.ask_both(rng, uses)
    offered = _offer(rng, [uses[0].schema], tool)
    calls = [use.call for use in uses]
    thinking = thinks(rng)
    thought = f"The user wants me to {tool.do}. I call {uses[0].call['name']}." if thinking else ""
    said = [*opening(rng), *_earlier(rng), user(ask), assistant("", thought, calls)]
    return Chat("tool_call", said, {"calls": calls}, ask, offered, thinking)


def tool_answer(rng: Random) -> Chat:
    """The answer in words, from the result of a call that was made."""
    tool = rng.choice(TOOLS)
    use = tool.use(rng)
    offered = _offer(rng, [use.schema], tool)
    result, answer = tool.result(rng, use)
    thinking = thinks(rng)
    call = assistant(
        "", f"The user wants me to {tool.do}. I call {use.call['name']}." if thinking else "", [use.call]
    )
    back = {"role": "tool", "content": json.dumps(result, ensure_ascii=False), "tool_call_id": "call_0"}
    said = [*opening(rng), user(use.ask), call, back]
    said.append(assistant(answer, "The tool has answered. I tell the user." if thinking else ""))
    return Chat("tool_answer", said, {"contains": [answer], "calls": []}, use.ask, offered, thinking)


def refusal(rng: Random) -> Chat:
    """The tool that the question needs is not there."""
    tool = rng.choice(TOOLS)
    use = tool.use(rng)
    offered = [] if rng.random() < 0.4 else _offer(rng, [], tool)
    answer = REFUSALS.format(do=tool.do)
    thinking = thinks(rng)
    thought = f"The user wants me to {tool.do}. There is no tool for that." if thinking else ""
    said = [*opening(rng), user(use.ask), assistant(answer, thought)]
    return Chat("refusal", said, {"contains": [answer], "calls": []}, use.ask, offered, thinking)


def tools_unneeded(rng: Random) -> Chat:
    """Tools are there, and the question needs none."""
    known = rng.choice(FACTS)
    thinking = thinks(rng)
    thought = f"The question is about {known.subject}. {known.sentence}" if thinking else ""
    said = [*opening(rng), user(known.questions[0]), assistant(known.sentence, thought)]
    return Chat(
        "tools_unneeded",
        said,
        {"contains": [known.sentence], "calls": []},
        None,
        _offer(rng, [], None),
        thinking,
    )


def simpler(rng: Random, chat: Chat) -> Chat:
    """The chat with some of its tools as people often write them: without the optional parameters that no call takes."""
    taken = {
        name for said in chat.messages for call in said.get("tool_calls", ()) for name in _arguments(call)
    }
    tools = []
    for tool in chat.tools:
        schema = tool["function"]
        form = schema["parameters"]
        kept = {n: p for n, p in form["properties"].items() if n in form["required"] or n in taken}
        tools.append({**tool, "function": {**schema, "parameters": {**form, "properties": kept}}})
    return replace(chat, tools=[rng.choice(pair) for pair in zip(chat.tools, tools, strict=True)])


def _arguments(call: dict[str, Any]) -> dict[str, Any]:
    arguments: dict[str, Any] = call["function"]["arguments"]
    return arguments


def _offer(rng: Random, needed: list[dict[str, Any]], tool: Tool | None) -> list[dict[str, Any]]:
    """The needed schemas among up to three others, in random order."""
    others = [other for other in TOOLS if other is not tool and (tool is None or other.do != tool.do)]
    most = 3 if needed else 4
    schemas = needed + [
        other.use(rng).schema for other in rng.sample(others, min(rng.randint(0 if needed else 1, most), 3))
    ]
    rng.shuffle(schemas)
    return [{"type": "function", "function": schema} for schema in schemas]


def _earlier(rng: Random) -> list[dict[str, Any]]:
    """Perhaps a turn before."""
    if rng.random() < 0.85:
        return []
    known = rng.choice(FACTS)
    return [user(known.questions[0]), assistant(known.sentence)]
