"""An engine in a process of its own: neither side waits for the other's GIL, and either may die alone.

The two talk msgpack over a ZeroMQ pair on a Unix socket in a directory that only this user can enter. The child's
standard input is a pipe: its first line says what to build, and its end tells the child that the parent is gone.
"""

import asyncio
import contextlib
import logging
import shutil
import signal
import sys
import tempfile

import msgspec

from openinfer.frontend.client import MESSAGES_A_TURN, Driver
from openinfer.frontend.contract import EngineSpec
from openinfer.frontend.errors import MissingExtraError
from openinfer.frontend.wire import Boot, Close, FromEngine, ToEngine

try:
    import zmq
except ImportError as error:
    raise MissingExtraError("the engine process", "process") from error

__all__ = ["ProcessDriver"]

_log = logging.getLogger(__name__)


class ProcessDriver(Driver):
    """Starts `python -m openinfer.frontend.engine_process` and speaks to it. An EngineClient.

    spec: what the child builds.
    hang_timeout_s: requests without a step for longer make health() say that the engine hangs.
    close_timeout_s: how long close() waits before it kills the child.
    """

    def __init__(
        self, spec: EngineSpec, *, hang_timeout_s: float = 60.0, close_timeout_s: float = 5.0
    ) -> None:
        super().__init__(hang_timeout_s)
        self._spec = spec
        self._close_timeout_s = close_timeout_s
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(FromEngine).decode
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._socket: zmq.Socket[bytes] | None = None
        self._directory: str | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._scheduled = False  # a _drain is on its way

    @property
    def pid(self) -> int:
        """Process id of the engine process. Raises ProcessLookupError before start()."""
        if self._process is None:
            raise ProcessLookupError("the engine process has not been started")
        return self._process.pid

    async def _launch(self) -> None:
        self._directory = tempfile.mkdtemp(prefix="openinfer-")  # mode 0700
        log_level = logging.getLevelName(logging.getLogger().getEffectiveLevel())
        boot = Boot(self._directory, self._spec, log_level)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)  # never drop, never block: what is in flight is bounded by the requests
        self._socket.bind(boot.address)
        asyncio.get_running_loop().add_reader(self._socket.fileno(), self._schedule)
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "openinfer.frontend.engine_process", stdin=asyncio.subprocess.PIPE
        )
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(boot) + b"\n")
        self._watcher = asyncio.create_task(self._watch(self._process))

    def _send(self, message: ToEngine) -> None:
        assert self._socket is not None
        # The child may have gone without our knowing yet: then _watch is about to fail what was sent.
        with contextlib.suppress(zmq.Again):
            self._socket.send(self._encode(message), zmq.NOBLOCK)
        # ZeroMQ signals its descriptor on edges, and sending may swallow one.
        self._schedule()

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._drain)

    def _drain(self) -> None:
        assert self._socket is not None
        self._scheduled = False
        if self._socket.closed:
            return
        messages: list[FromEngine] = []
        fault = None
        try:
            while len(messages) < MESSAGES_A_TURN:
                messages.append(self._decode(self._socket.recv(zmq.NOBLOCK)))
        except zmq.Again:
            pass
        except msgspec.MsgspecError as error:
            fault = error
        else:
            self._schedule()
        if messages:
            self._receive(messages)
        if fault is not None:
            self.lose(f"the engine breaks its contract: {fault}")

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        code = await process.wait()
        while self._socket is not None and self._socket.poll(0):  # its last words
            self._drain()
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
        if self._socket is not None and self._context is not None:
            asyncio.get_running_loop().remove_reader(self._socket.fileno())
            self._socket.close(linger=0)
            self._context.term()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
