"""RMS norm and the gated product: the elementwise neighbours of the linear layers."""

# mypy: ignore-errors
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def wait_ahead(EARLY: tl.constexpr):
    """If EARLY, wait until the kernel ahead has ended, and only then let the one behind start (launch.Launch). Every
    program does so before it writes, also one that returns at once.

    So when the one behind starts, all but this one have ended, and after its wait its loads see what all of them wrote,
    but for two kinds, which are .cg: of what the kernel ahead reads on one SM and writes on another, and of what other
    programs of the same kernel write. A load before the wait may find an old value in the first-level cache, so it is
    .cg as well, unless no kernel writes what it reads."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def start_next(EARLY: tl.constexpr):
    """If EARLY, let the kernel behind start at once, and wait until the one ahead has ended (launch.Launch). What other
    kernels ahead may have changed since this one started is not read from this SM's first-level cache (.cg). What the
    one behind reads before its wait, neither this one nor those that this one waits for may write."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def weighted(unit, gain, dtype: tl.constexpr):
    """Float32 `unit` times a weight, rounded to `dtype` before and after; only after if the weight is float32."""
    if gain.dtype == tl.float32:
        unit *= gain
    else:
        unit = unit.to(dtype).to(tl.float32) * gain.to(tl.float32)
    return unit.to(dtype)


@triton.jit
def rms_norm(out, x, weight, width, eps, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """out[t] = x[t] / rms(x[t]) weighted; rows of width <= BLOCK. Grid (rows,)."""
    row = tl.program_id(0).to(tl.int64) * width
    column = tl.arange(0, BLOCK)
    inside = column < width
    gain = tl.load(weight + column, mask=inside, other=0.0)
    start_next(EARLY)
    value = tl.load(x + row + column, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / width + eps)
    normed = weighted(value * scale, gain, x.dtype.element_ty)
    tl.store(out + row + column, normed.to(out.dtype.element_ty), mask=inside)


@triton.jit
def gated(gate, up, dtype: tl.constexpr):
    """round(silu(round(gate))) * round(up) in float32, rounding to `dtype`."""
    gate = gate.to(dtype).to(tl.float32)
    up = up.to(dtype).to(tl.float32)
    small = tl.exp2(tl.abs(gate) * -1.4426950408889634)  # never overflows
    silu = gate * tl.where(gate < 0, small, 1.0) / (1.0 + small)
    return silu.to(dtype).to(tl.float32) * up


@triton.jit
def silu_mul(out, both, width, BLOCK: tl.constexpr):
    """out[t] = silu(both[t, :width]) * both[t, width:]. Grid (rows, cdiv(width, BLOCK))."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(both + row * 2 * width + column, mask=inside, other=0.0)
    up = tl.load(both + row * 2 * width + width + column, mask=inside, other=0.0)
    value = gated(gate, up, out.dtype.element_ty)
    tl.store(out + row * width + column, value.to(out.dtype.element_ty), mask=inside)
