"""Lines of `openinfer chat` that begin with a slash, without a server."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from openinfer.cli import chat
from openinfer.cli.api import AnswerDelta


class Heard:
    """An Api that says "yes" and keeps what it was sent."""

    def __init__(self, said: str = "yes") -> None:
        self.bodies: list[dict[str, Any]] = []
        self.said = said

    def first_model(self) -> str:
        return self.said

    def stream(self, body: dict[str, Any]) -> Iterator[AnswerDelta]:
        self.bodies.append(body)
        yield AnswerDelta(content=self.said, reasoning=self.said)


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


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.attack
def test_no_model_and_no_server_commands_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """OSC 52 sets the clipboard, OSC 0 the title, CSI 2J clears; C1 has them in one character, and CR hides a line."""
    hostile = "\x1b]52;c;ZWNobw==\x07 \x1b[2J \x9b2J \x9d0;t\x9c \x00 \x08 a\rb \x7f \u202e \ud800"
    terminal, heard = Terminal(), Heard(f"one\ttwo\n{hostile} 日本\u3000 👩\u200d🔬 é\xa0")
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(f"sys.{name}", terminal)
    monkeypatch.setattr("sys.stdin", Terminal("hello\n"))
    monkeypatch.setattr("builtins.input", lambda _: sys.stdin.readline() or "/exit")
    monkeypatch.setattr("openinfer.cli.chat.Api", lambda *_: heard)
    assert chat.main(["http://x"]) == 0
    shown = terminal.getvalue().replace(chat.DIM, "").replace(chat.PLAIN, "")
    assert not set(shown) & set("\x1b\x07\x9b\x9d\x9c\x00\x08\r\x7f\u202e\ud800")
    assert "one\\ttwo\\n\\x1b]52;c;ZWNobw==\\x07 \\x1b[2J" in shown  # the model's name
    assert (
        shown.count("one\ttwo\n\\x1b]52;c;ZWNobw==\\x07 \\x1b[2J \\x9b2J") == 2
    )  # a thought, and the answer
    assert shown.count("日本\u3000 👩\u200d🔬 é\xa0") == 2
