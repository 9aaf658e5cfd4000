"""NcclRanks: collectives of NCCL among processes, one a GPU. Needs openinfer-tensor[nccl]."""

import ctypes
import os
from typing import Any

import numpy as np

from openinfer.tensor.device import Device
from openinfer.tensor.dtypes import bfloat16, float8_e4m3fn, float16, float32, uint8
from openinfer.tensor.errors import MissingExtra
from openinfer.tensor.stream import Stream

_ID_BYTES = 128
_TYPES = {bfloat16: "Bfloat16", float16: "Float16", float32: "Float32"}
_TYPES |= dict.fromkeys((float8_e4m3fn, uint8), "Uint8")  # which are only gathered


def _bindings() -> Any:
    try:
        from nccl.bindings import nccl
    except ImportError as error:
        raise MissingExtra(
            f"several GPUs need NCCL ({error}): pip install 'openinfer-tensor[nccl]'"
        ) from error
    return nccl


class NcclRanks:
    """This process among `size` that call the same collectives in the same order, each on its own GPU.

    Every rank gives the id that one of them made by `unique_id`. The constructor waits for all ranks. Counts are of
    elements of `dtype`; addresses are of memory on `device`. Calls may be captured into a CUDA graph. Use it from one
    thread; `abort` may come from any.
    """

    def __init__(self, device: Device, unique_id: bytes, rank: int, size: int) -> None:
        # NVLink multicast is never used: what it gains here our own kernels have.
        os.environ["NCCL_NVLS_ENABLE"] = "0"
        self._nccl, self.rank, self.size = _bindings(), rank, size
        device.activate()
        self._id = (ctypes.c_char * _ID_BYTES).from_buffer_copy(unique_id)
        self._comm = self._nccl.comm_init_rank(size, ctypes.addressof(self._id), rank)
        self._types = {dtype: int(getattr(self._nccl.DataType, name)) for dtype, name in _TYPES.items()}
        self._sum = int(self._nccl.RedOp.Sum)

    @staticmethod
    def unique_id() -> bytes:
        """An id for the ranks of one communicator. Raises MissingExtra."""
        made = _bindings().get_unique_id()
        address = made if isinstance(made, int) else made.ptr
        return ctypes.string_at(address, _ID_BYTES)

    def all_reduce(self, out: int, x: int, count: int, dtype: np.dtype[Any], stream: Stream) -> None:
        """out = the sum of the x of all ranks; `count` elements."""
        self._nccl.all_reduce(x, out, count, self._types[dtype], self._sum, self._comm, int(stream.handle))

    def all_gather(self, out: int, x: int, count: int, dtype: np.dtype[Any], stream: Stream) -> None:
        """out = the x of all ranks, one after the other; `count` elements of each."""
        self._nccl.all_gather(x, out, count, self._types[dtype], self._comm, int(stream.handle))

    def reduce_scatter(self, out: int, x: int, count: int, dtype: np.dtype[Any], stream: Stream) -> None:
        """out = this rank's part, `count` elements, of the sum of the x of all ranks."""
        self._nccl.reduce_scatter(
            x, out, count, self._types[dtype], self._sum, self._comm, int(stream.handle)
        )

    def abort(self) -> None:
        """End kernels that wait for other ranks, and give the communicator up. A second call does nothing."""
        comm, self._comm = self._comm, 0
        if comm:
            self._nccl.comm_abort(comm)
