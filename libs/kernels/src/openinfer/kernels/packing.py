"""Kernel parameters packed as the compiled kernels expect them.

Triton's parameter ABI, read off its PTX (3.6 to 3.9): the arguments less the constants, in order, each naturally
aligned; a tensor map is 128 bytes by value (here 128-byte aligned), then its shape as i32 and its strides as i64; last
come two pointers, global and profile scratch, which our kernels do not use.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from openinfer.kernels.launch import Aligned, Arg, KernelSpec, Scratch, TensorMap
from openinfer.tensor import Tensor

Address = Callable[[Tensor | Scratch], int]
EncodeTensorMap = Callable[[TensorMap, int, int], bytes]
"""(map, address, index of the map among the kernel's maps) -> the 128 bytes."""


@dataclass(frozen=True, slots=True)
class Packed:
    """Parameters in memory that a launch can point at. `params` is the address of the array of pointers to them; the
    buffers live as long as this object."""

    params: int
    offsets: tuple[int, ...]
    base: int
    _buffers: tuple[object, ...]

    def read(self, index: int, size: int) -> bytes:
        """The bytes of one parameter."""
        return ctypes.string_at(self.base + self.offsets[index], size)


def pack(spec: KernelSpec, args: Sequence[Arg], address: Address, encode: EncodeTensorMap) -> Packed:
    """Pack `args` for `spec`. `address` says where a tensor or a scratch is."""
    fields: list[bytes | ctypes._SimpleCData[int] | ctypes._SimpleCData[float]] = []
    maps = 0
    for arg in args:
        match arg:
            case TensorMap(tensor, _):
                rows, cols = tensor.shape
                stride = tensor.strides[0] if isinstance(tensor, Tensor) else cols
                fields.append(encode(arg, address(tensor), maps))
                fields += [ctypes.c_int32(rows), ctypes.c_int32(cols), ctypes.c_int64(stride), ctypes.c_int64(1)]
                maps += 1
            case Tensor() | Scratch():
                fields.append(ctypes.c_uint64(address(arg)))
            case Aligned(value):
                fields.append(ctypes.c_int32(value))
            case float():
                fields.append(ctypes.c_float(arg))
            case _:
                fields.append(ctypes.c_int32(arg))
    fields += [ctypes.c_uint64(0), ctypes.c_uint64(0)]
    offsets, end = [], 0
    for field in fields:
        size = len(field) if isinstance(field, bytes) else ctypes.sizeof(field)
        end = -(-end // size) * size
        offsets.append(end)
        end += size
    raw = ctypes.create_string_buffer(end + 128)
    base = (ctypes.addressof(raw) + 127) & ~127
    for field, offset in zip(fields, offsets, strict=True):
        data = field if isinstance(field, bytes) else bytes(field)
        ctypes.memmove(base + offset, data, len(data))
    pointers = (ctypes.c_void_p * len(offsets))(*[base + o for o in offsets])
    return Packed(ctypes.addressof(pointers), tuple(offsets), base, (raw, pointers))
