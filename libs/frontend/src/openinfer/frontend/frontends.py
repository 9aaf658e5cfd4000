"""Several HTTP processes on one port over one engine process: this is their parent, which serves no request itself.

Each child listens on a socket of its own (SO_REUSEPORT), so the kernel deals new connections out evenly. With one
shared socket, the process that wakes first would take all waiting connections. The parent makes the sockets and keeps
them open. So connections that wait on a child that dies are served by its successor.
"""

import asyncio
import contextlib
import logging
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from openinfer.frontend.client import EngineClient
from openinfer.frontend.errors import EngineStartError
from openinfer.frontend.frontend_process import (
    FrontendBoot,
    JoinedEngine,
    LostEngine,
    Order,
    ReadyReport,
    Stop,
)
from openinfer.frontend.http.admin.metrics import Board, Metrics
from openinfer.frontend.http.server import on_signals
from openinfer.frontend.process_driver import ProcessDriver
from openinfer.frontend.restart import RestartBudget, RestartingClient
from openinfer.frontend.web import WebOptions

KILL_AFTER_S = 10.0
"""Seconds until a child is killed, beyond the time that it gives its requests."""
SILENT_S = 20.0
"""A child that serves gives a sign of life every BEAT_S; one that gives none for so long hangs."""

_log = logging.getLogger(__name__)


