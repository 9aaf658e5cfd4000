"""Owners of bytes: device allocations and page-locked host buffers.

Memory goes back when nothing refers to it any more. `close()` gives up one reference; tensors, numpy views
and DLPack capsules hold their own, so none of them can dangle.
"""

import functools
import math
import platform
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from openinfer.tensor import cuda
from openinfer.tensor.device import Closing, Device
from openinfer.tensor.dtypes import DType
from openinfer.tensor.errors import ClosedError, CudaError, OutOfMemory, ShapeError

ALIGNMENT = 256  # bytes; what cuMemAlloc guarantees, and enough for any vector load or TMA descriptor
_PORTABLE = 1  # CU_MEMHOSTALLOC_PORTABLE: page-locked for every context of the process

_IN_ORDER = platform.machine() in ("x86_64", "AMD64")

_null_next = 1 << 40
_null_lock = threading.Lock()


def memory_fence() -> None:
    """Other processes see what this one has written to shared memory before what it writes afterwards, and this one
    reads afterwards what they had written before it. x86 keeps this order by itself; other processors keep it around a
    lock that is let go and taken again."""
    if not _IN_ORDER:
        lock = threading.Lock()
        lock.acquire()
        lock.release()
        lock.acquire()


class Allocation:
    """`nbytes` bytes on `device` from `ptr` on (256-byte aligned), freed when the object is collected.

    cuda: one cuMemAlloc. cpu: one numpy array. null: addresses of no other allocation, no memory. Raises OutOfMemory.
    """

    __slots__ = ("__weakref__", "_array", "device", "nbytes", "ptr")

    def __init__(self, device: Device, nbytes: int) -> None:
        self.device = device
        self.nbytes = nbytes
        self._array: np.ndarray[Any, Any] | None = None
        if device.kind == "null":
            global _null_next
            with _null_lock:
                self.ptr = _null_next
                _null_next += -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT
        elif device.kind == "cpu":
            self._array, self.ptr = _aligned(nbytes)
        else:
            context = cuda.make_current(device.index)
            cu = cuda.driver()
            size = max(nbytes, 1)
            self.ptr = int(or_out_of_memory(cu.cuMemAlloc, (size,), "cuMemAlloc", device, nbytes))
            weakref.finalize(self, _free, cu, context, self.ptr, "cuMemFree").atexit = False


class HostView:
    """An array interface over foreign host memory, which keeps `owner` alive."""

    __slots__ = ("__array_interface__", "__weakref__", "owner")

    def __init__(
        self, ptr: int, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int, owner: object
    ) -> None:
        self.owner = owner
        self.__array_interface__ = {
            "version": 3,
            "shape": shape,
            "typestr": f"|V{itemsize}",
            "strides": tuple(s * itemsize for s in strides),
            "data": (ptr, False),
        }


def host_array(
    ptr: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: DType, owner: object
) -> np.ndarray[Any, Any]:
    """A writable numpy view of host memory (`strides` in elements); it holds `owner`."""
    return np.asarray(HostView(ptr, shape, strides, dtype.itemsize, owner)).view(dtype)


