"""Lines of `openinfer chat` that begin with a slash, without a server."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import pytest

from openinfer.cli import chat


class Heard:
    """An Api that says "yes" and keeps what it was sent."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []

    def first_model(self) -> str:
        return "m"

    def stream(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        self.bodies.append(body)
        yield {"choices": [{"delta": {"content": "yes"}}]}


def talk(lines: str, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The contents of the messages that each request had."""
    heard = Heard()
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    monkeypatch.setattr("openinfer.cli.chat.Api", lambda *_: heard)
    assert chat.main(["http://x", "--system", "be kind"]) == 0
    return [[message["content"] for message in body["messages"]] for body in heard.bodies]


def test_clear_and_system_begin_another_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    assert talk("a\nb\n/clear\nc\n/system be brief\nd\n/clear\ne\n", monkeypatch) == [
        ["be kind", "a"],
        ["be kind", "a", "yes", "b"],
        ["be kind", "c"],
        ["be brief", "d"],
        ["be brief", "e"],
    ]


def test_exit_ends_the_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    assert talk("a\n/exit\nb\n", monkeypatch) == [["be kind", "a"]]


def test_help_names_every_command_and_an_unknown_one_is_not_sent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert talk("/help\n/quit\n/system\n", monkeypatch) == []
    said = capsys.readouterr().err
    assert all(name in said for name in ("/clear", "/system", "/help", "/exit"))
    assert "/quit is no command, and was not sent; /help names the commands" in said
    assert "system message: be kind" in said
