"""A server on a real socket for each test that asks, in a thread with its own event loop."""

import asyncio
import contextlib
import functools
import json
import logging
import re
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from openinfer.frontend import EngineSpec, Request
from openinfer.frontend.client import Driver, EngineClient, OutputDelta
from openinfer.frontend.errors import APIError, one_line
from openinfer.frontend.http import ChatTemplate, Tokenizer, create_app, find_templates, run_server
from openinfer.frontend.http.service import Service
from openinfer.frontend.process_driver import ProcessDriver
from openinfer.frontend.render_pool import RenderPool
from openinfer.frontend.thread_driver import ThreadDriver
from openinfer.sampler import SamplingParams

DATA = Path(__file__).parent / "data"

# To read the certificates of all authorities takes 20 ms, and each HTTP client here would do it for itself.
ssl.create_default_context = functools.cache(ssl.create_default_context)


class Live:
    """url, an httpx client bound to it, the driver and the service behind it."""

    def __init__(self, driver: Driver, app_kwargs: dict[str, Any], shutdown_timeout_s: float) -> None:
        self.driver = driver
        self.exit_code: int | None = None
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        # The server ends connections that are idle for 5 s; on a busy machine a test begins just then.
        kept = httpx.Limits(keepalive_expiry=2)
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=10, limits=kept)
        self._ready = threading.Event()
        self._app_kwargs = app_kwargs
        self._shutdown_timeout_s = shutdown_timeout_s
        self.thread = threading.Thread(target=lambda: asyncio.run(self._main()))
        self.thread.start()
        assert self._ready.wait(10)

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        await self.driver.start()
        app = create_app(self.driver, **self._app_kwargs)
        self.service: Service = app.state.service
        self.exit_code = await run_server(
            app,
            self._listener,
            shutdown_timeout_s=self._shutdown_timeout_s,
            on_ready=self._ready.set,
            stop=self._stop,
        )
        await self.driver.close()

    def begin_stop(self) -> None:
        # The loop is closed a moment before its thread ends: then there is nobody left to stop.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._stop.set)

    def buffer_little(self) -> None:
        """Let the system take 16 KiB of an answer that is not read, for connections from now on."""
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)

    def post(self, path: str, /, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def close(self) -> None:
        self.http.close()
        self.begin_stop()
        self.thread.join(10)
        assert not self.thread.is_alive()


class RendersHere(RenderPool):
    """Renders in this process, because to start another takes longer than most tests. A test that passes a template of
    its own gets processes."""

    def __init__(self, template: ChatTemplate) -> None:
        super().__init__(template.spec)
        self.template, self.variables = template, template.variables

    async def start(self) -> None:
        pass

    async def _ask(self, line: bytes, timeout_s: float) -> dict[str, Any]:
        try:
            return {"text": self.template.render(**json.loads(line))}
        except APIError as error:
            return {"refused": str(error), "param": error.param}
        except Exception as error:
            return {"error": f"{type(error).__name__}: {one_line(error)}"[:1000]}


Factory = Callable[..., Live]
Generate = Callable[..., Awaitable[list[OutputDelta]]]


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(DATA, vocab_size=1024)


@pytest.fixture(scope="module")  # servers that do nothing take time too
def start(tokenizer: Tokenizer) -> Iterator[Factory]:
    """start(engine={...}, app={...}, process=False, shutdown_timeout_s=0): a Live server with a FakeEngine, or with
    what `driver` drives."""
    servers: list[Live] = []

    def factory(
        engine: dict[str, Any] | None = None,
        app: dict[str, Any] | None = None,
        process: bool = False,
        shutdown_timeout_s: float = 0.0,
        hang_timeout_s: float = 60.0,
        driver: Driver | None = None,
    ) -> Live:
        source, _ = find_templates(DATA, tokenizer.config)
        assert source is not None
        template = RendersHere(ChatTemplate(source, tokenizer.special_tokens))
        spec = EngineSpec("openinfer.frontend.testing:FakeEngine", engine or {})
        if driver is not None:
            pass
        elif process:
            driver = ProcessDriver(spec, hang_timeout_s=hang_timeout_s, close_timeout_s=0.5)
        else:
            driver = ThreadDriver(spec.build, hang_timeout_s=hang_timeout_s, close_timeout_s=0.5)
        live = Live(driver, {"tokenizer": tokenizer, "template": template} | (app or {}), shutdown_timeout_s)
        servers.append(live)
        return live

    yield factory
    for live in servers:
        live.begin_stop()
    for live in servers:
        live.close()


SCRIPT = [sys.executable, str(Path(__file__).parent / "fake_recipe.py")]


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    path = tmp_path / "tiny"
    shutil.copytree(Path(__file__).parent / "data", path)
    (path / "config.json").write_text('{"model_type": "fake"}')
    return path


class Process:
    """A server process; `url` once it is ready."""

    def __init__(self, *args: object) -> None:
        self.process = subprocess.Popen(
            [*SCRIPT, "--port", "0", *map(str, args)], stderr=subprocess.PIPE, text=True
        )
        self.lines: list[str] = []
        assert self.process.stderr is not None
        self.url = ""
        for line in self.process.stderr:
            self.lines.append(line.rstrip())
            found = re.search(r"ready on (https?://\S+) in ", line)
            if found:
                self.url = found[1]
                break
        self._rest = ""
        self._reader = threading.Thread(target=self._read)  # a pipe that fills up would hold the server
        self._reader.start()
        if not self.url:
            self.end()
            raise AssertionError(self.lines)

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as stream:
            self._rest = stream.read()

    def children(self, module: str = "") -> list[int]:
        """Its child processes that run the module."""
        pid = self.process.pid
        found = list[int]()
        for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            with contextlib.suppress(OSError):  # it has ended meanwhile
                if module in Path(f"/proc/{one}/cmdline").read_text():
                    found.append(int(one))
        return found

    def end(self) -> tuple[int, str]:
        """The exit code, once it ends, and what it has said since it was ready."""
        code = self.process.wait(timeout=10)
        self._reader.join()
        return code, self._rest


@pytest.fixture
def launch() -> Iterator[Callable[..., Process]]:
    """launch(model_dir, *flags): the command line as a Process that is ready; killed at the end if it still runs."""
    started: list[Process] = []

    def start(*args: object) -> Process:
        started.append(Process(*args))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.process.kill()
        one.end()


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    logger = logging.getLogger()
    before, level = list(logger.handlers), logger.level
    yield logger
    logger.handlers[:] = before
    logger.setLevel(level)


@pytest.fixture
def generate() -> Generate:
    async def generate(
        client: EngineClient, max_tokens: int = 2, prompt: Sequence[int] = (10,), adapter: str = ""
    ) -> list[OutputDelta]:
        deltas, ended = list[OutputDelta](), asyncio.Event()

        def sink(delta: OutputDelta) -> None:
            deltas.append(delta)
            if delta.terminal is not None:
                ended.set()

        client.submit(
            Request(
                id=client.new_id(), prompt_token_ids=list(prompt), sampling=SamplingParams(ignore_eos=True),
                max_tokens=max_tokens, arrival=time.monotonic(), adapter=adapter,
            ),
            sink,
        )  # fmt: skip
        await ended.wait()
        return deltas

    return generate
