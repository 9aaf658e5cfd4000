"""An engine in a thread of this process: for tests, the CPU and engines that hardly hold the GIL."""

import asyncio
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable

from openinfer.frontend.client import MESSAGES_A_TURN, Driver
from openinfer.frontend.contract import Engine
from openinfer.frontend.engine_loop import IDLE_WAIT_S, run_engine
from openinfer.frontend.errors import is_users_error, one_line
from openinfer.frontend.wire import Close, FromEngine, Hello, StartFailed, ToEngine

_log = logging.getLogger(__name__)


class ThreadDriver(Driver):
    """Runs `factory()` and the engine loop in a daemon thread. An EngineClient.

    factory: builds the engine; called in the thread that will own it (`spec.build` fits).
    hang_timeout_s: requests without a step for longer make health() say that the engine hangs; None: EngineInfo's.
    close_timeout_s: how long close() waits for a step to end; a thread that hangs is left behind.
    """

    def __init__(
        self,
        factory: Callable[[], Engine],
        *,
        hang_timeout_s: float | None = None,
        close_timeout_s: float = 5.0,
    ) -> None:
        super().__init__(hang_timeout_s)
        self._factory = factory
        self._close_timeout_s = close_timeout_s
        self._inbox: queue.SimpleQueue[ToEngine] = queue.SimpleQueue()
        self._outbox: deque[FromEngine] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="openinfer-engine", daemon=True)

    async def _launch(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._inbox.put(Hello())
        self._thread.start()

    def _send(self, message: ToEngine) -> None:
        self._inbox.put(message)

    async def _stop(self) -> None:
        if not self._thread.ident:
            return
        self._inbox.put(Close())
        await asyncio.to_thread(self._thread.join, self._close_timeout_s)
        if self._thread.is_alive():
            _log.error("the engine's thread does not end; left behind")

    def _run(self) -> None:
        try:
            engine = self._factory()
        except Exception as error:
            if not is_users_error(error):
                _log.exception("the engine did not start")
            self._post(StartFailed(one_line(error)))
            return
        try:
            run_engine(engine, self._take, lambda _, message: self._post(message))
        except Exception:
            _log.exception("the engine raised")
        finally:
            engine.close()

    def _take(self, block: bool) -> list[tuple[int, ToEngine]]:
        messages: list[tuple[int, ToEngine]] = []
        try:
            messages.append((0, self._inbox.get(block, IDLE_WAIT_S if block else None)))
            while True:
                messages.append((0, self._inbox.get_nowait()))
        except queue.Empty:
            return messages

    def _post(self, message: FromEngine) -> None:
        """From the engine's thread: wake the event loop, once for all messages it has not read yet."""
        assert self._loop is not None
        self._outbox.append(message)
        if len(self._outbox) == 1:
            try:
                self._loop.call_soon_threadsafe(self._drain)
            except RuntimeError:  # the loop closed without close(), so no receiver is left
                _log.debug("event loop is closed")

    def _drain(self) -> None:
        assert self._loop is not None
        # The first message must stay until the others are read, because _post wakes the loop only for an empty queue.
        count = min(len(self._outbox), MESSAGES_A_TURN)
        self._receive([self._outbox[position] for position in range(count)])
        for _ in range(count):
            self._outbox.popleft()
        if self._outbox:
            self._loop.call_soon(self._drain)
