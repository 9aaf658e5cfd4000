"""Bodies in the shapes that programs send, which CI cannot install: load generators, agents' tools, SDKs."""

from typing import Any

import pytest

CHAT, TEXT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
STREAM = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
PARTS = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
SHELL = {
    "type": "function",
    "name": "exec_command",
    "description": "Runs a command.",
    "strict": False,
    "parameters": {"type": "object", "properties": {"cmd": {"type": "string"}}, "required": ["cmd"]},
}


def item(role: str, text: str) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "id": "msg_1", "role": role, "content": [{"type": kind, "text": text}]}


GRAMMAR = '%llguidance {}\n\nstart: weather\nweather[capture]: WEATHER\n\nWEATHER: "sunny"\n     | "wet"\n'
ANSWER = {
    "additionalProperties": False,
    "properties": {
        "city": {"enum": ["Bonn", "Paris"], "title": "City", "type": "string"},
        "days": {"maximum": 9, "minimum": 0, "title": "Days", "type": "integer"},
    },
    "required": ["city", "days"],
    "title": "Answer",
    "type": "object",
}


PAYLOADS: dict[str, tuple[str, dict[str, Any], str | None]] = {
    "guidellm, text": (
        TEXT,
        {"prompt": "hi", "max_tokens": 5, "stop": None, "ignore_eos": True, **STREAM},
        None,
    ),
    "guidellm, chat": (
        CHAT,
        {"messages": PARTS, "max_completion_tokens": 5, "stop": None, "ignore_eos": True, **STREAM},
        None,
    ),
    "vLLM's benchmark": (
        TEXT,
        {
            "prompt": "hi",
            "temperature": 0.0,
            "repetition_penalty": 1.0,
            "max_tokens": 5,
            "logprobs": None,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
        None,
    ),
    "aiperf": (
        CHAT,
        {
            "messages": [{"role": "user", "name": None, "content": "hi"}],
            "max_completion_tokens": 5,
            "min_tokens": 5,
            **STREAM,
        },
        None,
    ),
    "evalscope": (
        CHAT,
        {
            "messages": PARTS,
            "max_tokens": 5,
            "seed": 42,
            "n": 1,
            "stream": False,
            "logprobs": False,
            "top_logprobs": None,
        },
        None,
    ),
    "autogen": (
        CHAT,
        {
            "messages": [
                {"content": "You use tools.", "role": "system"},
                {"role": "user", "name": "user", "content": "hi"},
            ],
            "tools": [{"type": "function", "function": {"name": "f", "parameters": ANSWER, "strict": False}}],
            "tool_choice": "auto",
            "max_tokens": 5,
            "stream": False,
        },
        None,
    ),
    "guidance": (
        CHAT,
        {
            "messages": PARTS,
            "logprobs": True,
            "top_logprobs": 5,
            "top_p": None,
            "tools": None,
            "guided_decoding_backend": "guidance",
            "guided_grammar": GRAMMAR,
            "structured_outputs": {"grammar": GRAMMAR},
            "max_tokens": 5,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
        None,
    ),
    "mirascope": (
        RESPONSES,
        {
            "input": [{"content": "hi", "role": "user"}],
            "max_output_tokens": 5,
            "reasoning": {"effort": "none"},
            "text": {
                "format": {
                    "type": "json_schema",
                    "name": "Answer",
                    "schema": ANSWER,
                    "description": "d",
                    "strict": True,
                }
            },
        },
        None,
    ),
    "outlines": (
        CHAT,
        {
            "messages": [{"role": "user", "content": "hi"}],
            "max_tokens": 5,
            "structured_outputs": {"regex": "([a-f]{3}-[0-9]{2})"},
        },
        None,
    ),
    "vLLM's benchmark, responses": (
        RESPONSES,
        {"input": "hi", "max_output_tokens": 5, "stream": True, "store": False, "ignore_eos": True},
        None,
    ),
    "Codex CLI": (
        RESPONSES,
        {
            "instructions": "You are a coding agent.",
            "input": [
                item("developer", "You run commands."),
                item("developer", "These are your skills."),
                item("user", "Weather?"),
                {
                    "type": "reasoning",
                    "id": "rs_1",
                    "summary": [],
                    "content": None,
                    "encrypted_content": None,
                },
                {
                    "type": "function_call",
                    "id": "fc_1",
                    "call_id": "c",
                    "name": "exec_command",
                    "arguments": "{}",
                },
                {"type": "function_call_output", "call_id": "c", "output": "sunny"},
            ],
            "tools": [
                SHELL,
                {"type": "namespace", "name": "agents", "tools": [SHELL]},
                {"type": "web_search"},
            ],
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "reasoning": {"effort": "medium", "summary": "auto"},
            "text": {"verbosity": "low"},
            "store": False,
            "stream": True,
            "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": "k",
            "client_metadata": {"a": "b"},
            "max_output_tokens": 5,
        },
        "web_search",
    ),
    "an agent with thoughts": (
        CHAT,
        {
            "messages": [
                {"role": "system", "content": "a"},
                {"role": "developer", "content": "b"},
                {"role": "user", "content": "hi"},
                {
                    "role": "assistant",
                    "content": None,
                    "reasoning_content": "hm",
                    "refusal": None,
                    "annotations": [],
                    "audio": None,
                    "function_call": None,
                    "tool_calls": [
                        {
                            "id": "c",
                            "type": "function",
                            "function": {"name": "exec_command", "arguments": "{}"},
                        }
                    ],
                },
                {"role": "tool", "tool_call_id": "c", "content": "sunny"},
            ],
            "tools": [
                {"type": "function", "function": {name: SHELL[name] for name in ("name", "parameters")}}
            ],
            "tool_choice": "auto",
            "reasoning_effort": "low",
            "max_completion_tokens": 5,
            "store": False,
            "metadata": {},
            "service_tier": "auto",
            "parallel_tool_calls": True,
            "prompt_cache_key": "k",
            "safety_identifier": "s",
            "modalities": ["text"],
        },
        None,
    ),
    "Claude Code": (
        MESSAGES,
        {
            "system": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}],
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}],
                }
            ],
            "tools": [
                {"name": "Bash", "description": "d", "input_schema": {"type": "object", "properties": {}}}
            ],
            "thinking": {"type": "adaptive"},
            "output_config": {"effort": "medium"},
            "metadata": {"user_id": "u"},
            "max_tokens": 5,
            "stream": True,
            "temperature": 1,
        },
        None,
    ),
}


@pytest.fixture(scope="module")
def live(start: Any) -> Any:
    return start({"features": ["grammar"]}, {"tool_parser": "hermes", "reasoning_parser": "qwen3"})


@pytest.mark.parametrize("name", PAYLOADS)
def test_a_payload_is_served(live: Any, name: str) -> None:
    path, body, warning = PAYLOADS[name]
    answer = live.post(path, model="fake", **body)
    assert answer.status_code == 200, answer.text
    assert '"error":{' not in answer.text
    if warning is not None:
        assert any(warning in said for said in answer.headers.get_list("warning"))
