"""An engine client that outlives its engine: an engine that dies or hangs is ended and started anew."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable

from openinfer.frontend import contract
from openinfer.frontend.client import ClientBase, Driver, Health, Sink
from openinfer.frontend.errors import EngineDeadError, EngineStartError, Unsupported, one_line

CHECK_S = 0.5
"""Seconds between two checks for a hang."""
MAX_RESTARTS = 3
WINDOW_S = 600.0

_log = logging.getLogger(__name__)


class RestartingClient(ClientBase):
    """An EngineClient over drivers that can be ended from outside (ProcessDriver).

    Requests that were live fail; until the new engine is up, submit() raises EngineDeadError and health() says why.
    More than MAX_RESTARTS within WINDOW_S, or an engine that does not start again, is final: died() returns.

    make_driver: a new driver each time.
    first_id: of the requests. Ids are unique over all engines: a request may be made for one, sent to the next.
    keeper: end an engine that hangs, and bring the next one to its state; False where another process does both.
    on_up: called when an engine can be used, the first one too. on_lost: called with the reason when it no longer can.
    """

    def __init__(
        self,
        make_driver: Callable[[], Driver],
        *,
        first_id: int = 1,
        keeper: bool = True,
        on_up: Callable[[], None] = lambda: None,
        on_lost: Callable[[str], None] = lambda reason: None,
    ) -> None:
        super().__init__(first_id)
        self._make_driver = make_driver
        self._driver = make_driver()
        self._keeper, self._on_up, self._on_lost = keeper, on_up, on_lost
        self._budget = RestartBudget()
        self._down: str | None = "the engine is not running"
        self._task: asyncio.Task[None] | None = None
        self._token_table: contract.TokenTable | None = None  # the next engine needs it too
        self._state: contract.EngineStats | None = None  # of the engine before, at its end, if there was one

    async def start(self) -> None:
        self._lost = asyncio.get_running_loop().create_future()
        while True:
            try:
                await self._begin()
                break
            except EngineDeadError:
                if self._keeper:
                    raise
                # It died while we joined it, and its keeper brings another.
                self._driver = self._make_driver()
        self._task = asyncio.create_task(self._keep())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        await self._driver.close()

    def submit(self, request: contract.Request, sink: Sink) -> None:
        if self._down is not None:
            raise EngineDeadError(self._down)
        self._driver.submit(request, sink)

    def abort(self, request_id: int) -> None:
        self._driver.abort(request_id)

    async def control(self, command: contract.Command) -> str | None:
        if self._down is not None:
            raise EngineDeadError(self._down)
        answer = await self._driver.control(command)
        if isinstance(command, contract.TokenTable):
            self._token_table = command
        return answer

    def stats(self) -> contract.EngineStats:
        return self._driver.stats()

    def health(self) -> Health:
        return self._driver.health() if self._down is None else Health(False, self._down)

    async def _begin(self) -> None:
        await self._driver.start()
        if self._token_table is not None:
            await self._driver.control(self._token_table)
        if self._state is not None and self._keeper:
            await restore(self._driver, self._state)
        self._info = self._driver.info
        self._down = None
        self._on_up()

    async def _keep(self) -> None:
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
            reason = await broken(self._driver, self._keeper)
            if self._down is None:  # else it died before it had them all
                self._state = self._driver.stats()
                self._on_lost(reason)
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


class RestartBudget:
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


async def restore(driver: Driver, state: contract.EngineStats) -> None:
    """Bring a new engine to the state in which the one before said that it was: its adapters, and whether it sleeps.
    It has the adapters of its own flags already.

    Raises Unsupported, and EngineDeadError where the new engine dies; the next one does not get the adapter with which
    it died, because `state` loses it."""
    own = {one.name: one.path for one in driver.stats().adapters}
    for one in list(state.adapters):
        if own.get(one.name) == one.path:
            del own[one.name]
            continue
        try:
            await driver.control(contract.LoadAdapter(one.name, one.path, in_place=True))
            own.pop(one.name, None)
        except (Unsupported, EngineDeadError) as error:  # requests for others need none of it
            _log.error("the adapter %r is lost: %s", one.name, one_line(error))
            state.adapters.remove(one)
            if isinstance(error, EngineDeadError):
                raise
    for name in own:
        await driver.control(contract.UnloadAdapter(name))
    if state.asleep:
        await driver.control(contract.Sleep(2 if state.weights_dropped else 1))


async def broken(driver: Driver, keeper: bool) -> str:
    """Wait until an engine is dead or, for its keeper, hangs; how."""
    died = asyncio.create_task(driver.died())
    try:
        while True:
            await asyncio.wait([died], timeout=CHECK_S)
            if died.done():
                return died.result()
            health = driver.health()
            if keeper and not health.ok:
                return health.detail
    finally:
        died.cancel()
