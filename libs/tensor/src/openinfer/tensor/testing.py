# ruff: noqa: N802
"""A CUDA driver for tests on machines without a GPU.

    with fake_driver() as fake:
        stream = Stream(Device("cuda"))

The fake keeps device memory in host memory, records calls and checks their arguments. Work on a stream runs only when
something waits for it, which is the most adverse schedule that a device could choose. Device addresses must lie in a
live allocation, streams and events must exist, and the calling thread must have a current context; otherwise the fake
answers with the error code that the driver would. The fake launches no kernels and captures no graphs.
"""

import ctypes
import struct
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from typing import Any

from openinfer.tensor import cuda


@contextmanager
def fake_driver() -> "Iterator[FakeDriver]":
    """Replace this process's CUDA driver by a fake for the length of the `with` block.

    Objects on a "cuda" device belong to the driver that they were made with: make and drop them inside the block.
    """
    fake, before = FakeDriver(), (cuda._driver, cuda._contexts)
    cuda._driver, cuda._contexts = fake, {}
    try:
        yield fake
    finally:
        cuda._driver, cuda._contexts = before


class CUresult(IntEnum):
    """The driver's status codes that the fake answers with."""

    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_INVALID_HANDLE = 400
    CUDA_ERROR_NOT_READY = 600
    CUDA_ERROR_ILLEGAL_ADDRESS = 700


class CUdevice_attribute(IntEnum):  # noqa: N801
    """The device attributes that the library asks for."""

    CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76
    CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 97


_ATTRIBUTES = {16: 132, 75: 9, 76: 0, 97: 232448}
_NO_CONTEXT_NEEDED = ("cuCtxSetCurrent", "cuDevice", "cuGetError")
"""The beginnings of the names of such calls."""


class _Queue:
    """The work of one stream; `done` entries of it have run."""

    def __init__(self, priority: int = 0) -> None:
        self.priority = priority
        self.work: list[Any] = []
        self.done = 0

    def run(self, upto: int) -> None:
        while self.done < upto:
            self.done += 1
            self.work[self.done - 1]()


class _Refused(Exception):
    def __init__(self, code: CUresult) -> None:
        self.code = code


