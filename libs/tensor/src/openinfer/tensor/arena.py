"""Arena: one allocation, cut up front to back; and memory that can be given back as a whole, and taken again."""

import mmap
import sys
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from openinfer.tensor import cuda, dtypes
from openinfer.tensor.cuda import check
from openinfer.tensor.device import Closing, Device
from openinfer.tensor.dtypes import DType
from openinfer.tensor.errors import ClosedError, CudaError, DeviceError, OutOfMemory, ShapeError
from openinfer.tensor.memory import ALIGNMENT, Allocation, mappable, num_elements, open_to, or_out_of_memory
from openinfer.tensor.tensor import Tensor


class MappedMemory(Allocation):
    """Memory with `give_back` and `take_back`.

    cuda: a range of addresses (cuMemAddressReserve) over one allocation (cuMemCreate). cpu: an anonymous mapping. It is
    freed when the object is collected; the device must be idle then, and at every `give_back`. Raises OutOfMemory.
    """

    __slots__ = ("_handle", "_map", "_prop", "_size", "given_back")

    def __init__(self, device: Device, nbytes: int) -> None:
        if device.kind == "null":
            raise DeviceError("the null device has no pages to give back; use Memory")
        self.device, self.nbytes, self.given_back = device, nbytes, False
        self._array: np.ndarray[Any, Any] | None = None
        self._map: mmap.mmap | None = None
        if device.kind == "cpu":
            try:
                flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # shared pages would not go back
                self._map = mmap.mmap(-1, max(nbytes, 1), flags)
            except OSError as error:
                raise OutOfMemory(f"the host has no {nbytes} bytes left: {error}") from error
            self._array = np.frombuffer(self._map, np.uint8)
            self.ptr = int(self._array.ctypes.data)
            return
        context = cuda.make_current(device.index)
        cu = cuda.driver()
        self._prop, unit = mappable(device)
        self._size = -(-max(nbytes, 1) // unit) * unit
        self.ptr = int(check(cu.cuMemAddressReserve(self._size, unit, 0, 0), "cuMemAddressReserve"))
        self._handle = _Handle(cu, context, self.ptr, self._size)
        weakref.finalize(self, _Handle.free, self._handle).atexit = False
        self._handle.map(self._prop, device)

    def give_back(self) -> None:
        """Give the pages back, and lose their content. The addresses stay, and must not be used until `take_back`."""
        if self.given_back:
            raise DeviceError(f"the memory of {self.device} was given back already")
        if self._map is not None:
            self._map.madvise(mmap.MADV_DONTNEED)
        else:
            self._handle.unmap()
        self.given_back = True

    def take_back(self) -> None:
        """Take pages again, at the same addresses. Their content is not defined. Raises OutOfMemory."""
        if not self.given_back:
            raise DeviceError(f"the memory of {self.device} was not given back")
        if self._map is None:
            self._handle.map(self._prop, self.device)
        self.given_back = False


class _Handle:
    """The allocation under a range of addresses, or none."""

    def __init__(self, cu: Any, context: Any, address: int, size: int) -> None:
        self.cu, self.context, self.address, self.size = cu, context, address, size
        self.handle: Any = None

    def map(self, prop: Any, device: Device) -> None:
        cu = self.cu
        handle = or_out_of_memory(cu.cuMemCreate, (self.size, prop, 0), "cuMemCreate", device, self.size)
        try:
            check(cu.cuMemMap(self.address, self.size, 0, handle, 0), "cuMemMap")
        except CudaError:
            check(cu.cuMemRelease(handle), "cuMemRelease")  # so that a later try finds the range as it was
            raise
        self.handle = handle
        try:
            open_to(device, self.address, self.size)
        except CudaError:
            self.unmap()
            raise

    def unmap(self) -> None:
        if self.handle is not None:
            check(self.cu.cuMemUnmap(self.address, self.size), "cuMemUnmap")
            check(self.cu.cuMemRelease(self.handle), "cuMemRelease")
            self.handle = None

    def free(self) -> None:
        # Collection may run in a thread that never saw this device, so the context is made current again.
        check(self.cu.cuCtxSetCurrent(self.context), "cuCtxSetCurrent")
        self.unmap()
        check(self.cu.cuMemAddressFree(self.address, self.size), "cuMemAddressFree")


_UNBOUNDED = sys.maxsize // 2  # leaves every null address below 2**63


class Arena(Closing):
    """`capacity` bytes of device memory, handed out in order at stable addresses. Not thread-safe.

    On null the addresses are made up and `capacity_bytes` may be None for no bound: run an engine's
    allocations there and `used` is the memory it needs. (`capacity` is then a number no plan reaches.)
    Raises OutOfMemory at once where the device cannot give the whole capacity.

    mapped: `give_back` and `take_back` are possible, while addresses and tensors stay.

    `close()` (or leaving the `with` block) gives up the arena's hold; the memory goes back to the device
    when the last tensor that views it is gone.
    """

    __slots__ = ("_memory", "capacity", "device", "used")

    def __init__(self, device: Device, capacity_bytes: int | None, *, mapped: bool = False) -> None:
        if capacity_bytes is None and device.kind != "null":
            raise ShapeError(f"an arena on {device} needs a capacity in bytes; only null may be unbounded")
        if capacity_bytes is not None and capacity_bytes <= 0:
            raise ShapeError(f"an arena of {capacity_bytes} bytes; ask for at least one")
        self.device = device
        self.capacity = _UNBOUNDED if capacity_bytes is None else capacity_bytes
        self.used = 0
        reserve = 1 << 46 if capacity_bytes is None else capacity_bytes
        self._memory: Allocation | None = (MappedMemory if mapped else Allocation)(device, reserve)

    @property
    def remaining(self) -> int:
        """Bytes not handed out. The next allocation may lose up to 255 of them to alignment."""
        return self.capacity - self.used

    def alloc(self, shape: Sequence[int], dtype: DType | type | str, name: str = "") -> Tensor:
        """An uninitialised tensor at the next 256-byte boundary. Raises OutOfMemory, ClosedError, ShapeError."""
        memory = self._open()
        dtype, shape = dtypes.of(dtype), tuple(shape)
        nbytes = num_elements(shape) * dtype.itemsize
        start = -(-self.used // ALIGNMENT) * ALIGNMENT
        if start + nbytes > self.capacity:
            raise OutOfMemory(
                f"{name or 'tensor'} {dtype}{list(shape)} needs {nbytes} bytes; the arena on {self.device} "
                f"has used {self.used} of {self.capacity}; plan with a null arena, or make this one larger"
            )
        self.used = start + nbytes
        return Tensor(memory.ptr + start, shape, dtype, self.device, None, memory, name)

    @property
    def mapped(self) -> bool:
        """Whether the memory can be given back."""
        return isinstance(self._memory, MappedMemory)

    @property
    def base(self) -> int:
        """The address of the first byte. Raises ClosedError."""
        return self._open().ptr

    def give_back(self) -> None:
        """Give the device's memory back. Tensors keep their addresses and lose what they held. The device must be idle,
        and no tensor may be used until `take_back`. Raises DeviceError, ClosedError."""
        self._mapped().give_back()

    def take_back(self) -> None:
        """Take memory again at the same addresses. Tensors hold anything. Raises OutOfMemory, DeviceError."""
        self._mapped().take_back()

    def _mapped(self) -> MappedMemory:
        memory = self._open()
        if not isinstance(memory, MappedMemory):
            raise DeviceError(f"this arena on {self.device} cannot be given back; make it with mapped=True")
        return memory

    def _open(self) -> Allocation:
        if self._memory is None:
            raise ClosedError(f"this arena on {self.device} is closed; make a new one")
        return self._memory

    def close(self) -> None:
        """Give up the memory; see the class. Calling it again does nothing."""
        self._memory = None

    def __repr__(self) -> str:
        return f"Arena({self.device}, {self.used} of {self.capacity} bytes used)"
