"""MappedMemory: memory whose pages go back to the system while its addresses stay, as recorded graphs need them."""

import mmap
import weakref
from typing import Any

import numpy as np

from openinfer.tensor import cuda
from openinfer.tensor.cuda import check
from openinfer.tensor.device import Device
from openinfer.tensor.errors import CudaError, DeviceError, OutOfMemory
from openinfer.tensor.memory import Allocation


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
        self._prop = cu.CUmemAllocationProp()
        self._prop.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._prop.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._prop.location.id = device.index
        granularity = cu.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        unit = int(
            check(cu.cuMemGetAllocationGranularity(self._prop, granularity), "cuMemGetAllocationGranularity")
        )
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
        made = cu.cuMemCreate(self.size, prop, 0)
        if made[0] == cu.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            raise OutOfMemory(
                f"cuMemCreate of {self.size} bytes on {device}: too few are free; stop other processes on this device"
            )
        handle = check(made, "cuMemCreate")
        try:
            check(cu.cuMemMap(self.address, self.size, 0, handle, 0), "cuMemMap")
        except CudaError:
            check(cu.cuMemRelease(handle), "cuMemRelease")  # so that a later try finds the range as it was
            raise
        self.handle = handle
        access = cu.CUmemAccessDesc()
        access.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = device.index
        access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        try:
            check(cu.cuMemSetAccess(self.address, self.size, [access], 1), "cuMemSetAccess")
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
