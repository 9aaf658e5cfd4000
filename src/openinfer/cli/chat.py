"""`openinfer chat [MODEL_DIR | URL]`: talk to a model in the terminal.

A checkpoint is served while the chat lasts; a URL, by default http://127.0.0.1:8000, names a server that runs. Ctrl-C
stops an answer, Ctrl-D ends the chat, /help names the commands.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import tempfile
import unicodedata
from pathlib import Path
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
/help           these lines
/exit           end, as Ctrl-D does"""
DIM, PLAIN = "\x1b[2m", "\x1b[0m"


def main(argv: list[str]) -> int:
    """Chat until the input ends; returns 0, 1 if no server answers, 2 for wrong arguments."""
    at = argv.index("--") if "--" in argv else len(argv)
    args = _parser().parse_args(argv[:at])
    try:
        with contextlib.ExitStack() as stack:
            url = args.model
            if "://" not in url:
                log = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "server.log"
                print(f"starting {url} ...", file=sys.stderr)
                url = stack.enter_context(serving(recipes.checkpoint(url), argv[at + 1 :], log)).url
            return _talk(Api(url, api_key(args)), args)
    except (ApiError, FlagError) as error:
        print(f"{PROG}: error: {one_line(error)}", file=sys.stderr)
        return 1
    except NotReady as error:
        print(f"{PROG}: error: {printable(str(error), _is_text)}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = FlagParser(
        PROG,
        usage=f"{PROG} [MODEL_DIR | URL] [flags] [-- SERVER FLAGS]",
        description=__doc__,
    )
    parser.add_argument(
        "model", nargs="?", default=LOCAL, metavar="MODEL_DIR | URL", help=f"default: {LOCAL}"
    )
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    parser.add_argument(
        "--thinking",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="ask the model to think first, or not to; default: the template's choice",
    )
    add_api_key(parser)
    return parser


def _talk(api: Api, args: argparse.Namespace) -> int:
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):  # what an encoding does not have ends no chat
            stream.reconfigure(errors="replace")
    model = api.first_model()
    messages = _begun(args.system)
    shown = sys.stdin.isatty()
    if shown:
        print(
            f"{printable(model)}: Ctrl-C stops an answer, Ctrl-D ends the chat, /help names the commands",
            file=sys.stderr,
        )
    while True:
        try:
            text = input("> " if shown else "").strip()
        except (EOFError, KeyboardInterrupt):
            return 0
        if text == "/exit":
            return 0
        if text.startswith("/"):
            messages = _command(text, messages)
        elif text:
            body: dict[str, Any] = {
                "model": model,
                "messages": [*messages, {"role": "user", "content": text}],
            }
            if args.thinking is not None:
                body["chat_template_kwargs"] = {"enable_thinking": args.thinking}
            answer = _answer(api, body, sys.stdout)
            messages = [*body["messages"], {"role": "assistant", "content": answer}]


def _begun(system: str | None) -> list[dict[str, Any]]:
    """The messages of a chat that begins."""
    return [{"role": "system", "content": system}] if system else []


def _command(text: str, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Carry out a line that begins with a slash; the chat's messages after it."""
    name, _, rest = text.partition(" ")
    before = next((message["content"] for message in messages if message["role"] == "system"), None)
    if name == "/clear":
        return _begun(before)
    if name == "/system":
        if rest.strip():
            return _begun(rest.strip())
        print(f"system message: {before or 'none'}", file=sys.stderr)
    elif name == "/help":
        print(COMMANDS, file=sys.stderr)
    else:
        print(f"{name} is no command, and was not sent; /help names the commands", file=sys.stderr)
    return messages


def _answer(api: Api, body: dict[str, Any], out: TextIO) -> str:
    """Write the answer as it comes, with control characters written out; its content as it came. Thoughts are dim on a
    terminal and left out elsewhere."""
    said, dim = "", out.isatty()
    deltas = api.stream(body)
    try:
        thinking = False
        for delta in deltas:
            thought, content = delta.reasoning or delta.reasoning_content, delta.content
            if dim and thought:
                shown = printable(thought, _is_text)
                out.write(shown if thinking else DIM + shown)
                thinking = True
            if content:
                shown = printable(content, _is_text)
                out.write(f"{PLAIN}\n{shown}" if thinking else shown)
                thinking, said = False, said + content
            out.flush()
    except KeyboardInterrupt:
        pass
    finally:
        deltas.close()  # type: ignore[attr-defined]
        out.write(f"{PLAIN}\n" if dim else "\n")
    return said


def _is_text(char: str) -> bool:
    """Whether a character belongs to a text of several lines in any language. Controls, signs that change the direction
    of others, and half surrogates do not; the joiners of Persian, of Hindi and of emoji do."""
    return char in "\n\t\u200c\u200d" or unicodedata.category(char) not in ("Cc", "Cf", "Cs", "Zl", "Zp")
