"""What decides a step: the protocols Policy, with its view and its decision, and Speculation.."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from .runner import Row, Step
from .sequence import Owner, Seq


@dataclass(slots=True)
class View:
    """The state that a policy decides from. Collections are live, ordered by admission, and read only."""

    step: int
    """Index of the step being planned."""
    now: float
    """Seconds of the loop's clock."""
    max_rows: int
    free_slots: int
    num_free_blocks: int
    decode_tokens: int
    """Tokens of the decode rows in this step: one a row, and its drafts. Decode rows run in every step."""
    decoding: Mapping[Seq[Any], Row[Any]]
    prefilling: dict[Seq[Any], None]
    running: dict[Seq[Any], None]
    """All sequences that hold a slot, prefilling ones included."""
    num_loading: int
    """Number of waiting sequences in state LOADING. The loop ignores a policy that admits one of them."""
    look_up: Callable[[Seq[Any]], int]
    """Cached tokens of a waiting sequence. A call costs as much as the pool's acquire(), so ask about few."""
    lone_tokens: Sequence[int] = ()
    """Sizes, ascending, of chunks that may be larger than the policy's budget where they are alone in their step."""


@dataclass(slots=True)
class Decision:
    """A policy's answer, as changes: a sequence that it does not name goes on as before."""

    chunks: Mapping[Seq[Any], int] = field(default_factory=dict)
    """Tokens of this step for prefilling sequences, at most. A prefilling sequence that is not named pauses. For an
    admitted sequence the number limits its first chunk."""
    admit: Sequence[Seq[Any]] = ()
    """Waiting sequences to admit, in this order, until slots, blocks or admit_tokens run out. One whose prefix can be
    loaded from elsewhere turns LOADING instead, and waits again when the load has ended: name it again then."""
    admit_tokens: int = 0
    """Tokens of this step that the admitted sequences share, in order, as each needs them."""
    preempt: Sequence[Seq[Any]] = ()
    """Running sequences to send back to waiting. The loop first drains: it calls plan() again until nothing is in
    flight, and only the last answer counts."""


class Policy(Protocol):
    """Decides which sequences run. It keeps its own queue of waiting sequences; the on_ calls report the outcomes."""

    uses_priority: bool
    """Whether the policy uses Seq.priority. If not, an engine should refuse a request that sets a priority."""

    def on_submit(self, seq: Seq[Any]) -> None:
        """A new sequence waits."""

    def on_admit(self, seq: Seq[Any]) -> None:
        """A waiting sequence that the policy admitted got its slot and blocks, and runs."""

    def on_preempt(self, seq: Seq[Any]) -> None:
        """A running sequence waits again. Its prompt and output are its new prompt."""

    def on_finish(self, seq: Seq[Any]) -> None:
        """A running or waiting sequence ended."""

    def on_step(self, step: Step[Any], seconds: float) -> None:
        """The host read a step, which took `seconds`. Called for every step, so do little."""

    def plan(self, view: View) -> Decision:
        """The changes of the next step. Called only after an event or while a prefill is unfinished. The loop may
        call it again for the same step, so it must not assume that its answer is used."""

    def victim(self, view: View) -> Seq[Any]:
        """The running sequence to preempt, when the pool has too few blocks and nothing is in flight."""


class Speculation(Protocol[Owner]):
    """Chooses the number of drafts of each decode row. Draft tokens do not pass through the loop.

    A row with k drafts runs as 1 + k tokens, and the step reports how far it advanced (StepResult.advanced). The number
    can follow from the cost of the step, the acceptance rate, or the drafts at hand: an MTP head drafts on the device,
    an n-gram look-up on the host, and a look-up that finds nothing gives 0.

    rest_until: the loop does not ask before this step, and no row has drafts until then. 0: it asks before each.
    """

    rest_until: int

    def num_drafts(self, view: View) -> Mapping[Seq[Owner], int]:
        """Number of drafts of each row in step `view.step`. A row that is not named has none.

        The loop calls it before each step that has decode rows, and again if the step cannot be launched yet. Name
        rows of view.decoding only. The tokens of all decode rows must leave room for prompts in the policy's
        budget. The loop lowers a number near the end of a sequence, and sets it to 0 if the pool has no blocks for
        the drafts. Step.drafts has the numbers that run.
        """
