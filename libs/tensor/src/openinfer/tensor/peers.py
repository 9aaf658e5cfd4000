"""PeerMemory: a segment of a GPU's memory that the GPUs of other processes read and write."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from typing import Any

from openinfer.tensor import cuda
from openinfer.tensor.cuda import check
from openinfer.tensor.device import Device


class PeerMemory:
    """`nbytes` of zeros on `device`, which other processes of the host map by the descriptor of `export`.

    The memory is virtual (cuMemCreate) and has a POSIX descriptor for its handle. `connect` maps the segments of all
    ranks; `addresses` then has where each of them is in this process. It is freed when the object is collected; the
    device must be idle then.
    """

    def __init__(self, device: Device, nbytes: int) -> None:
        self.device = device
        cuda.activate(device.index)
        self._cu = cu = cuda.driver()
        kinds, places = cu.CUmemAllocationType, cu.CUmemLocationType
        prop = cu.CUmemAllocationProp()
        prop.type = kinds.CU_MEM_ALLOCATION_TYPE_PINNED
        prop.location.type = places.CU_MEM_LOCATION_TYPE_DEVICE
        prop.location.id = device.index
        self._handle_type = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        prop.requestedHandleTypes = self._handle_type
        granularity = cu.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        unit = check(cu.cuMemGetAllocationGranularity(prop, granularity), "cuMemGetAllocationGranularity")
        self._unit, self.nbytes = int(unit), -(-nbytes // int(unit)) * int(unit)
        self._handle = check(cu.cuMemCreate(self.nbytes, prop, 0), "cuMemCreate")
        self._own = self._map(self._handle)
        check(cu.cuMemsetD8(self._own, 0, self.nbytes), "cuMemsetD8")
        check(cu.cuCtxSynchronize(), "cuCtxSynchronize")
        self.addresses: tuple[int, ...] = ()

    def export(self) -> int:
        """A descriptor of the segment, for the `connect` of other processes. The caller closes it."""
        found = check(
            self._cu.cuMemExportToShareableHandle(self._handle, self._handle_type, 0),
            "cuMemExportToShareableHandle",
        )
        return int(found)

    def connect(self, rank: int, descriptors: Sequence[int | None]) -> None:
        """Map the segments of the other ranks; descriptors: by rank, None at our own. They are closed."""
        addresses = []
        for other, descriptor in enumerate(descriptors):
            if other == rank or descriptor is None:
                addresses.append(self._own)
                continue
            handle = check(
                self._cu.cuMemImportFromShareableHandle(descriptor, self._handle_type),
                "cuMemImportFromShareableHandle",
            )
            os.close(descriptor)
            addresses.append(self._map(handle))
        self.addresses = tuple(addresses)

    def _map(self, handle: Any) -> int:
        cu = self._cu
        address = check(cu.cuMemAddressReserve(self.nbytes, self._unit, 0, 0), "cuMemAddressReserve")
        check(cu.cuMemMap(address, self.nbytes, 0, handle, 0), "cuMemMap")
        access = cu.CUmemAccessDesc()
        access.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = self.device.index
        access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        check(cu.cuMemSetAccess(address, self.nbytes, [access], 1), "cuMemSetAccess")
        weakref.finalize(self, _unmap, cu, int(address), self.nbytes, handle).atexit = False
        return int(address)


def _unmap(cu: Any, address: int, nbytes: int, handle: Any) -> None:
    check(cu.cuMemUnmap(address, nbytes), "cuMemUnmap")
    check(cu.cuMemAddressFree(address, nbytes), "cuMemAddressFree")
    check(cu.cuMemRelease(handle), "cuMemRelease")
