"""A layer's output times the sigmoid of its gate."""

# mypy: ignore-errors
import triton
import triton.language as tl

from openinfer.recipes.qwen3_5.device.gates import sigmoid


@triton.jit
def sigmoid_gate(
    out, gate, width, token_stride, head_stride, DIM: tl.constexpr, GATES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out *= sigmoid(gate): out [T, width] of heads of DIM, a gate for each element (GATES = DIM) or one a head (1).
    Grid (T, cdiv(width, BLOCK))."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    of_gate = gate + token * token_stride + column // DIM * head_stride
    if GATES > 1:
        of_gate += column % DIM
    factor = sigmoid(tl.load(of_gate, mask=inside, other=0.0).to(tl.float32)).to(out.dtype.element_ty)
    place = out + token * width + column
    value = tl.load(place, mask=inside, other=0.0).to(tl.float32) * factor.to(tl.float32)
    tl.store(place, value.to(out.dtype.element_ty), mask=inside)
