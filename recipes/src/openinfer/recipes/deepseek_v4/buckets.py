"""The shapes that steps are recorded in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from openinfer.graph import bucket_for

LONE_TOKENS = 128
"""A lone row of at most this many tokens has segments of its own: its attention is then split over the whole GPU."""


@dataclass(frozen=True, slots=True)
class Buckets:
    """The shapes that steps are recorded in. A step runs in the smallest that holds it."""

    decode_rows: tuple[int, ...]
    mixed_tokens: tuple[int, ...]
    mixed_rows: tuple[int, ...]

    @classmethod
    def up_to(cls, max_rows: int, max_tokens: int) -> Buckets:
        """Padding of at most 7 rows in decode, and in mixed steps of a third up to 256 tokens and a quarter above: a
        prompt of 1,024 tokens beside decode rows must not pay for 1,536."""
        decode = [n for n in (1, 2, 4, *range(8, max_rows, 8)) if n < max_rows]
        sizes = [16, 32, 64, 96, 128, 192]
        octave = 256
        while octave < max_tokens:
            sizes += [
                octave * eighths // 8
                for eighths in ((8, 10, 12, 14) if octave < 1024 else (8, 9, 10, 12, 14))
            ]
            octave *= 2
        mixed = [n for n in sizes if n < max_tokens]
        rows = [n for n in (8, 64) if n < max_rows]
        return cls((*decode, max_rows), (*mixed, max_tokens), (*rows, max_rows))

    def segments(self) -> Iterator[tuple[int, int, int]]:
        """(tokens, rows, longest row) of every forward segment, largest first."""
        for tokens in reversed(self.mixed_tokens):
            yield from ((tokens, rows, tokens) for rows in reversed(self.mixed_rows) if rows <= tokens)
            if tokens <= LONE_TOKENS:
                yield tokens, 1, tokens
        yield from ((rows, rows, 1) for rows in reversed(self.decode_rows))

    def sample_rows(self) -> list[int]:
        """Rows of every sample segment."""
        return sorted({1, *self.decode_rows, *self.mixed_rows})

    def choose(self, tokens: int, rows: int) -> tuple[int, int, int]:
        """The segment for a step."""
        if tokens == rows:
            bucket = bucket_for(self.decode_rows, rows)
            return bucket, bucket, 1
        num_rows = bucket_for(self.mixed_rows, rows)
        num_tokens = bucket_for(self.mixed_tokens, max(tokens, num_rows))
        if rows == 1 and bucket_for(self.mixed_tokens, tokens) <= LONE_TOKENS:
            num_rows, num_tokens = 1, bucket_for(self.mixed_tokens, tokens)
        return num_tokens, num_rows, num_tokens
