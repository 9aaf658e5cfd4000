"""The repaired interpreter: bf16 and fp8 behave as numpy's ml_dtypes do."""

import ml_dtypes
import numpy as np
import pytest
import triton
import triton.language as tl

from openinfer.kernels.op.interpreter import Pointer, descriptor


@triton.jit
def cast(out, x, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(x + i).to(out.dtype.element_ty))


@triton.jit
def thirds(out, x, n, N: tl.constexpr):
    i = tl.arange(0, N)
    v, k = tl.load(x + i), tl.load(n + i)
    tl.store(out + i, v * 3.0 + v / 3.0)
    tl.store(out + N + i, (k + 1) * 2.0 + (k + 1.0))


@triton.jit
def copy_tile(out, x, row, N: tl.constexpr):
    tile = x.load([row, 0])
    i = tl.arange(0, N)
    tl.store(out + i[:, None] * N + i[None, :], tile)


def pointer(array, kind):
    return Pointer(array.ctypes.data, kind)


@pytest.mark.parametrize(
    ("kind", "dtype"), [("bf16", ml_dtypes.bfloat16), ("fp8e4nv", ml_dtypes.float8_e4m3fn)]
)
def test_casts_round_to_nearest_even(rng, kind, dtype):
    x = rng.standard_normal(256).astype(np.float32)
    x[:3] = [1 + 2**-9, 1 + 3 * 2**-8, -0.0]
    out = np.zeros(256, dtype)
    cast[(1,)](pointer(out, kind), pointer(x, "fp32"), N=256)
    np.testing.assert_array_equal(out.view(f"u{out.itemsize}"), x.astype(dtype).view(f"u{out.itemsize}"))


def test_arithmetic_is_on_values_of_the_operands_types(rng):
    """A quotient of bf16 is one of float32, and 127 + 1 overflows where the 1 is an int8."""
    x, n = rng.standard_normal(64).astype(ml_dtypes.bfloat16), np.full(64, 127, np.int8)
    out = np.zeros((2, 64), np.float32)
    thirds[(1,)](pointer(out, "fp32"), pointer(x, "bf16"), pointer(n, "i8"), N=64)
    assert (out[0] == (x * x.dtype.type(3)).astype(np.float32) + x.astype(np.float32) / np.float32(3)).all()
    assert (out[1] == (n + np.int8(1)) * 2.0 + (n + 1.0)).all()


def test_a_descriptor_reads_a_strided_tile_and_zeros_outside(rng):
    base = rng.standard_normal((20, 24)).astype(ml_dtypes.bfloat16)
    view = base[:, :16]
    out = np.full((16, 16), np.nan, ml_dtypes.bfloat16)
    tile = descriptor(base.ctypes.data, "bf16", [20, 16], [24, 1], [16, 16])
    copy_tile[(1,)](pointer(out, "bf16"), tile, 10, N=16)
    np.testing.assert_array_equal(out[:10], view[10:])
    assert not out[10:].any()
