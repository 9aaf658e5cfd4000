"""The prompt of DeepSeek-V4, which its authors publish as code and not as a Jinja template.

Every word and line break here must stay, because the model was trained on them.
"""

import ast
import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from openinfer.frontend.chat.formats import DSML
from openinfer.frontend.chat.parts import Message, RendererSpec, text_of
from openinfer.frontend.errors import APIError, ModelFilesError
from openinfer.frontend.model_files import read_text

__all__ = ["DeepSeekV4Renderer"]

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
THINK, END_THINK = "<think>", "</think>"
REMINDER = "<｜latest_reminder｜>"
_ABSOLUTE = (
    "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n"
    "You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve the root "
    "cause, rigorously stress-testing your logic against all potential paths, edge cases, and adversarial "
    "scenarios.\n"
    "Explicitly write out your entire deliberation process, documenting every intermediate step, considered "
    "alternative, and rejected hypothesis to ensure absolutely no assumption is left unchecked.\n\n"
)
_BEYOND = (
    "Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.\n"
    "You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance: exhaustively "
    "decompose the problem into its most fundamental components, trace every causal chain to its root, and "
    "resolve the underlying cause rather than any surface symptom.\n"
    "Do not stop reasoning until you have independently verified the solution from multiple angles and are "
    "certain that no assumption remains unchecked and no error remains undiscovered.\n\n"
)
PREVIEW = {"low": "", "high": "", "max": _ABSOLUTE}
"""Efforts of the preview of April 2026, and of checkpoints that do not bring their encoder."""
EFFORTS = {"low": "", "high": _ABSOLUTE, "max": _BEYOND}
"""Efforts of the releases since July 2026."""
ENCODER = "encoding/encoding_dsv4.py"
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
_JOINED = frozenset({"user", "tool"})
_BETWEEN = "\n\n"
_LITERALS = ("REASONING_EFFORT_PROMPTS", "DEFAULT_REASONING_EFFORT", "REASONING_EFFORT_MAX")


class DeepSeekV4Renderer:
    """A Renderer. Options: thinking or enable_thinking (off), reasoning_effort (all but "none" think).

    efforts: the text that each effort puts in front; default: the effort of a chat that names none, or one that the
    release does not have. System texts stand where they are, tool results join the user's turn, and the first developer
    or system message has the tools. Without tools, thoughts and developer messages before the last turn of the user are
    left out where the model thinks.
    """

    variables = frozenset({"thinking", "enable_thinking", "reasoning_effort"})

    def __init__(self, efforts: Mapping[str, str] = EFFORTS, default: str = "low") -> None:
        self._efforts, self._default = dict(efforts), default
        kwargs = {"efforts": self._efforts, "default": default}
        self.spec = RendererSpec("openinfer.frontend.chat:DeepSeekV4Renderer", kwargs)

    @classmethod
    def of(cls, model_dir: Path) -> "DeepSeekV4Renderer":
        """With the efforts of the encoder that a checkpoint brings. Raises ModelFilesError."""
        path = model_dir / ENCODER
        return cls(*_efforts_of(path)) if path.exists() else cls(PREVIEW)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        options = kwargs or {}
        effort, thinking = str(options.get("reasoning_effort")), thinks(options)
        turns = in_call_order(messages)
        if tools:
            _add_tools(turns, tools)
        forgets = thinking and not tools
        last_user = max((i for i, turn in enumerate(turns) if turn["role"] in _USERS), default=-1)
        kept = [i for i, t in enumerate(turns) if not forgets or i >= last_user or t["role"] != "developer"]
        known = self._efforts.get("max" if effort == "xhigh" else effort, self._efforts[self._default])
        pieces, answers = [BOS, known if thinking else ""], False
        for index, following in zip(kept, [*kept[1:], None], strict=True):
            turn = turns[index]
            role, after = turn["role"], None if following is None else turns[following]["role"]
            if role in _USERS:
                joined = index > 0 and {role, turns[index - 1]["role"]} <= _JOINED
                pieces += [_BETWEEN if joined else USER, _said(turn)]
                answers = after in ("assistant", "latest_reminder")
                if answers:
                    goes_on = thinking and (not forgets or index >= last_user)
                    pieces.append(ASSISTANT + (THINK if goes_on else END_THINK))
            elif role == "assistant":
                if thinking and (not forgets or index > last_user):
                    pieces.append(f"{turn.get('reasoning') or ''}{END_THINK}")
                pieces.append(answer_text(turn, "tool_calls"))
                answers = False
            elif role in ("system", "latest_reminder"):
                pieces.append((REMINDER if role == "latest_reminder" else "") + text_of(turn["content"]))
            else:
                raise APIError(
                    f"messages hold a role {role!r} that DeepSeek-V4 does not know", param="messages"
                )
        if add_generation_prompt and not answers:
            pieces.append(ASSISTANT + (THINK if thinking else END_THINK))
        return "".join(pieces)


