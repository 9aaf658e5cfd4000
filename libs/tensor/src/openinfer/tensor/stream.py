"""Stream and Event: order on a device, and the only places where the host waits for it."""

import ctypes
import time
from typing import Literal

from openinfer.tensor import cuda
from openinfer.tensor.device import Closing, Device
from openinfer.tensor.errors import ClosedError, DeviceError, ShapeError, TensorError

CopyKind = Literal["h2d", "d2h", "d2d"]
_COPIES = {"h2d": "cuMemcpyHtoDAsync", "d2h": "cuMemcpyDtoHAsync", "d2d": "cuMemcpyDtoDAsync"}

_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: no implicit order with the legacy default stream
_DISABLE_TIMING = 2  # CU_EVENT_DISABLE_TIMING


class Stream(Closing):
    """A queue of device work. cuda: a non-blocking stream; cpu: work is done at once; null: nothing is done.

    `priority`: a GPU takes the blocks of kernels of the lowest number first; 0 is the highest number, and what is below
    the device's range (H200: -5) means its end. `close()`, or leaving the `with` block, waits for the work put on it
    and destroys it.
    """

    __slots__ = ("_handle", "device")

    def __init__(self, device: Device, priority: int = 0) -> None:
        if priority > 0:
            raise DeviceError(f"a stream's priority is {priority}; it is 0 or, for a higher one, negative")
        self.device = device
        self._handle: int | None = 0
        if device.kind == "cuda":
            device.activate()
            made = cuda.driver().cuStreamCreateWithPriority(_NON_BLOCKING, priority)
            self._handle = int(cuda.check(made, "cuStreamCreateWithPriority"))

    @property
    def handle(self) -> int:
        """The CUstream as an int, 0 on cpu and null. Raises ClosedError once closed (0 would be a real stream)."""
        if self._handle is None:
            raise ClosedError(f"this stream of {self.device} is closed; make a new one")
        return self._handle

    def synchronize(self) -> None:
        """Wait until all work put on this stream is done. Failures of that work surface here as CudaError."""
        handle = self.handle
        if self.device.kind == "cuda":
            cuda.check(cuda.driver().cuStreamSynchronize(handle), "cuStreamSynchronize")

    def wait(self, event: "Event") -> None:
        """Let later work of this stream start only after `event`. The host does not wait."""
        handle, mark = self.handle, event.handle
        if self.device.kind == "cuda":
            cuda.check(cuda.driver().cuStreamWaitEvent(handle, mark, 0), "cuStreamWaitEvent")

    def copy_async(self, dst_ptr: int, src_ptr: int, nbytes: int, kind: CopyKind) -> None:
        """Copy `nbytes` between two addresses ("h2d", "d2h" or "d2d", one device). Addresses are not checked.

        Host memory must not change until the copy is done. It should be page-locked, because from pageable
        memory the driver copies twice and may block.
        """
        if kind not in _COPIES:
            raise DeviceError(f'unknown copy kind {kind!r}; use "h2d", "d2h" or "d2d"')
        if nbytes < 0:
            raise ShapeError(f"cannot copy {nbytes} bytes")
        handle = self.handle
        if self.device.kind == "cuda":
            call = _COPIES[kind]
            cuda.check(getattr(cuda.driver(), call)(dst_ptr, src_ptr, nbytes, handle), call)
        elif self.device.kind == "cpu":
            ctypes.memmove(dst_ptr, src_ptr, nbytes)

    def memset_async(self, ptr: int, byte: int, nbytes: int) -> None:
        """Set `nbytes` bytes at `ptr` to `byte` (0..255)."""
        if not 0 <= byte <= 255 or nbytes < 0:
            raise ShapeError(f"cannot set {nbytes} bytes to {byte}; a byte is 0..255, a count not negative")
        handle = self.handle
        if self.device.kind == "cuda":
            cuda.check(cuda.driver().cuMemsetD8Async(ptr, byte, nbytes, handle), "cuMemsetD8Async")
        elif self.device.kind == "cpu":
            ctypes.memset(ptr, byte, nbytes)

    def close(self) -> None:
        """Wait for the work, then destroy the stream. Calling it again does nothing."""
        if self._handle is None:
            return
        handle = self._handle
        try:
            self.device.activate()
            self.synchronize()
        finally:
            self._handle = None
            if self.device.kind == "cuda":
                cuda.check(cuda.driver().cuStreamDestroy(handle), "cuStreamDestroy")

    def __repr__(self) -> str:
        return f"Stream({self.device}, {'closed' if self._handle is None else hex(self._handle)})"


class Event(Closing):
    """A mark in a stream. `timing=True` lets `elapsed_s` measure between two; without it an event is cheaper.

    On cpu and null an event is done once it is recorded.
    """

    __slots__ = ("_handle", "_recorded_s", "device", "timing")

    def __init__(self, device: Device, timing: bool = False) -> None:
        self.device = device
        self.timing = timing
        self._handle: int | None = 0
        self._recorded_s: float | None = None
        if device.kind == "cuda":
            device.activate()
            flags = 0 if timing else _DISABLE_TIMING
            self._handle = int(cuda.check(cuda.driver().cuEventCreate(flags), "cuEventCreate"))

    @property
    def handle(self) -> int:
        """The CUevent as an int, 0 on cpu and null. Raises ClosedError once closed."""
        if self._handle is None:
            raise ClosedError(f"this event of {self.device} is closed; make a new one")
        return self._handle

    def record(self, stream: Stream) -> None:
        """Put the mark after all work now on `stream`. Recording again moves it."""
        handle, queue = self.handle, stream.handle
        if self.device.kind == "cuda":
            cuda.check(cuda.driver().cuEventRecord(handle, queue), "cuEventRecord")
        self._recorded_s = time.perf_counter()

    def query(self) -> bool:
        """Whether the work before the mark is done; True if it was never recorded. Does not wait."""
        handle = self.handle
        if self.device.kind != "cuda":
            return True
        cu = cuda.driver()
        result = cu.cuEventQuery(handle)
        if result[0] == cu.CUresult.CUDA_ERROR_NOT_READY:
            return False
        cuda.check(result, "cuEventQuery")
        return True

    def synchronize(self) -> None:
        """Wait until the work before the mark is done; returns at once if it was never recorded."""
        handle = self.handle
        if self.device.kind == "cuda":
            cuda.check(cuda.driver().cuEventSynchronize(handle), "cuEventSynchronize")

    def elapsed_s(self, since: "Event") -> float:
        """Seconds of device time from `since` to this event. Both: timing=True, recorded, and done."""
        if not (self.timing and since.timing):
            raise TensorError("elapsed_s needs two events made with timing=True")
        if self._recorded_s is None or since._recorded_s is None:
            raise TensorError("elapsed_s needs two recorded events; call record(stream) on both first")
        start, end = since.handle, self.handle
        if self.device.kind != "cuda":
            return self._recorded_s - since._recorded_s
        return 1e-3 * float(cuda.check(cuda.driver().cuEventElapsedTime(start, end), "cuEventElapsedTime"))

    def close(self) -> None:
        """Destroy the event; pending work is not disturbed. Calling it again does nothing."""
        if self._handle is None:
            return
        handle, self._handle = self._handle, None
        if self.device.kind == "cuda":
            self.device.activate()
            cuda.check(cuda.driver().cuEventDestroy(handle), "cuEventDestroy")

    def __repr__(self) -> str:
        return f"Event({self.device}, timing={self.timing}{', closed' if self._handle is None else ''})"
