"""Stream and Event: order on a device, and the only places where the host waits for it."""

from __future__ import annotations

import ctypes
import time
from typing import Literal

from openinfer.tensor import cuda
from openinfer.tensor.device import Device
from openinfer.tensor.errors import ClosedError, DeviceError, ShapeError, TensorError

CopyKind = Literal["h2d", "d2h", "d2d"]

_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: no implicit order with the legacy default stream
_DISABLE_TIMING = 2  # CU_EVENT_DISABLE_TIMING


class Stream:
    """A queue of device work. cuda: a non-blocking stream; cpu: work is done at once; null: nothing is done.

    `handle` is the CUstream as an int (0 on cpu and null). `close()`, or leaving its `with` block, waits for
    the work put on it and destroys it.
    """

    __slots__ = ("_closed", "device", "handle")

    def __init__(self, device: Device) -> None:
        self.device = device
        self.handle = 0
        self._closed = False
        if device.kind == "cuda":
            device.activate()
            self.handle = int(cuda.check(cuda.driver().cuStreamCreate(_NON_BLOCKING), "cuStreamCreate"))

    def synchronize(self) -> None:
        """Wait until all work put on this stream is done. Failures of that work surface here as CudaError."""
        if self._on_cuda():
            cuda.check(cuda.driver().cuStreamSynchronize(self.handle), "cuStreamSynchronize")

    def wait(self, event: Event) -> None:
        """Let later work of this stream start only after `event`. The host does not wait."""
        if self._on_cuda():
            cuda.check(cuda.driver().cuStreamWaitEvent(self.handle, event.handle, 0), "cuStreamWaitEvent")

    def copy_async(self, dst_ptr: int, src_ptr: int, nbytes: int, kind: CopyKind) -> None:
        """Copy `nbytes` between two addresses ("h2d", "d2h" or "d2d", one device). Addresses are not checked.

        Host memory must stay as it is until the copy is done, and should be page-locked: from pageable memory
        the driver copies twice and may block.
        """
        if kind not in ("h2d", "d2h", "d2d"):
            raise DeviceError(f'unknown copy kind {kind!r}; use "h2d", "d2h" or "d2d"')
        if nbytes < 0:
            raise ShapeError(f"cannot copy {nbytes} bytes")
        if self._on_cuda():
            cu = cuda.driver()
            if kind == "h2d":
                cuda.check(cu.cuMemcpyHtoDAsync(dst_ptr, src_ptr, nbytes, self.handle), "cuMemcpyHtoDAsync")
            elif kind == "d2h":
                cuda.check(cu.cuMemcpyDtoHAsync(dst_ptr, src_ptr, nbytes, self.handle), "cuMemcpyDtoHAsync")
            else:
                cuda.check(cu.cuMemcpyDtoDAsync(dst_ptr, src_ptr, nbytes, self.handle), "cuMemcpyDtoDAsync")
        elif self.device.kind == "cpu":
            ctypes.memmove(dst_ptr, src_ptr, nbytes)

    def memset_async(self, ptr: int, byte: int, nbytes: int) -> None:
        """Set `nbytes` bytes at `ptr` to `byte` (0..255)."""
        if not 0 <= byte <= 255 or nbytes < 0:
            raise ShapeError(
                f"cannot set {nbytes} bytes to {byte}; a byte is 0..255 and a count is not negative"
            )
        if self._on_cuda():
            cuda.check(cuda.driver().cuMemsetD8Async(ptr, byte, nbytes, self.handle), "cuMemsetD8Async")
        elif self.device.kind == "cpu":
            ctypes.memset(ptr, byte, nbytes)

    def close(self) -> None:
        """Wait for the work, then destroy the stream. Calling it again does nothing."""
        if not self._closed:
            if self.device.kind == "cuda":
                self.device.activate()
                self.synchronize()
                cuda.check(cuda.driver().cuStreamDestroy(self.handle), "cuStreamDestroy")
            # A closed handle of 0 would be the legacy default stream, so methods refuse instead.
            self._closed, self.handle = True, 0

    def _on_cuda(self) -> bool:
        if self._closed:
            raise ClosedError(f"this stream of {self.device} is closed; make a new one")
        return self.device.kind == "cuda"

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Stream({self.device}, {'closed' if self._closed else hex(self.handle)})"


class Event:
    """A mark in a stream. `timing=True` lets `elapsed_s` measure between two; without it an event is cheaper.

    On cpu and null an event is done as soon as it is recorded.
    """

    __slots__ = ("_closed", "_recorded_s", "device", "handle", "timing")

    def __init__(self, device: Device, timing: bool = False) -> None:
        self.device = device
        self.timing = timing
        self.handle = 0
        self._closed = False
        self._recorded_s: float | None = None
        if device.kind == "cuda":
            device.activate()
            flags = 0 if timing else _DISABLE_TIMING
            self.handle = int(cuda.check(cuda.driver().cuEventCreate(flags), "cuEventCreate"))

    def record(self, stream: Stream) -> None:
        """Put the mark after all work now on `stream`. Recording again moves it."""
        if self._on_cuda():
            cuda.check(cuda.driver().cuEventRecord(self.handle, stream.handle), "cuEventRecord")
        self._recorded_s = time.perf_counter()

    def query(self) -> bool:
        """Whether the work before the mark is done; True if it was never recorded. Does not wait."""
        if not self._on_cuda():
            return True
        cu = cuda.driver()
        result = cu.cuEventQuery(self.handle)
        if result[0] == cu.CUresult.CUDA_ERROR_NOT_READY:
            return False
        cuda.check(result, "cuEventQuery")
        return True

    def synchronize(self) -> None:
        """Wait until the work before the mark is done; returns at once if it was never recorded."""
        if self._on_cuda():
            cuda.check(cuda.driver().cuEventSynchronize(self.handle), "cuEventSynchronize")

    def elapsed_s(self, since: Event) -> float:
        """Seconds of device time from `since` to this event. Both: timing=True, recorded, and done."""
        if not (self.timing and since.timing):
            raise TensorError("elapsed_s needs two events made with timing=True")
        if self._recorded_s is None or since._recorded_s is None:
            raise TensorError("elapsed_s needs two recorded events; call record(stream) on both first")
        if not self._on_cuda():
            return self._recorded_s - since._recorded_s
        result = cuda.driver().cuEventElapsedTime(since.handle, self.handle)
        return float(cuda.check(result, "cuEventElapsedTime")) * 1e-3

    def close(self) -> None:
        """Destroy the event; pending work is not disturbed. Calling it again does nothing."""
        if not self._closed:
            if self.device.kind == "cuda":
                self.device.activate()
                cuda.check(cuda.driver().cuEventDestroy(self.handle), "cuEventDestroy")
            self._closed, self.handle = True, 0

    def _on_cuda(self) -> bool:
        if self._closed:
            raise ClosedError(f"this event of {self.device} is closed; make a new one")
        return self.device.kind == "cuda"

    def __enter__(self) -> Event:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Event({self.device}, timing={self.timing}{', closed' if self._closed else ''})"
