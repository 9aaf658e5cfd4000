"""The asyncio side of a driver, for the HTTP layer or a frontend of your own."""

import asyncio
import itertools
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import msgspec

from openinfer.frontend import contract, wire
from openinfer.frontend.errors import EngineDeadError, EngineStartError, Unsupported

MESSAGES_A_TURN = 32
"""Steps routed at once, before the responses get to write: a late frontend catches up in larger pieces."""

_log = logging.getLogger(__name__)


class OutputDelta(msgspec.Struct):
    """The results of one step, or of several that were read together, for one request. The receiving sink owns it."""

    token_ids: list[int]
    logprobs: list[contract.TokenLogprobs | None] | None = None
    """Parallel to token_ids, or None."""
    prompt_logprobs: list[contract.TokenLogprobs] | None = None
    """Log-probabilities of the prompt's next tokens; they come before the first of token_ids."""
    scheduled: contract.Scheduled | None = None
    """Happened before the tokens."""
    terminal: contract.Terminal | None = None
    """Happened after the tokens; the last delta of the request has it, and no other."""


Sink = Callable[[OutputDelta], None]
"""Called in the event loop's thread; must not block."""


class Health(NamedTuple):
    """Whether requests can be served, and why not."""

    ok: bool
    detail: str


class EngineClient(Protocol):
    """An engine seen from an event loop. All methods belong to that loop's thread."""

    @property
    def info(self) -> contract.EngineInfo:
        """Valid once start() has returned."""

    async def start(self) -> None:
        """Bring the engine up. Raises EngineStartError with one line for the user."""

    async def close(self) -> None:
        """End the engine; live requests get Failed."""

    def new_id(self) -> int:
        """An id for the next Request."""

    def submit(self, request: contract.Request, sink: Sink) -> None:
        """Start a request. The sink sees exactly one terminal, even if the engine dies. Raises EngineDeadError when it
        is dead already. Whatever this raises, the sink is not called."""

    def abort(self, request_id: int) -> None:
        """Ask to end a request; its sink still gets the terminal. An id that has ended is no error."""

    async def control(self, command: contract.Command) -> str | None:
        """Carry out a command; returns the answer of one that asks. Raises Unsupported or EngineDeadError."""

    def stats(self) -> contract.EngineStats:
        """The newest numbers received."""

    def health(self) -> Health:
        """Dead, hung (live requests but no sign of a step), starting, or ok."""

    async def died(self) -> str:
        """Wait until the engine is lost, and return why. Never returns for an engine closed in order."""


class ClientBase:
    """Code that drivers share with clients over them: ids, the engine's facts and its loss. first_id: of requests."""

    def __init__(self, first_id: int) -> None:
        self._ids = itertools.count(first_id)
        self._info: contract.EngineInfo | None = None
        self._lost: asyncio.Future[str] | None = None

    @property
    def info(self) -> contract.EngineInfo:
        if self._info is None:
            raise EngineDeadError("the engine has not been started")
        return self._info

    def new_id(self) -> int:
        return next(self._ids)

    async def died(self) -> str:
        if self._lost is None:
            raise EngineDeadError("the engine has not been started")
        return await asyncio.shield(self._lost)


