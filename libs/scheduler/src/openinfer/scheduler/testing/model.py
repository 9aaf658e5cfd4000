"""A fake model: each token depends on all tokens before it, through a cell of state for each token."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..sequence import FinishReason

VOCABULARY = 31
"""Token ids 0..30."""
EOS = 0
"""The token at which a row ends."""

_PRIME = (1 << 61) - 1


def cell(previous: int, token: int) -> int:
    """The cell of a token, from the cell of the token before it (0 at the start). It stands for KV."""
    return (previous * 6364136223846793005 + token * 1442695040888963407 + 1) % _PRIME


def next_token(cells: Iterable[int]) -> int:
    """The greedy continuation: it reads every stored cell, as attention does."""
    return (sum(cells) * 2862933555777941757 % _PRIME) % VOCABULARY


def generate(
    prompt: Sequence[int], max_len: int, window: int | None = None
) -> tuple[list[int], FinishReason]:
    """The sequential oracle: the output of a request that is alone on the device, and the reason of its end.
    window: the number of earlier cells that a token reads; None: all."""
    reach = 0 if window is None else -window - 1
    cells: list[int] = []
    output: list[int] = []
    for token in prompt:
        cells.append(cell(cells[-1] if cells else 0, token))
    while True:
        output.append(next_token(cells[reach:]))
        if output[-1] == EOS:
            return output, FinishReason.STOP
        if len(prompt) + len(output) == max_len:
            return output, FinishReason.LENGTH
        cells.append(cell(cells[-1], output[-1]))
