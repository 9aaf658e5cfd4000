"""`openinfer chat [MODEL_DIR | URL]`: talk to a model in the terminal.

A checkpoint is served while the chat lasts; a URL, by default http://127.0.0.1:8000, names a server that runs. Ctrl-C
stops an answer, Ctrl-D ends the chat, /help names the commands. Text of several lines stands between two \"\"\".
"""

import argparse
import contextlib
import io
import json
import re
import shutil
import sys
import time
import unicodedata
from typing import Any, TextIO

from openinfer.cli import recipes
from openinfer.cli.api import Api, ApiError, add_api_key, api_key
from openinfer.cli.bench.server import NotReady, serving
from openinfer.frontend.errors import FlagError, one_line, printable
from openinfer.frontend.flag_parser import FlagParser

PROG = "openinfer chat"
LOCAL = "http://127.0.0.1:8000"
COMMANDS = """\
/clear          begin another chat, with the same system message
/system TEXT    begin another chat, with this system message; without TEXT: show it
/set NAME VALUE a number for each request: {}
                without VALUE: the server's again; /set alone: show what is set
/help           these lines
/exit           end, as Ctrl-D does"""
SETTINGS = (
    "temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "presence_penalty", "frequency_penalty",
    "repetition_penalty",
)  # fmt: skip
QUOTES = '"""'
DIM, PLAIN = "\x1b[2m", "\x1b[0m"


def main(argv: list[str]) -> int:
    """Chat until the input ends; returns 0, 1 if no server answers, 2 for wrong arguments."""
    at = argv.index("--") if "--" in argv else len(argv)
    args = _parser().parse_args(argv[:at])
    try:
        with contextlib.ExitStack() as stack:
            url = args.model
            if "://" not in url:
                print(f"starting {url} ...", file=sys.stderr)
                url = stack.enter_context(serving(recipes.checkpoint(url), argv[at + 1 :])).url
            return _talk(Api(url, api_key(args)), args)
    except (ApiError, FlagError) as error:
        print(f"{PROG}: error: {one_line(error)}", file=sys.stderr)
        return 1
    except NotReady as error:
        print(f"{PROG}: error: {printable(str(error), _is_text)}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    usage = f"{PROG} [MODEL_DIR | URL] [flags] [-- SERVER FLAGS]"
    parser = FlagParser(PROG, usage=usage, description=__doc__)
    add = parser.add_argument
    add("model", nargs="?", default=LOCAL, metavar="MODEL_DIR | URL", help=f"default: {LOCAL}")
    add("--system", metavar="TEXT", help="the system message")
    add("--temperature", type=float, metavar="T", help="default: the server's; /set has more")
    add("--thinking", action=argparse.BooleanOptionalAction, default=None,
        help="ask the model to think first, or not to; default: the template's choice")  # fmt: skip
    add_api_key(parser)
    return parser


def _talk(api: Api, args: argparse.Namespace) -> int:
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):  # what an encoding does not have ends no chat
            stream.reconfigure(errors="replace")
    model = api.first_model()
    messages, settings = _begun(args.system), dict[str, float]()
    if args.temperature is not None:
        settings["temperature"] = args.temperature
    shown = sys.stdin.isatty()
    if shown:
        about = f"\n{printable(model.description)}" if model.description else ""
        keys = "Ctrl-C stops an answer, Ctrl-D ends the chat, /help names the commands"
        print(f"{printable(model.id)}: {keys}{about}", file=sys.stderr)
    while True:
        try:
            text, several = _read(shown)
        except (EOFError, KeyboardInterrupt):
            return 0
        if text == "/exit":
            return 0
        if text.startswith("/") and not several:
            messages = _command(text, messages, settings)
        elif text:
            asked = [*messages, {"role": "user", "content": text}]
            body: dict[str, Any] = {"model": model.id, "messages": asked, **settings}
            if args.thinking is not None:
                body["chat_template_kwargs"] = {"enable_thinking": args.thinking}
            try:
                answer = _answer(api, body, sys.stdout)
            except ApiError as error:
                if error.status != 400:
                    raise
                print(f"refused: {one_line(error)}", file=sys.stderr)
            else:
                messages = [*asked, {"role": "assistant", "content": answer}]


def _read(shown: bool) -> tuple[str, bool]:
    """What the user says, and whether it stood between two \"\"\"."""
    text = input("> " if shown else "").strip()
    if not text.startswith(QUOTES):
        return text, False
    text = text.removeprefix(QUOTES)
    while not text.endswith(QUOTES):
        text += "\n" + input("... " if shown else "").rstrip()
    return text.removesuffix(QUOTES).strip(), True


