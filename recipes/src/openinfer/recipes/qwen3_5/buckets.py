"""The shapes that steps are recorded in, and where in a prompt snapshots of its state are taken."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from openinfer.graph import bucket_for
from openinfer.recipes.qwen3_5.ops.gated_delta_net import STATE_CHUNK


@dataclass(frozen=True, slots=True)
class Boundaries:
    """Where snapshots of a prompt's state are taken: at the powers of two from STATE_CHUNK on below `interval`, so that
    short shared prefixes are found too, at its multiples, and where the last whole chunk of the prompt ends."""

    interval: int

    def within(self, start: int, end: int, prompt: int) -> list[int]:
        """Those in (start, end] of a prompt of so many tokens; the last of them leaves a token to compute."""
        regular = {*range(self.interval, end + 1, self.interval), (prompt - 1) // STATE_CHUNK * STATE_CHUNK}
        power = STATE_CHUNK
        while power < self.interval:
            regular.add(power)
            power *= 2
        return sorted(n for n in regular if start < n <= end and n < prompt)

    def most(self, num_tokens: int) -> int:
        """At most so many are within a chunk of num_tokens tokens."""
        powers = (self.interval // STATE_CHUNK).bit_length()
        return num_tokens // self.interval + powers + 1


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
        """In mixed steps padding of a third up to 256 tokens and a quarter above: a prompt of 1,024 tokens beside
        decode rows must not pay for 1,536. In decode up to 31 rows: one that is not there costs a program that ends at
        once, and weights are read for 32 rows as for one; each bucket costs 20 ms of the start."""
        decode = [n for n in (1, 2, 4, 8, 16, *range(32, max_rows, 32)) if n < max_rows]
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
