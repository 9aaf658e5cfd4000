"""PeerMemory: a segment of a GPU's memory that the GPUs of other processes read and write."""

import os
import weakref
from collections.abc import Sequence
from typing import Any

from openinfer.tensor import cuda
from openinfer.tensor.cuda import check
from openinfer.tensor.device import Device
from openinfer.tensor.memory import mappable, open_to


class PeerMemory:
    """`nbytes` of zeros on `device`, which other processes of the host map by the descriptor of `export`.

    The memory is virtual (cuMemCreate) and has a POSIX descriptor for its handle. `connect` maps the segments of all
    ranks; `addresses` then has where each is here. It is freed with the object; the device must be idle then.
    """

    def __init__(self, device: Device, nbytes: int) -> None:
        self.device = device
        cuda.make_current(device.index)
        self._cu = cu = cuda.driver()
        prop, unit = mappable(device)
        prop.requestedHandleTypes = _handle_type(cu)
        self.nbytes = -(-nbytes // unit) * unit
        self._handle = check(cu.cuMemCreate(self.nbytes, prop, 0), "cuMemCreate")
        self.address = _map(self, self._handle, device, self.nbytes)
        """Of our own segment."""
        check(cu.cuMemsetD8(self.address, 0, self.nbytes), "cuMemsetD8")
        check(cu.cuCtxSynchronize(), "cuCtxSynchronize")
        self.addresses: tuple[int, ...] = ()
        self._others: list[PeerSegment] = []

    def export(self) -> int:
        """A descriptor of the segment, for the `connect` of other processes. The caller closes it."""
        found = self._cu.cuMemExportToShareableHandle(self._handle, _handle_type(self._cu), 0)
        return int(check(found, "cuMemExportToShareableHandle"))

    def connect(self, rank: int, descriptors: Sequence[int | None]) -> None:
        """Map the segments of the other ranks; descriptors: by rank, None at our own. They are closed."""
        addresses = []
        for other, descriptor in enumerate(descriptors):
            if other == rank or descriptor is None:
                addresses.append(self.address)
                continue
            segment = PeerSegment(self.device, descriptor, self.nbytes)
            os.close(descriptor)
            self._others.append(segment)
            addresses.append(segment.address)
        self.addresses = tuple(addresses)


class PeerSegment:
    """A segment that another process of the host exported, mapped for `device` at `address`.

    descriptor: of PeerMemory.export or of any cuMemExportToShareableHandle; the caller closes it. nbytes: of the whole
    segment. It is unmapped when the object is collected; the device must be idle then. Raises CudaError.
    """

    def __init__(self, device: Device, descriptor: int, nbytes: int) -> None:
        self.device, self.nbytes = device, nbytes
        cuda.make_current(device.index)
        cu = cuda.driver()
        found = cu.cuMemImportFromShareableHandle(descriptor, _handle_type(cu))
        self.address = _map(self, check(found, "cuMemImportFromShareableHandle"), device, nbytes)


def _handle_type(cu: Any) -> Any:
    return cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


def _map(owner: object, handle: Any, device: Device, nbytes: int) -> int:
    """The address of a handle's memory in this process, until `owner` is collected."""
    cu = cuda.driver()
    address = check(cu.cuMemAddressReserve(nbytes, mappable(device)[1], 0, 0), "cuMemAddressReserve")
    check(cu.cuMemMap(address, nbytes, 0, handle, 0), "cuMemMap")
    open_to(device, int(address), nbytes)
    weakref.finalize(owner, _unmap, cu, int(address), nbytes, handle).atexit = False
    return int(address)


def _unmap(cu: Any, address: int, nbytes: int, handle: Any) -> None:
    check(cu.cuMemUnmap(address, nbytes), "cuMemUnmap")
    check(cu.cuMemAddressFree(address, nbytes), "cuMemAddressFree")
    check(cu.cuMemRelease(handle), "cuMemRelease")
