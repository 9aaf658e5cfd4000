"""A model's text, a piece at a time, to reasoning, content and tool calls.

One machine serves every format. The parts depend on the text alone, never on the pieces that it came in, nor on whether
calls are streamed. So text that may become a marker, and whitespace that one would swallow, are held back until then.

Where a call is:
- Behind its opening marker, a call of a tool on offer is one as soon as it names the tool, and its arguments are handed
  out as they come. If it goes wrong, or is cut, its arguments are ended as JSON, and the rest of the text is content.
- Within thoughts, without its opening marker, or of a tool that is not on offer, it is one once it is whole.
All other text that resembles a call stays where it is, verbatim.
"""

import re

from openinfer.frontend.chat.formats import ToolFormat
from openinfer.frontend.chat.json_calls import JsonReader
from openinfer.frontend.chat.parts import Arguments, Content, Part, Reasoning, Schemas, ToolCall, overlap
from openinfer.frontend.chat.python_calls import PythonReader
from openinfer.frontend.chat.tag_calls import TagReader

THINK, END_THINK = "<think>", "</think>"
MAX_TRIES = 16
"""What looks like a call and ends without being one is read again, as text that may hold a call. This often."""


class OutputParser:
    """Reads one sequence.

    reasoning: whether `<think>...</think>` at the start is reasoning. tools: None leaves calls in the content. schemas:
    parameters of the tools on offer. in_reasoning: the prompt ended inside `<think>`. max_calls: later calls are
    dropped (1 for parallel_tool_calls: false). streams: give calls as they come; otherwise each is one part.
    """

    def __init__(
        self,
        *,
        reasoning: bool = False,
        tools: ToolFormat | None = None,
        schemas: Schemas | None = None,
        in_reasoning: bool = False,
        max_calls: int | None = None,
        streams: bool = False,
    ) -> None:
        self._tools = tools
        self._schemas = schemas or {}
        self._calls_left = max_calls
        self.thought = reasoning and in_reasoning
        """Whether what came so far has thoughts, or goes on with those of the prompt."""
        self.cut: set[int] = set()
        """Which of the calls, in the order in which they were given, ended before they were whole."""
        self._given, self._ids = 0, set[str]()
        self._thinking = self.thought
        self._held = ""
        self._parts: list[Part] = []
        self._begun = False  # something was said in the reasoning
        self._at_line = True  # held text begins a line
        self._streams = streams
        self._whole: list[str] = []  # the call that is not streamed: its name and arguments so far
        self._reader: TagReader | JsonReader | PythonReader | None = None  # of the call that is being read
        self._raw: list[str] = []  # text of a call that may turn out to be none
        self._before = self._marker = ""  # whitespace and marker before it
        self._bare = False  # it must be whole, and of a tool on offer
        self._sure = False  # it was handed out
        self._dropped = False  # it is one too many
        self._after_call = False  # nothing but whitespace was said since a call
        self._tries = 0
        self._state = self._start if reasoning and not in_reasoning else self._text

    def push(self, text: str) -> list[Part]:
        """The parts that are certain after this text."""
        self._held += text
        return self._run(final=False)

    def flush(self) -> list[Part]:
        """At the end: what was held back."""
        return self._run(final=True)

    def _run(self, final: bool) -> list[Part]:
        while self._state(final):  # True: another state may go on
            pass
        parts, self._parts = self._parts, []
        return parts

    # -- text --

    def _start(self, final: bool) -> bool:
        text = self._held.lstrip()
        if text.startswith(THINK):
            self._held = text[len(THINK) :]
            self.thought = self._thinking = True
        elif THINK.startswith(text) and not final:
            return False
        self._state = self._text
        return True

    def _after_think(self, final: bool) -> bool:
        self._held = self._held.lstrip("\n")
        if not self._held:
            return False
        self._state, self._at_line = self._text, True
        return True

    def _text(self, final: bool) -> bool:
        if self._thinking and not self._begun:
            self._held = self._held.lstrip("\n")
        end = self._held.find(END_THINK) if self._thinking else -1
        if (call := self._call_in(self._held if end < 0 else self._held[:end])) is not None:
            start, marker = call
            before = self._held[:start]
            said = before.rstrip("\n") if self._thinking else before.rstrip()
            self._say_text(said)
            self._bare = self._thinking or not marker
            self._before, self._marker, self._sure = before[len(said) :] + marker, marker, False
            self._move(start + len(marker))
            self._begin_call()
            return True
        if end >= 0:
            self._say_text(self._held[:end].rstrip("\n"))
            self._move(end + len(END_THINK))
            self._thinking, self._state = False, self._after_think
            return True
        said = self._held if final else self._held[: self._certain()]
        if self._thinking:
            said = said if final else said.rstrip("\n")
        elif not final or self._after_call:
            said = said.rstrip()
        self._say_text(said)
        self._move(len(self._held) if final else len(said))
        return False

    def _call_in(self, text: str) -> tuple[int, str] | None:
        """Where a call may begin, and with which marker; no marker for one without its opening."""
        form = self._tools
        if form is None or self._tries > MAX_TRIES:
            return None
        found = text.find(form.opening)
        start, marker = (len(text), "") if found < 0 else (found, form.opening)
        if self._schemas and form.bare is not None and form.bare_start in text:
            for bare in form.bare.finditer(text, 0, start):
                if bare.start() or self._at_line or not form.bare.flags & re.MULTILINE:
                    return bare.end(), ""
        return None if found < 0 else (start, marker)

    def _certain(self) -> int:
        """How much of the held text cannot be the beginning of a marker."""
        markers = [END_THINK] if self._thinking else []
        if self._tools is not None and self._tries <= MAX_TRIES:
            markers.append(self._tools.opening)
            if self._schemas and self._tools.bare is not None:
                markers.append(self._tools.bare_start)
        return len(self._held) - max((overlap(self._held, marker) for marker in markers), default=0)

    def _move(self, count: int) -> None:
        if count:
            self._at_line = self._held[count - 1] == "\n"
            self._held = self._held[count:]

    def _say_text(self, text: str) -> None:
        if not text:
            return
        self._end_whole()
        if self._thinking:
            self._begun = True
            self._parts.append(Reasoning(text))
        else:
            self._after_call = False
            self._parts.append(Content(text))

    # -- calls --

    def _begin_call(self) -> None:
        assert self._tools is not None
        self._reader = self._tools.reader(self._schemas, bare=self._bare, marked=bool(self._marker))
        self._raw, self._state = [], self._call

    def _call(self, final: bool) -> bool:
        reader = self._reader
        assert reader is not None
        if self._bare or not reader.offered:
            self._raw.append(self._held)
        reader.text += self._held
        self._held = ""
        found = reader.run(final)
        sure = reader.offered and not self._bare
        if found and not sure and reader.mended:
            found = False
        if found or sure:
            self._give(reader.parts)
        if found is None:
            return False
        rest, self._reader = reader.text, None
        if found:
            self._end_whole()
            self._held, self._state = rest, self._between
            self._sure = self._after_call = True
        elif sure:
            self._end_whole()
            if not self._dropped:
                self.cut.add(self._given - 1)
            self._held, self._state, self._after_call = rest, self._text, True
        else:
            self._refuse(final)
        return True

    def _refuse(self, final: bool) -> None:
        text = "".join(self._raw)
        self._tries += final
        self._held, self._state = text, self._text
        if self._sure:  # other text behind a call, within its markers
            self._held = self._before + text
            return
        if self._before:
            self._say_text(self._before)
            self._at_line = False
        else:  # nothing was read of it yet: its first character is text
            self._say_text(text[:1])
            self._at_line, self._held = False, text[1:]

    def _between(self, final: bool) -> bool:
        """Behind a call: its closing marker, another call within the same markers, or text."""
        form = self._tools
        assert form is not None
        ended = form.end.match(self._held)
        if ended is not None and ended[0].strip():
            self._held = self._held[ended.end() :]
            self._state, self._at_line = self._text, False
            return True
        gap = form.between.match(self._held)
        assert gap is not None
        rest = self._held[gap.end() :]
        if not final and (not rest or form.closing.startswith(rest) or self._call_may_begin(rest) is None):
            return False
        self._state = self._text
        if not self._call_may_begin(rest):
            self._at_line = False
            return True
        self._before, self._held = self._held[: gap.end()], rest
        self._begin_call()
        return True

    def _call_may_begin(self, text: str) -> bool | None:
        assert self._tools is not None
        start = self._tools.bare_start
        if self._tools.bare is None or not text:
            return False
        return True if text.startswith(start) else None if start.startswith(text) else False

    def _give(self, parts: list[Part]) -> None:
        for part in parts:
            if isinstance(part, ToolCall):
                self._end_whole()
                self._dropped = self._calls_left == 0
                self._calls_left = self._calls_left and self._calls_left - 1
                if part.id in self._ids:  # a result could not say which call it is of
                    part = part._replace(id="")
                self._ids.add(part.id)
            if self._dropped:
                continue
            self._given += isinstance(part, ToolCall)
            if self._streams:
                self._parts.append(part)
            elif isinstance(part, ToolCall):
                self._whole = [part.name, part.id, part.arguments]
            elif isinstance(part, Arguments):
                self._whole.append(part.text)
        parts.clear()

    def _end_whole(self) -> None:
        if self._whole:
            name, identity, *arguments = self._whole
            self._parts.append(ToolCall(name, "".join(arguments), identity))
            self._whole = []
