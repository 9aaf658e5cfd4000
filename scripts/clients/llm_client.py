"""llm, the command: prompts, streams, conversations, schemas and a tool, over chats, responses and completions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

WEATHER = "def weather(city: str, days: int) -> str:\n    'Tells the weather.'\n    return f'{city} {days}: sunny'\n"
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Bonn", "Paris"]},
        "days": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
"""Bounded, because a model of random weights would write an endless text."""


def models(real: str, speaker: str) -> None:
    """Tell it of our servers, as its manual says for servers that speak as OpenAI's do."""
    folder = Path("llm")
    folder.mkdir(exist_ok=True)
    able = {"supports_tools": True, "supports_schema": True}
    entries = [
        {"model_id": "noise", "model_name": "qwen3-tiny", "api_base": f"{real}/v1", **able},
        {"model_id": "noise-text", "model_name": "qwen3-tiny", "api_base": f"{real}/v1", "completion": True},
        {"model_id": "chat", "model_name": "speaker", "api_base": f"{speaker}/v1", **able},
        {
            "model_id": "responses",
            "model_name": "speaker",
            "api_base": f"{speaker}/v1",
            "responses": True,
            **able,
        },
    ]
    (folder / "extra-openai-models.yaml").write_text(json.dumps(entries))  # JSON is YAML


def llm(*arguments: str) -> str:
    """The output of the command."""
    environment = {**os.environ, "LLM_USER_PATH": str(Path("llm").resolve())}
    command = [sys.executable, "-m", "llm", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, input="")
    assert done.returncode == 0, f"{arguments}: {done.stdout}{done.stderr}"
    return done.stdout.strip()


def check_streams_and_conversations(real: str, speaker: str) -> None:
    models(real, speaker)
    for model in ("chat", "responses"):
        assert llm("hi", "-m", model, "--no-stream", "-R") == "Hello there, friend."
        assert llm("hi", "-m", model, "-s", "Be short.", "-R") == "Hello there, friend."
        assert llm("again", "-c", "-R") == "Hello there, friend."


def check_noise_streams_as_it_comes(real: str, speaker: str) -> None:
    for model in ("noise", "noise-text"):
        options = ("hi", "-m", model, "-o", "max_tokens", "12", "-o", "temperature", "0", "-o", "seed", "1")
        assert llm(*options) == llm(*options, "--no-stream")


def check_a_tool(real: str, speaker: str) -> None:
    for model in ("chat", "responses"):
        said = llm("Weather in Bonn?", "-m", model, "--functions", WEATHER, "--td", "-R")
        assert "It will be sunny in Bonn." in said, said


def check_a_schema(real: str, speaker: str) -> None:
    answer = json.loads(llm("Weather?", "-m", "noise", "--schema", json.dumps(SCHEMA)))
    assert answer["city"] in ("Bonn", "Paris")


def check_an_endpoint(real: str, speaker: str) -> None:
    assert "Hello there, friend." in llm("openai", "endpoint", f"{speaker}/v1", "hi", "-m", "speaker")
