"""The kernel of add_bias."""

# mypy: ignore-errors
import triton
import triton.language as tl


@triton.jit
def add_bias(x, bias, width, BLOCK: tl.constexpr):
    """x [T, width] += bias [width]. Grid (T, cdiv(width, BLOCK))."""
    place = x + tl.program_id(0).to(tl.int64) * width
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(place + column, mask=inside).to(tl.float32) + tl.load(bias + column, mask=inside).to(
        tl.float32
    )
    tl.store(place + column, value.to(x.dtype.element_ty), mask=inside)
