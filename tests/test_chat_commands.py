"""Lines of `openinfer chat` that begin with a slash, without a server."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from openinfer.cli import chat
from openinfer.cli.api import AnswerDelta, ApiError, Model


class Heard:
    """An Api that says "yes" and keeps what it was sent."""

    def __init__(self, said: str = "yes", about: str | None = None) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.said, self.about = said, about

    def first_model(self) -> Model:
        return Model(self.said, self.about)

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


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_chat_says_what_the_model_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("openinfer.cli.chat.Api", lambda *_: Heard(about="Small.\x1b[2J"))
    for lines in (io.StringIO(""), Terminal("")):
        monkeypatch.setattr("sys.stdin", lines)
        assert chat.main(["http://x"]) == 0
        said = capsys.readouterr().err
        assert ("\nSmall.\\x1b[2J" in said) == lines.isatty()


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


def test_set_changes_every_later_request(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    heard = Heard()
    lines = "a\n/set top_k 5\n/set temperature 0.2\nb\n/set\n/set temperature\nc\n/set colour 1\n/set top_p high\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    monkeypatch.setattr("openinfer.cli.chat.Api", lambda *_: heard)
    assert chat.main(["http://x", "--temperature", "0.7"]) == 0
    sent = [{name: body[name] for name in ("temperature", "top_k") if name in body} for body in heard.bodies]
    assert sent == [{"temperature": 0.7}, {"temperature": 0.2, "top_k": 5}, {"top_k": 5}]
    said = capsys.readouterr().err
    assert "top_k 5, temperature 0.2" in said
    assert said.count("/set takes one of temperature, top_p") == 2


def test_text_of_several_lines_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = '"""a\n\n/exit\n"""\n"""/clear"""\n"""not ended\n'
    assert talk(lines, monkeypatch) == [
        ["be kind", "a\n\n/exit"],
        ["be kind", "a\n\n/exit", "yes", "/clear"],
    ]


def test_a_refused_request_leaves_the_chat_as_it_was(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    heard = Heard()

    def refusing(body: dict[str, Any]) -> Iterator[AnswerDelta]:
        if "temperature" in body:
            refusal = ApiError("temperature is 9")
            refusal.status = 400
            raise refusal
        yield from Heard.stream(heard, body)

    monkeypatch.setattr(heard, "stream", refusing)
    monkeypatch.setattr("sys.stdin", io.StringIO("/set temperature 9\na\n/set temperature\nb\n"))
    monkeypatch.setattr("openinfer.cli.chat.Api", lambda *_: heard)
    assert chat.main(["http://x"]) == 0
    assert "refused: temperature is 9" in capsys.readouterr().err
    assert [[one["content"] for one in body["messages"]] for body in heard.bodies] == [["b"]]


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


@pytest.mark.parametrize("cut", [1, 3, 200])
def test_lines_break_at_words(cut: int) -> None:
    text = "The capital of Norway is Oslo.\n\nA wordthatislongerthanaline, 東京 東京 東京 and  two blanks "
    terminal = io.StringIO()
    out = chat._Wrapped(terminal, 12)
    for start in range(0, len(text), cut):
        out.write(text[start : start + cut])
    out.sign("")
    assert terminal.getvalue() == (
        "The capital \nof Norway is\nOslo.\n\nA \nwordthatislongerthanaline,\n東京 東京 \n東京 and  \ntwo blanks "
    )


def test_the_speed_follows_an_answer_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, heard = Terminal(), Heard()

    def counted(body: dict[str, Any]) -> Iterator[AnswerDelta]:
        assert body["stream_options"] == {"include_usage": True}
        yield from (AnswerDelta(content="yes"), AnswerDelta(tokens=7))

    monkeypatch.setattr(heard, "stream", counted)
    monkeypatch.setattr("sys.stderr", terminal)
    chat._answer(heard, {}, terminal)  # type: ignore[arg-type]
    assert "yes" in terminal.getvalue()
    assert re.search(r"7 tokens, [\d.]+ a second; first after [\d.]+ s", terminal.getvalue())


def test_elsewhere_an_answer_is_written_as_it_came(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    heard = Heard()
    pieces = ["The", " capital", " of", " France\n", "is", " Paris", ". " * 100]
    monkeypatch.setattr(heard, "stream", lambda body: (AnswerDelta(content=piece) for piece in pieces))
    monkeypatch.setattr("sys.stdin", io.StringIO("a\n"))
    monkeypatch.setattr("openinfer.cli.chat.Api", lambda *_: heard)
    assert chat.main(["http://x"]) == 0
    assert capsys.readouterr().out == "".join(pieces) + "\n"


def test_a_word_that_comes_in_pieces_is_not_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, heard = Terminal(), Heard()
    monkeypatch.setenv("COLUMNS", "10")
    pieces = [AnswerDelta(reasoning=one) for one in ("He", "lle", "sdon", "t")]
    pieces += [AnswerDelta(content=one) for one in ("I", "'m", " he", "re,", " at ho", "me")]
    monkeypatch.setattr(heard, "stream", lambda body: (one for one in pieces))
    chat._answer(heard, {}, terminal)  # type: ignore[arg-type]
    assert terminal.getvalue() == f"{chat.DIM}Hellesdont{chat.PLAIN}\nI'm here, \nat home{chat.PLAIN}\n"
