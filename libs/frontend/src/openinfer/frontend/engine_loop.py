"""The loop that owns an engine: takes messages, steps while a request is live, sends what comes out."""

import logging
import time
from collections.abc import Callable

from openinfer.frontend.contract import TERMINALS, Engine, Failed, Request, StepOutputs
from openinfer.frontend.errors import Unsupported
from openinfer.frontend.wire import Abort, Close, Control, ControlDone, FromEngine, Stepped, Submit, ToEngine

__all__ = ["is_users_error", "one_line", "run_engine"]

STEP_WAIT_S = 0.01
"""An engine with live requests but nothing to compute may sleep this long; a new request waits no longer."""
SIGN_OF_LIFE_S = 0.25

_log = logging.getLogger(__name__)


def run_engine(
    engine: Engine, receive: Callable[[bool], list[ToEngine]], send: Callable[[FromEngine], None]
) -> None:
    """Drive `engine` until a Close message; whatever step() raises comes out of here.

    receive(block) returns the messages that are waiting, in order; with block=True at least one.
    send(message) must not block.
    """
    live: set[int] = set()
    last_sent = 0.0
    while True:
        for message in receive(not live):
            match message:
                case Submit(request):
                    _submit(engine, request, live, send)
                case Abort(request_id):
                    engine.abort(request_id)
                case Control():
                    send(_control(engine, message))
                case Close():
                    return
        if not live:
            continue
        outputs = engine.step(STEP_WAIT_S)
        live.difference_update(update.id for update in outputs.updates if isinstance(update, TERMINALS))
        now = time.monotonic()
        if outputs.token_ids or outputs.updates or now - last_sent > SIGN_OF_LIFE_S:
            send(Stepped(outputs, engine.stats()))
            last_sent = now


def _submit(engine: Engine, request: Request, live: set[int], send: Callable[[FromEngine], None]) -> None:
    try:
        engine.submit(request)
    except Exception as error:  # one request's fault must not take the others along
        _log.exception("the engine raised on submit")
        failed = Failed(request.id, f"the engine did not take the request: {one_line(error)}")
        send(Stepped(StepOutputs(updates=[failed]), engine.stats()))
    else:
        live.add(request.id)


def _control(engine: Engine, message: Control) -> ControlDone:
    try:
        engine.control(message.command)
    except Unsupported as error:
        return ControlDone(message.serial, one_line(error))
    return ControlDone(message.serial, None)


def is_users_error(error: BaseException) -> bool:
    """Whether a start-up error speaks to the user (bad checkpoint, missing file); anything else is a bug."""
    return isinstance(error, ValueError | OSError) and bool(str(error))


def one_line(error: BaseException) -> str:
    """An exception as one line for a user: its message, or its type where it has none."""
    return " ".join(str(error).split()) or type(error).__name__
