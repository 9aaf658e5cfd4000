"""The CPU cores of this process: how many there are, and work that is divided among them.

BLAS's own threads wait by spinning: beside other programs a product took thirty times as long with two of them as with
one. So BLAS has one thread, and helpers here sleep while they wait. A caller that is through with its own share does
what no helper has begun.
"""

import ctypes
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

Job = Callable[[], None]


class HostWay(NamedTuple):
    """How references compute: on how many threads, and whether a row may depend on the others of its step."""

    threads: int = 1
    batch_invariant: bool = True


class _Call(NamedTuple):
    """Jobs of one call of `together`; no thread takes those of another in between."""

    left: deque[Job]
    way: HostWay
    ended: SimpleQueue[BaseException | None]


HOST_WAY = ContextVar("host way", default=HostWay())  # noqa: B039 (it is immutable)
_calls: SimpleQueue[_Call] = SimpleQueue()
_helpers: list[threading.Thread] = []


def usable_cores(root: Path = Path("/")) -> int:
    """Cores that this process may use: by its affinity and the CPU quotas of its control groups (below `root`), and at
    most OPENBLAS_NUM_THREADS."""
    given = os.environ.get("OPENBLAS_NUM_THREADS", "")
    found = [len(os.sched_getaffinity(0)), *_quotas(root), *([int(given)] if given.isdigit() else [])]
    return max(1, min(found))


def _quotas(root: Path) -> Iterator[int]:
    """Cores of each control group with a quota around this process, in the first or the second version's files."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for _, controllers, own in (line.split(":", 2) for line in lines):
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / ("cpu" if controllers else "")
        below = Path(own.strip("/"))
        for folder in (top / below, *(top / one for one in below.parents)):
            files = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if controllers else ("cpu.max",)
            try:
                quota, period = " ".join((folder / name).read_text() for name in files).split()
            except (OSError, ValueError):
                continue
            if quota.isdigit():  # "max" and -1 are none
                yield math.ceil(int(quota) / int(period))


@cache
def lone_blas() -> bool:
    """Give numpy's OpenBLAS one thread; False where numpy has another BLAS, which then threads as it likes."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    for path in dict.fromkeys(line.split()[-1] for line in maps if "openblas" in line):
        library = ctypes.CDLL(path)
        for name in (
            "scipy_openblas_set_num_threads64_",
            "openblas_set_num_threads64_",
            "openblas_set_num_threads",
        ):
            if hasattr(library, name):
                getattr(library, name)(1)
                return True
    return False


def together(jobs: Sequence[Job]) -> None:
    """Run jobs that do not depend on each other, on the threads of HOST_WAY. Each job has one thread for what it calls.
    Returns when all have ended; raises what one raised."""
    way = HOST_WAY.get()
    if way.threads == 1 or len(jobs) < 2:
        for job in jobs:
            job()
        return
    while len(_helpers) < way.threads - 1:
        _helpers.append(threading.Thread(target=_help, name="cores", daemon=True))
        _helpers[-1].start()
    call = _Call(deque(jobs), way._replace(threads=1), SimpleQueue())
    for _ in range(min(way.threads, len(jobs)) - 1):
        _calls.put(call)
    token = HOST_WAY.set(way)
    _work(*call)
    HOST_WAY.reset(token)
    errors = [call.ended.get() for _ in jobs]
    for error in errors:
        if error is not None:
            raise error


def _help() -> None:
    while True:
        _work(*_calls.get())


def _work(left: deque[Job], way: HostWay, ended: SimpleQueue[BaseException | None]) -> None:
    """Run what is left of a call, until nothing is."""
    HOST_WAY.set(way)
    while left:
        try:
            job = left.popleft()
        except IndexError:  # another thread took the last one
            return
        try:
            job()
        except BaseException as error:  # its caller raises it
            ended.put(error)
        else:
            ended.put(None)
