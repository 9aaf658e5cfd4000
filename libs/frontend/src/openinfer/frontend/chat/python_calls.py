"""Calls that are written as a list of Python's: `[f(a=1), g(b="x")]`. They are read as soon as the list is whole."""

import re

from openinfer.frontend.chat.parts import TOOL_NAME, Part, Schemas, ToolCall
from openinfer.frontend.chat.values import Malformed, encode, fitted, read_value

_HEAD = re.compile(r"\s*([\[,])\s*([\w.:/-]*)\s*")
_END = re.compile(r"\s*,?\s*\]")
_MARKS = {  # by the quote of the string that is being read
    "": re.compile(r"[()\[\]{},\"']"),
    '"': re.compile(r'\\.|"', re.DOTALL),
    "'": re.compile(r"\\.|'", re.DOTALL),
}


class PythonReader:
    """The calls of one list. As `tag_calls.TagReader`; none is handed out before all are whole."""

    def __init__(self, schemas: Schemas, *, bare: bool) -> None:
        self.text, self.parts = "", list[Part]()
        self.offered = self.mended = False
        self._schemas, self._bare = schemas, bare
        self._calls: list[ToolCall] = []
        self._name, self._depth, self._quote = "", 0, ""
        self._at = 0  # in text, which begins with the arguments: read up to here
        self._cuts: list[int] = []

    def run(self, final: bool) -> bool | None:
        """See JsonReader.run."""
        while True:
            if not self._depth:
                if self._calls and (ended := _END.match(self.text)):
                    self.parts += self._calls
                    self.text = self.text[ended.end() :]
                    return True
                possible = self._begin()
                if not self._depth:
                    return None if possible and not final else False
            self._read()
            if self._depth:
                return False if final else None
            try:
                self._calls.append(self._call())
            except Malformed:
                return False
            self.text = self.text[self._at :]

    def _begin(self) -> bool:
        """Find the name of a call. False where none can come."""
        head = _HEAD.match(self.text)
        if head is None:
            return not self.text.strip()
        name, rest = head[2], self.text[head.end() :]
        if head[1] != ("," if self._calls else "[") or len(name) > 128:
            return False
        if not rest:
            return True
        if rest[0] == "(" and TOOL_NAME.fullmatch(name) and (name in self._schemas or not self._bare):
            self._name, self.text, self._at, self._depth, self._cuts = name, rest, 1, 1, [0]
        return self._depth > 0

    def _read(self) -> None:
        """Go on to the bracket that closes the arguments, or to the end of the text."""
        while self._depth:
            found = _MARKS[self._quote].search(self.text, self._at)
            if found is None:
                self._at = len(self.text) - (bool(self._quote) and self.text.endswith("\\"))
                return
            mark, self._at = found[0], found.end()
            if self._quote:
                self._quote = "" if mark == self._quote else self._quote
            elif mark in "\"'":
                self._quote = mark
            elif mark != ",":
                self._depth += 1 if mark in "([{" else -1
            if not self._quote and (not self._depth or (mark == "," and self._depth == 1)):
                self._cuts.append(found.start())

    def _call(self) -> ToolCall:
        arguments = {}
        for start, end in zip(self._cuts, self._cuts[1:], strict=False):
            name, equals, text = self.text[start + 1 : end].partition("=")
            if not equals and not name.strip():  # none, or behind the last comma
                continue
            name, text = name.strip(), text.strip()
            value = read_value(text)
            if not name.isidentifier() or name in arguments or value == text:  # which is no value
                raise Malformed
            arguments[name] = value
        schema = self._schemas.get(self._name) or {}
        return ToolCall(self._name, encode(fitted(arguments, schema, schema)))
