"""Parameters in memory, as the compiled kernels expect them."""

import ctypes
import struct

from openinfer.kernels import Aligned, Scratch, TensorMap, launch
from openinfer.kernels.op.packing import Parameters
from openinfer.tensor import Device, Tensor, bfloat16


def null(ptr, *shape, strides=None):
    return Tensor(ptr, shape, bfloat16, Device("null"), strides)


def packed(args, scratch_at=0x5000):
    record = launch("m", "f", (1,), args, {})
    parameters = Parameters(record.spec)
    maps = []

    def encode(tensor_map, address, index):
        maps.append((address, index))
        return bytes([index + 1]) * 128

    parameters.pack(record.args, lambda t: t.ptr if isinstance(t, Tensor) else scratch_at, encode)
    return parameters, maps


def pointers(parameters, count):
    return list((ctypes.c_uint64 * count).from_address(parameters.params))


def test_values_are_naturally_aligned_and_end_with_two_null_pointers():
    parameters, _ = packed(
        {"n": 3, "x": null(0x1000, 4), "k": Aligned(32), "eps": 0.5, "s": Scratch((1,), bfloat16)}
    )
    at = pointers(parameters, 7)
    base = at[0]
    assert [a - base for a in at] == [0, 8, 16, 20, 24, 32, 40]
    assert base % 128 == 0
    values = struct.unpack("<i4xQifQQQ", ctypes.string_at(base, 48))
    assert values == (3, 0x1000, 32, 0.5, 0x5000, 0, 0)
    assert parameters.read(3, 4) == struct.pack("<f", 0.5)


def test_a_tensor_map_is_by_value_with_shape_and_strides():
    view = null(0x2000, 6, 40, strides=(64, 1))
    maps_given = {"n": 1, "a": TensorMap(view, (2, 8)), "b": TensorMap(Scratch((3, 16), bfloat16), (1, 16))}
    parameters, maps = packed(maps_given)
    at = pointers(parameters, 13)
    assert [a - at[0] for a in at] == [0, 128, 256, 260, 264, 272, 384, 512, 516, 520, 528, 536, 544]
    assert all(a % 128 == 0 for a in (at[1], at[6]))
    assert ctypes.string_at(at[1], 152) == b"\1" * 128 + struct.pack("<iiqq", 6, 40, 64, 1)
    assert ctypes.string_at(at[6], 152) == b"\2" * 128 + struct.pack("<iiqq", 3, 16, 16, 1)
    assert maps == [(0x2000, 0), (0x5000, 1)]


def test_packing_again_overwrites():
    record = launch("m", "f", (1,), {"n": 3}, {})
    parameters = Parameters(record.spec)
    for n in (3, 4):
        parameters.pack((n,), lambda t: 0, lambda m, a, i: b"")
        assert parameters.read(0, 4) == struct.pack("<i", n)
