"""Parse command lines and stop: stdin has a JSON list of [words, folder]; stdout ends with what is wrong with each.

Every command runs until its own parser has taken its words. So no checkpoint is loaded and nothing is measured.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import runpy
import sys
from pathlib import Path
from typing import Any
from unittest import mock

from openinfer.cli import main as openinfer
from openinfer.frontend.flag_parser import FlagParser

NOT_HERE = ("torch", "transformers", "ray")
"""What only those need who make references and demo models, or serve with Ray."""


class Taken(BaseException):
    """A parser has taken the words."""


def stop_after(method: Any) -> Any:
    def parse_args(self: argparse.ArgumentParser, *given: Any, **named: Any) -> Any:
        method(self, *given, **named)
        raise Taken

    return parse_args


def fault(words: list[str], folder: str) -> str:
    """What is wrong with a command of openinfer or Python; "" if nothing is."""
    os.chdir(folder)
    program, *rest = words
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            if program == "openinfer":
                code = openinfer(rest)
            elif rest[0] == "-m":
                code = run(rest[2:], rest[1], runpy.run_module)
            else:
                code = script(rest)
    except Taken:
        # What follows `--` is for the server that the command starts.
        return (
            fault(["openinfer", "serve", "demo/qwen3", *words[words.index("--") + 1 :]], folder)
            if "--" in words
            else ""
        )
    except SystemExit as end:
        code = end.code
    return "" if code in (0, None) else printed.getvalue().strip() or f"exit code {code}"


def run(arguments: list[str], name: str, how: Any) -> int:
    with mock.patch.object(sys, "argv", [name, *arguments]):
        how(name, run_name="__main__", **({"alter_sys": True} if how is runpy.run_module else {}))
    return 0


def script(words: list[str]) -> int:
    """Run a script until it parses. One without a parser is not run: its source must name each flag."""
    path = Path(words[0])
    source = path.read_text()
    wants_more = any(re.search(rf"^\s*(import|from) {name}\b", source, re.M) for name in NOT_HERE)
    if "parse_args(" not in source or wants_more:
        compile(source, str(path), "exec")
        own = words[1 : words.index("--")] if "--" in words else words[1:]
        flags = [word for word in own if word.startswith("--")]
        missing = [flag for flag in flags if f'"{flag}"' not in source]
        if missing:
            print(f"{path} has no {' '.join(missing)}")
        return len(missing)
    with mock.patch.object(sys, "path", [str(path.resolve().parent), *sys.path]):
        return run(words[1:], str(path), runpy.run_path)


def main() -> int:
    with (
        mock.patch.object(FlagParser, "parse_args", stop_after(FlagParser.parse_args)),
        mock.patch.object(
            argparse.ArgumentParser, "parse_args", stop_after(argparse.ArgumentParser.parse_args)
        ),
    ):
        faults = []
        for words, folder in json.load(sys.stdin):
            try:
                faults.append(fault(words, folder))
            except Exception as error:
                faults.append(f"{type(error).__name__}: {error}")
    print(json.dumps(faults))
    return 0


if __name__ == "__main__":
    sys.exit(main())
