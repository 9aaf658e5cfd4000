"""uvicorn with an orderly end: drain, then abort, then exit; exit at once when the engine is lost."""

import asyncio
import contextlib
import logging
import resource
import signal
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from starlette.applications import Starlette

from openinfer.frontend.http import connections
from openinfer.frontend.http.service import Service

DEATH_LINGER_S = 2.0
"""After the engine's death: open streams get their error, probes see 503, then the process ends."""
CLOSE_TIMEOUT_S = 2
SAY_AGAIN_S = 30.0
MAX_FILES = 1 << 17

_log = logging.getLogger(__name__)


class _Server(uvicorn.Server):
    """uvicorn without its signal handling, telling when it listens."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def run_server(
    app: Starlette,
    listener: socket.socket,
    *,
    shutdown_timeout_s: float,
    on_ready: Callable[[], None],
    stop: asyncio.Event | None = None,
    now: asyncio.Event | None = None,
    ssl_certfile: str | None = None,
    ssl_keyfile: str | None = None,
) -> int:
    """Serve an app of create_app whose client is started, until a signal or the engine's death.

    listener: a bound socket, closed at the end. on_ready: called once requests are accepted.
    stop, now: to be set where signals do not arrive (outside the main thread) or must not count (in a process whose
    parent drains it): as the first and the second signal. Signals are left alone where `now` is given.
    ssl_certfile, ssl_keyfile: PEM files, for HTTPS; the key may be in the first.
    The first SIGTERM or SIGINT makes /ready and new work 503 and lets running requests finish for
    shutdown_timeout_s; then, or at the second signal, they are aborted.
    Returns the exit code: 0, or 1 when the engine was lost.
    """
    service: Service = app.state.service
    _allow_connections()
    server = _Server(_config(app, ssl_certfile, ssl_keyfile), on_ready)
    loop, stop = asyncio.get_running_loop(), stop or asyncio.Event()
    first = asyncio.FIRST_COMPLETED
    try:
        await service.prepare()
        if listener.family in (socket.AF_INET, socket.AF_INET6):
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # accepted sockets inherit it
        if now is None:
            now = asyncio.Event()
            on_signals(stop, now)
        loop.set_exception_handler(_LoopErrors())
        _log.info("%s", parts(loop, server.config.http))
        serving = asyncio.create_task(server.serve([listener]))
        sweep = asyncio.create_task(connections.close_stalled(server.server_state.connections))
        died = asyncio.create_task(service.client.died())
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait({serving, died, stopped}, return_when=first)
        if died.done():
            await asyncio.wait({serving, stopped}, timeout=DEATH_LINGER_S, return_when=first)
        elif stopped.done():
            await _drain(service, now, died, shutdown_timeout_s)
        code = 1 if died.done() else 0
        server.should_exit = True
        for task in (died, stopped, sweep):
            task.cancel()
        await serving
        return code
    finally:
        await service.close()


def _config(app: Starlette, ssl_certfile: str | None, ssl_keyfile: str | None) -> uvicorn.Config:
    protocol = connections.http_protocol()
    return uvicorn.Config(
        app if connections.parser_name(protocol) == "httptools" else connections.in_origin_form(app),
        http=protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=CLOSE_TIMEOUT_S,
        ssl_certfile=ssl_certfile,
        ssl_keyfile=ssl_keyfile,
    )


def parts(loop: asyncio.AbstractEventLoop, protocol: Any) -> str:
    """The event loop and the parser of http_protocol() in words, and the extra that has faster ones."""
    name, parser = type(loop).__module__.partition(".")[0], connections.parser_name(protocol)
    fast = (name, parser) == ("uvloop", "httptools")
    hint = "" if fast else "; faster ones: pip install 'openinfer-frontend[fast]'"
    return f"event loop {name}, HTTP parser {parser}{hint}"


class _LoopErrors:
    """asyncio logs each accept that fails, thousands a second, with a traceback. Here it is one line."""

    _quiet_until = 0.0

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error, now = context.get("exception"), time.monotonic()
        if not isinstance(error, OSError) or "accept" not in context["message"]:
            loop.default_exception_handler(context)
        elif now > self._quiet_until:
            self._quiet_until = now + SAY_AGAIN_S
            _log.error("new connections wait: %s", error.strerror)


def _allow_connections() -> None:
    """A connection is a file: take as many as the system lets us have, where a shell's default is 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def on_signals(stop: asyncio.Event, now: asyncio.Event) -> None:
    """Set `stop` at the first SIGTERM or SIGINT, `now` at the second."""
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        (now if stop.is_set() else stop).set()

    with contextlib.suppress(ValueError, RuntimeError):  # not the main thread: the caller has `stop`
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, on_signal)


async def _drain(service: Service, now: asyncio.Event, died: "asyncio.Task[str]", timeout_s: float) -> None:
    service.draining = True
    deadline = time.monotonic() + timeout_s
    if service.active:
        _log.info("shutting down: %d requests get up to %g s to finish", len(service.active), timeout_s)
    while service.active and not now.is_set() and not died.done() and time.monotonic() < deadline:
        await asyncio.sleep(0.02)
    for generation in list(service.active):
        generation.cancel("the server is shutting down")
