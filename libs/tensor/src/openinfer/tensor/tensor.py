"""Tensor: a strided view of device memory, and no arithmetic."""

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import numpy as np

from openinfer.tensor import cuda, dlpack, dtypes
from openinfer.tensor.device import Device
from openinfer.tensor.dtypes import DType
from openinfer.tensor.errors import DeviceError, DTypeError, IndexRangeError, ShapeError
from openinfer.tensor.memory import Allocation, contiguous_strides, host_array, num_elements
from openinfer.tensor.stream import CopyKind, Stream

Index = int | slice

CPU = Device("cpu")


class Tensor:
    """A view of memory on one device. Making one, slicing and reshaping touch no memory and no driver.

    ptr      address of element [0, ..., 0], an int
    shape    tuple of ints; strides: tuple of ints, in elements (not bytes)
    dtype    np.dtype, bfloat16 and float8 from ml_dtypes
    device   Device
    owner    whatever must stay alive for `ptr` to stay valid; views share it
    name     for messages and traces

    Treat the fields as read-only: captured graphs have copied `ptr`. Nothing checks that it is real.
    """

    __slots__ = ("device", "dtype", "name", "owner", "ptr", "shape", "strides")

    def __init__(
        self,
        ptr: int,
        shape: tuple[int, ...],
        dtype: DType,
        device: Device,
        strides: tuple[int, ...] | None = None,
        owner: object = None,
        name: str = "",
    ) -> None:
        self.ptr = ptr
        self.shape = shape
        self.dtype = dtype
        self.device = device
        self.strides = contiguous_strides(shape) if strides is None else strides
        self.owner = owner
        self.name = name

    @staticmethod
    def empty(shape: Sequence[int], dtype: DType | type | str, device: Device, name: str = "") -> "Tensor":
        """A contiguous tensor with an allocation of its own, not initialised. Raises OutOfMemory.

        For odd scratch and tests; an engine takes its tensors from one Arena.
        """
        dtype, shape = dtypes.of(dtype), tuple(shape)
        memory = Allocation(device, num_elements(shape) * dtype.itemsize)
        return Tensor(memory.ptr, shape, dtype, device, owner=memory, name=name)

    @staticmethod
    def from_numpy(array: np.ndarray[Any, Any], name: str = "") -> "Tensor":
        """A cpu tensor over the array's own memory, which it keeps alive.

        Raises DTypeError for an unknown dtype, and for what is no numpy array. Raises ShapeError for an array that is
        read-only (a Tensor is writable), or whose strides are negative or no multiples of an element: pass a copy.
        """
        if not isinstance(array, np.ndarray):
            raise DTypeError(
                f"given {type(array).__name__}; pass a numpy array, as of np.array(values, np.float32)"
            )
        if not array.flags.writeable:
            raise ShapeError("the array is read-only and a Tensor is writable; pass array.copy()")
        if any(s < 0 for s in array.strides):
            raise ShapeError(f"the array has negative strides {array.strides}; pass array.copy()")
        return _over(array, name)

    @staticmethod
    def from_dlpack(source: Any) -> "Tensor":
        """A tensor over the memory of any object with `__dlpack__`, on cpu or cuda, which it keeps alive.

        The data is complete when this returns: on cuda the host waits for the producer. Raises DTypeError or
        DeviceError for what a Tensor cannot be.
        """
        ptr, shape, strides, dtype, device, owner = dlpack.take(source)
        return Tensor(ptr, shape, dtype, device, strides, owner)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes an element."""
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the elements, without gaps between them."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def is_contiguous(self) -> bool:
        """Row-major without gaps. Strides of axes of length 1 do not matter."""
        return _is_contiguous(self.shape, self.strides)

    def __getitem__(self, index: Index | tuple[Index, ...]) -> "Tensor":
        """A view: an int drops its axis, a slice of step 1 narrows it, axes not named stay whole."""
        items = index if isinstance(index, tuple) else (index,)
        if len(items) > len(self.shape):
            raise IndexRangeError(f"{len(items)} indices for the {len(self.shape)} axes of {self!r}")
        offset, shape, strides = 0, [], []
        for axis, item in enumerate(items):
            n, stride = self.shape[axis], self.strides[axis]
            if type(item) is slice:
                start, stop, step = item.indices(n)
                if step != 1:
                    raise ShapeError(f"slice step {step} on axis {axis} of {self!r}; only 1 is supported")
                shape.append(stop - start if stop > start else 0)
                strides.append(stride)
            else:
                start = item.__index__()
                if not -n <= start < n:
                    raise IndexRangeError(f"index {start} on axis {axis} of {self!r}; allowed: {-n}..{n - 1}")
                start %= n
            offset += start * stride
        ptr = self.ptr + offset * self.dtype.itemsize
        shape += self.shape[len(items) :]
        strides += self.strides[len(items) :]
        return Tensor(ptr, tuple(shape), self.dtype, self.device, tuple(strides), self.owner, self.name)

    def reshape(self, *shape: int | Sequence[int]) -> "Tensor":
        """The same elements in another shape; one axis may be -1. Contiguous only: it never copies."""
        first = shape[0] if len(shape) == 1 else shape
        new = (first,) if isinstance(first, int) else tuple(cast(Sequence[int], first))
        numel = self.numel
        if new.count(-1) == 1:
            known = -math.prod(new)
            new = tuple(numel // known if n == -1 and known else n for n in new)
        if math.prod(new) != numel or min(new, default=0) < 0:
            raise ShapeError(f"cannot reshape {self!r} to {first}: {numel} elements must stay")
        self._require_contiguous("reshape")
        return Tensor(self.ptr, new, self.dtype, self.device, None, self.owner, self.name)

    def view_as(self, dtype: DType | type | str) -> "Tensor":
        """The same bytes read as another dtype; the last axis is rescaled. Contiguous tensors only."""
        dtype = dtypes.of(dtype)
        self._require_contiguous("view_as")
        shape = self.shape
        if dtype.itemsize != self.dtype.itemsize:
            row = shape[-1] * self.dtype.itemsize if shape else -1
            if row % dtype.itemsize or row < 0 or self.ptr % dtype.itemsize:
                raise ShapeError(f"cannot view {self!r} as {dtype}: rows and address must be whole elements")
            shape = (*shape[:-1], row // dtype.itemsize)
        return Tensor(self.ptr, shape, dtype, self.device, None, self.owner, self.name)

    def numpy(self) -> np.ndarray[Any, Any]:
        """cpu: a writable view without a copy. cuda: a copy, after waiting for all work on the device.

        Raises DeviceError on null, ShapeError for a cuda tensor that is not contiguous.
        """
        if self.device.kind == "cpu":
            return host_array(self.ptr, self.shape, self.strides, self.dtype, self.owner)
        if self.device.kind == "null":
            raise DeviceError(f"{self!r} has no data: the null device has addresses and no memory")
        self._require_contiguous("numpy")
        out = np.empty(self.shape, self.dtype)
        with _ordered(self.device, None) as stream:
            stream.copy_async(out.ctypes.data, self.ptr, self.nbytes, "d2h")
        return out

    def copy_from(self, src: "np.ndarray[Any, Any] | Tensor", stream: Stream | None = None) -> None:
        """Copy elements of the same shape and dtype into this tensor. On cuda both sides must be contiguous.

        With a stream (of the cuda device involved) the copy is ordered there and `src` must live until it is
        done. Without one the host waits for all work on the device, before and after. On null only the checks
        are made.
        Raises ShapeError, DTypeError, DeviceError.
        """
        source = src if isinstance(src, Tensor) else _over(src, "")
        if source.shape != self.shape:
            raise ShapeError(f"cannot copy shape {source.shape} into {self!r}; shapes must be equal")
        if source.dtype != self.dtype:
            raise DTypeError(f"cannot copy {source.dtype} into {self!r}; dtypes must be equal")
        if self.device.kind == "null":
            return
        if source.device.kind == "null":
            raise DeviceError(f"cannot copy {source!r}: the null device has no data")
        if source.device.kind == self.device.kind == "cpu":
            np.copyto(self.numpy(), source.numpy())
            return
        if source.device.kind == self.device.kind and source.device != self.device:
            raise DeviceError(f"cannot copy from {source.device} to {self.device}; copy through the host")
        self._require_contiguous("copy_from to or from cuda")
        source._require_contiguous("copy_from to or from cuda")
        from_host, to_host = source.device.kind == "cpu", self.device.kind == "cpu"
        kind: CopyKind = "h2d" if from_host else "d2h" if to_host else "d2d"
        with _ordered(source.device if kind == "d2h" else self.device, stream) as where:
            where.copy_async(self.ptr, source.ptr, self.nbytes, kind)

    def zero_(self, stream: Stream | None = None) -> None:
        """Set all bytes to zero. Streams as for `copy_from`; on cuda contiguous only; on null nothing."""
        if self.device.kind == "cpu":
            self.numpy()[...] = 0
        elif self.device.kind == "cuda":
            self._require_contiguous("zero_")
            with _ordered(self.device, stream) as where:
                where.memset_async(self.ptr, 0, self.nbytes)

    def __dlpack__(self, **request: Any) -> Any:
        """A DLPack capsule over this memory (bfloat16 included; float8 has no agreed code: DTypeError).

        cuda: waits for all work on the device first, unless the consumer passes stream=-1.
        """
        return dlpack.give(self.ptr, self.shape, self.strides, self.dtype, self.device, self.owner, **request)

    def __dlpack_device__(self) -> tuple[int, int]:
        return dlpack.device_of(self.device)

    def __repr__(self) -> str:
        name = f"{self.name!r}, " if self.name else ""
        return f"Tensor({name}{self.dtype.name}{list(self.shape)}, {self.device})"

    def _require_contiguous(self, what: str) -> None:
        if not self.is_contiguous:
            raise ShapeError(f"{what} needs a contiguous tensor; {self!r} has strides {self.strides}")


@functools.lru_cache(4096)
def _is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    step = 1
    for n, stride in zip(reversed(shape), reversed(strides), strict=True):
        if n != 1:
            if stride != step:
                return 0 in shape
            step *= n
    return True


def _over(array: np.ndarray[Any, Any], name: str) -> Tensor:
    dtype = dtypes.of(array.dtype)
    if any(s % dtype.itemsize for s in array.strides):
        raise ShapeError(f"byte strides {array.strides} are no multiple of a {dtype}; pass array.copy()")
    strides = tuple(s // dtype.itemsize for s in array.strides)
    return Tensor(array.ctypes.data, array.shape, dtype, CPU, strides, owner=array, name=name)


@contextmanager
def _ordered(device: Device, stream: Stream | None) -> Iterator[Stream]:
    """The stream given; or one that starts after all work on the device and that the host waits for.

    The driver's synchronous calls would not do: they are ordered with the legacy default stream only, and
    may return before a copy from pageable memory has reached the device.
    """
    if stream is not None:
        if stream.device != device:
            raise DeviceError(
                f"a stream of {stream.device} cannot order work on {device}; pass one of {device}"
            )
        yield stream
        return
    with Stream(device) as own:
        cuda.check(cuda.driver().cuCtxSynchronize(), "cuCtxSynchronize")
        yield own


def nbytes_of(buffers: Any) -> int:
    """Bytes of what has `nbytes`, as tensors do, in the fields of a dataclass or in tuples there. Each counts once."""
    values = [getattr(buffers, field.name) for field in dataclasses.fields(buffers)]
    every = (one for value in values for one in (value if isinstance(value, tuple) else (value,)))
    return sum(one.nbytes for one in {one for one in every if hasattr(one, "nbytes")})
