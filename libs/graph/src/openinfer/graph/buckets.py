"""Buckets: the shapes that steps are recorded in."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from openinfer.graph.steps import bucket_for

LONE_TOKENS = 128
"""A lone row of at most this many tokens has segments of its own, so that its attention is split over the whole GPU.
Powers of two and the largest step have them too: no kernel for decode rows runs there in vain."""


class Shape(NamedTuple):
    """The shape that a forward segment is recorded for: tokens, rows, the tokens of its longest row, and the most
    drafts of a row (0: the step has none)."""

    tokens: int
    rows: int
    longest: int
    drafts: int = 0

    def __str__(self) -> str:
        decode = self.longest == 1 + self.drafts
        name = f"decode, {self.rows} rows" if decode else f"{self.tokens} tokens, {self.rows} rows"
        return f"{name}, {self.drafts} drafts" if self.drafts else name


@dataclass(frozen=True, slots=True)
class Buckets:
    """The shapes that steps are recorded in. A step runs in the smallest shape that holds it. All are ascending.

    max_drafts: the most drafts of a row. Above 0, each shape exists for steps without and with drafts: a decode step's
    for each of `draft_levels`, a mixed step's for the most. lone_tokens: of shapes for a lone, longer row."""

    decode_rows: tuple[int, ...]
    mixed_tokens: tuple[int, ...]
    mixed_rows: tuple[int, ...]
    max_drafts: int = 0
    lone_tokens: tuple[int, ...] = ()

    @classmethod
    def up_to(
        cls,
        max_rows: int,
        max_tokens: int,
        decode_rows: Iterable[int],
        max_drafts: int = 0,
        lone_tokens: tuple[int, ...] = (),
    ) -> "Buckets":
        """Shapes for steps of at most `max_rows` rows and `max_tokens` tokens, and for lone rows of `lone_tokens`.

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
        return cls((*decode, max_rows), (*mixed, max_tokens), (*rows, max_rows), max_drafts, lone_tokens)

    @property
    def max_rows(self) -> int:
        """Rows of the largest step."""
        return self.mixed_rows[-1]

    @property
    def max_tokens(self) -> int:
        """Tokens of the largest step of several rows."""
        return self.mixed_tokens[-1]

    @property
    def draft_levels(self) -> tuple[int, ...]:
        """The most drafts of a row in decode steps that are recorded: powers of two, and max_drafts."""
        powers = (1 << n for n in range(self.max_drafts.bit_length()))
        return tuple(sorted({*powers, self.max_drafts})) if self.max_drafts else ()

    def segments(self) -> Iterator[Shape]:
        """The shape of every forward segment, largest first."""
        for drafts in sorted({0, self.max_drafts}):
            yield from (Shape(tokens, 1, tokens, drafts) for tokens in reversed(self.lone_tokens))
            for tokens in reversed(self.mixed_tokens):
                rows = [n for n in reversed(self.mixed_rows) if n <= tokens]
                yield from (Shape(tokens, n, tokens, drafts) for n in rows)
                if self._has_lone(tokens) and 1 not in rows:
                    yield Shape(tokens, 1, tokens, drafts)
        for drafts in (0, *self.draft_levels):
            for n in reversed(self.decode_rows):
                if n * (1 + drafts) <= self.max_tokens:
                    yield Shape(n * (1 + drafts), n, 1 + drafts, drafts)

    def sample_rows(self) -> list[int]:
        """Rows of every sample segment."""
        return sorted({1, *self.decode_rows, *self.mixed_rows})

    def chunks(self, tokens: int) -> Iterator[tuple[int, int]]:
        """The steps of one prompt alone: where each begins, and its tokens."""
        start = 0
        while start < tokens:
            left = tokens - start
            count = max((n for n in self.lone_tokens if n <= left), default=min(left, self.max_tokens))
            yield start, count
            start += count

    def choose(self, tokens: int, rows: int, *, drafts: int = 0, chunks: bool = True) -> Shape:
        """The shape for a step. drafts: the most of a row; a step with drafts may be without chunks of prompts. Raises
        UnknownStep if the step is larger than every shape."""
        most = self.max_drafts if drafts else 0
        if rows == 1 and tokens > self.max_tokens and self.lone_tokens:
            lone = bucket_for(self.lone_tokens, tokens)
            return Shape(lone, 1, lone, most)
        if tokens == rows or not chunks:
            level = bucket_for(self.draft_levels, drafts) if drafts else 0
            bucket = bucket_for(self.decode_rows, rows)
            if bucket * (1 + level) <= self.max_tokens:
                return Shape(bucket * (1 + level), bucket, 1 + level, level)
        num_rows = bucket_for(self.mixed_rows, rows)
        num_tokens = bucket_for(self.mixed_tokens, max(tokens, num_rows))
        if rows == 1 and self._has_lone(bucket_for(self.mixed_tokens, tokens)):
            num_rows, num_tokens = 1, bucket_for(self.mixed_tokens, tokens)
        return Shape(num_tokens, num_rows, num_tokens, most)

    def _has_lone(self, tokens: int) -> bool:
        return tokens <= LONE_TOKENS or tokens & (tokens - 1) == 0 or tokens == self.max_tokens
