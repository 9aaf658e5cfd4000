"""The text that a choice has gathered, read as parts: one output parser a choice."""

import uuid
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from openinfer.frontend.chat import Content, OutputParser, Part, Reasoning
from openinfer.frontend.chat.output import END_THINK
from openinfer.frontend.contract import TokenLogprobs
from openinfer.frontend.http.generation import Choice
from openinfer.frontend.http.text.detokenizer import Detokenizer
from openinfer.frontend.http.tokenizer import Tokenizer


class TextPiece(NamedTuple):
    """A piece of an answer. logprobs: parallel to token_ids, or empty. last: the last piece of the gathered text."""

    parts: list[Part]
    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]
    last: bool = True


class Reader:
    """Takes from choices. tokenizer: needed where they have a parser."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._end_think = tokenizer.token_id(END_THINK) if tokenizer else None
        self._widths: dict[int, Detokenizer] = {}  # how much of the text is a token's
        self._counts: dict[int, int] = {}
        self._closed: set[int] = set()

    def take(self, choice: Choice) -> TextPiece:
        """All since the last call; with the end of a finished choice."""
        text, token_ids, logprobs = choice.take()
        return TextPiece(self._read(choice, text, token_ids, choice.done), token_ids, logprobs)

    def each(self, choice: Choice, skip_special_tokens: bool) -> Iterator[TextPiece]:
        """Like take(), but with log-probabilities one token at a time.

        A client that gets several at once takes the text from their log-probabilities, which have markers too."""
        text, token_ids, logprobs = choice.take()
        if not logprobs or self._tokenizer is None:
            yield TextPiece(self._read(choice, text, token_ids, choice.done), token_ids, logprobs)
            return
        widths = self._widths.get(choice.index)
        if widths is None:
            widths = self._widths[choice.index] = self._tokenizer.detokenizer(skip_special_tokens)
        for left, (token_id, entry) in enumerate(zip(token_ids, logprobs, strict=True), 1 - len(token_ids)):
            width = len(widths.push((token_id,)))
            piece, text = (text[:width], text[width:]) if left else (text, "")
            yield TextPiece(
                self._read(choice, piece, [token_id], choice.done and not left), [token_id], [entry], not left
            )

    def _read(self, choice: Choice, text: str, token_ids: list[int], ended: bool) -> list[Part]:
        parser = choice.parser
        if parser is None:
            return [Content(text)] if text else []
        if choice.read is not None:
            parts, choice.read.parts = choice.read.parts, []
        else:
            parts = parser.push(text) if text else []
            if ended:
                parts += parser.flush()
        self._count(choice, parser, parts, token_ids)
        return parts

    def _count(self, choice: Choice, parser: OutputParser, parts: list[Part], token_ids: list[int]) -> None:
        """Tokens of thoughts, with the marker that ends them."""
        if self._end_think is None:  # the marker is no token of its own: thoughts are counted in their text
            thought = said(parts, Reasoning)
            if thought and self._tokenizer is not None:
                choice.reasoning_tokens += len(self._tokenizer.encode_short(thought))
            return
        if choice.index in self._closed:
            return
        count = len(token_ids)
        if self._end_think in token_ids:
            count = token_ids.index(self._end_think) + 1
            self._closed.add(choice.index)
        self._counts[choice.index] = self._counts.get(choice.index, 0) + count
        if parser.thought:
            choice.reasoning_tokens = self._counts[choice.index]


def said(parts: Iterable[Part], kind: type[Content] | type[Reasoning]) -> str:
    """The text of all parts of a kind."""
    return "".join([part.text for part in parts if isinstance(part, kind)])


def new_call_id() -> str:
    """The id by which a tool's result will name its call."""
    return f"call_{uuid.uuid4().hex[:24]}"
