"""Rows of a few tokens through a gated delta-rule layer, the last ones drafts: token by token, as delta_step does one.

A row first takes the drafts that its last step accepted. Their inputs are in `recent`, at their positions modulo RING.
The convolution's inputs at the positions before these are in the ring of the row's block.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

from openinfer.recipes.qwen3_5.device.gates import gated_norm, log_decay, sigmoid, silu


@triton.jit
def _input(
    channel, position, begin, start, ring, recent, recent_width, token, qkv_stride, width,
    TAPS: tl.constexpr, RING: tl.constexpr,
):  # fmt: skip
    """The convolution's inputs of channels [N] at a position. begin, start: the positions of the row's state and of its
    first new token, which `token` points at. Before position 0: what the ring holds there."""
    kept = tl.load(
        ring + (position + TAPS) % TAPS * width + channel,
        mask=(position < begin) & (begin > 0),
        other=0.0,
    )
    draft = tl.load(
        recent + (position + RING) % RING * recent_width + channel,
        mask=(position >= begin) & (position < start), other=0.0,
    )  # fmt: skip
    new = tl.load(
        token + (position - start).to(tl.int64) * qkv_stride + channel, mask=position >= start, other=0.0
    )
    return kept + draft + new


@triton.jit
def _convolved(
    channel, position, begin, start, ring, recent, recent_width, token, qkv_stride, weight, width,
    TAPS: tl.constexpr, RING: tl.constexpr,
):  # fmt: skip
    """silu of the convolution at a position, rounded, in float32: [N]."""
    total = tl.zeros(channel.shape, tl.float32)
    for back in tl.static_range(TAPS):
        value = _input(
            channel, position - back, begin, start, ring, recent, recent_width, token, qkv_stride, width, TAPS,
            RING,
        )  # fmt: skip
        value = tl.where(position >= back, value, 0.0)
        total += value.to(tl.float32) * tl.load(weight + channel * TAPS + TAPS - 1 - back).to(tl.float32)
    return silu(total).to(token.dtype.element_ty).to(tl.float32)


@triton.jit
def delta_verify(
    out, qkv, z, ba, conv_weight, decay, dt_bias, norm_weight, conv_state, state, slots, q_starts, seq_lens, alive,
    state_from, state_to, snapshot_ends, snapshot_blocks, recent, accepted, num_drafts, qkv_stride, z_stride, ba_stride,
    conv_stride, state_stride, recent_stride, eps, tokens, snapshots, short,
    KEYS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, GROUP: tl.constexpr, TAPS: tl.constexpr, RING: tl.constexpr,
    SNAPSHOTS: tl.constexpr,
):  # fmt: skip
    """Rows of 1 to `short` tokens, and zeros for the tokens from the last row's end to `tokens`. Grid (heads, rows).

    It writes outputs and states. `delta_keep` writes the convolution's inputs, because heads read those of others."""
    head, row, rows = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    heads: tl.constexpr = KEYS * GROUP
    width: tl.constexpr = 2 * KEYS * DK + heads * DV
    recent_width: tl.constexpr = width + 2 * heads
    i, j = tl.arange(0, DK), tl.arange(0, DV)
    dtype = out.dtype.element_ty
    slot, first, after = tl.load(slots + row), tl.load(q_starts + row), tl.load(q_starts + row + 1)
    end = tl.load(q_starts + rows)
    for padding in range(end + row, tokens, rows):
        tl.store(out + (padding * heads + head) * DV + j, tl.zeros((DV,), dtype))
    length = after - first
    if (length == 0) | (length > short):
        return
    if tl.load(alive + slot) == 0:
        for dead in range(first, after):
            tl.store(out + (dead * heads + head) * DV + j, tl.zeros((DV,), dtype))
        return
    start = tl.load(seq_lens + slot)
    begin = start - tl.load(accepted + slot)
    sure = start + length - tl.load(num_drafts + row)
    source, target = tl.load(state_from + slot).to(tl.int64), tl.load(state_to + slot).to(tl.int64)
    place = (head * DK + i[:, None]) * DV + j[None, :]
    s = tl.load(state + source * state_stride + place, mask=begin > 0, other=0.0)
    ring, drafts = conv_state + source * conv_stride, recent + slot.to(tl.int64) * recent_stride
    of_row = qkv + first.to(tl.int64) * qkv_stride
    rate, bias = tl.load(decay + head), tl.load(dt_bias + head)
    weight = tl.load(norm_weight + j)
    which = tl.arange(0, SNAPSHOTS)
    ends = tl.load(snapshot_ends + row * snapshots + which, mask=which < snapshots, other=0)
    of_q = head // GROUP * DK + i
    of_v = 2 * KEYS * DK + head * DV + j
    for position in range(begin, start + length):
        new = position >= start
        token = (first + position - start).to(tl.int64)
        q = _convolved(
            of_q, position, begin, start, ring, drafts, recent_width, of_row, qkv_stride, conv_weight, width,
            TAPS, RING,
        )  # fmt: skip
        k = _convolved(
            of_q + KEYS * DK, position, begin, start, ring, drafts, recent_width, of_row, qkv_stride,
            conv_weight, width, TAPS, RING,
        )  # fmt: skip
        v = _convolved(
            of_v, position, begin, start, ring, drafts, recent_width, of_row, qkv_stride, conv_weight, width,
            TAPS, RING,
        )  # fmt: skip
        of_gates = drafts + position % RING * recent_width + width + head
        a = tl.load(ba + token * ba_stride + heads + head, mask=new, other=0.0)
        a += tl.load(of_gates + heads, mask=position < start, other=0.0)
        b = tl.load(ba + token * ba_stride + head, mask=new, other=0.0)
        b += tl.load(of_gates, mask=position < start, other=0.0)
        q *= tl.rsqrt(tl.sum(q * q, 0) + 1e-6) * DK**-0.5
        k *= tl.rsqrt(tl.sum(k * k, 0) + 1e-6)
        left = tl.exp(log_decay(a, rate, bias))
        beta = sigmoid(b.to(tl.float32)).to(dtype).to(tl.float32)
        u = beta * (v - left * tl.sum(s * k[:, None], 0))
        o = left * tl.sum(s * q[:, None], 0) + tl.sum(q * k, 0) * u  # of the state after the update
        s = left * s + k[:, None] * u[None, :]
        if new:
            gate = tl.load(z + token * z_stride + head * DV + j)
            o = o.to(dtype).to(tl.float32)
            tl.store(out + (token * heads + head) * DV + j, gated_norm(o, gate, weight, eps, DV, dtype))
        due = (ends == position + 1) & (which < snapshots)
        block = tl.max(tl.load(snapshot_blocks + row * snapshots + which, mask=due, other=0), 0)
        if block > 0:
            tl.store(state + block.to(tl.int64) * state_stride + place, s)
        if position + 1 == sure:
            tl.store(state + target * state_stride + place, s)


