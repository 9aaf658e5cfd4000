"""A model's text, a piece at a time, to reasoning, content and tool calls.

One machine serves every format. A format is a pair of markers and a function that reads the text between them. The
parts depend on the text alone, never on the pieces that it came in. So text that may still become a marker, and
whitespace that a marker would swallow, are held back until that is decided.

A call is handed out when it is complete. Text that only resembles a call, or a call that is cut off, is content,
verbatim. Where calls are streamed, a call is handed out once it names a tool on offer, and its arguments as they come.
"""

from typing import Protocol

from openinfer.frontend.chat.parts import (
    Content,
    Part,
    Reasoning,
    Schemas,
    ToolCall,
    overlap,
)
from openinfer.frontend.chat.streams import CallStream
from openinfer.sampler.lark import Lark

__all__ = ["OutputParser", "ToolFormat", "repeated"]

THINK, END_THINK, NEWLINE = "<think>", "</think>", "\n"


class ToolFormat(Protocol):
    """How a model writes its calls: between `opening` and `closing`."""

    opening: str
    closing: str

    def parse(self, body: str, schemas: Schemas) -> list[ToolCall] | None:
        """The calls in the text between the markers; None when it is malformed. Never raises."""

    def stream(self, schemas: Schemas) -> CallStream:
        """A new reader of the text between two markers."""

    def grammar(self, lark: Lark, schemas: Schemas, many: bool) -> str:
        """The grammar after `opening` for a forced call of one of these tools, `closing` included.

        With `many` any number of further calls may follow, in as many blocks as the format takes. Raises
        InvalidGrammar for a schema that cannot be forced."""


def repeated(lark: Lark, form: ToolFormat, call: str, many: bool) -> str:
    """`call`, and with `many` further ones, each in a block on a line of its own."""
    return f"{call} {lark.rule(f'{lark.text(NEWLINE + form.opening)} {call}')}*" if many else call


class OutputParser:
    """Reads one sequence.

    reasoning: whether `<think>...</think>` at the start is reasoning. tools: None leaves calls in the content.
    schemas: parameters of the tools on offer. in_reasoning: the prompt ended inside `<think>`.
    max_calls: later calls are dropped (1 for parallel_tool_calls: false). streams: give calls as they come.
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
        self._held = ""
        self._parts: list[Part] = []
        self._begun = False  # something was said in the reasoning
        self._space = ""  # whitespace before a call, dropped if it is one
        self._body: list[str] = []
        self._streams = streams
        self._stream: CallStream | None = None  # of the call that is being read
        self._dropped = False  # the call that is being streamed is one too many
        self._after_call = False  # nothing but whitespace was said since a call
        self._state = self._text
        if reasoning:
            self._state = self._think if in_reasoning else self._start

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

    def _say(self, part: Part) -> None:
        if isinstance(part, ToolCall) or part.text:
            self._parts.append(part)

    def _start(self, final: bool) -> bool:
        text = self._held.lstrip()
        if text.startswith(THINK):
            self._held = text[len(THINK) :]
            self._state = self._think
            self.thought = True
            return True
        if THINK.startswith(text) and not final:
            return False
        self._state = self._text
        return True

    def _think(self, final: bool) -> bool:
        if not self._begun:
            self._held = self._held.lstrip("\n")
        end = self._held.find(END_THINK)
        if end >= 0:
            self._say(Reasoning(self._held[:end].rstrip("\n")))
            self._held = self._held[end + len(END_THINK) :]
            self._state = self._after_think
            return True
        keep = 0 if final else overlap(self._held, END_THINK)
        said = self._held[: len(self._held) - keep]
        said = said if final else said.rstrip("\n")
        self._begun = self._begun or bool(said)
        self._say(Reasoning(said))
        self._held = self._held[len(said) :]
        return False

    def _after_think(self, final: bool) -> bool:
        self._held = self._held.lstrip("\n")
        if not self._held:
            return False
        self._state = self._text
        return True

    def _text(self, final: bool) -> bool:
        if self._tools is None:
            self._say(Content(self._held))
            self._held = ""
            return False
        start = self._held.find(self._tools.opening)
        if start >= 0:
            before = self._held[:start]
            self._say_content(before.rstrip())
            self._space = before[len(before.rstrip()) :]
            self._held = self._held[start + len(self._tools.opening) :]
            self._stream = self._tools.stream(self._schemas) if self._streams else None
            self._state = self._call
            return True
        keep = 0 if final else overlap(self._held, self._tools.opening)
        said = self._held[: len(self._held) - keep]
        if not final or self._after_call:
            said = said.rstrip()
        self._say_content(said)
        self._held = "" if final else self._held[len(said) :]
        return False

    def _say_content(self, text: str) -> None:
        self._after_call = self._after_call and not text
        self._say(Content(text))

    def _call(self, final: bool) -> bool:
        assert self._tools is not None
        closing = self._tools.closing
        end = self._held.find(closing)
        if end < 0:
            keep = 0 if final else overlap(self._held, closing)
            cut = len(self._held) - keep
            self._read(self._held[:cut])  # so that a long call is not searched again and again
            self._held = self._held[cut:]
            if final:
                self._end_call("")
            return False
        self._read(self._held[:end])
        self._held = self._held[end + len(closing) :]
        self._end_call(closing)
        self._state = self._text
        return True

    def _read(self, text: str) -> None:
        """More of a call."""
        self._body.append(text)
        for part in self._stream.push(text) if self._stream is not None else ():
            if isinstance(part, ToolCall):
                self._dropped = self._calls_left == 0
                self._calls_left = self._calls_left and self._calls_left - 1
            if not self._dropped:
                self._say(part)

    def _end_call(self, closing: str) -> None:
        assert self._tools is not None
        body = "".join(self._body)
        self._body = []
        if self._stream is not None and self._stream.begun:
            self._after_call = True
            return
        calls = self._tools.parse(body, self._schemas)
        if calls is None:
            self._say_content(self._space + self._tools.opening + body + closing)
            return
        self._after_call = True
        if self._calls_left is not None:
            calls = calls[: self._calls_left]
            self._calls_left -= len(calls)
        for call in calls:
            self._say(call)
