"""The rows of a step that get a token, kept from step to step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from openinfer.graph.runner import Payload, Sampling
from openinfer.scheduler import Row, Tokens


class Emitting(NamedTuple):
    """The rows that get a token in a step, kept while the batch does not change.

    A steady step then makes one call a row: the row's entry of `appends` puts the token into the scheduler's sequence.
    """

    rows: Sequence[Row[Sampling]]
    positions: list[int]
    ids: list[int]
    appends: list[Callable[[int], None]]
    wants_logprobs: bool

    @classmethod
    def of(cls, event: Tokens[Sampling, Payload]) -> Emitting:
        emitting = list(event.emitting())
        seqs = [seq for _, seq in emitting]
        return cls(
            event.rows,
            [position for position, _ in emitting],
            [seq.id for seq in seqs],
            [seq.tokens.append for seq in seqs],
            any(seq.owner.params.logprobs is not None for seq in seqs),
        )


NO_ROWS = Emitting((), [], [], [], False)
