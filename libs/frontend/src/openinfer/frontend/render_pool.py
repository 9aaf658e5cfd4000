"""Chats as prompts, off the event loop and under a deadline: processes that can be killed and are replaced."""

import asyncio
import contextlib
import json
import sys
from typing import Any

from openinfer.frontend.chat import RendererSpec
from openinfer.frontend.errors import APIError, ModelFilesError, one_line

START_TIMEOUT_S = 30.0
"""From the renderer's spec to its answer. The engine may load and compile meanwhile, on the same cores."""
LIFE_TIMEOUT_S = 3.0
"""From a chat to the process's sign of life: one that waits may have been killed, or stopped."""
LANES = (2, 2)
"""Processes for small chats, and for large ones: a large chat waits only for other large ones."""
MAX_ANSWER_BYTES = 256 << 20


class _Lost(Exception):
    """A process of the pool has ended, or is stopped."""


class RenderPool:
    """A Renderer in processes of its own. start() first, close() last; both in the event loop that renders. spec: how a
    process makes the renderer. first: of `spawn`, which the pool takes over; None: start() makes one."""

    def __init__(self, spec: RendererSpec, first: asyncio.subprocess.Process | None = None) -> None:
        self.spec = spec
        self._first = first
        self.variables: frozenset[str] = frozenset()
        """Names of the options that the renderer heeds; known once it has started."""
        sources = [spec.kwargs.get(name) or "" for name in ("source", "with_tools")]
        self.shows_tools = "source" not in spec.kwargs or any("tools" in source for source in sources)
        """Whether the model sees a chat's tools; code does without a source."""
        self._idle: list[asyncio.subprocess.Process] = []
        self._lanes = [asyncio.Semaphore(size) for size in LANES]

    async def start(self) -> None:
        """Make the renderer. Raises ModelFilesError with one line where it cannot be made."""
        if not self._idle:
            first, self._first = self._first, None
            self._idle.append(await self._made(first or await spawn()))

    async def close(self) -> None:
        """End the processes that wait; a second time is no error."""
        while self._idle:
            await end(self._idle.pop())

    async def render(self, call: dict[str, Any], large: bool, timeout_s: float) -> str:
        """The prompt; `call` has the arguments of Renderer.render.

        A process that was lost while it waited costs nothing: a new one writes the chat. Raises APIError: 400 where the
        renderer refuses, takes longer than timeout_s or too much memory, 503 where no process was free for so long, or
        where a new one was lost too.
        """
        try:
            line = json.dumps(call).encode() + b"\n"
        except (ValueError, RecursionError) as error:
            raise APIError(f"the chat cannot be written as a prompt: {error}", param="messages") from error
        lane = self._lanes[large]
        try:
            await asyncio.wait_for(lane.acquire(), timeout_s)
        except TimeoutError as error:
            raise APIError(
                "too many chats wait to be written as prompts; try later", status=503, code="queue_full"
            ) from error
        try:
            answer = await self._ask(line, timeout_s)
        except TimeoutError as error:
            raise APIError(
                f"the chat takes longer than {timeout_s:g} s to be written as a prompt: shorten it",
                param="messages",
            ) from error
        except (_Lost, ModelFilesError, OSError) as error:  # OSError: no memory or files for another process
            raise APIError(
                f"no process writes chats as prompts: {one_line(error)}; try later",
                status=503,
                code="renderer_lost",
            ) from error
        finally:
            lane.release()
        if "refused" in answer:
            raise APIError(answer["refused"], param=answer["param"])
        if "text" not in answer:
            raise APIError(f"the chat cannot be written as a prompt: {answer['error']}", param="messages")
        return str(answer["text"])

    async def _ask(self, line: bytes, timeout_s: float) -> dict[str, Any]:
        answer = None
        if self._idle:
            process = self._idle.pop()
            with contextlib.suppress(_Lost):
                answer = await _answer(process, line, LIFE_TIMEOUT_S, timeout_s)
        if answer is None:
            process = await self._made(await spawn())
            answer = await _answer(process, line, LIFE_TIMEOUT_S, timeout_s)
        self._idle.append(process)
        return answer

    async def _made(self, process: asyncio.subprocess.Process) -> asyncio.subprocess.Process:
        line = json.dumps(self.spec._asdict()).encode() + b"\n"
        try:
            made = await _answer(process, line, START_TIMEOUT_S, START_TIMEOUT_S)
            if "variables" not in made:
                await end(process)
                raise _Lost(made.get("error", "it was refused"))
        except TimeoutError as error:
            raise ModelFilesError(
                f"the chat template is not ready after {START_TIMEOUT_S:g} s: it seems to loop"
            ) from error
        except _Lost as error:
            raise ModelFilesError(f"the chat template cannot be used: {error}") from error
        self.variables = frozenset(made["variables"])
        return process


async def _answer(
    process: asyncio.subprocess.Process, line: bytes, life_s: float, answer_s: float
) -> dict[str, Any]:
    """The answer to a line. Raises _Lost where the process has ended or gives no sign of life within life_s, and
    TimeoutError where it takes longer than answer_s from there. A process without an answer, also where the caller is
    cancelled, is ended, because its answer may still come and would be read as the answer to another request."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        try:
            async with asyncio.timeout(life_s):
                process.stdin.write(line)
                await process.stdin.drain()
                lives = await process.stdout.readline()
        except TimeoutError:
            raise _Lost("the process gives no sign of life") from None
        async with asyncio.timeout(answer_s):
            said = await process.stdout.readline() if lives else b""
        return dict(json.loads(said))
    except BaseException as error:
        await end(process)
        # ValueError: no line, or one beyond the limit. RuntimeError: uvloop's, for a pipe that is closed already.
        if isinstance(error, ConnectionError | ValueError | RuntimeError):
            raise _Lost("the process that renders it ended") from None
        raise


async def spawn() -> asyncio.subprocess.Process:
    """A process that waits for its renderer's spec. The caller gives it to a RenderPool or to `end`."""
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "openinfer.frontend.render_process"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for the parent, which drains first
        limit=MAX_ANSWER_BYTES,
    )


async def end(process: asyncio.subprocess.Process) -> None:
    """Kill a process of `spawn`; one that has ended is no error."""
    if process.returncode is None:
        process.kill()
    await process.communicate()
