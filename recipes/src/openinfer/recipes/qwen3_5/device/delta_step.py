"""One token a row through a gated delta-rule layer: convolution, gates, state and gated norm in one pass.

A state of a value head is [DK, DV], float32 or bfloat16; a program reads and writes BV columns of one, once. GROUP
value heads share a key head. Inputs of the convolution are kept in a ring of TAPS rows: with the input of position p in
row p % TAPS, no program reads a row that another one writes.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

from openinfer.kernels.device.norm import start_next
from openinfer.recipes.qwen3_5.device.gates import gated_norm, log_decay, sigmoid, silu


@triton.jit
def of_batch(place):
    """A number of the batch's arrays, read before the wait (norm.wait_ahead)."""
    return tl.load(place, cache_modifier=".cg")


@triton.jit
def _old_inputs(channel, ring, weight, width, position, real, TAPS: tl.constexpr):
    """The inputs of channels [N] at the TAPS - 1 positions before, newest first, zeros before position 0; and all
    taps."""
    inputs = ()
    for back in tl.static_range(1, TAPS):
        row = (position - back + TAPS) % TAPS * width
        inputs += (
            tl.load(ring + row + channel, mask=real & (position >= back), other=0.0, cache_modifier=".cg"),
        )
    for back in tl.static_range(TAPS):
        inputs += (tl.load(weight + channel * TAPS + TAPS - 1 - back),)
    return inputs


@triton.jit
def _convolved(inputs, TAPS: tl.constexpr):
    """silu of the convolution at the newest input, rounded, in float32: [N]."""
    total = inputs[0].to(tl.float32) * inputs[TAPS].to(tl.float32)
    for back in tl.static_range(1, TAPS):
        total += inputs[back].to(tl.float32) * inputs[TAPS + back].to(tl.float32)
    return silu(total).to(inputs[0].dtype).to(tl.float32)


@triton.jit
def _keep(inputs, channel, ring, width, position, whole, TAPS: tl.constexpr):
    """The newest input into the ring; with `whole`, all of them."""
    tl.store(ring + position % TAPS * width + channel, inputs[0])
    if whole:
        for back in tl.static_range(1, TAPS):
            tl.store(ring + (position - back + TAPS) % TAPS * width + channel, inputs[back])


@triton.jit
def delta_step(
    out, qkv, z, ba, conv_weight, decay, dt_bias, norm_weight, conv_state, state, slots, q_starts, seq_lens, alive,
    state_from, state_to, partial, arrived, qkv_stride, z_stride, ba_stride, conv_stride, state_stride, eps, tokens,
    KEYS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, GROUP: tl.constexpr, TAPS: tl.constexpr, BV: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Rows of exactly one token, and zeros for the tokens from the last row's end to `tokens`. Grid (heads * parts
    of BV columns, rows): the part of a head that arrives last does the norm.

    partial: float32 [rows, heads, DV]; arrived: int32 [rows, heads], zero before and after. Loads are issued in three
    waves, each as early as its addresses are known. An SM holds only a few programs, and a program that waits for an
    address has no load in flight. EARLY: all but the inputs of this token is read before the wait (norm.start_next), so
    no kernel ahead in the step may write states.
    """
    PARTS: tl.constexpr = DV // BV
    head, part, row = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS, tl.program_id(1)
    heads: tl.constexpr = KEYS * GROUP
    rows = tl.num_programs(1)
    i, j, whole_j = tl.arange(0, DK), part * BV + tl.arange(0, BV), tl.arange(0, DV)
    dtype = out.dtype.element_ty
    slot, first = of_batch(slots + row), of_batch(q_starts + row).to(tl.int64)
    after, end = of_batch(q_starts + row + 1), of_batch(q_starts + rows)
    live, position = of_batch(alive + slot), of_batch(seq_lens + slot)
    source, target = of_batch(state_from + slot).to(tl.int64), of_batch(state_to + slot).to(tl.int64)
    real = (after - first == 1) & (live != 0)

    place = (head * DK + i[:, None]) * DV + j[None, :]
    of_state = state + source * state_stride + place
    s = tl.load(of_state, mask=real & (position > 0), other=0.0, cache_modifier=".cg").to(tl.float32)
    tl.debug_barrier()  # else the assembler moves these loads behind loads that must wait
    rate, bias = tl.load(decay + head), tl.load(dt_bias + head)
    width: tl.constexpr = 2 * KEYS * DK + heads * DV
    old, new = conv_state + source * conv_stride, conv_state + target * conv_stride
    of_q = head // GROUP * DK + i
    of_k = of_q + KEYS * DK
    of_v = 2 * KEYS * DK + head * DV + j
    q_old = _old_inputs(of_q, old, conv_weight, width, position, real, TAPS)
    k_old = _old_inputs(of_k, old, conv_weight, width, position, real, TAPS)
    v_old = _old_inputs(of_v, old, conv_weight, width, position, real, TAPS)
    start_next(EARLY)
    for token in range(end + row, tokens, rows):
        tl.store(out + (token * heads + head) * DV + j, tl.zeros((BV,), dtype))
    if after - first != 1:
        return
    to = out + (first * heads + head) * DV
    if live == 0:
        tl.store(to + j, tl.zeros((BV,), dtype))
        return
    gates = ba + first * ba_stride + head
    a, b = tl.load(gates + heads), tl.load(gates)
    of_z = z + first * z_stride + head * DV
    if PARTS == 1:
        gate, weight = tl.load(of_z + j), tl.load(norm_weight + j)
    token = qkv + first * qkv_stride
    moved = (source != target) | (position == 0)
    q_in, k_in, v_in = (tl.load(token + of_q),), (tl.load(token + of_k),), (tl.load(token + of_v),)
    q_in += q_old
    k_in += k_old
    v_in += v_old
    q = _convolved(q_in, TAPS)
    k = _convolved(k_in, TAPS)
    v = _convolved(v_in, TAPS)

    q *= tl.rsqrt(tl.sum(q * q, 0) + 1e-6) * DK**-0.5
    k *= tl.rsqrt(tl.sum(k * k, 0) + 1e-6)
    left = tl.exp(log_decay(a, rate, bias))
    beta = sigmoid(b.to(tl.float32)).to(dtype).to(tl.float32)
    u = beta * (v - left * tl.sum(s * k[:, None], 0))
    o = left * tl.sum(s * q[:, None], 0) + tl.sum(q * k, 0) * u  # of the state after the update
    o = o.to(dtype).to(tl.float32)
    tl.store(state + target * state_stride + place, left * s + k[:, None] * u[None, :])
    _keep(v_in, of_v, new, width, position, moved, TAPS)
    if head % GROUP == 0 and part == 0:
        _keep(q_in, of_q, new, width, position, moved, TAPS)
        _keep(k_in, of_k, new, width, position, moved, TAPS)

    if PARTS == 1:
        tl.store(to + j, gated_norm(o, gate, weight, eps, DV, dtype))
    else:
        of_head = row * heads + head
        tl.store(partial + of_head * DV + j, o)
        tl.debug_barrier()  # every thread's part is written before one of them says so
        if tl.atomic_add(arrived + of_head, 1, sem="acq_rel") == PARTS - 1:
            # .cg: not from this SM's first-level cache
            whole = tl.load(partial + of_head * DV + whole_j, cache_modifier=".cg")
            gate, weight = tl.load(of_z + whole_j), tl.load(norm_weight + whole_j)
            tl.store(to + whole_j, gated_norm(whole, gate, weight, eps, DV, dtype))
            tl.store(arrived + of_head, 0)
