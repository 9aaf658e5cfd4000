"""Overlap of consecutive kernels: programmatic dependent launch (sm_90 and up).

A kernel compiled with OVERLAP may start while the one before it still runs. It must call `begin` before it touches
anything another kernel wrote or reads, in every program and before any return, so that its end implies the end of all
before it. What it may do first is fetch weights, which nobody writes.
"""

# mypy: ignore-errors
import triton
import triton.language as tl
from triton.language.extra import cuda


@triton.jit
def begin(OVERLAP: tl.constexpr):
    """Let the next kernel start, then wait for the kernels before this one."""
    if OVERLAP:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()


@triton.jit
def fetch(pointers):
    """Bring the 128-byte lines at `pointers` into L2; nothing waits for them."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )
