"""The protocols of a model that a runner drives. They name no layer."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from openinfer.graph.rows import Rows
from openinfer.graph.runner.batch import Batch
from openinfer.kernels import Pack
from openinfer.scheduler import Seq, Step
from openinfer.tensor import Stream, Tensor


class States(Protocol):
    """State of a sequence that no block table describes, such as recurrent state with snapshots.

    lags: whether it may lag behind by the drafts that the last step accepted. Then a row's next step after one with
    drafts runs in a shape with drafts, even if the row has none."""

    lags: bool

    def join(self, rows: Rows, joined: Sequence[Seq[Any]]) -> None:
        """Write the fields of the sequences that join. Called before every launch; mostly no sequence joins."""

    def chunks(self, rows: Rows, step: Step[Any], num_rows: int) -> None:
        """Write what the step's prompt chunks keep. Called when the rows of a step with chunks have changed; the step
        runs in a bucket of `num_rows` rows."""

    def snapshots(self, start: int, end: int, prompt: int) -> Sequence[int]:
        """Positions in (start, end] where `chunks` keeps the state of a prompt of `prompt` tokens for that chunk."""


class NoStates:
    """The States of a model whose block tables describe all of a sequence's state."""

    lags = False

    def join(self, rows: Rows, joined: Sequence[Seq[Any]]) -> None:
        """See States."""

    def chunks(self, rows: Rows, step: Step[Any], num_rows: int) -> None:
        """See States."""

    def snapshots(self, start: int, end: int, prompt: int) -> Sequence[int]:
        return ()


class Constraint(Protocol):
    """The tokens that a sequence may draw next. openinfer.sampler.constraint.Constraint is one."""

    ended: bool
    """Set by the runner when the sequence is over."""
    problem: str
    """Why no token was left to choose; empty while there is one."""

    def accept(self, token: int) -> None:
        """Advance by a token that was drawn under the mask. Never raises for a token that the mask allowed."""

    def forced(self) -> Sequence[int]:
        """The next tokens, as far as there is no choice."""


class Masks(Protocol):
    """Makes masks of allowed tokens; openinfer.sampler.constraint.Masks is one."""

    def fill(self, constraints: Sequence[Any]) -> tuple[np.ndarray[Any, Any], list[bool]]:
        """A mask for each constraint, and whether only EOS may come.

        Masks are int32 [n, (V + 31) // 32] with a bit a token, lowest first, and valid until the next call."""

    def look_ahead(
        self, constraint: Any, mask: np.ndarray[Any, Any], drafts: Sequence[int]
    ) -> tuple[np.ndarray[Any, Any], list[int]]:
        """The masks int32 [D, W] after each draft of one sequence, whose mask `fill` made, and the drafts to verify.

        Where a mask is missing although the one before it allows the draft, that draft is one that it forbids."""


class Model(Protocol):
    """Weights, cache and buffers of one model, laid out, and its forward pass: seven names.

    Every method only puts work on the stream of its pack, so that a graph can capture it.
    """

    @property
    def batch(self) -> Batch:
        """The rows of a step and the buffers that every model has."""

    @property
    def tables(self) -> Sequence[str | None]:
        """The row field with the block tables of each group of the pool; None for a group whose tables are not read."""

    @property
    def states(self) -> States:
        """The object that writes the part of a sequence's state that no block table describes."""

    @property
    def hidden(self) -> Tensor:
        """[T, W]: the hidden states of each token after `forward`, which `head` reads."""

    def forward(
        self, pack: Pack, num_tokens: int, num_rows: int, max_q_len: int, num_drafts: int = 0
    ) -> None:
        """Turn the step's tokens into logits of each row's last token, and write the cache. Rows have at most
        `max_q_len` tokens, the last `num_drafts` or fewer of them drafts. `Batch.select` and `head` end it."""

    def head(self, pack: Pack, num_rows: int) -> None:
        """batch.logits[:num_rows] of batch.last[:num_rows]."""

    def clear(self, stream: Stream) -> None:
        """Zero the padding blocks of the cache."""
