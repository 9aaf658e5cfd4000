"""Device activity with times: kernels, copies and memsets as CUPTI times them, inside graphs too.

CUPTI is opened at run time, from the package nvidia-cuda-cupti or from a CUDA toolkit. It must be opened before the
first context is made. It makes every launch somewhat slower, so it is opened only on request.
"""

import ctypes
import importlib.util
import os
import struct
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from openinfer.tensor.errors import ActivityNotAvailable

_KINDS = {1: "copy", 2: "memset", 10: "kernel"}  # CUPTI_ACTIVITY_KIND_MEMCPY, _MEMSET, _CONCURRENT_KERNEL
_COPIES = {1: "copy to device", 2: "copy to host", 8: "copy on device"}  # CUpti_ActivityMemcpyKind

# Fields of the records that CUPTI 12 and 13 write (CUpti_ActivityKernel9, _Memcpy5, _Memset4 and what followed them,
# each of which only added at the end).
_TIMES = struct.Struct("<i12xQQ")  # kind; start, end: ns
_KERNEL = struct.Struct("<48xI40xI8xQ")  # stream, correlation, address of the name
_OTHER = struct.Struct("<4xB35xII")  # kind of a copy, stream, correlation

_kept: list[Any] = []  # CUPTI may call from threads of its own until the process ends

BUFFER_BYTES = 1 << 20
"""The size of one buffer that CUPTI fills: about 4,800 kernels."""
DISORDER_NS = 50_000_000
"""Activities come in the order of their start, and some of them late by up to this time."""

_REQUESTED = ctypes.CFUNCTYPE(
    None, ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_size_t), ctypes.POINTER(ctypes.c_size_t)
)
_COMPLETED = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t
)


class Activity(NamedTuple):
    """One thing that the device did. Times are time.perf_counter_ns(); all of one launch has one `correlation`."""

    kind: str
    """kernel, copy or memset."""
    name: str
    start_ns: int
    end_ns: int
    stream: int
    correlation: int


class ActivityRecorder:
    """Records what the devices of this process do, from now until `close`; the last `keep_bytes` of it are kept.

    One at a time in a process, opened before any context is made. Raises ActivityNotAvailable where there is no CUPTI
    or the driver does not let it work.
    """

    def __init__(self, keep_bytes: int = 64 << 20, *, library: Any = None) -> None:
        self._cupti = library if library is not None else _library()
        self._lent: dict[int, Any] = {}  # buffers that CUPTI has, by address
        self._full: deque[tuple[Any, int]] = deque(maxlen=max(1, keep_bytes // BUFFER_BYTES))
        callbacks = _REQUESTED(self._requested), _COMPLETED(self._completed)
        _kept.append(callbacks)
        self._call("cuptiActivityRegisterCallbacks", *callbacks)
        self._enabled: list[int] = []
        try:
            self.resume()
        except ActivityNotAvailable:
            self.pause()
            raise

    def resume(self) -> None:
        """Go on recording after `pause`."""
        for kind in _KINDS:
            if kind not in self._enabled:
                self._call("cuptiActivityEnable", kind)
                self._enabled.append(kind)

    def pause(self) -> None:
        """Record nothing until `resume`; what was recorded stays."""
        while self._enabled:
            self._call("cuptiActivityDisable", self._enabled.pop())

    def read(self) -> list[Activity]:
        """Finished activities in the order of their start; the next call gives only what is newer. Wait for the
        device first to have all."""
        offset = self._flush()
        found: list[Activity] = []
        while self._full:
            found += self._records(*self._full.popleft(), offset)
        return sorted(found, key=lambda a: a.start_ns)

    def since(self, start_ns: int) -> list[Activity]:
        """Finished activities that started at this time or later, in the order of their start. They stay for `read`.

        Buffers with older ones only are not looked at, because a look at all of them takes seconds."""
        offset = self._flush()
        found: list[Activity] = []
        for memory, valid in reversed(self._full):
            records = list(self._records(memory, valid, offset))
            found += (a for a in records if a.start_ns >= start_ns)
            if records and records[-1].start_ns < start_ns - DISORDER_NS:
                break
        return sorted(found, key=lambda a: a.start_ns)

    def close(self) -> None:
        """Stop recording, and take back what CUPTI holds."""
        self.pause()
        self._call("cuptiActivityFlushAll", 1)
        self._full.clear()

    def _requested(self, buffer: Any, size: Any, most: Any) -> None:
        memory = ctypes.create_string_buffer(BUFFER_BYTES + 8)
        address = -(-ctypes.addressof(memory) // 8) * 8
        self._lent[address] = memory
        buffer[0], size[0], most[0] = address, BUFFER_BYTES, 0

    def _completed(self, context: Any, stream: int, buffer: int, size: int, valid: int) -> None:
        memory = self._lent.pop(buffer)
        if valid:
            self._full.append((memory, valid))

    def _flush(self) -> int:
        """Have CUPTI deliver what it holds. Returns what its clock must be moved by to be the host's."""
        self._call("cuptiActivityFlushAll", 1)
        now, stamp = time.perf_counter_ns(), ctypes.c_uint64()
        self._call("cuptiGetTimestamp", ctypes.byref(stamp))
        return (now + time.perf_counter_ns()) // 2 - stamp.value

    def _records(self, memory: Any, valid: int, offset: int) -> Iterator[Activity]:
        base = ctypes.addressof(memory)
        buffer, size, record = ctypes.c_void_p(-(-base // 8) * 8), ctypes.c_size_t(valid), ctypes.c_void_p()
        following, place = self._cupti.cuptiActivityGetNextRecord, ctypes.byref(record)
        names: dict[int, str] = {0: "?"}
        while not following(buffer, size, place):
            at = (record.value or 0) - base
            kind, start, end = _TIMES.unpack_from(memory, at)
            if kind not in _KINDS or end <= start:  # not done yet: no times
                continue
            if kind == 10:
                stream, correlation, address = _KERNEL.unpack_from(memory, at)
                if address not in names:
                    names[address] = ctypes.string_at(address).decode()
                name = names[address]
            else:
                copied, stream, correlation = _OTHER.unpack_from(memory, at)
                name = _COPIES.get(copied, "copy") if kind == 1 else "memset"
            yield Activity(_KINDS[kind], name, start + offset, end + offset, stream, correlation)

    def _call(self, name: str, *args: Any) -> None:
        status = getattr(self._cupti, name)(*args)
        if status:
            text = ctypes.c_char_p()
            self._cupti.cuptiGetResultString(status, ctypes.byref(text))
            raise ActivityNotAvailable(f"{name} failed: {(text.value or b'').decode()} ({status})")


def _library() -> Any:
    """libcupti: the newest of the installed packages, else what the loader or CUDA_HOME has."""
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(folder) for folder in (spec.submodule_search_locations if spec else None) or ()]
    found = [str(file) for folder in folders for file in folder.glob("*/lib/libcupti.so.*")]
    found.sort(key=lambda file: int(file.rpartition(".")[2]), reverse=True)
    toolkit = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    problems = []
    for name in (*found, "libcupti.so", str(toolkit / "extras/CUPTI/lib64/libcupti.so")):
        try:
            return ctypes.CDLL(name)
        except OSError as error:
            problems.append(str(error))
    raise ActivityNotAvailable(f"no libcupti ({problems[-1]}); run: pip install 'openinfer-tensor[cupti]'")
