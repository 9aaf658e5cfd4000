"""Kernel parameters packed as the compiled kernels expect them.

Triton's parameter ABI, read off its PTX (3.6 to 3.9): the arguments less the constants, in order, each naturally
aligned; a tensor map is 128 bytes by value (here 128-byte aligned), then its shape as i32 and its strides as i64; last
come two pointers, global and profile scratch, which our kernels do not use. A kernel of CUDA C++ has its arguments
alone, and of a tensor map the 128 bytes.
"""

import ctypes
import struct
from collections.abc import Callable, Sequence

from openinfer.kernels.op.launch import Aligned, Arg, CudaSpec, PeerTable, Scratch, Spec, TensorMap
from openinfer.tensor import Tensor

Address = Callable[[Tensor | Scratch | PeerTable], int]
EncodeTensorMap = Callable[[TensorMap, int, int], bytes]
"""(map, address, index of the map among the kernel's maps) -> the 128 bytes."""

_SIZES = {"Q": 8, "q": 8, "i": 4, "f": 4, "128s": 128}
_MEMORY, _NUMBERS = (Tensor, Scratch, PeerTable), (int, float)  # tuples: asking a union is five times slower
_SCALARS = {"i32": "i", "fp32": "f"}


def _fields(spec: Spec) -> list[str]:
    cuda = isinstance(spec, CudaSpec)
    of_map = ["128s"] if cuda else ["128s", "i", "i", "q", "q"]
    codes: list[str] = []
    for _, kind in spec.signature:
        codes += of_map if kind.startswith("tensordesc") else [_SCALARS.get(kind, "Q")]
    return codes if cuda else [*codes, "Q", "Q"]


class Parameters:
    """The parameters of one kernel in memory that a launch can point at: `params` is the address of the array of
    pointers to them. A launch copies them, and `pack` overwrites them: use one object from one thread.
    """

    def __init__(self, spec: Spec) -> None:
        codes, layout, offsets, end = _fields(spec), "<", [], 0
        for code in codes:
            size = _SIZES[code]
            start = -(-end // size) * size
            layout += f"{start - end}x{code}"
            offsets.append(start)
            end = start + size
        self._struct = struct.Struct(layout)
        self._memory = ctypes.create_string_buffer(end + 128)
        self._start = -ctypes.addressof(self._memory) % 128
        self._base = ctypes.addressof(self._memory) + self._start
        self._offsets = offsets
        self._pointers = (ctypes.c_void_p * len(codes))(*(self._base + o for o in offsets))
        self.params = ctypes.addressof(self._pointers)
        self._cuda = isinstance(spec, CudaSpec)

    def pack(self, args: Sequence[Arg], address: Address, encode: EncodeTensorMap) -> None:
        """Write the values of `args`. `address` says where a tensor, a scratch or a table of peers is."""
        values: list[int | float | bytes] = []
        maps = 0
        for arg in args:
            if isinstance(arg, _NUMBERS):
                values.append(arg)
            elif isinstance(arg, _MEMORY):
                values.append(address(arg))
            elif isinstance(arg, Aligned):
                values.append(arg.value)
            else:
                tensor = arg.tensor
                values.append(encode(arg, address(tensor), maps))
                if not self._cuda:
                    rows, cols = tensor.shape
                    values += (rows, cols, tensor.strides[0], 1)
                maps += 1
        rest = () if self._cuda else (0, 0)
        self._struct.pack_into(self._memory, self._start, *values, *rest)

    def read(self, index: int, size: int) -> bytes:
        """The bytes of one parameter."""
        return ctypes.string_at(self._base + self._offsets[index], size)
