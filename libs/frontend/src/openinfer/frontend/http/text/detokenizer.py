"""Token ids to text, a few at a time: the pieces add up to what decoding the whole sequence gives.

Half a UTF-8 character waits for its other half or the end. Stop strings are found however the text is cut into pieces.
"""

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

from openinfer.frontend.chat import Content, OutputParser, Part
from openinfer.frontend.chat.parts import overlap

MAX_HELD_TOKENS = 8
"""A character has at most 4 bytes, hence 4 tokens; more than this without a whole one is no UTF-8."""
MAX_WINDOW_TOKENS = 64


class Detokenizer(Protocol):
    """Incremental decoder of one sequence."""

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that is certain after these tokens."""

    def flush(self) -> str:
        """At the end: what was held back, U+FFFD for the broken."""


class ByteDetokenizer:
    """For byte-level BPE, where a token is some bytes. table: those of each id; an id beyond it stands for nothing."""

    __slots__ = ("_decode", "_table")

    def __init__(self, table: list[bytes]) -> None:
        self._table = table
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def push(self, token_ids: Sequence[int]) -> str:
        table = self._table
        if len(token_ids) == 1:
            token_id = token_ids[0]
            return self._decode(table[token_id]) if token_id < len(table) else ""
        return self._decode(b"".join([table[token_id] for token_id in token_ids if token_id < len(table)]))

    def flush(self) -> str:
        return self._decode(b"", True)


class TextDetokenizer:
    """For any other tokenizer, where a token's text depends on its neighbours: `decode` a short window of ids anew. It
    starts where the text before the last one handed out began, as the neighbour on the left decides about spaces."""

    __slots__ = ("_decode", "_ids", "_read", "_sent")

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._read = 0  # tokens of the window whose text was handed out
        self._sent = 0  # characters that is

    def push(self, token_ids: Sequence[int]) -> str:
        return "".join([self._push_one(token_id) for token_id in token_ids])

    def _push_one(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._decode(self._ids)
        if text.endswith("\ufffd") and len(self._ids) - self._read <= MAX_HELD_TOKENS:
            return ""
        new = text[self._sent :]
        if new:
            self._ids = self._ids[self._read :]
            self._sent = len(self._decode(self._ids))
        elif len(self._ids) > MAX_WINDOW_TOKENS:
            self._ids.pop()  # a long run of tokens without text
        self._read = len(self._ids)
        return new

    def flush(self) -> str:
        new = self._decode(self._ids)[self._sent :]
        self._sent += len(new)
        return new


class StopStrings:
    """Watches a text for the first of several strings, `stops`; holds back only what may become one.

    The one that is complete first counts (the longest, where several end together), however the text was cut.
    include: hand out the stop string too."""

    __slots__ = ("_held", "_include", "_stops")

    def __init__(self, stops: Sequence[str], include: bool) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Take more text. Returns what may be handed out, and the stop string that ended it, or None to go on. After a
        match nothing may be pushed any more."""
        text = self._held + text
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        if best is not None:
            end, start, stop = best
            return text[: end if self._include else start], stop
        keep = max(overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def flush(self) -> str:
        """At the end: what was held back."""
        held, self._held = self._held, ""
        return held


class ContentStops:
    """Watches the content of an answer, which may have other parts too: thoughts and calls hold no stop string.

    parser: reads the text; None: all of it is content. parts: what can be handed out; the caller takes it."""

    __slots__ = ("_parser", "_stops", "parts")

    def __init__(self, parser: OutputParser | None, stops: Sequence[str], include: bool) -> None:
        self._parser, self.parts = parser, list[Part]()
        self._stops = StopStrings(stops, include)

    def push(self, text: str, *, watched: bool = True) -> str | None:
        """Take more text. Returns the stop string that ended it; nothing may be pushed after that."""
        return self._watch([Content(text)] if self._parser is None else self._parser.push(text), watched)

    def flush(self) -> str | None:
        """At the end: what was held back may have a stop string too."""
        matched = None if self._parser is None else self._watch(self._parser.flush(), True)
        if matched is None:
            self._say(self._stops.flush())
        return matched

    def _watch(self, parts: Sequence[Part], watched: bool) -> str | None:
        for part in parts:
            if not isinstance(part, Content):
                self._say(self._stops.flush())
                self.parts.append(part)
            elif not watched:
                self.parts.append(part)
            else:
                shown, matched = self._stops.push(part.text)
                self._say(shown)
                if matched is not None:
                    return matched
        return None

    def _say(self, text: str) -> None:
        if text:
            self.parts.append(Content(text))