class PinnedBuffer(Closing):
    """Page-locked host memory, which a device copies from and to while the host works; plain on cpu and null.

    `array` is a writable uint8 view of `nbytes` bytes; it and views of it keep the memory alive after
    `close()`. Page-locking is slow: make these once. Raises OutOfMemory.
    """

    __slots__ = ("_array", "device", "nbytes")

    def __init__(self, device: Device, nbytes: int) -> None:
        if nbytes <= 0:
            raise ShapeError(f"a pinned buffer of {nbytes} bytes; ask for at least one")
        self.device = device
        self.nbytes = nbytes
        self._array: np.ndarray[Any, Any] | None
        if device.kind != "cuda":
            self._array, _ = _aligned(nbytes)
            return
        context = cuda.make_current(device.index)
        cu = cuda.driver()
        ptr = int(or_out_of_memory(cu.cuMemHostAlloc, (nbytes, _PORTABLE), "cuMemHostAlloc", device, nbytes))
        view = HostView(ptr, (nbytes,), (1,), 1, None)
        weakref.finalize(view, _free, cu, context, ptr, "cuMemFreeHost").atexit = False
        self._array = np.asarray(view).view(np.uint8)

    @classmethod
    def over(cls, device: Device, memory: np.ndarray[Any, Any]) -> "PinnedBuffer":
        """Lock memory that exists, uint8 `[nbytes]`, for example memory that processes share. Its address and size must
        be multiples of 4,096. The memory is unlocked when the buffer and all views of it are gone. Raises OutOfMemory.
        """
        made = cls.__new__(cls)
        made.device, made.nbytes, made._array = device, memory.nbytes, memory
        if device.kind == "cuda":
            context, ptr = cuda.make_current(device.index), int(memory.ctypes.data)
            cu = cuda.driver()
            args = (ptr, memory.nbytes, _PORTABLE)
            or_out_of_memory(cu.cuMemHostRegister, args, "cuMemHostRegister", device, memory.nbytes)
            view = HostView(ptr, (memory.nbytes,), (1,), 1, memory)
            weakref.finalize(view, _free, cu, context, ptr, "cuMemHostUnregister").atexit = False
            made._array = np.asarray(view).view(np.uint8)
        return made

    @property
    def array(self) -> np.ndarray[Any, Any]:
        """The buffer as uint8 `[nbytes]`."""
        if self._array is None:
            raise ClosedError("this pinned buffer is closed; make a new one")
        return self._array

    @property
    def ptr(self) -> int:
        """Its address, the same on host and device."""
        return int(self.array.ctypes.data)

    def close(self) -> None:
        """Let go of the memory. Wait for copies that use it first. Calling it again does nothing."""
        self._array = None


def mappable(device: Device) -> tuple[Any, int]:
    """The CUmemAllocationProp of memory on a GPU that can be mapped, and the unit of its sizes in bytes."""
    cu = cuda.driver()
    prop = cu.CUmemAllocationProp()
    prop.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    prop.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    prop.location.id = device.index
    kind = cu.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
    found = cu.cuMemGetAllocationGranularity(prop, kind)
    return prop, int(cuda.check(found, "cuMemGetAllocationGranularity"))


def open_to(device: Device, address: int, nbytes: int) -> None:
    """Let a GPU read and write what cuMemMap has put at an address."""
    cu = cuda.driver()
    access = cu.CUmemAccessDesc()
    access.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = device.index
    access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    cuda.check(cu.cuMemSetAccess(address, nbytes, [access], 1), "cuMemSetAccess")


@functools.lru_cache(4096)
def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides, in elements."""
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= max(int(n), 1)  # a numpy int would come back for a shape of ints, which is equal
    return tuple(reversed(strides))


def num_elements(shape: tuple[int, ...]) -> int:
    """Elements of a shape. Raises ShapeError for a negative axis."""
    if any(n < 0 for n in shape):
        raise ShapeError(f"shape {shape} has a negative axis")
    return math.prod(shape)


def _aligned(nbytes: int) -> tuple[np.ndarray[Any, Any], int]:
    try:
        raw = np.empty(nbytes + ALIGNMENT, np.uint8)
    except MemoryError as e:
        raise OutOfMemory(f"the host has no {nbytes} bytes left") from e
    start = -raw.ctypes.data % ALIGNMENT
    array = raw[start : start + nbytes]
    return array, int(raw.ctypes.data) + start


def or_out_of_memory(
    function: Callable[..., tuple[Any, ...]], args: tuple[Any, ...], call: str, device: Device, nbytes: int
) -> Any:
    try:
        return cuda.check(function(*args), call)
    except CudaError as e:
        if e.code == "CUDA_ERROR_OUT_OF_MEMORY":
            free, total = cuda.check(cuda.driver().cuMemGetInfo(), "cuMemGetInfo")
            raise OutOfMemory(
                f"{call} of {nbytes} bytes on {device}: {free} of {total} device bytes are free; ask for "
                "less, or stop other processes on this device"
            ) from e
        raise


def _free(cu: Any, context: Any, ptr: int, call: str) -> None:
    # Collection may run in a thread that never saw this device, so the context is made current again.
    cuda.check(cu.cuCtxSetCurrent(context), "cuCtxSetCurrent")
    cuda.check(getattr(cu, call)(ptr), call)
