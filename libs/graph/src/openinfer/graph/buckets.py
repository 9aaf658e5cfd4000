"""Buckets: the shapes that steps are recorded in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from openinfer.graph.steps import bucket_for

LONE_TOKENS = 128
"""A lone row of at most this many tokens has segments of its own, so that its attention is split over the whole GPU."""


class Shape(NamedTuple):
    """The shape that a forward segment is recorded for: tokens, rows, and the tokens of its longest row."""

    tokens: int
    rows: int
    longest: int

    def __str__(self) -> str:
        return f"decode, {self.rows} rows" if self.longest == 1 else f"{self.tokens} tokens, {self.rows} rows"


@dataclass(frozen=True, slots=True)
class Buckets:
    """The shapes that steps are recorded in. A step runs in the smallest shape that holds it. All are ascending."""

    decode_rows: tuple[int, ...]
    mixed_tokens: tuple[int, ...]
    mixed_rows: tuple[int, ...]

    @classmethod
    def up_to(cls, max_rows: int, max_tokens: int, decode_rows: Iterable[int]) -> Buckets:
        """Shapes for steps of at most `max_rows` rows and `max_tokens` tokens.

        decode_rows: sizes of decode steps that deserve a recording. The model chooses them: each recording adds to
        start-up and saves what kernels lose to padding rows. In steps with prompts, padding is at most a third of the
        tokens up to 256, and a quarter above. A prompt of 1,024 tokens must not pay for 1,536.
        """
        decode = sorted({n for n in decode_rows if n < max_rows})
        sizes = [16, 32, 64, 96, 128, 192]
        octave = 256
        while octave < max_tokens:
            eighths = (8, 10, 12, 14) if octave < 1024 else (8, 9, 10, 12, 14)
            sizes += [octave * n // 8 for n in eighths]
            octave *= 2
        mixed = [n for n in sizes if n < max_tokens]
        rows = [n for n in (8, 64) if n < max_rows]
        return cls((*decode, max_rows), (*mixed, max_tokens), (*rows, max_rows))

    @property
    def max_rows(self) -> int:
        """Rows of the largest step."""
        return self.mixed_rows[-1]

    @property
    def max_tokens(self) -> int:
        """Tokens of the largest step."""
        return self.mixed_tokens[-1]

    def segments(self) -> Iterator[Shape]:
        """The shape of every forward segment, largest first."""
        for tokens in reversed(self.mixed_tokens):
            yield from (Shape(tokens, rows, tokens) for rows in reversed(self.mixed_rows) if rows <= tokens)
            if tokens <= LONE_TOKENS:
                yield Shape(tokens, 1, tokens)
        yield from (Shape(rows, rows, 1) for rows in reversed(self.decode_rows))

    def sample_rows(self) -> list[int]:
        """Rows of every sample segment."""
        return sorted({1, *self.decode_rows, *self.mixed_rows})

    def choose(self, tokens: int, rows: int) -> Shape:
        """The shape for a step. Raises UnknownStep if the step is larger than every shape."""
        if tokens == rows:
            bucket = bucket_for(self.decode_rows, rows)
            return Shape(bucket, bucket, 1)
        num_rows = bucket_for(self.mixed_rows, rows)
        num_tokens = bucket_for(self.mixed_tokens, max(tokens, num_rows))
        if rows == 1 and bucket_for(self.mixed_tokens, tokens) <= LONE_TOKENS:
            num_rows, num_tokens = 1, bucket_for(self.mixed_tokens, tokens)
        return Shape(num_tokens, num_rows, num_tokens)
