"""What a choice has gathered, read as parts: one output parser a choice."""

import uuid
from collections.abc import Iterable

from openinfer.frontend.chat import Content, OutputParser, Part, Reasoning
from openinfer.frontend.contract import TokenLogprobs
from openinfer.frontend.http.chat import ParserFactory
from openinfer.frontend.http.generation import Choice

__all__ = ["Reader", "new_call_id", "said"]


class Reader:
    """Takes from choices. new_parser: None makes all text content."""

    def __init__(self, new_parser: ParserFactory | None) -> None:
        self._new_parser = new_parser
        self._parsers: dict[int, OutputParser] = {}

    def take(self, choice: Choice) -> tuple[list[Part], list[int], list[TokenLogprobs | None]]:
        """parts, token_ids and logprobs since the last call; with the end of a finished choice."""
        text, token_ids, logprobs = choice.take()
        if self._new_parser is None:
            return [Content(text)] if text else [], token_ids, logprobs
        parser = self._parsers.get(choice.index)
        if parser is None:
            parser = self._parsers[choice.index] = self._new_parser()
        parts = parser.push(text) if text else []
        if choice.done:
            parts += parser.flush()
        return parts, token_ids, logprobs


def said(parts: Iterable[Part], kind: type[Content] | type[Reasoning]) -> str:
    """The text of all parts of a kind."""
    return "".join([part.text for part in parts if isinstance(part, kind)])


def new_call_id() -> str:
    """The id by which a tool's result will name its call."""
    return f"call_{uuid.uuid4().hex[:24]}"
