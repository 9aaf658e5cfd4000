"""An engine client that outlives its engine: an engine that dies or hangs is ended and started anew."""

import asyncio
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable

import msgspec

from openinfer.frontend.client import Driver, Health, Sink
from openinfer.frontend.contract import (
    Command,
    EngineInfo,
    EngineStats,
    LoadAdapter,
    Request,
    Sleep,
    TokenTable,
    UnloadAdapter,
    WakeUp,
)
from openinfer.frontend.errors import EngineDeadError, EngineStartError, Unsupported, one_line

__all__ = ["MAX_RESTARTS", "WINDOW_S", "Budget", "RestartingClient", "broken"]

CHECK_S = 0.5
"""Seconds between two checks for a hang."""
MAX_RESTARTS = 3
WINDOW_S = 600.0

_log = logging.getLogger(__name__)


class RestartingClient:
    """An EngineClient over drivers that can be ended from outside (ProcessDriver).

    Requests that were live fail; until the new engine is up, submit() raises EngineDeadError and health() says why.
    More than MAX_RESTARTS within WINDOW_S, or an engine that does not start again, is final: died() returns.

    make_driver: a new driver each time.
    first_id: of the requests. Ids are unique over all engines: a request may be made for one, sent to the next.
    watch_hangs: end an engine that hangs; False where another process does.
    """

    def __init__(
        self, make_driver: Callable[[], Driver], *, first_id: int = 1, watch_hangs: bool = True
    ) -> None:
        self._make_driver = make_driver
        self._driver = make_driver()
        self._ids = itertools.count(first_id)
        self._watch_hangs = watch_hangs
        self._budget = Budget()
        self._down: str | None = "the engine is not running"
        self._info: EngineInfo | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._lost: asyncio.Future[str] | None = None
        self._token_table: TokenTable | None = None  # the next engine needs it too
        self._adapters: dict[str, LoadAdapter] = {}  # by name; as is this
        self._known: set[str] | None = None  # adapters of the engine before; None: there was none
        self._asleep: Sleep | None = None  # as is this

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise EngineDeadError("the engine has not been started")
        return self._info

    async def start(self) -> None:
        self._lost = asyncio.get_running_loop().create_future()
        await self._begin()
        self._keeper = asyncio.create_task(self._keep())

    async def close(self) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait([self._keeper])
        await self._driver.close()

    def new_id(self) -> int:
        return next(self._ids)

    def submit(self, request: Request, sink: Sink) -> None:
        if self._down is not None:
            raise EngineDeadError(self._down)
        self._driver.submit(request, sink)

    def abort(self, request_id: int) -> None:
        self._driver.abort(request_id)

    async def control(self, command: Command) -> str | None:
        if self._down is not None:
            raise EngineDeadError(self._down)
        answer = await self._driver.control(command)
        if isinstance(command, TokenTable):
            self._token_table = command
        if isinstance(command, LoadAdapter):
            self._adapters[command.name] = command
        if isinstance(command, Sleep | WakeUp):
            self._asleep = command if isinstance(command, Sleep) else None
        return answer

    def stats(self) -> EngineStats:
        return self._driver.stats()

    def health(self) -> Health:
        return self._driver.health() if self._down is None else Health(False, self._down)

    async def died(self) -> str:
        if self._lost is None:
            raise EngineDeadError("the engine has not been started")
        return await asyncio.shield(self._lost)

    async def _begin(self) -> None:
        await self._driver.start()
        if self._token_table is not None:
            await self._driver.control(self._token_table)
        await self._restore_adapters()
        if self._asleep is not None:
            await self._driver.control(self._asleep)
        self._info = self._driver.info
        self._down = None

    async def _restore_adapters(self) -> None:
        """Give a new engine the adapters of the one before. It has those of its own flags already.

        Raises EngineDeadError; the next engine does not get the adapter with which this one died.
        """
        for name, command in list(self._adapters.items()):
            try:
                await self._driver.control(msgspec.structs.replace(command, in_place=True))
            except (Unsupported, EngineDeadError) as error:  # requests for others need none of it
                _log.error("the adapter %r is lost: %s", name, one_line(error))
                del self._adapters[name]
                if isinstance(error, EngineDeadError):
                    raise
        for state in self._driver.stats().adapters:
            if self._known is not None and state.name not in self._known:
                await self._driver.control(UnloadAdapter(state.name))

    async def _keep(self) -> None:
        """Watch, and restart, until it is final."""
        assert self._lost is not None
        try:
            self._down = await self._restart_while_possible()
        except Exception as error:  # any error: a caller that waits for a restart must not wait for ever
            _log.exception("the engine cannot be restarted")
            self._down = f"the engine cannot be restarted: {one_line(error)}"
        self._lost.set_result(self._down)

    async def _restart_while_possible(self) -> str:
        """The reason why no engine will be started any more."""
        while True:
            reason = await broken(self._driver, self._watch_hangs)
            if self._down is None:  # else it died before it had them all
                self._known = {state.name for state in self._driver.stats().adapters}
                self._adapters = {name: one for name, one in self._adapters.items() if name in self._known}
            self._down = f"{reason}; restarting it"
            self._driver.lose(reason)
            await self._driver.close()
            now = time.monotonic()
            if not self._budget.take():
                return f"{reason}; it was restarted {MAX_RESTARTS} times already"
            _log.error("restarting the engine: %s", reason)
            self._driver = self._make_driver()
            try:
                await self._begin()
            except EngineDeadError:  # it had started
                continue
            except (EngineStartError, Unsupported, OSError) as error:
                return f"{reason}; it does not start again: {one_line(error)}"
            _log.info("the engine runs again after %.1f s", time.monotonic() - now)


class Budget:
    """The limit of restarts: MAX_RESTARTS times within WINDOW_S."""

    def __init__(self) -> None:
        self._taken: deque[float] = deque(maxlen=MAX_RESTARTS)

    def take(self) -> bool:
        """Count one restart; False if it is one too many."""
        now = time.monotonic()
        if len(self._taken) == MAX_RESTARTS and now - self._taken[0] < WINDOW_S:
            return False
        self._taken.append(now)
        return True


async def broken(driver: Driver, watch_hangs: bool) -> str:
    """Wait until an engine is dead or, if those are watched for, hangs; how."""
    died = asyncio.create_task(driver.died())
    try:
        while True:
            await asyncio.wait([died], timeout=CHECK_S)
            if died.done():
                return died.result()
            health = driver.health()
            if watch_hangs and not health.ok:
                return health.detail
    finally:
        died.cancel()
