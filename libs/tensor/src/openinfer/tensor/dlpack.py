"""DLPack, both ways: memory shared with numpy, CuPy, JAX, PyTorch and others without a copy.

The structs are those of dlpack.h 1.0; consumers that name no version get a legacy capsule ("dltensor").
"""

import ctypes
from typing import Any, TypeAlias

from openinfer.tensor import cuda, dtypes
from openinfer.tensor.device import Device
from openinfer.tensor.dtypes import DType
from openinfer.tensor.errors import DeviceError, DTypeError, ShapeError, TensorError
from openinfer.tensor.memory import contiguous_strides, host_array

View: TypeAlias = tuple[int, tuple[int, ...], tuple[int, ...], DType, Device, object]

_CPU, _CUDA, _CUDA_HOST = 1, 2, 3
_READ_ONLY = 1
_LEGACY, _VERSIONED = b"dltensor", b"dltensor_versioned"
_TAKEN = {name: b"used_" + name for name in (_LEGACY, _VERSIONED)}  # a capsule keeps no copy of its name
_CODES = {"i": 0, "u": 1, "f": 2, "b": 6}
_BFLOAT16 = 4
_DTYPES: dict[tuple[int, int], DType] = {(_BFLOAT16, 16): dtypes.bfloat16} | {
    (_CODES[d.kind], 8 * d.itemsize): d for d in dtypes.ALL if d.kind in _CODES and "float8" not in d.name
}
_CODE_OF = {dtype: code for code, dtype in _DTYPES.items()}


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class _ManagedVersioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


_STRUCTS: dict[bytes, type[_Managed] | type[_ManagedVersioned]] = {
    _LEGACY: _Managed,
    _VERSIONED: _ManagedVersioned,
}


def _prototype(name: str, result: Any, *arguments: Any) -> Any:
    return ctypes.PYFUNCTYPE(result, *arguments)((name, ctypes.pythonapi))


_is_valid = _prototype("PyCapsule_IsValid", ctypes.c_int, ctypes.py_object, ctypes.c_char_p)
_pointer = _prototype("PyCapsule_GetPointer", ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)
_rename = _prototype("PyCapsule_SetName", ctypes.c_int, ctypes.py_object, ctypes.c_char_p)


def device_of(device: Device) -> tuple[int, int]:
    """DLPack's (device type, device id). Raises DeviceError on null."""
    if device.kind == "null":
        raise DeviceError("a tensor on null has no data to share; DLPack needs cpu or cuda")
    return (_CPU if device.kind == "cpu" else _CUDA), device.index


def give(
    ptr: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: DType,
    device: Device,
    owner: object,
    *,
    stream: int | None = None,
    max_version: tuple[int, int] | None = None,
    dl_device: tuple[int, int] | None = None,
    copy: bool | None = None,
) -> Any:
    """A capsule over this memory that holds `owner`; keywords are those of the `__dlpack__` protocol.

    Raises DTypeError for float8, DeviceError for null or another device than asked, BufferError for copy.
    """
    where = device_of(device)
    if dtype not in _CODE_OF:
        raise DTypeError(f"{dtype} has no DLPack code that consumers agree on; share it as view_as('uint8')")
    if dl_device is not None and dl_device != where:
        raise DeviceError(
            f"DLPack export to device {dl_device} was asked for; this tensor is on {where} ({device})"
        )
    if copy:
        raise BufferError("DLPack export copies nothing; copy first, then share the copy")
    if device.kind == "cuda" and stream != -1:  # which stream wrote the data is not known here
        device.activate()
        cuda.check(cuda.driver().cuCtxSynchronize(), "cuCtxSynchronize")
    # numpy makes the capsule, over an array it never reads, and its dtype and device are then put right. A
    # capsule's destructor may run while an exception passes or at exit, so it must be C; numpy's is.
    array = host_array(ptr, shape, strides, dtypes.of(f"uint{8 * dtype.itemsize}"), owner)
    try:
        capsule = array.__dlpack__(max_version=max_version)  # type: ignore[call-arg,unused-ignore]
    except TypeError:  # numpy before 2.1
        capsule = array.__dlpack__()
    tensor = _open(capsule)[1].tensor
    tensor.device_type, tensor.device_id = where
    tensor.code, tensor.bits = _CODE_OF[dtype]
    return capsule


def _open(capsule: Any) -> tuple[bytes, _Managed | _ManagedVersioned]:
    """The name of a capsule that has no owner yet, and the struct in it."""
    for name, struct in _STRUCTS.items():
        if _is_valid(capsule, name):
            return name, struct.from_address(_pointer(capsule, name))
    raise TensorError(f"{capsule!r} is no fresh DLPack capsule; a capsule can be taken once")


class _Taken:
    """Owns what a producer gave; calls its deleter when collected."""

    __slots__ = ("address", "delete")

    def __init__(self, address: int, delete: int | None) -> None:
        self.address = address
        self.delete = _Deleter(delete) if delete else None

    def __del__(self) -> None:
        if self.delete is not None:
            self.delete(self.address)


def take(source: Any) -> View:
    """(ptr, shape, strides in elements, dtype, device, owner) of an object with `__dlpack__`.

    Raises TensorError for any other object; DeviceError, DTypeError or ShapeError for data that a Tensor cannot view.
    """
    if not hasattr(source, "__dlpack__"):
        raise TensorError(f"{type(source).__name__} has no __dlpack__; pass an array of a DLPack library")
    try:
        try:
            capsule = source.__dlpack__(max_version=(1, 0))
        except TypeError:  # a producer older than the keyword
            capsule = source.__dlpack__()
    except BufferError as e:
        raise ShapeError(f"{type(source).__name__} cannot share its memory: {e}; copy it") from e
    name, managed = _open(capsule)
    view = _read(managed.tensor)
    if isinstance(managed, _ManagedVersioned) and (managed.major != 1 or managed.flags & _READ_ONLY):
        raise ShapeError(
            "the DLPack data is read-only (or of an unknown version) and a Tensor is writable; copy it"
        )
    _rename(capsule, _TAKEN[name])
    device = view[-1]
    if device.kind == "cuda":
        # Asked without a stream, the producer orders its work before the legacy default one.
        device.activate()
        cuda.check(cuda.driver().cuStreamSynchronize(0), "cuStreamSynchronize")
    return *view, _Taken(ctypes.addressof(managed), managed.deleter)


def _read(t: _Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...], DType, Device]:
    shape = tuple(t.shape[i] for i in range(t.ndim))
    strides = tuple(t.strides[i] for i in range(t.ndim)) if t.strides else contiguous_strides(shape)
    if t.device_type not in (_CPU, _CUDA, _CUDA_HOST):
        raise DeviceError(f"DLPack device type {t.device_type} is neither cpu nor cuda memory")
    dtype = _DTYPES.get((t.code, t.bits)) if t.lanes == 1 else None
    if dtype is None:
        raise DTypeError(
            f"DLPack dtype code {t.code}, {t.bits} bits, {t.lanes} lanes is not one a Tensor can have"
        )
    if any(s < 0 for s in strides):
        raise ShapeError(f"DLPack strides {strides} are negative; copy the data first")
    device = Device("cuda", t.device_id) if t.device_type == _CUDA else Device("cpu")
    return (t.data or 0) + t.byte_offset, shape, strides, dtype, device
