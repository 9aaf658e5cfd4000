"""The scalar functions of the delta rule's gates, in float32, and the kernel of a layer's output gate."""

# mypy: ignore-errors
import triton
import triton.language as tl

from openinfer.kernels.device.norm import start_next


@triton.jit
def sigmoid(x):
    """1 / (1 + e^-x); where that overflows, 0."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def silu(x):
    """x sigmoid(x); -0 where e^-x overflows."""
    return x / (1.0 + tl.exp(-x))


@triton.jit
def log_decay(a, decay, dt_bias):
    """decay softplus(a + dt_bias), at most 0: the logarithm of the factor by which a token shrinks the state."""
    x = a.to(tl.float32) + dt_bias
    return decay * (tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x))))


@triton.jit
def gated_norm(o, z, weight, eps, WIDTH: tl.constexpr, dtype: tl.constexpr):
    """RMS norm of o over its last axis of WIDTH, times silu(z); o float32 of rounded values. Rounded to `dtype` after
    the norm, after its weight and at the end."""
    scale = tl.rsqrt(tl.sum(o * o, -1) / WIDTH + eps)
    if len(o.shape) == 2:
        scale = scale[:, None]
    unit = (o * scale).to(dtype).to(tl.float32)
    return ((unit * weight).to(dtype).to(tl.float32) * silu(z.to(tl.float32))).to(dtype)


@triton.jit
def sigmoid_gate(
    out, gate, width, token_stride, head_stride, DIM: tl.constexpr, GATES: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """out *= sigmoid(gate): out [T, width] of heads of DIM, a gate for each element (GATES = DIM) or one a head (1).
    EARLY: as for norm.start_next. Grid (T, cdiv(width, BLOCK))."""
    start_next(EARLY)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    of_gate = gate + token * token_stride + column // DIM * head_stride
    if GATES > 1:
        of_gate += column % DIM
    factor = sigmoid(tl.load(of_gate, mask=inside, other=0.0).to(tl.float32)).to(out.dtype.element_ty)
    place = out + token * width + column
    old = tl.load(place, mask=inside, other=0.0, cache_modifier=".cg")
    value = old.to(tl.float32) * factor.to(tl.float32)
    tl.store(place, value.to(out.dtype.element_ty), mask=inside)
