"""Rows token by token through a gated delta-rule layer, as delta_step does one: rows of a few tokens whose last ones
are drafts, and, where kernels are batch-invariant, rows of any length.

A row first takes the drafts that its last step accepted. Their inputs are in `recent`, at positions modulo `ring_size`.
The convolution's inputs at the positions before these are in the ring of the row's block. delta_token_inputs runs the
convolution for all positions, and keeps its inputs. delta_tokens carries the states through the positions, which it
reads before the wait of EARLY (norm.start_next): no kernel ahead in the step may write states.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

from openinfer.kernels.device.norm import start_next
from openinfer.recipes.qwen3_5.device.delta_step import of_batch
from openinfer.recipes.qwen3_5.device.gates import gated_norm, log_decay, sigmoid, silu


@triton.jit
def _input(channel, inside, position, row, width, TAPS: tl.constexpr):
    """The convolution's inputs of channels at positions, 0 where not `inside`. row: the positions of its state and of
    its first new token; its ring; the inputs of drafts, their width and number; the first new token, and the distance
    to the next. Before position 0: what the ring holds there."""
    begin, start, ring, recent, recent_width, ring_size, token, qkv_stride = row
    kept = tl.load(
        ring + (position + TAPS) % TAPS * width + channel,
        mask=inside & (position < begin) & (begin > 0),
        other=0.0,
    )
    draft = tl.load(
        recent + (position & (ring_size - 1)) * recent_width + channel,
        mask=inside & (position >= begin) & (position < start), other=0.0,
    )  # fmt: skip
    new = tl.load(
        token + (position - start).to(tl.int64) * qkv_stride + channel,
        mask=inside & (position >= start),
        other=0.0,
    )
    return kept + draft + new


@triton.jit
def _kept(channel, inside, upto, block, row, width, conv_state, conv_stride, TAPS: tl.constexpr):
    """The ring of a block gets the inputs of the last TAPS positions before `upto`."""
    inputs = ()
    for back in tl.static_range(TAPS):
        position = upto - 1 - back
        inputs += (_input(channel, inside, position, row, width, TAPS),)
    to = conv_state + block.to(tl.int64) * conv_stride
    for back in tl.static_range(TAPS):
        tl.store(to + (upto - 1 - back + TAPS) % TAPS * width + channel, inputs[back], mask=inside)


@triton.jit
def _made(made, row, first, ring_size, width, BY_ROW: tl.constexpr):
    """Where the queries, keys and values of a row begin. BY_ROW: each row has ring_size places; else those of its
    tokens, and ring_size / 2 for accepted drafts."""
    if BY_ROW:
        return made + row.to(tl.int64) * ring_size * width
    return made + (first + row * (ring_size // 2)).to(tl.int64) * width


@triton.jit
def delta_token_inputs(
    qkv, ba, conv_weight, conv_state, slots, q_starts, seq_lens, alive, state_from, state_to, snapshot_ends,
    snapshot_blocks, recent, accepted, num_drafts, qkv_stride, ba_stride, conv_stride, recent_stride, made, snapshots,
    short, ring_size, KEYS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, GROUP: tl.constexpr, TAPS: tl.constexpr,
    TILE: tl.constexpr, BY_ROW: tl.constexpr, WIDE: tl.constexpr, GATES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Queries, keys and values of rows of 1 to `short` tokens, float32 [places, channels] in made: from _made on, those
    of the positions after the row's state. The convolution's inputs go into the rings of the row's blocks, and the
    inputs of its drafts into `recent`, where ring_size is not 0. Grid (2 KEYS + heads + 1, rows, any number): a head
    each, and the gates; the last axis deals the tiles of TILE positions.

    WIDE: DK or DV, the larger; GATES: a power of two of at least twice the heads. Only the first tile reads what was
    kept of earlier steps: TILE is more than the accepted drafts and TAPS. Its program alone keeps anything, last."""
    start_next(EARLY)
    part, row, program = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    heads: tl.constexpr = KEYS * GROUP
    width: tl.constexpr = 2 * KEYS * DK + heads * DV
    recent_width: tl.constexpr = width + 2 * heads
    slot, first = tl.load(slots + row), tl.load(q_starts + row)
    length = tl.load(q_starts + row + 1) - first
    if (length == 0) | (length > short) | (tl.load(alive + slot) == 0):
        return
    start, drafted = tl.load(seq_lens + slot), ring_size > 0
    begin = start - tl.load(accepted + slot, mask=drafted, other=0)
    end = start + length
    sure = end - tl.load(num_drafts + row, mask=drafted, other=0)
    drafts = recent + slot.to(tl.int64) * recent_stride
    if part == 2 * KEYS + heads:
        if program > 0:
            return
        gate = tl.arange(0, GATES)
        for position in range(sure, end):
            value = tl.load(
                ba + (first + position - start).to(tl.int64) * ba_stride + gate, mask=gate < 2 * heads
            )
            to = drafts + (position & (ring_size - 1)) * recent_width + width + gate
            tl.store(to, value, mask=gate < 2 * heads)
        return
    column, is_key = tl.arange(0, WIDE), part < 2 * KEYS
    channel = tl.where(is_key, part * DK, 2 * KEYS * DK + (part - 2 * KEYS) * DV) + column
    inside = column < tl.where(is_key, DK, DV)
    ring = conv_state + tl.load(state_from + slot).to(tl.int64) * conv_stride
    token = qkv + first.to(tl.int64) * qkv_stride
    of_step = (begin, start, ring, drafts, recent_width, ring_size, token, qkv_stride)
    of_row = _made(made, row, first, ring_size, width, BY_ROW)
    for tile in range(begin + program * TILE, end, tl.num_programs(2) * TILE):
        step = tile + tl.arange(0, TILE)[:, None]
        live = (step < end) & inside[None, :]
        total = tl.zeros((TILE, WIDE), tl.float32)
        for back in tl.static_range(TAPS):
            value = _input(channel[None, :], live & (step >= back), step - back, of_step, width, TAPS)
            tap = tl.load(conv_weight + channel * TAPS + TAPS - 1 - back, mask=inside, other=0.0)
            total += value.to(tl.float32) * tap.to(tl.float32)[None, :]
        value = silu(total).to(qkv.dtype.element_ty).to(tl.float32)
        if is_key:
            scale = tl.rsqrt(tl.sum(value * value, 1) + 1e-6)
            value *= tl.where(part < KEYS, scale * DK**-0.5, scale)[:, None]
        tl.store(of_row + (step - begin).to(tl.int64) * width + channel[None, :], value, mask=live)
    if program > 0:
        return
    tl.debug_barrier()  # the rings are read before any thread writes them

    for n in range(snapshots):
        upto = tl.load(snapshot_ends + row * snapshots + n)
        if (upto > start) & (upto <= sure):
            block = tl.load(snapshot_blocks + row * snapshots + n)
            _kept(channel, inside, upto, block, of_step, width, conv_state, conv_stride, TAPS)
    _kept(channel, inside, sure, tl.load(state_to + slot), of_step, width, conv_state, conv_stride, TAPS)
    for position in range(sure, end):
        new = tl.load(token + (position - start).to(tl.int64) * qkv_stride + channel, mask=inside)
        tl.store(drafts + (position & (ring_size - 1)) * recent_width + channel, new, mask=inside)


