"""Work on what a client sent that may take long, under a deadline: a thread that is told to stop, and does."""

import asyncio
import contextlib
import ctypes
import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from openinfer.frontend.errors import APIError

__all__ = ["in_thread", "larger_than"]

_Result = TypeVar("_Result")


class _Stop(BaseException):
    """Raised in the thread; not an Exception, so that the work does not take it for an error of its own."""


async def in_thread(work: Callable[[], _Result], timeout_s: float) -> _Result:
    """What `work` returns or raises; APIError (400) when it takes longer than timeout_s.

    The event loop goes on meanwhile, though the thread takes its share of the interpreter. At the deadline, or when the
    waiting task is cancelled, an exception is raised in the thread: Python code stops at its next instruction.
    """
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[_Result] = loop.create_future()
    lock, ended = threading.Lock(), threading.Event()

    def settle(result: Any, error: Exception | None) -> None:
        if outcome.done():
            return
        if error is None:
            outcome.set_result(result)
        else:
            outcome.set_exception(error)

    def run() -> None:
        result, error = None, None
        try:
            try:
                result = work()
            except Exception as raised:
                error = raised
            with lock:
                ended.set()
        except _Stop:
            return
        with contextlib.suppress(RuntimeError):  # the loop has closed: nobody waits any more
            loop.call_soon_threadsafe(settle, result, error)

    thread = threading.Thread(target=run, name="openinfer-render", daemon=True)
    thread.start()
    try:
        return await asyncio.wait_for(outcome, timeout_s)
    except TimeoutError as error:
        raise APIError(
            f"the chat takes longer than {timeout_s:g} s to be written as a prompt: shorten it",
            param="messages",
        ) from error
    finally:
        with lock:
            if not ended.is_set() and thread.ident is not None:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(thread.ident), ctypes.py_object(_Stop)
                )


def larger_than(limit: int, value: object) -> bool:
    """Whether a JSON value has more characters and items than `limit`; looks at no more than it needs to know."""
    left = limit
    values = [value]
    while values and left >= 0:
        one = values.pop()
        if isinstance(one, str):
            left -= len(one)
        elif isinstance(one, Mapping):
            left -= len(one)
            if left >= 0:
                values += one.keys()
                values += one.values()
        elif isinstance(one, list | tuple):
            left -= len(one)
            if left >= 0:
                values += one
    return left < 0
