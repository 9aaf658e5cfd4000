"""Calls whose arguments stand between tags, read while they are being written.

Values are bare text without escapes, so a file that a model writes may quote the tags that end a value. What ends one:

- its closing tag, if the next parameter, the end of the call or the end of the block follows;
- without a closing tag, the end of the call where the block ends or another call begins; the end of the block where the
  answer ends or another block begins; and, on a line of its own, a parameter of this tool that has no value yet.

Everything else is text. A call or block that opens on a line of its own within a value is quoted up to its own end, and
so is the value of a parameter that is no next one.
"""

import json
import re
from typing import TYPE_CHECKING

from openinfer.frontend.chat.parts import TOOL_NAME, Arguments, Part, Schemas, ToolCall, overlap
from openinfer.frontend.chat.values import child, escaped, kinds, written_as

if TYPE_CHECKING:
    from openinfer.frontend.chat.formats import TagFormat

MAX_HEAD = 1024
"""Characters in which an opening tag must have ended."""
_SPACE = re.compile(r"\s*")
_ENDS = {
    "end_parameter": ("parameter", ("parameter", "closing", "end")),
    "end_call": ("call", ("closing", "call", "opening", "end")),
    "closing": ("opening", ("opening", "end")),
}
"""By a tag that may end a value: the tag that it ends where that is quoted, and what follows it where none is."""