def thinks(options: Mapping[str, Any]) -> bool:
    """Whether the model is to think."""
    on_request = options.get("thinking", options.get("enable_thinking"))
    return options.get("reasoning_effort") not in (None, "none") if on_request is None else bool(on_request)


def literals(path: Path, names: Collection[str]) -> dict[str, Any]:
    """The literals of these names in a published encoder, which is never run. Raises ModelFilesError."""
    try:
        return {
            target.id: ast.literal_eval(one.value)
            for one in ast.parse(read_text(path)).body
            if isinstance(one, ast.Assign | ast.AnnAssign) and one.value is not None
            for target in (one.targets if isinstance(one, ast.Assign) else [one.target])
            if isinstance(target, ast.Name) and target.id in names
        }
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise ModelFilesError(f"{path} cannot be read: {error}") from error


def _efforts_of(path: Path) -> tuple[dict[str, str], str]:
    named = literals(path, _LITERALS)
    efforts, most = named.get("REASONING_EFFORT_PROMPTS"), named.get("REASONING_EFFORT_MAX")
    default = named.get("DEFAULT_REASONING_EFFORT", "low")
    if efforts is None and isinstance(most, str):
        return {**PREVIEW, "max": most}, "low"
    if not isinstance(efforts, dict) or not all(isinstance(x, str) for pair in efforts.items() for x in pair):
        raise ModelFilesError(
            f"{path} has neither REASONING_EFFORT_PROMPTS, texts by effort, nor REASONING_EFFORT_MAX, a text"
        )
    if default not in efforts:
        raise ModelFilesError(
            f"{path}: DEFAULT_REASONING_EFFORT is {default!r:.80}; it must be one of the efforts"
        )
    return efforts, default


def _add_tools(turns: list[Message], tools: Sequence[Mapping[str, Any]]) -> None:
    text = TOOLS_HEAD + "\n".join(as_json(tool["function"]) for tool in tools) + TOOLS_TAIL
    for role in ("developer", "system"):
        for index, turn in enumerate(turns):
            if turn["role"] == role:
                turns[index] = {**turn, "content": f"{text_of(turn['content'])}\n\n{text}"}
                return
    turns.insert(0, {"role": "system", "content": f"\n\n{text}"})


def in_call_order(messages: Sequence[Message]) -> list[Message]:
    """The messages with the tool results of each turn of the user in the order of the calls that they answer."""
    turns, places = list(messages), list[int]()
    order: dict[object, int] = {}
    for index, message in enumerate([*messages, {"role": ""}]):
        if message["role"] == "tool":
            places.append(index)
        elif message["role"] != "user":
            results = sorted(places, key=lambda place: order.get(messages[place].get("tool_call_id"), 0))
            for place, result in zip(places, results, strict=True):
                turns[place] = messages[result]
            places = []
            calls = message.get("tool_calls") or ()
            order = {call["id"]: number for number, call in enumerate(calls) if call.get("id")} or order
    return turns


def _said(turn: Message) -> str:
    if turn["role"] == "tool":
        return f"<tool_result>{text_of(turn['content'], _BETWEEN)}</tool_result>"
    return text_of(turn["content"])


def answer_text(turn: Message, block_name: str) -> str:
    """What the assistant said and called, to the end of its turn."""
    calls = [_call(call["function"]) for call in turn.get("tool_calls") or ()]
    block = f"\n\n<{DSML}{block_name}>\n" + "\n".join(calls) + f"\n</{DSML}{block_name}>" if calls else ""
    return f"{text_of(turn['content'])}{block}{EOS}"


def _call(function: Mapping[str, Any]) -> str:
    lines = []
    for key, value in function["arguments"].items():
        kind, text = ("true", value) if isinstance(value, str) else ("false", as_json(value))
        lines.append(f'<{DSML}parameter name="{key}" string="{kind}">{text}</{DSML}parameter>')
    arguments = "\n".join(lines)  # none leave an empty line
    return f'<{DSML}invoke name="{function["name"]}">\n{arguments}\n</{DSML}invoke>'


def as_json(value: Any) -> str:
    """A value of a schema or a call."""
    return json.dumps(value, ensure_ascii=False)
