"""Gates: where sequences wait before they run. A sequence passes them in the order of Engine.gates, each once.

A grammar is compiled before peers are asked for blocks, because a request whose grammar is malformed needs none. A
place for its adapter comes last before the queue: a sequence that holds one must not wait for anything but a row.
Sequences whose blocks are loading wait in the step loop, behind the last gate.
"""

from collections.abc import Sequence
from typing import Literal, Protocol

from openinfer import scheduler
from openinfer.frontend.contract import Rejected, Request
from openinfer.graph.runner import Payload, Sampling
from openinfer.scheduler import RejectReason, Seq, StepLoop


class Refused(Exception):
    """A sequence cannot go on; `why` is its terminal."""

    def __init__(self, why: Rejected) -> None:
        super().__init__(why.reason)
        self.why = why


class Gate(Protocol):
    """One reason to wait. One thread uses it."""

    def __len__(self) -> int:
        """Sequences that wait here."""

    def refusal(self, request: Request, waiting: int) -> Rejected | None:
        """The refusal of a request that can never pass, or that would wait here as one too many. waiting: requests
        that wait, at all gates. Notes nothing."""
        return None

    def admit(self, request: Request) -> None:
        """No gate has refused the request. Notes what `take` needs of it; `end` forgets it."""
        return

    def take(self, seq: Seq[Sampling]) -> bool:
        """A sequence comes to this gate. Returns whether it waits here; else it goes on. Raises Refused."""

    def ready(self, wait_s: float) -> Sequence[Seq[Sampling] | Rejected]:
        """The sequences that go on, and the terminals of those that cannot. Waits up to wait_s seconds for the first,
        if one waits here for another thread."""
        return ()

    def drop(self, request_id: int) -> bool:
        """Forget a sequence that waits here; False if none has this id."""

    def end(self, seq: Seq[Sampling]) -> None:
        """A sequence is over, wherever it was: frees what is held for it."""
        return


def full(request: Request, waiting: int, max_queued: int) -> Rejected | None:
    """The refusal of a request where too many wait."""
    if waiting < max_queued:
        return None
    return Rejected(request.id, f"{waiting} requests wait (max_queued {max_queued}); try later", "queue_full")


CODES: dict[RejectReason, Literal["too_long", "queue_full"]] = {
    RejectReason.TOO_LONG: "too_long",
    RejectReason.POOL_TOO_SMALL: "too_long",
    RejectReason.QUEUE_FULL: "queue_full",
}


class Queue(Gate):
    """The last Gate. What passes it, the loop reports itself."""

    def __init__(self, loop: StepLoop[Sampling, Payload]) -> None:
        self._loop = loop

    def __len__(self) -> int:
        return self._loop.stats.waiting

    def take(self, seq: Seq[Sampling]) -> bool:
        try:
            self._loop.submit(seq)
        except scheduler.Rejected as error:
            raise Refused(Rejected(seq.id, str(error), CODES.get(error.reason, "invalid"))) from error
        return True

    def drop(self, request_id: int) -> bool:
        self._loop.abort(request_id)
        return False  # the loop has its terminal
