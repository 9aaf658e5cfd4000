"""The prompt of DeepSeek-V4, which its authors publish as code and not as a Jinja template.

Every word and line break here must stay, because the model was trained on them.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from openinfer.frontend.chat.dsml import DSML
from openinfer.frontend.chat.renderer import Message, RendererSpec, text_of
from openinfer.frontend.errors import APIError

__all__ = ["DeepSeekV4Renderer"]

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
THINK, END_THINK = "<think>", "</think>"
EFFORT_MAX = (
    "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n"
    "You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve the root "
    "cause, rigorously stress-testing your logic against all potential paths, edge cases, and adversarial "
    "scenarios.\n"
    "Explicitly write out your entire deliberation process, documenting every intermediate step, considered "
    "alternative, and rejected hypothesis to ensure absolutely no assumption is left unchecked.\n\n"
)
TOOLS_HEAD = (
    "## Tools\n\n"
    "You have access to a set of tools to help answer the user's question. You can invoke tools by writing a "
    f'"<{DSML}tool_calls>" block like the following:\n\n'
    f"<{DSML}tool_calls>\n"
    f'<{DSML}invoke name="$TOOL_NAME">\n'
    f'<{DSML}parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{DSML}parameter>\n'
    "...\n"
    f"</{DSML}invoke>\n"
    f'<{DSML}invoke name="$TOOL_NAME2">\n'
    "...\n"
    f"</{DSML}invoke>\n"
    f"</{DSML}tool_calls>\n\n"
    'String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, '
    'arrays, objects), pass the value in JSON format and set `string="false"`.\n\n'
    f"If thinking_mode is enabled (triggered by {THINK}), you MUST output your complete reasoning inside "
    f"{THINK}...{END_THINK} BEFORE any tool calls or final response.\n\n"
    f"Otherwise, output directly after {END_THINK} with tool calls or final response.\n\n"
    "### Available Tool Schemas\n\n"
)
TOOLS_TAIL = (
    "\n\nYou MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.\n"
)

_USERS = frozenset({"user", "developer", "tool"})


class DeepSeekV4Renderer:
    """A Renderer. Options: thinking or enable_thinking (off), reasoning_effort (all but "none" think; "max" says so).

    The system text is the first message's, if that is a system message; tool results join the user's turn.
    """

    variables = frozenset({"thinking", "enable_thinking", "reasoning_effort"})
    spec = RendererSpec("openinfer.frontend.chat:DeepSeekV4Renderer", {})

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        options = kwargs or {}
        effort = options.get("reasoning_effort")
        on_request = options.get("thinking", options.get("enable_thinking"))
        thinking = effort not in (None, "none") if on_request is None else bool(on_request)
        turns = _in_call_order(messages)
        system = text_of(turns.pop(0)["content"]) if turns and turns[0]["role"] == "system" else ""
        if tools:
            system += "\n\n" + _tools(tools)
        pieces = [BOS, EFFORT_MAX if thinking and effort == "max" else "", system]
        last_user = max((i for i, turn in enumerate(turns) if turn["role"] in _USERS), default=-1)
        before = ""
        for index, turn in enumerate(turns):
            role = turn["role"]
            if role in _USERS:
                joined = role != "developer" and before in ("user", "tool")
                pieces += ["\n\n" if joined else USER, _said(turn)]
            elif role == "assistant":
                if before in _USERS:
                    keep = thinking and (bool(tools) or index > last_user)
                    thought = f"{THINK}{turn.get('reasoning') or ''}" if keep else ""
                    pieces.append(f"{ASSISTANT}{thought}{END_THINK}")
                pieces.append(_answer(turn))
            elif role == "system":
                pieces.append(text_of(turn["content"]))
            else:
                raise APIError(
                    f"messages hold a role {role!r} that DeepSeek-V4 does not know", param="messages"
                )
            before = role
        if add_generation_prompt:
            pieces.append(ASSISTANT + (THINK if thinking else END_THINK))
        return "".join(pieces)


def _in_call_order(messages: Sequence[Message]) -> list[Message]:
    """Tool results in the order of the calls they answer, wherever several follow one turn."""
    order: dict[object, int] = {}
    keyed: list[tuple[int, int, Message]] = []
    for place, message in enumerate(messages):
        if message["role"] == "tool" and keyed and keyed[-1][2]["role"] == "tool":
            place = keyed[-1][0]  # one run of results
        else:
            calls = message.get("tool_calls") or ()
            order = {call.get("id"): index for index, call in enumerate(calls)} or order
        keyed.append((place, order.get(message.get("tool_call_id"), 0), message))
    return [message for _, _, message in sorted(keyed, key=lambda entry: entry[:2])]


def _tools(tools: Sequence[Mapping[str, Any]]) -> str:
    return TOOLS_HEAD + "\n".join(_json(tool["function"]) for tool in tools) + TOOLS_TAIL


def _said(turn: Message) -> str:
    text = text_of(turn["content"])
    return f"<tool_result>{text}</tool_result>" if turn["role"] == "tool" else text


def _answer(turn: Message) -> str:
    calls = [_call(call["function"]) for call in turn.get("tool_calls") or ()]
    block = f"\n\n<{DSML}tool_calls>\n" + "\n".join(calls) + f"\n</{DSML}tool_calls>" if calls else ""
    return f"{text_of(turn['content'])}{block}{EOS}"


def _call(function: Mapping[str, Any]) -> str:
    lines = [f'<{DSML}invoke name="{function["name"]}">']
    for key, value in function["arguments"].items():
        is_text = isinstance(value, str)
        text = value if is_text else _json(value)
        kind = "true" if is_text else "false"
        lines.append(f'<{DSML}parameter name="{key}" string="{kind}">{text}</{DSML}parameter>')
    return "\n".join([*lines, f"</{DSML}invoke>"])


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
