"""An engine in a process of its own: neither side waits for the other's GIL, and either may die alone.

The two talk msgpack over ZeroMQ on a Unix socket in a directory that only this user can enter; the frontends of a
larger server join on the same socket (AttachedDriver). The child's standard input is a pipe: its first line says what
to build, and its end tells the child that the parent is gone.
"""

import asyncio
import shutil
import signal
import sys
import tempfile
from collections.abc import Awaitable, Callable

import msgspec

from openinfer.frontend.client import Driver
from openinfer.frontend.contract import EngineSpec
from openinfer.frontend.errors import EngineDeadError, EngineStartError
from openinfer.frontend.link import EngineLink
from openinfer.frontend.logs import log_settings
from openinfer.frontend.wire import Boot, Close, Gone, ToEngine, first_id


class ProcessDriver(Driver):
    """Starts `python -m openinfer.frontend.engine_process` and speaks to it. An EngineClient.

    spec: what the child builds.
    hang_timeout_s: requests without a step for longer make health() say that the engine hangs; None: EngineInfo's.
    close_timeout_s: how long close() waits before it kills the child.
    """

    def __init__(
        self, spec: EngineSpec, *, hang_timeout_s: float | None = None, close_timeout_s: float = 5.0
    ) -> None:
        super().__init__(hang_timeout_s)
        self._spec = spec
        self._close_timeout_s = close_timeout_s
        self._link: EngineLink | None = None
        self._directory: str | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._watcher: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        """Process id of the engine process. Raises ProcessLookupError before start()."""
        if self._process is None:
            raise ProcessLookupError("the engine process has not been started")
        return self._process.pid

    @property
    def address(self) -> str:
        """The address for an AttachedDriver. Raises ProcessLookupError before start()."""
        if self._directory is None:
            raise ProcessLookupError("the engine process has not been started")
        return Boot.address_in(self._directory)

    def forget(self, client: int) -> None:
        """Another client of the engine has died: its requests are aborted."""
        self._send(Gone(client))

    async def _launch(self) -> None:
        self._directory = tempfile.mkdtemp(prefix="openinfer-")  # mode 0700
        boot = Boot(self._directory, self._spec, *log_settings())
        self._link = EngineLink(self.address, 0, self._receive, self.lose)
        made = asyncio.create_task(
            asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "openinfer.frontend.engine_process"),
                stdin=asyncio.subprocess.PIPE,
                start_new_session=True,  # Ctrl-C is for the parent, which drains first
            )
        )
        try:
            self._process = await asyncio.shield(made)
        except asyncio.CancelledError:
            # uvloop would lose the process, and see it end behind the end of its loop.
            self._process = await made
            raise
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(boot) + b"\n")
        self._watcher = asyncio.create_task(self._watch(self._process, self._link))

    def _send(self, message: ToEngine) -> None:
        # The child may have gone without our knowing yet: then _watch is about to fail what was sent.
        assert self._link is not None
        self._link.send(message)

    async def _watch(self, process: asyncio.subprocess.Process, link: EngineLink) -> None:
        code = await process.wait()
        await link.read_rest()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        self.lose(f"the engine process {how}")

    async def _stop(self) -> None:
        if self._process is not None and self._process.returncode is None:
            if self._info is not None:  # while it still loads it does not listen
                self._send(Close())
                await asyncio.wait([self._watcher] if self._watcher else [], timeout=self._close_timeout_s)
            if self._process.returncode is None:
                self._process.kill()
            await self._process.wait()
        if self._watcher is not None:
            await self._watcher
        if self._link is not None:
            self._link.close()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)


class AttachedDriver(Driver):
    """Speaks to the engine behind a ProcessDriver in another process. An EngineClient.

    The process that watches calls lose() when the engine has died, and the ProcessDriver's forget() when this one has.

    address: waits for the ProcessDriver's. client: our number, never used before with this engine. hang_timeout_s: as
    ProcessDriver has it.
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
