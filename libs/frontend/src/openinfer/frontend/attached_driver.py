"""A further client of an engine process that another process started, watches and ends."""

from collections.abc import Awaitable, Callable

from openinfer.frontend.client import Driver
from openinfer.frontend.errors import EngineDeadError, EngineStartError
from openinfer.frontend.link import EngineLink
from openinfer.frontend.wire import ToEngine, first_id

__all__ = ["AttachedDriver"]


class AttachedDriver(Driver):
    """Speaks to the engine behind a ProcessDriver in another process. An EngineClient.

    The process that watches the engine calls lose() when the engine has died. It calls the ProcessDriver's forget()
    when this client's process has died.

    address: waits for the ProcessDriver's address. client: our number, never used before with this engine.
    hang_timeout_s: requests without a step for longer make health() say that the engine hangs; None: EngineInfo's.
    """

    def __init__(
        self, address: Callable[[], Awaitable[str]], client: int, *, hang_timeout_s: float | None = None
    ) -> None:
        super().__init__(hang_timeout_s, first_id(client))
        self._address = address
        self._client = client
        self._link: EngineLink | None = None

    async def start(self) -> None:
        """Join the engine. Raises EngineStartError where there will be none, EngineDeadError where it has just died."""
        try:
            await super().start()
        except EngineStartError as error:
            if self._link is None or self._dead is None:
                raise
            raise EngineDeadError(self._dead) from error

    async def _launch(self) -> None:
        self._link = EngineLink(await self._address(), self._client, self._receive, self.lose)

    def _send(self, message: ToEngine) -> None:
        assert self._link is not None
        self._link.send(message)

    async def _stop(self) -> None:
        if self._link is not None:
            self._link.close()
