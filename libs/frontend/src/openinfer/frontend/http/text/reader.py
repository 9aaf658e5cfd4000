"""The text that a choice has gathered, read as parts: one output parser a choice."""

import uuid
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from openinfer.frontend.chat import Content, Part, Reasoning
from openinfer.frontend.chat.output import END_THINK
from openinfer.frontend.contract import TokenLogprobs
from openinfer.frontend.http.generation import Choice
from openinfer.frontend.http.tokenizer import Tokenizer


class TextPiece(NamedTuple):
    """A piece of an answer. logprobs: parallel to token_ids, or empty. last: the last piece of the gathered text."""

    parts: list[Part]
    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]
    last: bool = True


def take_piece(choice: Choice, tokenizer: Tokenizer | None) -> TextPiece:
    """All that a choice has gathered since the last call; with the end of a finished one. tokenizer: needed where there
    is a parser."""
    text, token_ids, logprobs = choice.take()
    return TextPiece(_read(choice, tokenizer, text, token_ids, choice.done), token_ids, logprobs)


def pieces(choice: Choice, tokenizer: Tokenizer | None, skip_special_tokens: bool) -> Iterator[TextPiece]:
    """Like take_piece(), but with log-probabilities one token at a time: a client that gets several at once takes the
    text from their log-probabilities, which have markers too."""
    if not choice.logprobs or tokenizer is None:
        yield take_piece(choice, tokenizer)
        return
    text, token_ids, logprobs = choice.take()
    if choice.widths is None:
        choice.widths = tokenizer.detokenizer(skip_special_tokens)
    for left, (token_id, entry) in enumerate(zip(token_ids, logprobs, strict=True), 1 - len(token_ids)):
        width = len(choice.widths.push((token_id,)))
        piece, text = (text[:width], text[width:]) if left else (text, "")
        parts = _read(choice, tokenizer, piece, [token_id], choice.done and not left)
        yield TextPiece(parts, [token_id], [entry], not left)


def _read(
    choice: Choice, tokenizer: Tokenizer | None, text: str, token_ids: list[int], ended: bool
) -> list[Part]:
    parser = choice.parser
    if parser is None:
        return [Content(text)] if text else []
    if choice.read is not None:
        parts, choice.read.parts = choice.read.parts, []
    else:
        parts = parser.push(text) if text else []
        if ended:
            parts += parser.flush()
    # Tokens of thoughts, with the marker that ends them.
    end_think = tokenizer.token_id(END_THINK) if tokenizer else None
    if end_think is None:  # the marker is no token of its own: thoughts are counted in their text
        thought = said(parts, Reasoning)
        if thought and tokenizer is not None:
            choice.reasoning_tokens += len(tokenizer.encode_short(thought))
    elif not choice.thoughts_over:
        choice.thoughts_over = end_think in token_ids
        choice.read_tokens += token_ids.index(end_think) + 1 if choice.thoughts_over else len(token_ids)
        if parser.thought:
            choice.reasoning_tokens = choice.read_tokens
    return parts


def said(parts: Iterable[Part], kind: type[Content] | type[Reasoning]) -> str:
    """The text of all parts of a kind."""
    return "".join([part.text for part in parts if isinstance(part, kind)])


def new_call_id() -> str:
    """The id by which a tool's result will name its call."""
    return f"call_{uuid.uuid4().hex[:24]}"
