"""Calls while they are being written: a call is sent when its name is there, and its arguments as they come.

A part that was sent cannot be taken back. A call that turns out malformed, or is cut off, ends there, and its arguments
are not JSON then.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from openinfer.frontend.chat.parts import Arguments, Part, Schemas, ToolCall, overlap
from openinfer.frontend.chat.values import Malformed

__all__ = ["CallStream", "JsonStream", "ParameterStream"]

MAX_HEAD = 1024
"""Characters in which the name of a call must have come."""
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\]+)"\s*,\s*"arguments"\s*:\s*(?=\{)')
_SPECIAL = re.compile(r'\\.|["{}\[\]\x00-\x1f]', re.DOTALL)
_OPEN_ESCAPE = re.compile(r"(?<!\\)(?:\\\\)*\\$")


class CallStream(Protocol):
    """Reads the text between a format's markers."""

    begun: bool
    """It has told of a call."""

    def push(self, text: str) -> list[Part]:
        """The parts that are certain after more text; the first is a ToolCall, Arguments go on with the last one."""


class JsonStream:
    """`{"name": ..., "arguments": {...}}` of a tool on offer."""

    def __init__(self, schemas: Schemas) -> None:
        self.begun = False
        self._schemas, self._held = schemas, ""
        self._depth, self._in_string, self._over = 0, False, False

    def push(self, text: str) -> list[Part]:
        self._held += text
        if self._over:
            return []
        parts: list[Part] = []
        if not self.begun:
            head = _HEAD.match(self._held)
            if head is None or head[1] not in self._schemas:
                self._over = head is not None or len(self._held) > MAX_HEAD
                return []
            self.begun, self._held = True, self._held[head.end() :]
            parts.append(ToolCall(head[1], ""))
        keep = 1 if _OPEN_ESCAPE.search(self._held) else 0
        ready, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        written = self._scan(ready)
        return [*parts, Arguments(written)] if written else parts

    def _scan(self, text: str) -> str:
        """The object's own text, with line breaks in its strings as JSON has them."""
        pieces, last = [], 0
        for found in _SPECIAL.finditer(text):
            mark = found[0]
            if self._in_string and mark < " ":
                pieces += [text[last : found.start()], json.dumps(mark)[1:-1]]
                last = found.end()
            elif mark == '"':
                self._in_string = not self._in_string
            elif not self._in_string and mark in "{[":
                self._depth += 1
            elif not self._in_string and mark in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self._over = True
                    return "".join([*pieces, text[last : found.end()]])
        return "".join([*pieces, text[last:]])


class ParameterStream:
    """Calls whose arguments are written one by one, between markers.

    call, value: expressions of the openings of a call and of a value, with the name in their first group.
    end: the text that ends a value. end_call: the expression that ends a call.
    is_text: whether a value is a text that is written bare. read: the JSON of any other value. Both get the call's
    name and the match of `value`.
    trims: a line break on each side of a value is not part of it.
    """

    def __init__(
        self,
        schemas: Mapping[str, Any],
        call: re.Pattern[str],
        value: re.Pattern[str],
        end: str,
        end_call: re.Pattern[str],
        is_text: Callable[[str, re.Match[str]], bool],
        read: Callable[[str, re.Match[str], str], str],
        *,
        trims: bool,
    ) -> None:
        self.begun = False
        self._schemas, self._call, self._value, self._end, self._end_call = (
            schemas,
            call,
            value,
            end,
            end_call,
        )
        self._is_text, self._read, self._trims = is_text, read, trims
        self._held, self._name, self._count = "", "", 0
        self._opened: re.Match[str] | None = None
        self._in_text, self._at_start, self._over = False, False, False
        self._parts: list[Part] = []

    def push(self, text: str) -> list[Part]:
        self._held += text
        while not self._over and self._step():
            pass
        parts, self._parts = self._parts, []
        return parts

    def _say(self, text: str) -> None:
        if text:
            self._parts.append(Arguments(text))

    def _step(self) -> bool:
        """Go on by one thing; False where more text is needed."""
        if self._opened is not None:
            return self._in_value(self._opened)
        if not self._name:
            return self._begin_call()
        if opened := self._value.match(self._held):
            self._held = self._held[opened.end() :]
            self._opened, self._at_start = opened, True
            self._in_text = self._is_text(self._name, opened)
            comma = ", " if self._count else ""
            key = json.dumps(opened[1].strip(), ensure_ascii=False)
            self._say(f"{comma}{key}: " + '"' * self._in_text)
            self._count += 1
            return True
        if closed := self._end_call.match(self._held):
            self._held, self._name = self._held[closed.end() :], ""
            self._say("}")
            return True
        return False

    def _begin_call(self) -> bool:
        found = self._call.match(self._held)
        if found is None or found[1].strip() not in self._schemas:
            self._over = found is not None or len(self._held) > MAX_HEAD
            return False
        self._held, self._name, self._count, self.begun = self._held[found.end() :], found[1].strip(), 0, True
        self._parts.append(ToolCall(self._name, "{"))
        return True

    def _in_value(self, opened: re.Match[str]) -> bool:
        at = self._held.find(self._end)
        if not self._in_text:
            if at < 0:
                return False
            try:
                self._say(self._read(self._name, opened, self._held[:at]))
            except Malformed:
                self._over = True
            self._held, self._opened = self._held[at + len(self._end) :], None
            return True
        cut = at if at >= 0 else len(self._held) - overlap(self._held, self._end)
        if self._trims and self._at_start and self._held[:1] == "\n" and cut > 0:
            self._held, cut = self._held[1:], cut - 1
            self._at_start = False
        said = self._held[:cut]
        if self._trims and said.endswith("\n"):
            said = said[:-1]  # perhaps the one before the end
        self._at_start = self._at_start and not said
        self._say(json.dumps(said, ensure_ascii=False)[1:-1])
        if at < 0:
            self._held = self._held[len(said) :]
            return False
        self._say('"')
        self._held, self._opened = self._held[cut + len(self._end) :], None
        return True
