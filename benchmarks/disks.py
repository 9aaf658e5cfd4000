"""The long prompt from a disk, for benchmarks/tiers.py; also from one whose speed is given."""

from __future__ import annotations

import concurrent.futures
import contextlib
import mmap
import os
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from driven import LONG, Driven, Json, loaded, loads_seen

from openinfer.kvpool.tiers import disk, record
from openinfer.kvpool.tiers.layout import ALIGNMENT

PACE = 5e9
"""Bytes a second of the disk that `paced` stands for."""


class Paced:
    """`os` with reads of at most PACE bytes a second, in all threads together."""

    def __init__(self) -> None:
        self._free, self._lock = 0.0, threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def preadv(self, fd: int, rooms: Sequence[Any], offset: int) -> int:
        began = time.perf_counter()
        count = os.preadv(fd, rooms, offset)
        with self._lock:
            self._free = max(self._free, began) + count / PACE
            wait = self._free - time.perf_counter()
        if wait > 0:
            time.sleep(wait)
        return count


@contextlib.contextmanager
def paced() -> Iterator[None]:
    """Disk tiers that are opened within read from the page cache, and as slowly as a disk of PACE."""
    before = disk.takes_direct, record.os
    disk.takes_direct, record.os = lambda folder: "paced", Paced()  # type: ignore[assignment]
    try:
        yield
    finally:
        disk.takes_direct, record.os = before


def from_disk(one: Driven) -> Json:
    """The long prompt from the disk, beside the same files read by nothing but threads."""
    found: Json = {"locked_after_s": one.wait_for_memory()}
    documents = [one.prompt(LONG) for _ in range(2)]
    for document in documents:
        one.run(document)
    tiers, pool = one.tiers, one.engine.pool
    written, began = tiers.stats.to_disk, time.perf_counter()
    type(tiers).keep(tiers, pool, 25.0)
    while tiers._disk.num_writing or tiers._saves:
        tiers._collect(0.001)
    seconds = time.perf_counter() - began
    found["write_gb_per_s"] = (tiers.stats.to_disk - written) * one.page_bytes / seconds / 1e9
    paths = sorted(tiers._disk.folder.glob("??/*"), key=lambda path: path.stat().st_mtime)[-LONG // 16 :]
    found["loaded"], found["bare"] = [], []
    for turn in range(4):
        tiers.take_all(pool)
        while tiers._disk.num_writing or tiers._saves:
            tiers._collect(0.001)
        tiers._host.clear()
        with loads_seen() as seen:
            found["loaded"].append(loaded(one, [one.run(documents[turn % 2])], seen))
        found["bare"].append(bare_reads(paths, one.page_bytes, 8 if turn % 2 else 4))
    data = os.urandom(1 << 20) * 32
    began = time.perf_counter()
    zlib.crc32(data)
    found["crc32_gb_per_s"] = len(data) / (time.perf_counter() - began) / 1e9
    return found


def bare_reads(paths: Sequence[Path], nbytes: int, threads: int) -> Json:
    """The time to read these files as the tier reads them, in threads that do nothing else."""
    flags = os.O_RDONLY if isinstance(record.os, Paced) else os.O_RDONLY | os.O_DIRECT

    def work(mine: Sequence[Path]) -> None:
        room = mmap.mmap(-1, ALIGNMENT + nbytes)
        for path in mine:
            fd = os.open(path, flags)
            record.os.preadv(fd, [room], 0)
            os.close(fd)

    began = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, [paths[n::threads] for n in range(threads)]))
    seconds = time.perf_counter() - began
    rate = len(paths) * nbytes / seconds / 1e9
    return {"files": len(paths), "threads": threads, "ms": 1e3 * seconds, "gb_per_s": rate}
