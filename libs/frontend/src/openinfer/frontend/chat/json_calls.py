"""Calls that are JSON objects, read while they are being written.

What is handed out is always the beginning of valid JSON that a few closing marks complete: a key is held back until its
value begins, and a number or a word until it ends. So a call that is cut, or goes wrong, can be ended at any place.
"""

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from openinfer.frontend.chat.parts import TOOL_NAME, Arguments, Part, Schemas, ToolCall
from openinfer.frontend.chat.values import Malformed, child, decode, encode, escaped, fitted, kinds

if TYPE_CHECKING:
    from openinfer.frontend.chat.formats import JsonFormat

MAX_HEAD = 1024
"""Characters in which the head of a call must have come, and the tail."""
MAX_DEPTH = 128
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_SCALAR = re.compile(r"[-+.\w]+")
_WORDS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}
_SPACE = re.compile(r"[ \t\n\r]*")
_MEMBERS = {"name", "arguments", "parameters", "id", "type", "index"}


class JsonText:
    """One JSON value, checked and written anew as it comes. out: what can be handed out. text: what was not read, or
    not handed out. over: the value is complete."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self.text, self.out, self.over = "", "", False
        self._root = schema
        self._stack: list[str] = []  # the marks that close what is open
        self._schemas = [schema]
        self._expects = "value"
        self._held = ""  # a comma and a key, until a value begins
        self._key: list[str] | None = None
        self._in_string = False
        self._at = 0  # in text: read up to here
        self._said: list[str] = []

    def run(self, final: bool) -> bool:
        """Go on as far as possible. False where the text can be JSON no longer, or where it ends before the value."""
        moved: bool | None = True
        done = 0  # handed out up to here
        while moved and not self.over:
            moved = self._string() if self._in_string else self._step()
            if not self._held and self._key is None:
                done = self._at
        self.text, self._at = self.text[done:], self._at - done
        self.out += "".join(self._said)
        self._said = []
        return self.over or (moved is not None and not final)

    def ended(self) -> str:
        """The marks that make JSON of what was handed out."""
        marks = '"' if self._in_string and self._key is None else ""
        return marks + "".join(reversed(self._stack))

    def _step(self) -> bool | None:
        """Go on by a mark; False where more text is needed, None for what is no JSON."""
        space = _SPACE.match(self.text, self._at)
        assert space is not None
        at, expects = space.end(), self._expects
        char = self.text[at : at + 1]
        if not char:
            return False
        after, self._at = self._at, at + 1
        if char == '"' and expects in ("value", "first", "key", "first key"):
            self._in_string = True
            if expects in ("key", "first key"):
                self._key = []
            else:
                self._begin('"')
        elif char in "{[" and expects in ("value", "first") and len(self._stack) < MAX_DEPTH:
            self._begin(char)
            self._stack.append("}" if char == "{" else "]")
            self._expects = "first key" if char == "{" else "first"
            if char == "[":
                self._schemas.append(child(self._schemas[-1], None, self._root))
        elif expects in ("comma", "first key", "first") and self._stack[-1:] == [char]:
            if self._stack.pop() == "]":
                self._schemas.pop()
            self._said.append(char)
            self._end()
        elif char == "," and expects == "comma":
            self._held = ", "
            self._expects = "key" if self._stack[-1] == "}" else "value"
        elif char == ":" and expects == "colon":
            self._held += ": "
            self._expects = "value"
        else:
            self._at = after
            return self._scalar(at) if expects in ("value", "first") else None
        return True

    def _scalar(self, at: int) -> bool | None:
        found = _SCALAR.match(self.text, at)
        if found is None:
            return None
        if found.end() == len(self.text):
            return False if len(found[0]) <= MAX_HEAD else None
        word = _WORDS.get(found[0])
        if word is None:
            if _NUMBER.fullmatch(found[0]) is None:
                return None
            word, schema = found[0], self._schemas[-1]
            if len(word) < 32 and kinds(schema, self._root) & {"integer", "number"} == {"integer"}:
                word = encode(fitted(json.loads(word), schema, self._root))
        self._at = found.end()
        self._begin(word)
        self._end()
        return True

    def _string(self) -> bool | None:
        if plain := _PLAIN.match(self.text, self._at):
            return self._put(plain[0], plain.end())
        char = self.text[self._at : self._at + 1]
        if char == '"':
            self._at += 1
            self._in_string = False
            if self._key is None:
                self._said.append(char)
                self._end()
            else:
                key = "".join(self._key)
                self._held += json.dumps(key, ensure_ascii=False)
                self._schemas.append(child(self._schemas[-1], key, self._root))
                self._key, self._expects = None, "colon"
            return True
        if char != "\\":
            return self._put(char, self._at + 1) if char else False  # a raw line break
        escape = _ESCAPE.match(self.text, self._at)
        left = self.text[self._at : self._at + 12]
        if escape is None:
            return False if len(left) < 2 or (left[1] == "u" and len(left) < 6) else None
        size = len(escape[0])
        if size == 6 and 0xD800 <= int(escape[0][2:], 16) < 0xDC00:
            if len(left) < 12 and (left[6:8] == "\\u" or "\\u".startswith(left[6:8])):
                return False
            size = 12
        try:
            said = json.loads(f'"{left[:size]}"')
            said.encode()
        except ValueError:
            return None  # half a pair
        return self._put(said, self._at + size)

    def _put(self, said: str, at: int) -> bool:
        self._at = at
        if self._key is not None:
            self._key.append(said)
        else:
            self._said.append(escaped(said))
        return True

    def _begin(self, text: str) -> None:
        self._said += [self._held, text]
        self._held = ""

    def _end(self) -> None:
        self.over = not self._stack
        self._expects = "comma"
        if self._stack[-1:] == ["}"]:
            self._schemas.pop()


class JsonReader:
    """One call of a JsonFormat. As `tag_calls.TagReader`."""

    def __init__(self, form: "JsonFormat", schemas: Schemas, *, bare: bool, marked: bool) -> None:
        self.text, self.parts = "", list[Part]()
        self.offered = self.mended = False
        self._form, self._schemas, self._bare, self._marked = form, schemas, bare, marked
        self._json: JsonText | None = None
        self._tail, self._name, self._id = False, "", ""  # the name of a tool that is not on offer

    def run(self, final: bool) -> bool | None:
        """True: the call is whole, and `text` what follows it. None: more text is needed. False: what was handed out is
        ended, and `text` is the rest, which is no call."""
        if self._tail:
            return self._end(final)
        if self._json is None:
            possible = self._begin(final)
            if self._json is None:
                return None if possible and not final else False
        self._json.text, self.text = self._json.text + self.text, ""
        good = self._json.run(final)
        if self.offered and self._json.out:
            self.parts.append(Arguments(self._json.out))
            self._json.out = ""
        if self._json.over:
            self.text, self._tail = self._json.text, True
            return self._end(final) if self.offered or self._whole(self._json.out) else False
        if good:
            return None
        self.text = self._json.text
        if self.offered:
            self.parts.append(Arguments(self._json.ended()))
        return False

    def _begin(self, final: bool) -> bool:
        """Find the beginning of the arguments, or of an object that may be a call. False where neither can come."""
        head = self._form.head.match(self.text)
        if head is not None and head[1] in self._schemas:
            self.offered, self.text = True, self.text[head.end() :]
            self.parts.append(ToolCall(head[1], "", self._form.call_id(head)))
            self._json = JsonText(self._schemas[head[1]] or {})
            return True
        if head is not None and self._form.end_call and not self._bare:
            self._name, self._id = head[1], self._form.call_id(head)
            self.text, self._json = self.text[head.end() :], JsonText({})
            return True
        begun = "".join(self.text[:MAX_HEAD].split()).lstrip("[" if self._form.listed else "")
        if self._bare or not self._form.wrapped:
            start = '{"name":' if self._form.wrapped else "".join(self._form.start.split())
            fits = begun.startswith(start) or start.startswith(begun)
            return head is None and fits and len(self.text) <= MAX_HEAD
        if begun[:1] not in ("", "{"):
            return False
        strange = head is not None or not begun.startswith('{"name":'[: len(begun)])
        if strange or final or len(self.text) > MAX_HEAD:
            self._json = JsonText({})
        return True

    def _whole(self, text: str) -> bool:
        """A call whose head is not as usual, or of a tool that is not on offer; or a list of them."""
        try:
            found = decode(text)
            found = {"name": self._name, "arguments": found} if self._name else found
            several = isinstance(found, list) and self._form.listed
            parts = [self._call(one) for one in (found if several else [found])]
        except Malformed:
            return False
        self.parts += parts
        return bool(parts)

    def _call(self, call: object) -> ToolCall:
        if not isinstance(call, dict) or not call.keys() <= _MEMBERS:
            raise Malformed
        if not isinstance(call.get("name"), str) or not TOOL_NAME.fullmatch(call["name"]):
            raise Malformed
        arguments = call.get("arguments", call.get("parameters", {}))
        if isinstance(arguments, str):  # JSON within JSON, as some write it
            arguments = decode(arguments)
        if not isinstance(arguments, dict):
            raise Malformed
        schema = self._schemas.get(call["name"]) or {}
        return ToolCall(call["name"], encode(fitted(arguments, schema, schema)), self._id)

    def _end(self, final: bool) -> bool | None:
        """Other members and the brace behind the arguments, or the mark that ends a call."""
        wrapped, end = self._form.wrapped, self._form.end_call.lstrip()
        if not (end or (self.offered and wrapped)):
            return True
        found = self._form.tail.match(self.text)
        if found is None or found.end() > MAX_HEAD:
            rest = self.text.lstrip()
            waits = (end.startswith(rest) if end else rest[:1] in ("", ",")) and len(self.text) <= MAX_HEAD
            return None if waits and not final else True
        rest = self.text[found.end() :].lstrip()
        if not self._marked and wrapped:
            # JSON in an answer may only show a call: an example is followed by more text.
            ends = [self._form.closing or ";", "</think>", "{"]
            if not final and (not rest or any(mark.startswith(rest) for mark in ends)):
                return None
            if rest and not rest.startswith(tuple(ends)):
                return False
        self.text = self.text[found.end() :]
        return True