class FakeDriver:
    """A stand-in for the module `cuda.bindings.driver`: `cuMemAlloc(64)` answers `(CUresult.CUDA_SUCCESS, address)`.

    `calls` has the name of every call so far. `fail[name] = code` makes a call fail. `total_memory` may be set.
    """

    CUresult = CUresult
    CUdevice_attribute = CUdevice_attribute
    total_memory = 1 << 30

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.fail: dict[str, CUresult] = {}
        self.device_memory: dict[int, Any] = {}
        self.pinned: dict[int, Any] = {}
        self.streams: dict[int, _Queue] = {0: _Queue()}
        self.events: dict[int, tuple[_Queue, int]] = {}
        self._next_handle = 100
        self._thread = threading.local()

    def count(self, name: str) -> int:
        """How often a driver function was called."""
        return self.calls.count(name)

    def live(self) -> tuple[int, int, int, int]:
        """(device allocations, pinned buffers, streams, events) not yet given back."""
        return len(self.device_memory), len(self.pinned), len(self.streams) - 1, len(self.events)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)
        work = getattr(self, "_" + name)

        def call(*args: Any) -> tuple[Any, ...]:
            self.calls.append(name)
            if name in self.fail:
                return self.fail[name], None
            if not name.startswith(_NO_CONTEXT_NEEDED) and getattr(self._thread, "context", None) is None:
                return CUresult.CUDA_ERROR_INVALID_CONTEXT, None
            try:
                out = work(*args)
            except _Refused as e:
                return e.code, None
            return (CUresult.CUDA_SUCCESS,) if out is None else (CUresult.CUDA_SUCCESS, *out)

        return call

    # errors, devices and contexts
    def _cuGetErrorName(self, code: int) -> tuple[bytes]:
        return (CUresult(code).name.encode(),)

    def _cuGetErrorString(self, code: int) -> tuple[bytes]:
        return (f"fake text of {int(code)}".encode(),)

    def _cuDeviceGet(self, index: int) -> tuple[int]:
        if index > 1:
            raise _Refused(CUresult.CUDA_ERROR_INVALID_VALUE)
        return (index,)

    def _cuDevicePrimaryCtxRetain(self, device: int) -> tuple[str]:
        return (f"context {device}",)

    def _cuCtxSetCurrent(self, context: str) -> None:
        self._thread.context = context

    def _cuCtxSynchronize(self) -> None:
        for queue in list(self.streams.values()):
            queue.run(len(queue.work))

    def _cuDeviceGetName(self, length: int, device: int) -> tuple[bytes]:
        return (f"Fake {device}".encode().ljust(length, b"\0"),)

    def _cuDeviceGetAttribute(self, key: int, device: int) -> tuple[int]:
        return (_ATTRIBUTES[key],)

    def _cuDeviceTotalMem(self, device: int) -> tuple[int]:
        return (self.total_memory,)

    def _cuMemGetInfo(self) -> tuple[int, int]:
        used = sum(len(b) for b in self.device_memory.values())
        return self.total_memory - used, self.total_memory

    # memory
    def _cuMemAlloc(self, nbytes: int) -> tuple[int]:
        if nbytes <= 0:
            raise _Refused(CUresult.CUDA_ERROR_INVALID_VALUE)
        if nbytes > self._cuMemGetInfo()[0]:
            raise _Refused(CUresult.CUDA_ERROR_OUT_OF_MEMORY)
        return (self._allocate(self.device_memory, nbytes),)

    def _cuMemFree(self, ptr: int) -> None:
        self._cuCtxSynchronize()
        del self.device_memory[ptr]

    def _cuMemHostAlloc(self, nbytes: int, flags: int) -> tuple[int]:
        return (self._allocate(self.pinned, nbytes),)

    def _cuMemFreeHost(self, ptr: int) -> None:
        del self.pinned[ptr]

    def _cuMemHostRegister(self, ptr: int, nbytes: int, flags: int) -> None:
        assert (ptr % 4096, nbytes % 4096) == (0, 0)
        self.pinned[ptr] = range(nbytes)

    def _cuMemHostUnregister(self, ptr: int) -> None:
        del self.pinned[ptr]

    @staticmethod
    def _allocate(table: dict[int, Any], nbytes: int) -> int:
        raw = (ctypes.c_uint8 * (nbytes + 256))()
        ptr = -(-ctypes.addressof(raw) // 256) * 256
        ctypes.memset(ptr, 0xCD, nbytes)  # fresh memory is never zero here
        table[ptr] = raw
        return ptr

    def _on_device(self, ptr: int, nbytes: int) -> None:
        if not any(p <= ptr and ptr + nbytes <= p + len(raw) - 256 for p, raw in self.device_memory.items()):
            raise _Refused(CUresult.CUDA_ERROR_INVALID_VALUE)

    def _cuMemcpyHtoDAsync(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        self._on_device(dst, nbytes)
        pinned = any(p <= src < p + len(raw) for p, raw in self.pinned.items())
        # Pageable memory is copied aside before the call returns.
        source = src if pinned else ctypes.string_at(src, nbytes)
        self._put(stream, lambda: ctypes.memmove(dst, source, nbytes))

    def _cuMemcpyDtoHAsync(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        self._on_device(src, nbytes)
        self._put(stream, lambda: ctypes.memmove(dst, src, nbytes))

    def _cuMemcpyDtoDAsync(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        self._on_device(dst, nbytes)
        self._cuMemcpyDtoHAsync(dst, src, nbytes, stream)

    def _cuMemsetD8Async(self, ptr: int, byte: int, nbytes: int, stream: int) -> None:
        self._on_device(ptr, nbytes)
        self._put(stream, lambda: ctypes.memset(ptr, byte, nbytes))

    # streams and events
    def _put(self, stream: int, work: Any) -> None:
        self._queue(stream).work.append(work)

    def _queue(self, stream: int) -> _Queue:
        if stream not in self.streams:
            raise _Refused(CUresult.CUDA_ERROR_INVALID_HANDLE)
        return self.streams[stream]

    def _cuStreamCreateWithPriority(self, flags: int, priority: int) -> tuple[int]:
        assert flags == 1, "streams must be non-blocking"
        self._next_handle += 1
        self.streams[self._next_handle] = _Queue(priority)
        return (self._next_handle,)

    def _cuStreamDestroy(self, stream: int) -> None:
        self._queue(stream)
        del self.streams[stream]

    def _cuStreamSynchronize(self, stream: int) -> None:
        queue = self._queue(stream)
        queue.run(len(queue.work))

    def _cuStreamWaitEvent(self, stream: int, event: int, flags: int) -> None:
        queue, upto = self.events[event]
        self._put(stream, lambda: queue.run(upto))

    def _cuEventCreate(self, flags: int) -> tuple[int]:
        self._next_handle += 1
        self.events[self._next_handle] = _Queue(), 0
        return (self._next_handle,)

    def _cuEventDestroy(self, event: int) -> None:
        del self.events[event]

    def _cuEventRecord(self, event: int, stream: int) -> None:
        queue = self._queue(stream)
        self.events[event] = (queue, len(queue.work))

    def _cuEventQuery(self, event: int) -> None:
        queue, upto = self.events[event]
        if queue.done < upto:
            raise _Refused(CUresult.CUDA_ERROR_NOT_READY)

    def _cuEventSynchronize(self, event: int) -> None:
        queue, upto = self.events[event]
        queue.run(upto)

    def _cuEventElapsedTime(self, start: int, end: int) -> tuple[float]:
        return (250.0,)


def _gguf_string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _gguf_value(given: Any) -> bytes:
    """A metadata value with its type before it."""
    if isinstance(given, bytes):
        return given
    for kind, number, code in ((bool, 7, "?"), (int, 4, "I"), (float, 6, "f")):
        if isinstance(given, kind):
            return struct.pack(f"<I{code}", number, given)
    if isinstance(given, str):
        return struct.pack("<I", 8) + _gguf_string(given)
    if given and isinstance(given[0], str):
        return struct.pack("<IIQ", 9, 8, len(given)) + b"".join(map(_gguf_string, given))
    return struct.pack("<IIQ", 9, 5, len(given)) + struct.pack(f"<{len(given)}i", *given)


def write_gguf(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, tuple[tuple[int, ...], int, bytes]],
    *,
    version: int = 3,
    counts: tuple[int, int] | None = None,
    places: Mapping[str, int] | None = None,
) -> Path:
    """Write a GGUF file. tensors: shape (row-major), type and bytes by name.

    counts: of tensors and pairs, and places: offsets of tensors, where the header should say something untrue.
    """
    number = counts or (len(tensors), len(metadata))
    head = b"GGUF" + struct.pack("<IQQ", version, *number)
    head += b"".join(_gguf_string(key) + _gguf_value(given) for key, given in metadata.items())
    data = b""
    for name, (shape, kind, raw) in tensors.items():
        data += b"\0" * (-len(data) % 32)
        offset = (places or {}).get(name, len(data))
        head += _gguf_string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], kind, offset)
        data += raw
    path.write_bytes(head + b"\0" * (-len(head) % 32) + data)
    return path
