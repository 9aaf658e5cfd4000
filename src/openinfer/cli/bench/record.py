"""The record of every benchmark: a JSON object that says when, where and by which command its figures were measured."""

import argparse
import datetime
import json
import math
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np


def add_record_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that all benchmarks share."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file")
    parser.add_argument("--commit", metavar="ID", help="commit of the code; default: this checkout's")


def record(kind: str, args: argparse.Namespace, results: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """The object for results/*.json: `kind` names the yardstick, `more` are facts of this run."""
    gpu, driver = _gpu()
    return {
        "bench": kind,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["openinfer", *_shown(sys.argv[1:])]),
        "commit": args.commit or commit(),
        "gpu": gpu,
        "driver": driver,
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        **more,
        "results": results,
    }


def _shown(words: list[str]) -> list[str]:
    """The words of a command without API keys."""
    words = [re.sub(r"^(--api-key=).*", r"\1...", word, flags=re.S) for word in words]
    pairs = zip(["", *words], words, strict=False)
    return ["..." if before == "--api-key" else word for before, word in pairs]


def write(path: Path, data: dict[str, Any]) -> None:
    """Write as JSON, a list of numbers a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(data, indent=1)
    text = re.sub(r"\[[-\d.eE,\s]*\]", lambda m: re.sub(r"\s+", " ", m[0]), text)
    path.write_text(text + "\n")
    print(f"wrote {path}", file=sys.stderr)


def progress(line: str) -> None:
    """Write a line to stderr: the current work, or a result."""
    print(f"openinfer: {line}", file=sys.stderr, flush=True)


def percentile(values: Iterable[float], percent: float) -> float:
    """A percentile by linear interpolation between the nearest ranks; NaN without values."""
    found = list(values)
    return float(np.percentile(found, percent)) if found else math.nan


def _gpu() -> tuple[str | None, str | None]:
    """Name and driver of the first GPU, without making a context on it."""
    command = ["nvidia-smi", "--id=0", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None, None
    name, _, driver = done.stdout.strip().partition(", ")
    return name, driver


def commit() -> str:
    """The commit of the checkout that this runs in, or "unknown"."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"
