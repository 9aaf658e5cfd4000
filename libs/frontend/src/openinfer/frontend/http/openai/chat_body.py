"""The body of /v1/chat/completions, and the chat that it stands for."""

from typing import Annotated, Any, ClassVar, Literal

import msgspec

from openinfer.frontend.errors import APIError
from openinfer.frontend.http.body import (
    MAX_LOGPROBS,
    MAX_TOOLS,
    REFUSED,
    Budget,
    CommonBody,
    FunctionSpec,
    Logprobs,
    Messages,
    Positive,
    Thinking,
    ToolName,
    ToolSpec,
)
from openinfer.frontend.http.chat import Chat, chat_messages
from openinfer.frontend.http.text.thoughts import thinking_options

BudgetOrAll = Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)]
_BUDGETS = ("thinking_token_budget", "max_thinking_tokens", "thinking_budget")


class FunctionName(msgspec.Struct):
    """The function of a NamedChoice."""

    name: ToolName


class NamedChoice(msgspec.Struct):
    """tool_choice, to force one."""

    type: Literal["function"]
    function: FunctionName


class ReasoningOptions(msgspec.Struct):
    """OpenRouter's `reasoning`: whether and how much to think, and whether to leave the thoughts out of the answer."""

    enabled: bool | None = None
    effort: str | None = None
    max_tokens: Budget | None = None
    exclude: bool | None = None


class ChatBody(CommonBody, kw_only=True):
    """POST /v1/chat/completions."""

    refused: ClassVar = {**REFUSED, "echo": (None, False), "add_special_tokens": (None, False)}
    messages: Messages | None = None
    tools: Annotated[list[ToolSpec], msgspec.Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None
    """SGLang's field: false leaves the thoughts in the content."""
    reasoning_effort: str | None = None
    thinking: Thinking | None = None
    enable_thinking: bool | None = None
    think: bool | str | None = None
    """Ollama's field: a switch, or an effort."""
    reasoning: ReasoningOptions | None = None
    thinking_token_budget: BudgetOrAll | None = None
    thinking_budget: BudgetOrAll | None = None
    max_thinking_tokens: BudgetOrAll | None = None
    """The last three are one thing under the names of three servers: tokens of the thoughts. -1: any number."""
    verbosity: str | None = None
    """Ignored: no template has such a thing."""
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: Logprobs | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


def chat_of(body: ChatBody, variables: frozenset[str]) -> Chat:
    """variables: options of the server's template. Raises APIError (400) naming the place."""
    budget, field = _budget(body)
    reasoning, warnings = body.reasoning or ReasoningOptions(), verbosity_warnings(body.verbosity)
    switches = {
        "thinking": body.thinking,
        "enable_thinking": body.enable_thinking,
        "think": body.think if isinstance(body.think, bool) else None,
        "reasoning.enabled": reasoning.enabled,
    }
    think = body.think if isinstance(body.think, str) else None
    options, choice = thinking_options(switches, variables, warnings), body.tool_choice or "auto"
    return Chat(
        messages=chat_messages(body.messages, warnings),
        tools=[tool_object(tool.function) for tool in body.tools or ()],
        tool_choice=choice if isinstance(choice, str) else f"tool {choice.function.name}",
        strict=[tool.function.name for tool in body.tools or () if tool.function.strict],
        parallel_calls=body.parallel_tool_calls is not False,
        add_generation_prompt=_generation_prompt(body),
        continue_final=bool(body.continue_final_message),
        effort=body.reasoning_effort or reasoning.effort or think,
        budget=budget,
        budget_field=field,
        separate=body.separate_reasoning is not False,
        warnings=warnings,
        options={**options, **(body.chat_template_kwargs or {})},
    )


def tool_object(function: FunctionSpec) -> dict[str, Any]:
    """A tool in the form for templates: OpenAI's object without the fields for the server."""
    fields = {"name": function.name, "description": function.description, "parameters": function.parameters}
    given = {name: value for name, value in fields.items() if value is not None}
    return {"type": "function", "function": given}


def top_logprobs(body: ChatBody) -> int | None:
    """Chat's logprobs: bool and top_logprobs: int as the sampler's one number."""
    if body.top_logprobs is not None:
        if not body.logprobs:
            raise APIError("top_logprobs needs logprobs: true", param="top_logprobs")
        if not 0 <= body.top_logprobs <= MAX_LOGPROBS:
            raise APIError(
                f"top_logprobs is {body.top_logprobs}, allowed is 0 to {MAX_LOGPROBS}", param="top_logprobs"
            )
    return (body.top_logprobs or 0) if body.logprobs else None


def verbosity_warnings(verbosity: str | None) -> list[str]:
    """Warnings about `verbosity`, in the form of Chat.warnings."""
    if verbosity in (None, "medium"):
        return []
    return [f"verbosity {verbosity} is ignored: this model's chat template has no such thing"]


def _budget(body: ChatBody) -> tuple[int | None, str]:
    for field in _BUDGETS:
        if (tokens := getattr(body, field)) is not None:
            return None if tokens < 0 else tokens, field
    if body.reasoning and body.reasoning.max_tokens is not None:
        return body.reasoning.max_tokens, "reasoning"
    return body.thinking.budget_tokens if body.thinking else None, "thinking"


def _generation_prompt(body: ChatBody) -> bool:
    if body.continue_final_message and body.add_generation_prompt:
        raise APIError(
            "continue_final_message and add_generation_prompt exclude each other",
            param="continue_final_message",
        )
    return body.add_generation_prompt is not False