class Driver(ClientBase, ABC):
    """Code that all drivers share: sinks and pending controls, health, and the reading of the engine's messages."""

    def __init__(self, hang_timeout_s: float | None, first_id: int = 1) -> None:
        super().__init__(first_id)
        self._hang_timeout_s = hang_timeout_s
        self._serials = itertools.count(1)
        self._sinks: dict[int, Sink] = {}
        self._controls: dict[int, asyncio.Future[str | None]] = {}
        self._stats = contract.EngineStats()
        self._live = 0  # requests of all the engine's clients, as last heard
        self._dead: str | None = None
        self._closing = False
        self._close_task: asyncio.Task[None] | None = None
        self._last_sign = 0.0
        self._started: asyncio.Future[contract.EngineInfo] | None = None

    @abstractmethod
    async def _launch(self) -> None:
        """Begin bringing the engine up; its Ready or StartFailed arrives later."""

    @abstractmethod
    def _send(self, message: wire.ToEngine) -> None:
        """Hand a message to the engine loop without blocking."""

    @abstractmethod
    async def _stop(self) -> None:
        """End the engine loop and wait for it, or kill it."""

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._started, self._lost = loop.create_future(), loop.create_future()
        try:
            await self._launch()
            info = await self._started
            if info.contract_version != contract.CONTRACT_VERSION:
                raise EngineStartError(
                    f"the engine speaks contract version {info.contract_version}, this frontend "
                    f"{contract.CONTRACT_VERSION}: install versions of both that match"
                )
        except BaseException:
            await self.close()
            raise
        self._info = info

    async def close(self) -> None:
        self._closing = True
        if self._close_task is None:
            self._close_task = asyncio.create_task(self._close())
        # Shielded, because a caller that is cancelled while waiting must not leave a process half ended.
        await asyncio.shield(self._close_task)

    async def _close(self) -> None:
        await self._stop()
        self._fail_all("the engine was shut down")

    def submit(self, request: contract.Request, sink: Sink) -> None:
        if self._dead is not None or self._closing:
            raise EngineDeadError(self._dead or "the engine was shut down")
        if not self._sinks and not self._live:
            self._last_sign = time.monotonic()
        self._sinks[request.id] = sink
        try:
            self._send(wire.Submit(request))
        except BaseException:  # the engine has not heard of it and would never end it
            del self._sinks[request.id]
            raise

    def abort(self, request_id: int) -> None:
        if request_id in self._sinks:
            self._send(wire.Abort(request_id))

    async def control(self, command: contract.Command) -> str | None:
        if self._dead is not None or self._closing:
            raise EngineDeadError(self._dead or "the engine was shut down")
        serial = next(self._serials)
        answer: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._controls[serial] = answer
        try:
            self._send(wire.ControlFrame(serial, command))
            return await answer
        finally:
            self._controls.pop(serial, None)

    def stats(self) -> contract.EngineStats:
        return self._stats

    def health(self) -> Health:
        if self._dead is not None:
            return Health(False, self._dead)
        if self._info is None or self._closing:
            return Health(False, "the engine is not running")
        silent_s = time.monotonic() - self._last_sign
        live = max(self._live, len(self._sinks))
        limit_s = self._info.hang_timeout_s if self._hang_timeout_s is None else self._hang_timeout_s
        if live and silent_s > limit_s:
            return Health(False, f"the engine hangs: {live} requests but no step for {silent_s:.0f} s")
        return Health(True, "ok")

    def _receive(self, messages: Sequence[wire.FromEngine]) -> None:
        """Take the messages of the engine loop (in the event loop's thread). Never raises."""
        self._last_sign = time.monotonic()
        deltas: dict[int, OutputDelta] = {}
        try:
            for message in messages:
                if isinstance(message, wire.Stepped):
                    stats, self._live = message.stats, message.live
                    stats.step_times = stats.step_times or self._stats.step_times
                    self._stats = stats
                    _gather(message.outputs, deltas)
                else:
                    self._handle(message)
        except Exception as error:
            _log.exception("a message of the engine breaks the contract")
            self._route(deltas)
            self.lose(f"the engine breaks its contract: {error}")
        else:
            self._route(deltas)

    def _handle(self, message: wire.FromEngine) -> None:
        match message:
            case wire.ControlDone(serial, error, found):
                future = self._controls.pop(serial, None)
                if future is None or future.done():  # the waiting caller has left
                    return
                if error is None:
                    future.set_result(found)
                else:
                    future.set_exception(Unsupported(error))
            case wire.Ready(info, stats):
                self._stats = stats
                if self._started is not None and not self._started.done():
                    self._started.set_result(info)
            case wire.StartFailed(text) | wire.Lost(text):
                self.lose(text)

    def lose(self, message: str) -> None:
        """The engine is gone, hangs, or never came up: fail all that is open. Only the first reason counts."""
        if self._dead is not None or self._closing:
            return
        self._dead = message
        if self._started is not None and not self._started.done():
            self._started.set_exception(EngineStartError(message))
        else:
            _log.error("the engine is lost: %s", message)
        if self._lost is not None:
            self._lost.set_result(message)
        self._fail_all(message)

    def _fail_all(self, message: str) -> None:
        sinks, self._sinks = self._sinks, {}
        for request_id, sink in sinks.items():
            _call(sink, OutputDelta([], terminal=contract.Failed(request_id, message)))
        controls, self._controls = self._controls, {}
        for future in controls.values():
            if not future.done():
                future.set_exception(EngineDeadError(message))

    def _route(self, deltas: dict[int, OutputDelta]) -> None:
        for request_id, delta in deltas.items():
            take = self._sinks.get if delta.terminal is None else self._sinks.pop
            sink = take(request_id, None)
            if sink is not None:
                _call(sink, delta)


def _gather(outputs: contract.StepOutputs, deltas: dict[int, OutputDelta]) -> None:
    logprobs, token_ids = outputs.logprobs, outputs.token_ids
    for position, request_id in enumerate(outputs.request_ids):
        delta = deltas.get(request_id)
        if delta is None:
            delta = deltas[request_id] = OutputDelta([])
        delta.token_ids.append(token_ids[position])
        if logprobs is not None:
            if delta.logprobs is None:
                delta.logprobs = [None] * (len(delta.token_ids) - 1)
            delta.logprobs.append(logprobs[position])
        elif delta.logprobs is not None:
            delta.logprobs.append(None)
    for scored in outputs.prompt_logprobs:
        delta = deltas.setdefault(scored.id, OutputDelta([]))
        delta.prompt_logprobs = [*(delta.prompt_logprobs or ()), *scored.logprobs]
    for update in outputs.updates:
        delta = deltas.setdefault(update.id, OutputDelta([]))
        if isinstance(update, contract.Scheduled):
            delta.scheduled = update
        else:
            delta.terminal = update


def _call(sink: Sink, delta: OutputDelta) -> None:
    try:
        sink(delta)
    except Exception:  # a sink's bug must not cost the other requests their tokens
        _log.exception("a sink raised")