def _begun(system: str | None) -> list[dict[str, Any]]:
    return [{"role": "system", "content": system}] if system else []


def _command(text: str, messages: list[dict[str, Any]], settings: dict[str, float]) -> list[dict[str, Any]]:
    """Carry out a line that begins with a slash; the chat's messages after it."""
    name, _, rest = text.partition(" ")
    before = next((message["content"] for message in messages if message["role"] == "system"), None)
    if name == "/clear":
        return _begun(before)
    if name == "/system":
        if rest.strip():
            return _begun(rest.strip())
        print(f"system message: {before or 'none'}", file=sys.stderr)
    elif name == "/set":
        _set(rest.split(), settings)
    elif name == "/help":
        print(COMMANDS.format(", ".join(SETTINGS)), file=sys.stderr)
    else:
        print(f"{name} is no command, and was not sent; /help names the commands", file=sys.stderr)
    return messages


def _set(words: list[str], settings: dict[str, float]) -> None:
    said = f"/set takes one of {', '.join(SETTINGS)}, and a number"
    if not words or (len(words) <= 2 and words[0] in SETTINGS):
        with contextlib.suppress(ValueError):
            value = {name: json.loads(one) for name, one in [words] if one} if len(words) == 2 else {}
            settings.pop(words[0] if words else "", None)
            settings.update(value)
            now = ", ".join(f"{name} {value}" for name, value in settings.items())
            said = now or "all as the server has it"
    print(said, file=sys.stderr)


def _answer(api: Api, body: dict[str, Any], terminal: TextIO) -> str:
    """Write the answer as it comes, with control characters written out; its content as it came. On a terminal lines
    break at words, thoughts are dim, and the speed follows; elsewhere thoughts are left out."""
    said, dim = "", terminal.isatty()
    out = _Wrapped(terminal, shutil.get_terminal_size().columns if dim else 0)
    deltas = api.stream({**body, "stream_options": {"include_usage": True}} if dim else body)
    began, first, tokens = time.monotonic(), 0.0, 0
    try:
        thinking = False
        for delta in deltas:
            first, tokens = first or time.monotonic(), delta.tokens or tokens
            thought, content = delta.reasoning or delta.reasoning_content, delta.content
            if dim and thought:
                if not thinking:
                    out.sign(DIM)
                out.write(printable(thought, _is_text))
                thinking = True
            if content:
                if thinking:
                    out.sign(f"{PLAIN}\n")
                out.write(printable(content, _is_text))
                thinking, said = False, said + content
            terminal.flush()
    except KeyboardInterrupt:
        pass
    finally:
        deltas.close()  # type: ignore[attr-defined]
        out.sign(PLAIN if dim else "")
        terminal.write("\n")
    if tokens > 1:
        speed = (tokens - 1) / max(time.monotonic() - first, 1e-6)
        told = f"{tokens} tokens, {speed:.1f} a second; first after {first - began:.2f} s"
        print(f"{DIM}{told}{PLAIN}", file=sys.stderr)
    return said


class _Wrapped:
    """Breaks lines at words, in `width` columns; 0: nowhere. A word is written when it is over."""

    def __init__(self, out: TextIO, width: int) -> None:
        self._out, self._width, self._column, self._word = out, width, 0, ""

    def write(self, text: str) -> None:
        *over, self._word = re.split(r"(?<=[ \n])", self._word + text) if self._width else (text, "")
        for word in over:
            self._put(word)

    def sign(self, sequence: str) -> None:
        """Write what is left, then a sequence that takes no column, or ends the line."""
        self._put(self._word)
        self._word, self._column = "", 0 if sequence.endswith("\n") else self._column
        self._out.write(sequence)

    def _put(self, word: str) -> None:
        cells = sum(1 + (unicodedata.east_asian_width(one) in "WF") for one in word.rstrip(" \n"))
        if self._width and self._column and self._width < self._column + cells:
            self._out.write("\n")
            self._column = 0
        full = word.endswith(" ") and self._width and self._width <= self._column + cells
        self._out.write(f"{word[:-1]}\n" if full else word)
        self._column = 0 if full or word.endswith("\n") else self._column + cells + word.endswith(" ")


def _is_text(char: str) -> bool:
    """Whether a character belongs to a text of several lines in any language. Controls, signs that change the direction
    of others, and half surrogates do not; the joiners of Persian, of Hindi and of emoji do."""
    return char in "\n\t\u200c\u200d" or unicodedata.category(char) not in ("Cc", "Cf", "Cs", "Zl", "Zp")
