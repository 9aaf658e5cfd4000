"""One token a row through a gated delta-rule layer: convolution, gates, state and gated norm in one pass.

A state of a value head is [DK, DV] float32; a program reads and writes BV columns of one, once. GROUP value heads
share a key head. Inputs of the convolution are kept in a ring of TAPS rows: with the input of position p in row
p % TAPS, no program reads a row that another one writes.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

from openinfer.recipes.qwen3_5.device.gates import gated_norm, log_decay, sigmoid, silu


@triton.jit
def _inputs(channel, token, source, width, position, TAPS: tl.constexpr):
    """The inputs of the last TAPS positions: [TAPS, N], zeros before position 0. `token`: the one at `position`."""
    tap = tl.arange(0, TAPS)[:, None]
    past = position - (TAPS - 1) + tap
    of_old = source + (past + TAPS) % TAPS * width + channel[None, :]
    old = tl.load(of_old, mask=(past >= 0) & (tap < TAPS - 1), other=0.0)
    return old + tl.load(token + channel[None, :] + tap * 0, mask=tap == TAPS - 1, other=0.0)


@triton.jit
def _keep(inputs, channel, target, width, position, whole, TAPS: tl.constexpr):
    """The new input into the ring at `target`; with `whole`, all of them."""
    tap = tl.arange(0, TAPS)[:, None]
    row = (position + 1 + tap) % TAPS
    tl.store(
        target + row * width + channel[None, :], inputs, mask=whole | (tap + channel[None, :] * 0 == TAPS - 1)
    )


@triton.jit
def _convolved(inputs, channel, weight, TAPS: tl.constexpr):
    """silu of the convolution at the newest input, rounded, in float32: [N]."""
    tap = tl.arange(0, TAPS)[:, None]
    taps = tl.load(weight + channel[None, :] * TAPS + tap).to(tl.float32)
    total = tl.sum(inputs.to(tl.float32) * taps, 0)
    return silu(total).to(inputs.dtype).to(tl.float32)


@triton.jit
def delta_step(
    out, qkv, z, ba, conv_weight, decay, dt_bias, norm_weight, conv_state, state, slots, q_starts, seq_lens, alive,
    state_from, state_to, partial, arrived, qkv_stride, z_stride, ba_stride, conv_stride, state_stride, key_heads, eps,
    tokens,
    DK: tl.constexpr, DV: tl.constexpr, GROUP: tl.constexpr, TAPS: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Rows of exactly one token, and zeros for the tokens from the last row's end to `tokens`. Grid (heads * parts
    of BV columns, rows): the part of a head that arrives last does the norm.

    partial: float32 [rows, heads, DV]; arrived: int32 [rows, heads], zero before and after.
    """
    PARTS: tl.constexpr = DV // BV
    head, part, row = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS, tl.program_id(1)
    heads, rows = tl.num_programs(0) // PARTS, tl.num_programs(1)
    i, j, whole_j = tl.arange(0, DK), part * BV + tl.arange(0, BV), tl.arange(0, DV)
    dtype = out.dtype.element_ty
    for token in range(tl.load(q_starts + rows) + row, tokens, rows):
        tl.store(out + (heads.to(tl.int64) * token + head) * DV + j, tl.zeros((BV,), dtype))
    first = tl.load(q_starts + row).to(tl.int64)
    if tl.load(q_starts + row + 1) - first != 1:
        return
    slot = tl.load(slots + row)
    to = out + (first * heads + head) * DV
    if tl.load(alive + slot) == 0:
        tl.store(to + j, tl.zeros((BV,), dtype))
        return

    position = tl.load(seq_lens + slot)
    source, target = tl.load(state_from + slot).to(tl.int64), tl.load(state_to + slot).to(tl.int64)
    place = (head * DK + i[:, None]) * DV + j[None, :]
    s = tl.load(state + source * state_stride + place, mask=position > 0, other=0.0)
    key_head = head // GROUP
    width = 2 * key_heads * DK + heads * DV
    token = qkv + first * qkv_stride
    old_ring, new_ring = conv_state + source * conv_stride, conv_state + target * conv_stride
    moved = (source != target) | (position == 0)
    of_q = key_head * DK + i
    of_k = of_q + key_heads * DK
    of_v = 2 * key_heads * DK + head * DV + j
    q_in = _inputs(of_q, token, old_ring, width, position, TAPS)
    k_in = _inputs(of_k, token, old_ring, width, position, TAPS)
    v_in = _inputs(of_v, token, old_ring, width, position, TAPS)
    q = _convolved(q_in, of_q, conv_weight, TAPS)
    k = _convolved(k_in, of_k, conv_weight, TAPS)
    v = _convolved(v_in, of_v, conv_weight, TAPS)
    _keep(v_in, of_v, new_ring, width, position, moved, TAPS)
    if head % GROUP == 0 and part == 0:
        _keep(q_in, of_q, new_ring, width, position, moved, TAPS)
        _keep(k_in, of_k, new_ring, width, position, moved, TAPS)

    q *= tl.rsqrt(tl.sum(q * q, 0) + 1e-6) * DK**-0.5
    k *= tl.rsqrt(tl.sum(k * k, 0) + 1e-6)
    gates = ba + first * ba_stride + head
    left = tl.exp(log_decay(tl.load(gates + heads), tl.load(decay + head), tl.load(dt_bias + head)))
    beta = sigmoid(tl.load(gates).to(tl.float32)).to(dtype).to(tl.float32)
    u = beta * (v - left * tl.sum(s * k[:, None], 0))
    o = left * tl.sum(s * q[:, None], 0) + tl.sum(q * k, 0) * u  # of the state after the update
    o = o.to(dtype).to(tl.float32)
    tl.store(state + target * state_stride + place, left * s + k[:, None] * u[None, :])

    of_z = z + first * z_stride + head * DV
    if PARTS == 1:
        tl.store(to + j, gated_norm(o, tl.load(of_z + j), tl.load(norm_weight + j), eps, DV, dtype))
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
