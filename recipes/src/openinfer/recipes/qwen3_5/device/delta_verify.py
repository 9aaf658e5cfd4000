"""Rows of a few tokens through a gated delta-rule layer, the last ones drafts: token by token, as delta_step does one.

A row first takes the drafts that its last step accepted. Their inputs are in `recent`, at their positions modulo RING.
The convolution's inputs at the positions before these are in the ring of the row's block. delta_inputs_short runs the
convolution for all positions at once, and keeps its inputs. delta_verify carries the states through the positions.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

from openinfer.recipes.qwen3_5.device.gates import gated_norm, log_decay, sigmoid, silu


@triton.jit
def _input(
    channel, inside, position, begin, start, ring, recent, recent_width, token, qkv_stride, width,
    TAPS: tl.constexpr, RING: tl.constexpr,
):  # fmt: skip
    """The convolution's inputs of channels at positions, 0 where not `inside`. begin, start: the positions of the row's
    state and of its first new token, which `token` points at. Before position 0: what the ring holds there."""
    kept = tl.load(
        ring + (position + TAPS) % TAPS * width + channel,
        mask=inside & (position < begin) & (begin > 0),
        other=0.0,
    )
    draft = tl.load(
        recent + (position + RING) % RING * recent_width + channel,
        mask=inside & (position >= begin) & (position < start), other=0.0,
    )  # fmt: skip
    new = tl.load(
        token + (position - start).to(tl.int64) * qkv_stride + channel,
        mask=inside & (position >= start),
        other=0.0,
    )
    return kept + draft + new


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
                channel, inside, position, begin, start, ring, recent, recent_width, token, qkv_stride, width,
                TAPS, RING,
            ),
        )  # fmt: skip
    to = conv_state + block.to(tl.int64) * conv_stride
    for back in tl.static_range(TAPS):
        tl.store(to + (upto - 1 - back + TAPS) % TAPS * width + channel, inputs[back], mask=inside)


@triton.jit
def delta_inputs_short(
    qkv, ba, conv_weight, conv_state, slots, q_starts, seq_lens, alive, state_from, state_to, snapshot_ends,
    snapshot_blocks, recent, accepted, num_drafts, qkv_stride, ba_stride, conv_stride, recent_stride, made, snapshots,
    short, KEYS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, GROUP: tl.constexpr, TAPS: tl.constexpr,
    RING: tl.constexpr, SNAPSHOTS: tl.constexpr, WIDE: tl.constexpr, GATES: tl.constexpr,
):  # fmt: skip
    """Queries, keys and values of rows of 1 to `short` tokens, float32 in made [rows, RING, channels]: made[row, n] has
    those of the position n after the row's state. The convolution's inputs go into the rings of the row's blocks, and
    the inputs of its drafts into `recent`. Grid (2 KEYS + heads + 1, rows): a head each, and the gates.

    WIDE: DK or DV, the larger; GATES: a power of two of at least twice the heads. A program reads all that it needs of
    its channels before it writes any."""
    part, row = tl.program_id(0), tl.program_id(1)
    heads: tl.constexpr = KEYS * GROUP
    width: tl.constexpr = 2 * KEYS * DK + heads * DV
    recent_width: tl.constexpr = width + 2 * heads
    slot, first = tl.load(slots + row), tl.load(q_starts + row)
    length = tl.load(q_starts + row + 1) - first
    if (length == 0) | (length > short) | (tl.load(alive + slot) == 0):
        return
    start = tl.load(seq_lens + slot)
    begin = start - tl.load(accepted + slot)
    end = start + length
    sure = end - tl.load(num_drafts + row)
    drafts = recent + slot.to(tl.int64) * recent_stride
    if part == 2 * KEYS + heads:
        gate = tl.arange(0, GATES)
        for position in range(sure, end):
            value = tl.load(
                ba + (first + position - start).to(tl.int64) * ba_stride + gate, mask=gate < 2 * heads
            )
            tl.store(drafts + position % RING * recent_width + width + gate, value, mask=gate < 2 * heads)
        return
    column, is_key = tl.arange(0, WIDE), part < 2 * KEYS
    channel = tl.where(is_key, part * DK, 2 * KEYS * DK + (part - 2 * KEYS) * DV) + column
    inside = column < tl.where(is_key, DK, DV)
    ring = conv_state + tl.load(state_from + slot).to(tl.int64) * conv_stride
    token = qkv + first.to(tl.int64) * qkv_stride

    step = tl.arange(0, RING)[:, None]
    live = (begin + step < end) & inside[None, :]
    total = tl.zeros((RING, WIDE), tl.float32)
    for back in tl.static_range(TAPS):
        position = begin + step - back
        value = _input(
            channel[None, :], live & (position >= 0), position, begin, start, ring, drafts, recent_width, token,
            qkv_stride, width, TAPS, RING,
        )  # fmt: skip
        tap = tl.load(conv_weight + channel * TAPS + TAPS - 1 - back, mask=inside, other=0.0)
        total += value.to(tl.float32) * tap.to(tl.float32)[None, :]
    value = silu(total).to(qkv.dtype.element_ty).to(tl.float32)
    if is_key:
        scale = tl.rsqrt(tl.sum(value * value, 1) + 1e-6)
        value *= tl.where(part < KEYS, scale * DK**-0.5, scale)[:, None]
    tl.store(made + (row.to(tl.int64) * RING + step) * width + channel[None, :], value, mask=live)
    tl.debug_barrier()  # the rings are read before any thread writes them

    which = tl.arange(0, SNAPSHOTS)
    ends = tl.load(snapshot_ends + row * snapshots + which, mask=which < snapshots, other=0)
    for upto in range(start + 1, sure + 1):
        due = (ends == upto) & (which < snapshots)
        if tl.max(due.to(tl.int32), 0) > 0:
            block = tl.max(tl.load(snapshot_blocks + row * snapshots + which, mask=due, other=0), 0)
            _kept(
                channel, inside, upto, block, begin, start, ring, drafts, recent_width, token, qkv_stride, width,
                conv_state, conv_stride, TAPS, RING,
            )  # fmt: skip
    _kept(
        channel, inside, sure, tl.load(state_to + slot), begin, start, ring, drafts, recent_width, token, qkv_stride,
        width, conv_state, conv_stride, TAPS, RING,
    )  # fmt: skip
    for position in range(sure, end):
        new = tl.load(token + (position - start).to(tl.int64) * qkv_stride + channel, mask=inside)
        tl.store(drafts + position % RING * recent_width + channel, new, mask=inside)


@triton.jit
def delta_verify(
    out, z, ba, decay, dt_bias, norm_weight, state, slots, q_starts, seq_lens, alive, state_from, state_to,
    snapshot_ends, snapshot_blocks, recent, accepted, num_drafts, z_stride, ba_stride, state_stride, recent_stride,
    made, snapshots, short, partial, arrived, eps, tokens,
    KEYS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, GROUP: tl.constexpr, RING: tl.constexpr,
    SNAPSHOTS: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Rows of 1 to `short` tokens, and zeros for the tokens from the last row's end to `tokens`. Grid (heads * parts
    of BV columns, rows): the part of a head that arrives last does the norm.

    made: of delta_inputs_short. partial: float32 [rows, heads, short, DV]; arrived: int32 [rows, heads], zero before
    and after."""
    PARTS: tl.constexpr = DV // BV
    head, part, row = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS, tl.program_id(1)
    heads: tl.constexpr = KEYS * GROUP
    width: tl.constexpr = 2 * KEYS * DK + heads * DV
    recent_width: tl.constexpr = width + 2 * heads
    rows = tl.num_programs(1)
    i, j, whole_j = tl.arange(0, DK), part * BV + tl.arange(0, BV), tl.arange(0, DV)
    dtype = out.dtype.element_ty
    slot, first, after = tl.load(slots + row), tl.load(q_starts + row), tl.load(q_starts + row + 1)
    end = tl.load(q_starts + rows)
    for padding in range(end + row, tokens, rows):
        tl.store(out + (padding * heads + head) * DV + j, tl.zeros((BV,), dtype))
    length = after - first
    if (length == 0) | (length > short):
        return
    if tl.load(alive + slot) == 0:
        for dead in range(first, after):
            tl.store(out + (dead * heads + head) * DV + j, tl.zeros((BV,), dtype))
        return
    start = tl.load(seq_lens + slot)
    begin = start - tl.load(accepted + slot)
    sure = start + length - tl.load(num_drafts + row)
    source, target = tl.load(state_from + slot).to(tl.int64), tl.load(state_to + slot).to(tl.int64)
    place = (head * DK + i[:, None]) * DV + j[None, :]
    s = tl.load(state + source * state_stride + place, mask=begin > 0, other=0.0).to(tl.float32)
    of_row = made + row.to(tl.int64) * RING * width
    of_q, of_v = of_row + head // GROUP * DK + i, of_row + 2 * KEYS * DK + head * DV + j
    of_k = of_q + KEYS * DK
    next_q, next_k, next_v = tl.load(of_q), tl.load(of_k), tl.load(of_v)
    rate, bias = tl.load(decay + head), tl.load(dt_bias + head)
    which = tl.arange(0, SNAPSHOTS)
    ends = tl.load(snapshot_ends + row * snapshots + which, mask=which < snapshots, other=0)
    of_head = (row * heads + head).to(tl.int64)
    for position in range(begin, start + length):
        q, k, v = next_q, next_k, next_v
        more, behind = position + 1 < start + length, (position + 1 - begin) * width
        next_q = tl.load(of_q + behind, mask=more, other=0.0)  # while this position is worked on
        next_k = tl.load(of_k + behind, mask=more, other=0.0)
        next_v = tl.load(of_v + behind, mask=more, other=0.0)
        new = position >= start
        of_new = ba + (first + position - start).to(tl.int64) * ba_stride + head
        of_draft = recent + slot.to(tl.int64) * recent_stride + position % RING * recent_width + width + head
        a = tl.load(of_new + heads, mask=new, other=0.0) + tl.load(
            of_draft + heads, mask=position < start, other=0.0
        )
        b = tl.load(of_new, mask=new, other=0.0) + tl.load(of_draft, mask=position < start, other=0.0)
        left = tl.exp(log_decay(a, rate, bias))
        beta = sigmoid(b.to(tl.float32)).to(dtype).to(tl.float32)
        u = beta * (v - left * tl.sum(s * k[:, None], 0))
        o = left * tl.sum(s * q[:, None], 0) + tl.sum(q * k, 0) * u  # of the state after the update
        s = (left * s + k[:, None] * u[None, :]).to(state.dtype.element_ty).to(tl.float32)  # as between steps
        if new:
            tl.store(partial + (of_head * short + position - start) * DV + j, o.to(dtype).to(tl.float32))
        due = (ends == position + 1) & (which < snapshots)
        if tl.max(due.to(tl.int32), 0) > 0:
            block = tl.max(tl.load(snapshot_blocks + row * snapshots + which, mask=due, other=0), 0)
            tl.store(state + block.to(tl.int64) * state_stride + place, s)
        if position + 1 == sure:
            tl.store(state + target * state_stride + place, s)
    tl.debug_barrier()  # every thread's part is written before one of them says so
    if tl.atomic_add(arrived + of_head, 1, sem="acq_rel") == PARTS - 1:
        weight = tl.load(norm_weight + whole_j)
        for n in range(length):
            # .cg: not from this SM's first-level cache
            whole = tl.load(partial + (of_head * short + n) * DV + whole_j, cache_modifier=".cg")
            token = first.to(tl.int64) + n
            gate = tl.load(z + token * z_stride + head * DV + whole_j)
            to = out + (token * heads + head) * DV + whole_j
            tl.store(to, gated_norm(whole, gate, weight, eps, DV, dtype))
        tl.store(arrived + of_head, 0)
