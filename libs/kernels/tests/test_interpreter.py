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
def twice(out, x, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(x + i) * 2.0)


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


def test_bf16_arithmetic_is_on_values(rng):
    x = rng.standard_normal(64).astype(ml_dtypes.bfloat16)
    out = np.zeros(64, ml_dtypes.bfloat16)
    twice[(1,)](pointer(out, "bf16"), pointer(x, "bf16"), N=64)
    np.testing.assert_array_equal(out, x * ml_dtypes.bfloat16(2))


def test_a_descriptor_reads_a_strided_tile_and_zeros_outside(rng):
    base = rng.standard_normal((20, 24)).astype(ml_dtypes.bfloat16)
    view = base[:, :16]
    out = np.full((16, 16), np.nan, ml_dtypes.bfloat16)
    tile = descriptor(base.ctypes.data, "bf16", [20, 16], [24, 1], [16, 16])
    copy_tile[(1,)](pointer(out, "bf16"), tile, 10, N=16)
    np.testing.assert_array_equal(out[:10], view[10:])
    assert not out[10:].any()