@triton.jit
def _gates(position, start, new, ba_stride, kept, recent_width, ring_size, more, heads: tl.constexpr):
    """a and b of a head at a position, 0 unless `more`: of a new token, or of an accepted draft."""
    of_new, of_draft = new + (position - start).to(tl.int64) * ba_stride, position & (ring_size - 1)
    of_draft = kept + of_draft * recent_width
    late, early = more & (position >= start), more & (position < start)
    a = tl.load(of_new + heads, mask=late, other=0.0) + tl.load(of_draft + heads, mask=early, other=0.0)
    return a, tl.load(of_new, mask=late, other=0.0) + tl.load(of_draft, mask=early, other=0.0)


@triton.jit
def delta_tokens(
    out, z, ba, decay, dt_bias, norm_weight, state, slots, q_starts, seq_lens, alive, state_from, state_to,
    snapshot_ends, snapshot_blocks, recent, accepted, num_drafts, z_stride, ba_stride, state_stride, recent_stride,
    made, snapshots, short, ring_size, partial, arrived, eps, tokens,
    KEYS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, GROUP: tl.constexpr, BV: tl.constexpr,
    BY_ROW: tl.constexpr, SNAPSHOTS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Rows of 1 to `short` tokens, and zeros for the tokens from the last row's end to `tokens`. Grid (heads * parts
    of BV columns, rows): the part of a head that arrives last does the norm.

    made, BY_ROW: of delta_token_inputs. partial: float32 [rows, heads, short, DV]; arrived: int32 [rows, heads], zero
    before and after. Without these `out` gets what delta_token_norm is to norm. The inputs of a token are loaded while
    the one before it is worked on."""
    PARTS: tl.constexpr = DV // BV
    head, part, row = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS, tl.program_id(1)
    heads: tl.constexpr = KEYS * GROUP
    width: tl.constexpr = 2 * KEYS * DK + heads * DV
    recent_width: tl.constexpr = width + 2 * heads
    rows = tl.num_programs(1)
    i, j, whole_j = tl.arange(0, DK), part * BV + tl.arange(0, BV), tl.arange(0, DV)
    dtype = out.dtype.element_ty
    slot, first, after = of_batch(slots + row), of_batch(q_starts + row), of_batch(q_starts + row + 1)
    end, live, length = of_batch(q_starts + rows), of_batch(alive + slot) != 0, after - first
    start, drafted = of_batch(seq_lens + slot), ring_size > 0
    begin, stop = start - tl.where(drafted, of_batch(accepted + slot), 0), start + length
    sure = stop - tl.where(drafted, of_batch(num_drafts + row), 0)
    source, target = of_batch(state_from + slot).to(tl.int64), of_batch(state_to + slot).to(tl.int64)
    place, known = (head * DK + i[:, None]) * DV + j[None, :], live & (begin > 0) & (length <= short)
    s = tl.load(state + source * state_stride + place, mask=known, other=0.0, cache_modifier=".cg").to(
        tl.float32
    )
    start_next(EARLY)
    for padding in range(end + row, tokens, rows):
        tl.store(out + (padding * heads + head) * DV + j, tl.zeros((BV,), dtype))
    if (length == 0) | (length > short):
        return
    if live == 0:
        for dead in range(first, after):
            tl.store(out + (dead * heads + head) * DV + j, tl.zeros((BV,), dtype))
        return
    of_row = _made(made, row, first, ring_size, width, BY_ROW)
    of_q, of_v = of_row + head // GROUP * DK + i, of_row + 2 * KEYS * DK + head * DV + j
    of_k = of_q + KEYS * DK
    new = ba + first.to(tl.int64) * ba_stride + head
    kept = recent + slot.to(tl.int64) * recent_stride + width + head
    next_q, next_k, next_v = tl.load(of_q), tl.load(of_k), tl.load(of_v)
    next_a, next_b = _gates(begin, start, new, ba_stride, kept, recent_width, ring_size, True, heads)
    rate, bias = tl.load(decay + head), tl.load(dt_bias + head)
    which = tl.arange(0, SNAPSHOTS)
    ends = tl.load(snapshot_ends + row * snapshots + which, mask=which < snapshots, other=0)
    due = tl.min(tl.where(ends > start, ends, 1 << 30), 0)
    of_head = (row * heads + head).to(tl.int64)
    for position in range(begin, stop):
        q, k, v, a, b = next_q, next_k, next_v, next_a, next_b
        more, behind = position + 1 < stop, (position + 1 - begin).to(tl.int64) * width
        next_q = tl.load(of_q + behind, mask=more, other=0.0)
        next_k = tl.load(of_k + behind, mask=more, other=0.0)
        next_v = tl.load(of_v + behind, mask=more, other=0.0)
        next_a, next_b = _gates(
            position + 1, start, new, ba_stride, kept, recent_width, ring_size, more, heads
        )
        left = tl.exp(log_decay(a, rate, bias))
        beta = sigmoid(b.to(tl.float32)).to(dtype).to(tl.float32)
        u = beta * (v - left * tl.sum(s * k[:, None], 0))
        o = left * tl.sum(s * q[:, None], 0) + tl.sum(q * k, 0) * u  # of the state after the update
        s = (left * s + k[:, None] * u[None, :]).to(state.dtype.element_ty).to(tl.float32)  # as between steps
        if position >= start:
            if arrived is None:
                at = (first + position - start).to(tl.int64) * heads + head
                tl.store(out + at * DV + j, o.to(dtype))
            else:
                tl.store(partial + (of_head * short + position - start) * DV + j, o.to(dtype).to(tl.float32))
        if position + 1 == due:
            found = (ends == due) & (which < snapshots)
            block = tl.max(tl.load(snapshot_blocks + row * snapshots + which, mask=found, other=0), 0)
            tl.store(state + block.to(tl.int64) * state_stride + place, s)
            due = tl.min(tl.where(ends > due, ends, 1 << 30), 0)
        if position + 1 == sure:
            tl.store(state + target * state_stride + place, s)
    if arrived is not None:
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


@triton.jit
def delta_token_norm(out, o, z, norm_weight, z_stride, eps, DV: tl.constexpr):
    """out = the gated norm of o [T, heads, DV]; 0 where o is, whatever the gate. Grid (T, heads)."""
    token, head, j = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, DV)
    place = (token * tl.num_programs(1) + head) * DV + j
    value = tl.load(o + place).to(tl.float32)
    gate = tl.load(z + token * z_stride + head * DV + j)
    found = gated_norm(value, gate, tl.load(norm_weight + j), eps, DV, out.dtype.element_ty)
    tl.store(out + place, tl.where(tl.max(tl.abs(value), 0) > 0, found, 0.0))
