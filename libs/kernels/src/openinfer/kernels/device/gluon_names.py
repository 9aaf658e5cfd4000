"""Functions of Gluon whose names differ between the Tritons that are allowed."""

# mypy: ignore-errors
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
"""(tensor map, coordinates, barrier, buffer): starts a bulk tensor copy. Triton 3.8 renamed it."""

load_elements = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
"""(buffer, pointers, mask): starts copies of what each thread points to. Triton 3.8 renamed it."""

REINTERPRET_IS_PUBLIC = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


@gluon.jit
def reinterpret(buffer, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
    """The same shared memory as a buffer of another dtype, shape and layout. Triton 3.9 renamed the method."""
    return (
        buffer.reinterpret(dtype, shape, layout)
        if REINTERPRET_IS_PUBLIC
        else buffer._reinterpret(dtype, shape, layout)
    )
