"""A prompt's text to ids. A text that is far too long for the model is refused before all of it is encoded."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence

from openinfer.frontend.contract import EngineInfo
from openinfer.frontend.errors import APIError, TooLong
from openinfer.frontend.http.params import prompt_ids
from openinfer.frontend.http.tokenizer import Tokenizer

TIMEOUT_S = 10.0
USUAL_CHARS = 8
"""Texts have fewer characters a token. One that may be too long although it has not is encoded twice."""
SLICE_CHARS = 1 << 16
SLACK = 64
"""Tokens that a cut may add: the count of slices less these is no more than the count of the whole."""


async def encode_prompt(
    tokenizer: Tokenizer,
    parts: Sequence[str],
    add_special_tokens: bool,
    info: EngineInfo,
    param: str,
    gone: Callable[[], Awaitable[bool]],
) -> list[int]:
    """The ids of a text, each part encoded by itself, checked as prompt_ids does. gone: whether the client has left.

    A text with more characters than the allowed tokens can have is refused at once. Any other long text is counted in
    slices, each in a thread, until there are too many tokens. Raises APIError (400) naming `param`.
    """
    text = "".join(parts)
    limit, longest = info.max_model_len, tokenizer.most_chars_a_token
    if longest is not None and len(text) > longest * limit:
        raise TooLong(-(-len(text) // longest), None, limit, param, more=True)
    until, count = time.monotonic() + TIMEOUT_S, 0
    for part in _slices(text) if len(text) > USUAL_CHARS * limit else ():
        count += max(0, await asyncio.to_thread(tokenizer.count, part) - SLACK)
        if count > limit:
            raise TooLong(count, None, limit, param, more=True)
        if time.monotonic() > until:
            raise APIError(f"{param} takes longer than {TIMEOUT_S:g} s to be read: shorten it", param=param)
        if await gone():
            raise APIError("the client has left")
    return prompt_ids(await tokenizer.encode(*parts, add_special_tokens=add_special_tokens), info, param)


def _slices(text: str) -> Iterator[str]:
    """Parts that end, where there is one, before the last space."""
    start = 0
    while start < len(text):
        end = start + SLICE_CHARS
        if end < len(text):
            space = text.rfind(" ", start + 1, end)
            end = end if space < 0 else space
        yield text[start:end]
        start = end