@triton.jit
def _kept(
    channel, inside, upto, block, begin, start, ring, recent, recent_width, token, qkv_stride, width, conv_state,
    conv_stride, TAPS: tl.constexpr, RING: tl.constexpr,
):  # fmt: skip
    """The ring of a block gets the inputs of the last TAPS positions before `upto`."""
    inputs = ()
    for back in tl.static_range(TAPS):
        position = upto - 1 - back
        inputs += (
            _input(
                channel, position, begin, start, ring, recent, recent_width, token, qkv_stride, width, TAPS, RING
            ),
        )  # fmt: skip
    to = conv_state + block.to(tl.int64) * conv_stride
    for back in tl.static_range(TAPS):
        tl.store(to + (upto - 1 - back + TAPS) % TAPS * width + channel, inputs[back], mask=inside)


@triton.jit
def delta_keep(
    qkv, ba, conv_state, recent, slots, q_starts, seq_lens, alive, state_from, state_to, snapshot_ends,
    snapshot_blocks, accepted, num_drafts, qkv_stride, ba_stride, conv_stride, recent_stride, width, gates, snapshots,
    short, TAPS: tl.constexpr, RING: tl.constexpr, BLOCK: tl.constexpr, SNAPSHOTS: tl.constexpr,
):  # fmt: skip
    """The convolution's inputs of delta_verify's rows into the rings of their blocks, and the inputs of their drafts
    into `recent`. Grid (cdiv(width + gates, BLOCK), rows); a program reads all it needs of BLOCK channels first."""
    channel, row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1)
    slot, first = tl.load(slots + row), tl.load(q_starts + row)
    length = tl.load(q_starts + row + 1) - first
    if (length == 0) | (length > short) | (tl.load(alive + slot) == 0):
        return
    start = tl.load(seq_lens + slot)
    begin = start - tl.load(accepted + slot)
    sure = start + length - tl.load(num_drafts + row)
    recent_width = width + gates
    mixed = tl.where(channel < width, channel, 0)
    ring = conv_state + tl.load(state_from + slot).to(tl.int64) * conv_stride
    drafts = recent + slot.to(tl.int64) * recent_stride
    token = qkv + first.to(tl.int64) * qkv_stride
    which = tl.arange(0, SNAPSHOTS)
    ends = tl.load(snapshot_ends + row * snapshots + which, mask=which < snapshots, other=0)
    for upto in range(start + 1, sure):  # snapshots before the end
        due = (ends == upto) & (which < snapshots)
        block = tl.max(tl.load(snapshot_blocks + row * snapshots + which, mask=due, other=0), 0)
        if block > 0:
            _kept(
                mixed, channel < width, upto, block, begin, start, ring, drafts, recent_width, token, qkv_stride, width,
                conv_state, conv_stride, TAPS, RING,
            )  # fmt: skip
    due = (ends == sure) & (which < snapshots)
    block = tl.max(tl.load(snapshot_blocks + row * snapshots + which, mask=due, other=0), 0)
    if block > 0:
        _kept(
            mixed, channel < width, sure, block, begin, start, ring, drafts, recent_width, token, qkv_stride, width,
            conv_state, conv_stride, TAPS, RING,
        )  # fmt: skip
    _kept(
        mixed, channel < width, sure, tl.load(state_to + slot), begin, start, ring, drafts, recent_width, token,
        qkv_stride, width, conv_state, conv_stride, TAPS, RING,
    )  # fmt: skip
    for position in range(sure, start + length):
        at = (first + position - start).to(tl.int64)
        value = tl.load(qkv + at * qkv_stride + channel, mask=channel < width, other=0.0)
        of_gates = (channel >= width) & (channel < recent_width)
        value += tl.load(ba + at * ba_stride + channel - width, mask=of_gates, other=0.0)
        tl.store(drafts + position % RING * recent_width + channel, value, mask=channel < recent_width)