class TagReader:
    """One call of a TagFormat: from its own opening tag to its end.

    text: what was not read yet; the caller adds to it. parts: what can be handed out; the caller takes it. A ToolCall
    comes first, Arguments go on with it. offered: the call names a tool on offer. mended: a tag was left out.
    """

    def __init__(self, form: "TagFormat", schemas: Schemas, *, bare: bool, marked: bool) -> None:
        self.text, self.parts = "", list[Part]()
        self.offered = self.mended = False
        self._form, self._schemas, self._bare, self._marked = form, schemas, bare, marked
        self._name = ""
        self._given: list[str] = []
        self._parameter: re.Match[str] | None = None  # whose value is being read
        self._is_text = self._at_start = False
        self._at = 0  # in text: searched up to here
        self._line = True  # a line begins where text begins
        self._weak: int | None = None  # in text: the value ends here unless a better end comes
        self._quoted: dict[str, int] = {}

    def run(self, final: bool) -> bool | None:
        """True: the call is whole, and `text` what follows it. None: more text is needed. False: what was handed out is
        ended, and `text` is the rest, which is no call."""
        found: bool | None = self._begin(final) if not self._name else None
        while self._name and found is None:
            before = len(self.text), self._at, self._parameter
            found = self._between(final) if self._parameter is None else self._value(final)
            if found is None and before == (len(self.text), self._at, self._parameter):
                break
        return found if found is not None or not final else False

    def _begin(self, final: bool) -> bool | None:
        opened = self._form.call_tag.match(self.text)
        if opened is None:
            begun = self.text.lstrip()
            half = self._form.bare_start.startswith(begun) or self._form.half_call.fullmatch(begun)
            return None if half and len(begun) < MAX_HEAD and not final else False
        self._name = opened[1].strip()
        self.offered = self._name in self._schemas
        self.text = self.text[opened.end() :]
        if not self.offered and (self._bare or not TOOL_NAME.fullmatch(self._name)):
            return False
        self.parts.append(ToolCall(self._name, "{"))
        return None

    def _next(self, at: int, final: bool) -> str | None:
        """What stands behind blanks here: the name of a tag, "end" of all text, "" for other text; None: not known."""
        blank = _SPACE.match(self.text, at)
        assert blank is not None
        at = blank.end()
        if len(blank[0]) > MAX_HEAD:
            return ""
        if at == len(self.text):
            return "end" if final else None
        rest = self.text[at : at + 64]
        for name, mark in self._form.marks:
            if rest.startswith(mark):
                return name
        if any(mark.startswith(rest) for _, mark in self._form.marks):
            return "end" if final else None
        return ""

    def _between(self, final: bool) -> bool | None:
        match self._next(0, final):
            case None:
                return None
            case "parameter":
                if (opened := self._form.parameter_tag.match(self.text)) is not None:
                    self._open(opened)
                    return None
                begun = self.text.lstrip()
                if self._form.half_parameter.fullmatch(begun) and len(begun) < MAX_HEAD and not final:
                    return None
            case "end_call":
                self.text = self.text.partition(self._form.end_call)[2]
                self._say("}")
                return True
            case "closing" | "call" | "opening" as found:
                # The end of the call was left out, or a block is a call.
                self.mended = bool(self._form.end_call) or found != "closing"
                if not self._form.bare_start and not self.offered and not self._given:
                    return False  # any word in a block would be a call
                self._say("}")
                return True
        self._say("}")
        return False

    def _open(self, opened: re.Match[str]) -> None:
        self._parameter, self._key = opened, opened[1].strip()
        self._given.append(self._key)
        root = self._schemas.get(self._name) or {}
        self._schema = child(root, self._key, root), root
        said = opened[2] if self._form.says_text else None
        allowed = kinds(*self._schema)
        may_be_text = allowed <= {"string"} or (said == "true" and "string" in allowed)
        self._is_text = may_be_text and said != "false"
        self._says_json = said == "false"
        self.text = self.text[opened.end() :]
        self._at, self._line, self._at_start, self._weak = 0, True, True, None
        self._quoted = dict.fromkeys(("opening", "call", "parameter"), 0)
        if self._is_text:
            self._say(f'{self._comma}{json.dumps(self._key, ensure_ascii=False)}: "')

    @property
    def _comma(self) -> str:
        return ", " if len(self._given) > 1 else ""

    def _say(self, text: str) -> None:
        if text:
            self.parts.append(Arguments(text))

    def _value(self, final: bool) -> bool | None:
        for tag in self._form.tags.finditer(self.text, self._at):
            ends = self._ends(tag, final)
            if ends is None:
                self._release(tag.start())
                return None
            if ends and tag.lastgroup == "end_parameter":
                return self._close(tag.start(), tag.end())
            if ends:
                return self._close_unmarked(tag.start())
            self._at = tag.end()
        if final:
            return self._cut()
        self._release(len(self.text))
        return None

    def _ends(self, tag: re.Match[str], final: bool) -> bool | None:
        """Whether a tag in a value ends it; None where more text will tell."""
        kind, quoted = tag.lastgroup, self._quoted
        outside = not quoted["call"] and not quoted["opening"]
        if kind in ("opening", "call", "parameter"):
            if not (self._line if tag.start() == 0 else self.text[tag.start() - 1] == "\n"):
                return False
            if kind == "parameter" and outside and self._is_next(tag[0]):
                return True
            rest = self.text[tag.end() : tag.end() + 1]
            if not rest and not final:
                return None
            quoted[kind] += rest == "\n"
            return False
        follows = self._next(tag.end(), final)
        if follows is None:
            return None
        if kind == "end_parameter":
            if outside and follows == "end_call":
                place = self.text.index(self._form.end_call, tag.end()) + len(self._form.end_call)
                beyond = self._next(place, final)
                if beyond is None:
                    return None
                if beyond in ("closing", "call", "opening", "end") or not self._marked:
                    return True
                self._weak = tag.start()
            elif follows == "end_call":
                self._weak = tag.start()
        opening, ways_on = _ENDS[str(kind)]
        if quoted[opening]:
            quoted[opening] -= 1
            return False
        return outside and follows in ways_on

    def _is_next(self, tag: str) -> bool:
        """Whether an opening tag is of a parameter of this tool that has no value yet."""
        opened = self._form.parameter_tag.match(tag)
        properties = (self._schemas.get(self._name) or {}).get("properties")
        name = opened[1].strip() if opened is not None else ""
        return isinstance(properties, dict) and name in properties and name not in self._given

    def _release(self, until: int) -> None:
        """Hand out the text of a value up to a place, but for what may belong to its end."""
        if self._weak is not None:
            until = min(until, self._weak)
        if until == len(self.text):
            until = self._at = self._form.before_tag(self.text, self._at)
        pad = self._form.pad if self._at_start else ""
        skipped = len(pad) if self.text[:until].startswith(pad) else 0
        said = self.text[skipped:until].removesuffix("\n")  # perhaps the one before the end
        if not self._is_text or not said:
            return
        count = skipped + len(said)
        self._say(escaped(said))
        self.text, self._line, self._at_start = self.text[count:], said[-1] == "\n", False
        self._at = max(self._at - count, 0)
        if self._weak is not None:
            self._weak -= count

    def _close(self, end: int, after: int) -> bool | None:
        value = self.text[:end]
        value = (value.removeprefix(self._form.pad) if self._at_start else value).removesuffix(self._form.pad)
        self.text = self.text[after:]
        self._parameter, self._at = None, 0
        if self._is_text:
            self._say(escaped(value) + '"')
        else:
            written = written_as(value, *self._schema, says_json=self._says_json)
            self._say(f"{self._comma}{json.dumps(self._key, ensure_ascii=False)}: {written}")
        return None

    def _close_unmarked(self, end: int) -> bool | None:
        """The value ends without its closing tag; or that was taken for the end of something quoted."""
        self.mended = True
        if self._weak is not None:
            after = self._weak + len(self._form.end_parameter)
            if self.text[after:end].strip() in ("", self._form.end_call):
                return self._close(self._weak, after)
        return self._close(end - (self.text[end - 1 : end] == "\n" and not self._form.pad), end)

    def _cut(self) -> bool | None:
        if self._weak is not None:
            return self._close(self._weak, self._weak + len(self._form.end_parameter))
        if not self._is_text:
            assert self._parameter is not None
            self.text = self._parameter[0] + self.text
            self._say("}")
            return False
        held = overlap(self.text, self._form.end_parameter)
        self._close(len(self.text) - (held if held > 1 else 0), len(self.text))
        self._say("}")
        return False
