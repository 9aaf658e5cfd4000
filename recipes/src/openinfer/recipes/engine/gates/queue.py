"""Queue: the step loop, where sequences wait for a row, and for blocks that are on their way."""

from collections.abc import Sequence
from typing import Literal

from openinfer import scheduler
from openinfer.frontend.contract import Rejected, Request
from openinfer.graph.runner import Payload, Sampling
from openinfer.recipes.engine.gates import Refused
from openinfer.scheduler import RejectReason, Seq, StepLoop

CODES: dict[RejectReason, Literal["too_long", "queue_full"]] = {
    RejectReason.TOO_LONG: "too_long",
    RejectReason.POOL_TOO_SMALL: "too_long",
    RejectReason.QUEUE_FULL: "queue_full",
}


class Queue:
    """The last Gate. What passes it, the loop reports itself."""

    def __init__(self, loop: StepLoop[Sampling, Payload]) -> None:
        self._loop = loop

    def __len__(self) -> int:
        return self._loop.stats.waiting

    def refusal(self, request: Request, waiting: int) -> Rejected | None:
        return None  # `take` knows, once the sequence is here

    def admit(self, request: Request) -> None:
        pass

    def take(self, seq: Seq[Sampling]) -> bool:
        try:
            self._loop.submit(seq)
        except scheduler.Rejected as error:
            raise Refused(Rejected(seq.id, str(error), CODES.get(error.reason, "invalid"))) from error
        return True

    def ready(self, wait_s: float) -> Sequence[Seq[Sampling] | Rejected]:
        return ()

    def drop(self, request_id: int) -> bool:
        self._loop.abort(request_id)
        return False  # the loop has its terminal

    def end(self, seq: Seq[Sampling]) -> None:
        pass
