"""The command `openinfer`. Every subcommand imports what it needs itself, so that --help answers at once."""

import importlib
import os
import select
import sys
from collections.abc import Sequence

__all__ = ["main"]

DISTRIBUTIONS = (
    "openinfer-cli", "openinfer-recipes", "openinfer-tensor", "openinfer-kernels", "openinfer-graph",
    "openinfer-kvpool", "openinfer-sampler", "openinfer-scheduler", "openinfer-frontend",
)  # fmt: skip


INTERRUPTED = 128 + 2
"""The exit code after Ctrl-C, as of a shell: 128 and the signal's number."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns the exit code: 0 done, 1 failed, 2 wrong arguments, 130 after Ctrl-C."""
    if None in (sys.stdin, sys.stdout, sys.stderr):
        from openinfer.frontend.logs import open_standard_streams

        open_standard_streams()
    try:
        code = _run(argv)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        if not _reader_left():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED


def _reader_left() -> bool:
    """Whether the reader of our output has closed the pipe, as in `openinfer serve --help | head`."""
    output = select.poll()
    output.register(1, 0)
    return any(events & select.POLLERR for _, events in output.poll(0))


def _run(argv: Sequence[str] | None) -> int:
    name, *rest = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in ("-h", "--help"):
        print(_help())
        return 0
    if name in ("-V", "--version"):
        print(_versions())
        return 0
    if name not in COMMANDS:
        return _unknown(name)
    # What OpenBLAS takes where OPENBLAS_NUM_THREADS is not set. Its threads wait by spinning, so an engine has its own.
    os.environ.setdefault("GOTO_NUM_THREADS", "1")
    code: int = importlib.import_module(f"openinfer.cli.{name}").main(rest)
    return code


COMMANDS = {
    "serve": "serve a checkpoint over an OpenAI-compatible HTTP API",
    "chat": "talk to a model in the terminal",
    "compile": "compile a checkpoint's kernels ahead of time; needs no GPU",
    "bench": "measure: a server, steps, ops, the host, answers",
    "tune": "measure which kernels are fastest for a checkpoint on this GPU",
    "plan": "a server's latencies and throughput over load, before there is one; needs no GPU",
    "check": "what a checkpoint is, whether it loads, its memory; reads headers only",
    "explain": "a step op by op: floor, cost, memory plan; needs no GPU",
    "selftest": "check this machine's GPU: tests, accuracy, speed",
}
"""Modules of this package by name, with what each does."""


def _help() -> str:
    lines = "\n".join(f"  {name:<10} {what}" for name, what in COMMANDS.items())
    return f"""usage: openinfer COMMAND ...

LLM inference without PyTorch.

commands:
{lines}

  openinfer COMMAND --help   the flags of a command
  openinfer --version        the versions of all parts"""


def _versions() -> str:
    from importlib.metadata import PackageNotFoundError, version

    lines = []
    for name in DISTRIBUTIONS:
        try:
            lines.append(f"{name:<20} {version(name)}")
        except PackageNotFoundError:
            lines.append(f"{name:<20} not installed")
    return "\n".join(lines)


def _unknown(name: str) -> int:
    from difflib import get_close_matches

    close = get_close_matches(name, COMMANDS, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(COMMANDS)}"
    print(f"openinfer: error: unknown command {name!r}; {hint} (openinfer --help)", file=sys.stderr)
    return 2
