"""The loop that owns an engine: it takes messages, steps while a request is live, and sends the outputs."""

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait

from openinfer.frontend import contract, wire
from openinfer.frontend.errors import InvalidRequest, Unsupported, one_line

STEP_WAIT_S = 0.01
"""An engine with live requests but nothing to compute may sleep this long; a new request waits no longer."""
SIGN_OF_LIFE_S = 0.25
IDLE_WAIT_S = 0.5

_log = logging.getLogger(__name__)


def run_engine(
    engine: contract.Engine,
    receive: Callable[[bool], Sequence[tuple[int, wire.ToEngine]]],
    send: Callable[[int, wire.FromEngine], None],
) -> None:
    """Drive `engine` until a Close message; tells every client Lost and raises whatever step() raises.

    receive(block) returns the messages that are waiting, each with its client, in order. With block=True it waits for
    one up to IDLE_WAIT_S. Then an idle engine is asked for its stats, so that it can say that it has lost a part.
    send(client, message) must not block.
    """
    desk = _Desk(engine, send)
    try:
        while True:
            messages = receive(not desk.live and not desk.pending)
            for client, message in messages:
                if isinstance(message, wire.Close):
                    return
                desk.take(client, message)
            if desk.pending:
                desk.answer()
            if desk.live:
                desk.step()
            elif not messages:
                engine.stats()
    except Exception as error:
        desk.tell_all(wire.Lost(f"the engine failed: {one_line(error)}"))
        raise


class _Desk:
    """The live requests, and the clients that get messages about them."""

    def __init__(self, engine: contract.Engine, send: Callable[[int, wire.FromEngine], None]) -> None:
        self.live: set[int] = set()
        self.pending: list[tuple[int, int, Future[None]]] = []  # client, serial and future of begun commands
        self._engine = engine
        self._send = send
        self._heard: dict[int, float] = {}  # client -> when it was last sent something
        self._gone: set[int] = set()
        self._busy = False  # as the clients know it

    def take(self, client: int, message: wire.ToEngine) -> None:
        if client not in self._heard and not isinstance(message, wire.Hello):
            return  # what a client that is gone had sent before
        match message:
            case wire.Hello() if client not in self._gone:
                self._heard[client] = 0.0
                self._send(client, wire.Ready(self._engine.info, self._engine.stats()))
            case wire.Submit(request):
                self._submit(client, request)
            case wire.Abort(request_id) if wire.owner(request_id) == client:
                self._engine.abort(request_id)
            case wire.ControlFrame():
                self._control(client, message)
            case wire.Gone(other):
                self._heard.pop(other, None)
                self._gone.add(other)
                for request_id in self.live:
                    if wire.owner(request_id) == other:
                        self._engine.abort(request_id)

    def step(self) -> None:
        if not self._busy:
            # Tell before the step: an engine that hangs in it must not look idle to clients without requests.
            self._busy = True
            if len(self._heard) > 1:
                self.tell_all(wire.Stepped(contract.StepOutputs(), self._engine.stats(), len(self.live)))
        outputs = self._engine.step(STEP_WAIT_S)
        if not isinstance(outputs, contract.StepOutputs):
            name = f"{type(self._engine).__name__}.step()"
            raise TypeError(f"{name} returned {type(outputs).__name__}; it must return StepOutputs")
        self.live.difference_update(
            update.id for update in outputs.updates if isinstance(update, contract.TERMINALS)
        )
        self._busy = bool(self.live)
        parts = dict.fromkeys(self._heard, outputs) if len(self._heard) == 1 else _split(outputs)
        now = time.monotonic()
        stats = None
        for client, last in self._heard.items():
            part = parts.get(client) or contract.StepOutputs()
            due = now - last > SIGN_OF_LIFE_S or not self._busy
            if due or part.token_ids or part.updates or part.prompt_logprobs:
                stats = stats or self._engine.stats()
                self._send(client, wire.Stepped(part, stats, len(self.live)))
                self._heard[client] = now

    def tell_all(self, message: wire.FromEngine) -> None:
        for client in self._heard:
            self._send(client, message)

    def _submit(self, client: int, request: contract.Request) -> None:
        try:
            if wire.owner(request.id) != client:
                raise InvalidRequest(f"id {request.id} is not one of client {client}'s")
            self._engine.submit(request)
        except Exception as error:  # one request's fault must not take the others along
            _log.exception("the engine raised on submit of sequence %d", request.id)
            failed = contract.Failed(request.id, f"the engine did not take the request: {one_line(error)}")
            self._send(
                client,
                wire.Stepped(contract.StepOutputs(updates=[failed]), self._engine.stats(), len(self.live)),
            )
        else:
            self.live.add(request.id)

    def answer(self) -> None:
        """Answer the commands that are done now. Waits a little for one if no request is live."""
        wait({future for *_, future in self.pending}, 0 if self.live else STEP_WAIT_S, FIRST_COMPLETED)
        done = [one for one in self.pending if one[2].done()]
        self.pending = [one for one in self.pending if one not in done]
        for client, serial, future in done:
            refusal = None
            try:
                future.result()
            except Unsupported as error:
                refusal = one_line(error)
            except Exception as error:  # one command's fault must not take the requests along
                _log.exception("a command failed")
                refusal = f"the engine failed at it: {one_line(error)}"
            else:
                self.tell_all(wire.Stepped(contract.StepOutputs(), self._engine.stats(), len(self.live)))
            self._send(client, wire.ControlDone(serial, refusal))

    def _control(self, client: int, message: wire.ControlFrame) -> None:
        try:
            answer = self._engine.control(message.command)
        except Unsupported as error:
            self._send(client, wire.ControlDone(message.serial, one_line(error)))
            return
        if isinstance(answer, Future):
            self.pending.append((client, message.serial, answer))
            return
        # All clients must know it.
        if isinstance(
            message.command,
            contract.Sleep | contract.UnloadAdapter | contract.UpdateWeights | contract.WakeUp,
        ):
            self.tell_all(wire.Stepped(contract.StepOutputs(), self._engine.stats(), len(self.live)))
        self._send(client, wire.ControlDone(message.serial, None, answer))


def _split(outputs: contract.StepOutputs) -> dict[int, contract.StepOutputs]:
    parts: dict[int, contract.StepOutputs] = {}
    for position, request_id in enumerate(outputs.request_ids):
        part = parts.get(wire.owner(request_id))
        if part is None:
            part = parts[wire.owner(request_id)] = contract.StepOutputs(
                logprobs=None if outputs.logprobs is None else []
            )
        part.request_ids.append(request_id)
        part.token_ids.append(outputs.token_ids[position])
        if part.logprobs is not None and outputs.logprobs is not None:
            part.logprobs.append(outputs.logprobs[position])
    for scored in outputs.prompt_logprobs:
        parts.setdefault(wire.owner(scored.id), contract.StepOutputs()).prompt_logprobs.append(scored)
    for update in outputs.updates:
        parts.setdefault(wire.owner(update.id), contract.StepOutputs()).updates.append(update)
    return parts
