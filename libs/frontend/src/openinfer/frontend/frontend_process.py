"""One of several HTTP processes: `python -m openinfer.frontend.frontend_process`, a child of frontends.

Its standard input has a line of JSON for each message: first a FrontendBoot, then Orders. Its standard output is a
Report, then an empty line now and then, by which the parent sees that the event loop turns. When standard input ends,
the parent is gone, and this process ends too.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import sys
from pathlib import Path

import msgspec

from openinfer.frontend.client import Driver, EngineClient
from openinfer.frontend.errors import EngineStartError, is_users_error, one_line
from openinfer.frontend.logs import set_up_logging
from openinfer.frontend.process_driver import AttachedDriver
from openinfer.frontend.restart import RestartingClient
from openinfer.frontend.web import WebOptions, run_loop, serve_web
from openinfer.frontend.wire import first_id

BEAT_S = 1.0
"""Seconds between two signs of life."""


class FrontendBoot(msgspec.Struct, frozen=True):
    """The first message to a child."""

    options: WebOptions
    listener: int
    """Descriptor of our bound socket, inherited."""
    client: int
    """Our number with the engine."""
    boards: list[str]
    """Files that all processes count in, ours first."""


class JoinedEngine(msgspec.Struct, frozen=True, tag="engine"):
    """An engine is up: join it at this address."""

    address: str


class LostEngine(msgspec.Struct, frozen=True, tag="lost"):
    """The engine is gone, or does not start: end what is open with this reason. Another may follow."""

    reason: str
    final: bool


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Drain and end; said again: at once."""


Order = JoinedEngine | LostEngine | Stop


class ReadyReport(msgspec.Struct, frozen=True):
    """The child's first line: that it serves, or the reason why not."""

    error: str | None = None


class _Orders:
    """The parent's orders, in the form that the client and the server need."""

    def __init__(self, boot: FrontendBoot) -> None:
        self.stop, self.now = asyncio.Event(), asyncio.Event()
        self._boot = boot
        self._addresses: asyncio.Queue[str | EngineStartError] = asyncio.Queue()
        self._driver: Driver | None = None
        self._decode = msgspec.json.Decoder(Order).decode

    async def address(self) -> str:
        """The next engine's. Raises EngineStartError when there will be none."""
        found = await self._addresses.get()
        if isinstance(found, EngineStartError):
            raise found
        return found

    def make_driver(self) -> Driver:
        self._driver = AttachedDriver(
            self.address, self._boot.client, hang_timeout_s=self._boot.options.engine_hang_timeout
        )
        return self._driver

    async def follow(self) -> None:
        """Carry out orders until the parent is gone."""
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        while line := await reader.readline():
            match self._decode(line):
                case JoinedEngine(address):
                    self._addresses.put_nowait(address)
                case LostEngine(reason, final):
                    if final:
                        self._addresses.put_nowait(EngineStartError(reason))
                    if self._driver is not None:
                        self._driver.lose(reason)
                case Stop():
                    (self.now if self.stop.is_set() else self.stop).set()
        # A parent that was killed could not.
        shutil.rmtree(Path(self._boot.boards[0]).parent, ignore_errors=True)
        os._exit(2)


async def _serve(boot: FrontendBoot) -> int:
    orders = _Orders(boot)
    tasks = [asyncio.create_task(orders.follow())]

    def on_ready() -> None:
        _report(ReadyReport())
        tasks.append(asyncio.create_task(_beat()))

    client: EngineClient
    if boot.options.restart_engine:
        client = RestartingClient(orders.make_driver, first_id=first_id(boot.client), keeper=False)
    else:
        client = orders.make_driver()
    try:
        with socket.socket(fileno=boot.listener) as listener:
            return await serve_web(
                boot.options,
                client,
                listener,
                on_ready=on_ready,
                stop=orders.stop,
                now=orders.now,
                boards=[Path(path) for path in boot.boards],
            )
    except Exception as error:
        _report(ReadyReport(one_line(error)))
        if not is_users_error(error):
            raise
        return 1
    finally:
        for task in tasks:
            task.cancel()


async def _beat() -> None:
    """Send the parent signs of life. A parent that does not read must not stop this process."""
    os.set_blocking(1, False)
    while True:
        await asyncio.sleep(BEAT_S)
        with contextlib.suppress(BlockingIOError):
            os.write(1, b"\n")


def _report(report: ReadyReport) -> None:
    os.write(1, msgspec.json.encode(report) + b"\n")


def main() -> int:
    """Serve as the first line says; the exit code is that of run_server."""
    # Ctrl-C and a supervisor's SIGTERM reach the whole group; the parent says Stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    boot = msgspec.json.decode(_first_line(), type=FrontendBoot)
    options = boot.options
    set_up_logging(options.log_level, options.log_format, [options.api_key] if options.api_key else [])
    return run_loop(_serve(boot))


def _first_line() -> bytes:
    """Not a byte more: what follows is the event loop's to read."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            os._exit(2)
        line += byte
    return line


if __name__ == "__main__":
    sys.exit(main())
