"""The prompt of DeepSeek-V3.2, published as code: kin to V4's. Its words about tools are read from that code."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from openinfer.frontend.chat.deepseek_v4 import (
    ASSISTANT,
    BOS,
    END_THINK,
    THINK,
    USER,
    DeepSeekV4Renderer,
    answer_text,
    as_json,
    in_call_order,
    literals,
    thinks,
)
from openinfer.frontend.chat.formats import DSML
from openinfer.frontend.chat.parts import Message, Renderer, RendererSpec, text_of
from openinfer.frontend.errors import APIError, ModelFilesError

ENCODER = "encoding/encoding_dsv32.py"
TOOLS = "TOOLS_SYSTEM_TEMPLATE"
_FIELDS = {"{dsml_token}": DSML, "{thinking_start_token}": THINK, "{thinking_end_token}": END_THINK}
_USERS = ("user", "developer")


class DeepSeekV32Renderer:
    """A Renderer. Options: as DeepSeekV4Renderer's; efforts do no more than think.

    tools: the text about tools, with {tool_schemas} in it. The first message has it, if it is the system's, or else one
    in front. Where the model thinks, thoughts and messages of developers before the user's last turn are left out.
    """

    variables = DeepSeekV4Renderer.variables

    def __init__(self, tools: str) -> None:
        self._tools = tools
        self.spec = RendererSpec("openinfer.frontend.chat:DeepSeekV32Renderer", {"tools": tools})

    @classmethod
    def of(cls, model_dir: Path) -> "DeepSeekV32Renderer":
        """With the text of the encoder that a checkpoint brings. Raises ModelFilesError."""
        text = literals(model_dir / ENCODER, {TOOLS}).get(TOOLS)
        if not isinstance(text, str) or "{tool_schemas}" not in text:
            raise ModelFilesError(f"{model_dir / ENCODER} has no {TOOLS}, a text with {{tool_schemas}} in it")
        for field, value in _FIELDS.items():
            text = text.replace(field, value)
        return cls(text)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        thinking, turns = thinks(kwargs or {}), in_call_order(messages)
        if tools:
            schemas = "\n".join(as_json(tool["function"]) for tool in tools)
            first = turns.pop(0) if turns and turns[0]["role"] == "system" else {"content": ""}
            text = self._tools.replace("{tool_schemas}", schemas)
            turns.insert(0, {"role": "system", "content": f"{text_of(first['content'])}\n\n{text}"})
        last_user = max((n for n, turn in enumerate(turns) if turn["role"] in _USERS), default=-1)
        if thinking and last_user > 0:
            before = [turn for turn in turns[:last_user] if turn["role"] != "developer"]
            turns, last_user = before + turns[last_user:], len(before)
        pieces, roles = [BOS], [turn["role"] for turn in turns]
        for n, (role, turn) in enumerate(zip(roles, turns, strict=True)):
            opens = THINK if thinking and n >= last_user else END_THINK
            if role in _USERS:
                lead = "\n\n# The user's message is: " if role == "developer" else ""
                pieces.append(f"{USER}{lead}{text_of(turn['content'])}{ASSISTANT}{opens}")
            elif role == "tool":
                begins, ends = roles[n - 1 : n] != ["tool"], roles[n + 1 : n + 2] != ["tool"]
                pieces.append("\n\n<function_results>" if begins else "")
                pieces.append(f"\n<result>{text_of(turn['content'])}</result>")
                pieces.append(f"\n</function_results>\n\n{opens}" if ends else "")
            elif role == "assistant":
                if thinking and n > last_user:
                    pieces.append(f"{turn.get('reasoning') or ''}{END_THINK}")
                pieces.append(answer_text(turn, "function_calls"))
            elif role == "system":
                pieces.append(text_of(turn["content"]))
            else:
                raise APIError(
                    f"messages hold a role {role!r} that DeepSeek-V3.2 does not know", param="messages"
                )
        if add_generation_prompt and roles[-1:] not in (["user"], ["developer"], ["tool"]):
            pieces.append(ASSISTANT + (THINK if thinking else END_THINK))
        return "".join(pieces)


def coded_renderer(model_dir: Path, model_type: str) -> Renderer | None:
    """The renderer of a checkpoint that has published code and no template; None for others. Raises ModelFilesError."""
    if model_type.startswith("deepseek_v4"):
        return DeepSeekV4Renderer.of(model_dir)
    return DeepSeekV32Renderer.of(model_dir) if (model_dir / ENCODER).exists() else None
