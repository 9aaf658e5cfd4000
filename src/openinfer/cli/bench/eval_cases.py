"""Evaluation cases with exact checks of an answer, whatever server or engine made it.

A case file is JSON lines: {"kind", "messages", "tools", "thinking", "check"}. A check is an object with any of:

- `contains`: texts that the content holds.
- `last_number`: the last whole number in the content.
- `json`: the content is this value.
- `calls`: the tool calls, in order: [{"name", "arguments"}]; [] for none.
"""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHECKS = {"contains", "last_number", "json", "calls"}


class CaseError(ValueError):
    """A case file cannot be read; the message says where and why."""

    user_can_mend = True


@dataclass(frozen=True, slots=True)
class EvalCase:
    """A chat whose answer is checked. tools: OpenAI's tool objects."""

    kind: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    thinking: bool
    check: dict[str, Any]


def load_cases(path: Path) -> list[EvalCase]:
    """The cases of a file. Raises CaseError."""
    cases = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise CaseError(f"{path} cannot be read: {error.strerror}; --cases FILE names another") from None
    for number, line in enumerate(lines, 1):
        try:
            raw = json.loads(line)
            tools, thinking = raw.get("tools", []), raw.get("thinking", False)
            case = EvalCase(raw["kind"], raw["messages"], tools, thinking, raw["check"])
        except (ValueError, KeyError, TypeError) as error:
            raise CaseError(f"{path}, line {number} is no case: {error!r}") from None
        if not case.check or set(case.check) - CHECKS:
            raise CaseError(
                f"{path}, line {number}: the check has {sorted(case.check)}; possible are {sorted(CHECKS)}"
            )
        cases.append(case)
    return cases


def passed(check: dict[str, Any], content: str, calls: Sequence[tuple[str, str]]) -> bool:
    """Whether an answer is right. calls: names and arguments as JSON text."""
    if any(text not in content for text in check.get("contains", ())):
        return False
    if "last_number" in check:
        numbers = re.findall(r"-?\d+", content)
        if not numbers or int(numbers[-1]) != check["last_number"]:
            return False
    if "json" in check and _canonical(content) != json.dumps(check["json"], sort_keys=True):
        return False
    if "calls" in check:
        wanted = [(call["name"], json.dumps(call["arguments"], sort_keys=True)) for call in check["calls"]]
        return wanted == [(name, _canonical(arguments)) for name, arguments in calls]
    return True


def scores(results: Iterable[tuple[str, bool]]) -> dict[str, tuple[int, int]]:
    """Right answers and cases by kind, and of `all`, from (kind, right)."""
    found: dict[str, tuple[int, int]] = {}
    for kind, right in results:
        for name in (kind, "all"):
            good, count = found.get(name, (0, 0))
            found[name] = (good + right, count + 1)
    return dict(sorted(found.items(), key=lambda entry: (entry[0] == "all", entry[0])))


def _canonical(text: str) -> str | None:
    try:
        return json.dumps(json.loads(text), sort_keys=True)
    except (ValueError, RecursionError):
        return None
