"""What one example is, and which examples training never sees."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from random import Random
from typing import Any

HELD_OUT_ONE_IN = 16


@dataclass(slots=True)
class Chat:
    """A conversation whose last message is the assistant's, the one that is learned or checked.

    messages: as OpenAI writes them, arguments of calls as objects, the assistant's thoughts as `reasoning`. key: what
    makes this example a new one; None where there is nothing to hold out. check: what a right answer has, as
    `openinfer bench eval` reads it.
    """

    kind: str
    messages: list[dict[str, Any]]
    check: dict[str, Any]
    key: str | None = None
    tools: list[dict[str, Any]] = field(default_factory=list)
    thinking: bool = False

    @property
    def held_out(self) -> bool:
        """Whether this example belongs to the evaluation and never to the training text."""
        return self.key is not None and zlib.crc32(self.key.encode()) % HELD_OUT_ONE_IN == 0


SYSTEMS = (
    "You are a helpful assistant.",
    "You are a friendly assistant. Answer briefly.",
    "Answer in one sentence.",
    "You help people with small tasks.",
    "Be polite and brief.",
)


def user(text: str) -> dict[str, Any]:
    """A user's message."""
    return {"role": "user", "content": text}


def assistant(text: str, reasoning: str = "", calls: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """The assistant's message; calls: [{name, arguments}]."""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if reasoning:
        message["reasoning"] = message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [
            {"type": "function", "id": f"call_{n}", "function": call} for n, call in enumerate(calls)
        ]
    return message


def opening(rng: Random) -> list[dict[str, Any]]:
    """A system message, or none."""
    return [{"role": "system", "content": rng.choice(SYSTEMS)}] if rng.random() < 0.3 else []


def thinks(rng: Random) -> bool:
    """Whether an example is in the thinking mode: every other one is."""
    return rng.random() < 0.5