class Frontends:
    """The children and the engine; run() once. options: of each child. make_engine: a driver of a new engine.
    listeners: bound sockets, one a child."""

    def __init__(
        self, options: WebOptions, make_engine: Callable[[], ProcessDriver], listeners: list[socket.socket]
    ) -> None:
        self._options, self._make_engine, self._listeners = options, make_engine, listeners
        self._driver: ProcessDriver | None = None  # of the engine of now
        self._address: str | None = None  # of an engine that can be used
        self._clients = 0
        self._children: dict[int, asyncio.subprocess.Process] = {}
        self._budget = RestartBudget()
        self._ending = False
        self._failed = asyncio.Event()  # for good

    async def run(
        self,
        on_engine: Callable[[EngineClient], None],
        on_ready: Callable[[], None],
        on_stop: Callable[[str], None],
    ) -> int:
        """Start all, serve until a signal or a loss that is final; returns the exit code, 0 or 1. on_engine, on_ready,
        on_stop: as serve_web has them. Raises FrontendError or OSError with one line for the user when something does
        not start."""
        keepers: list[asyncio.Task[Any]] = []
        engine: EngineClient = (
            RestartingClient(self._new_driver, on_up=self._on_up, on_lost=self._on_lost)
            if self._options.restart_engine
            else self._new_driver()
        )
        directory = Path(tempfile.mkdtemp(prefix="openinfer-"))
        try:
            boards = [directory / f"board-{index}" for index in range(len(self._listeners))]
            for board in boards:
                Board.create(board)
            ready = [asyncio.get_running_loop().create_future() for _ in boards]
            for index in range(len(boards)):
                mine_first = [str(boards[index]), *(str(b) for b in boards if b != boards[index])]
                keepers.append(asyncio.create_task(self._keep(index, mine_first, ready[index])))
            started = asyncio.create_task(self._start_engine(engine))
            keepers.append(started)
            await asyncio.gather(started, *ready)
            on_engine(engine)
            stop, now = asyncio.Event(), asyncio.Event()
            on_signals(stop, now)
            on_ready()
            keepers.append(asyncio.create_task(self._watch(engine)))
            stopped, failed = (asyncio.create_task(event.wait()) for event in (stop, self._failed))
            keepers += [stopped, failed]
            await asyncio.wait([stopped, failed], return_when=asyncio.FIRST_COMPLETED)
            if stopped.done():
                self._tell(Stop())
            self._ending = True
            await self._drain(now)
            on_stop(Metrics(engine, None, board=Board.shared(boards)).served())
            return 1 if self._failed.is_set() else 0
        finally:
            self._ending = True
            for keeper in keepers:
                keeper.cancel()
            await asyncio.gather(*keepers, return_exceptions=True)
            for child in self._children.values():
                with contextlib.suppress(ProcessLookupError):
                    child.kill()
                await child.wait()
            await engine.close()
            shutil.rmtree(directory, ignore_errors=True)

    def _tell(self, order: Order) -> None:
        for child in self._children.values():
            _write(child, order)

    async def _drain(self, now: asyncio.Event) -> None:
        """Wait for the children, which end by themselves. At a second signal, or after a limit, they are hurried."""
        ended: asyncio.Future[Any] = asyncio.gather(*(child.wait() for child in self._children.values()))
        hurry: asyncio.Future[Any] = asyncio.create_task(now.wait())
        limit = self._options.shutdown_timeout + KILL_AFTER_S
        await asyncio.wait([ended, hurry], timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        self._tell(Stop())
        await asyncio.wait([ended], timeout=KILL_AFTER_S)
        ended.cancel()
        hurry.cancel()

    def _new_driver(self) -> ProcessDriver:
        self._driver = self._make_engine()
        return self._driver

    async def _start_engine(self, engine: EngineClient) -> None:
        await engine.start()
        if not self._options.restart_engine:
            self._on_up()

    def _on_up(self) -> None:
        assert self._driver is not None
        self._address = self._driver.address
        self._tell(JoinedEngine(self._address))

    def _on_lost(self, reason: str) -> None:
        self._address = None
        self._tell(LostEngine(reason, final=False))

    async def _watch(self, engine: EngineClient) -> None:
        reason = await engine.died()
        self._ending, self._address = True, None
        self._tell(LostEngine(reason, final=True))
        self._failed.set()

    async def _keep(self, index: int, boards: list[str], ready: "asyncio.Future[None]") -> None:
        try:
            await self._keep_child(index, boards, ready)
        except Exception as error:
            if not ready.done():
                ready.set_exception(error)
                return
            _log.exception("HTTP process %d cannot be kept", index)
            self._tell(Stop())
            self._failed.set()

    async def _keep_child(self, index: int, boards: list[str], ready: "asyncio.Future[None]") -> None:
        """Run one child, and another when it dies; one that never got ready fails the start."""
        while True:
            self._clients += 1
            client = self._clients
            child = await self._spawn(index, client, boards)
            try:
                assert child.stdout is not None
                line = await child.stdout.readline()
                ended = ReadyReport("it ended while starting")
                report = msgspec.json.decode(line, type=ReadyReport) if line else ended
                if not ready.done():
                    if report.error is None:
                        ready.set_result(None)
                    else:
                        ready.set_exception(EngineStartError(report.error))
                code = await _outcome(index, child)
            finally:
                if child.returncode is not None:
                    self._children.pop(index, None)
            if self._ending:
                return
            how = (
                f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            )
            if self._address is not None and self._driver is not None:
                self._driver.forget(client)
            if report.error is not None or not self._budget.take():
                _log.error("HTTP process %d %s, and is not started again", index, how)
                self._tell(Stop())
                self._failed.set()
                return
            _log.error("HTTP process %d %s; its connections are lost, starting another", index, how)

    async def _spawn(self, index: int, client: int, boards: list[str]) -> asyncio.subprocess.Process:
        listener = self._listeners[index].fileno()
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "openinfer.frontend.frontend_process"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            pass_fds=[listener],
        )
        self._children[index] = child
        _write(child, FrontendBoot(self._options, listener, client, boards))
        if self._address is not None:
            _write(child, JoinedEngine(self._address))
        return child


async def _outcome(index: int, child: asyncio.subprocess.Process) -> int:
    """The exit code of a child that has reported, once it ends; one that hangs is killed."""
    assert child.stdout is not None
    missed = 0
    while missed < 2:  # twice the half: after a pause of the whole machine all are late once
        try:
            if not await asyncio.wait_for(child.stdout.readline(), SILENT_S / 2):
                break
            missed = 0
        except TimeoutError:
            missed += 1
    else:
        _log.error("HTTP process %d hangs: no sign of life for %.0f s", index, SILENT_S)
        child.kill()
    return await child.wait()


def _write(child: asyncio.subprocess.Process, message: FrontendBoot | Order) -> None:
    assert child.stdin is not None
    if not child.stdin.is_closing():  # it may have died without our knowing yet
        child.stdin.write(msgspec.json.encode(message) + b"\n")
