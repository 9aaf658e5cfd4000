"""Many tokens a row through a gated delta-rule layer, in chunks that end at positions divisible by C.

With G the running sum of the log decays inside a chunk and D[i, j] = exp(G[i] - G[j]) for i >= j, the updates V' of the
state S by a chunk's tokens depend on each other only through a triangular system:

    (I + strictly_lower(diag(beta) K K^T . D)) V' = diag(beta) (V - diag(exp G) K S)

`delta_inputs` makes Q, K and V; `delta_prepare` inverts every chunk's system by itself: `solved`, times diag(beta); and
has Q K^T . D as `scores`; `delta_scan` goes through a row's chunks in order, carries S, and gives the outputs
diag(exp G) Q S + (Q K^T . D) V'; `delta_norm` is the gated norm. Never exp(-G), which overflows: only differences,
which are at most 0.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

from openinfer.recipes.qwen3_5.device.gates import gated_norm, log_decay, sigmoid, silu


@triton.jit
def _row_of(tile, q_starts, rows, C: tl.constexpr):
    """The row that a tile belongs to. Row r has the tiles from q_starts[r] // C + 2 r on, a chunk each: two more than
    its tokens fill, since they need not begin or end with a chunk. The tokens after the last row count as one more."""
    SEARCH: tl.constexpr = 128
    passed = tl.zeros((SEARCH,), tl.int32)
    for r in range(0, rows + 1, SEARCH):
        candidate = r + tl.arange(0, SEARCH)
        start = tl.load(q_starts + candidate, mask=candidate <= rows, other=1 << 30)
        passed += (start // C + 2 * candidate <= tile).to(tl.int32)
    return tl.sum(passed, 0) - 1


@triton.jit
def _chunk(tile, row, slots, q_starts, seq_lens, alive, rows, short, C: tl.constexpr):
    """Of a tile: its row's slot, first token, position before the step and position after it, and the position that its
    chunk starts at, which is not before the one after the step if there is nothing to do."""
    first = tl.load(q_starts + row)
    count = tl.load(q_starts + tl.minimum(row + 1, rows)) - first
    slot = tl.load(slots + tl.minimum(row, rows - 1))
    before = tl.load(seq_lens + slot)
    start = (before // C + tile - first // C - 2 * row) * C
    end = before + count
    if (count <= short) | (tl.load(alive + slot) == 0):
        start = end
    return slot, first, before, end, start


@triton.jit
def _convolved(
    channel, start, end, first, before, qkv, stride, ring, width, weight, C: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    """silu of the causal convolution of channels [N] at positions from `start`, rounded: [C, N]. Positions outside the
    step's, `before` to `end`, get anything."""
    i, tap_of = tl.arange(0, C), tl.arange(0, TAPS)[None, :]
    taps = tl.load(weight + channel[:, None] * TAPS + tap_of).to(tl.float32)
    token = qkv + (first + start - before).to(tl.int64) * stride
    last = end - 1 - start
    total = tl.zeros((C, channel.shape[0]), tl.float32)
    for tap in tl.static_range(TAPS):
        of_tap = tl.sum(tl.where(tap_of == tap, taps, 0.0), 1)
        at = tl.minimum(i, last) + tap - (TAPS - 1)
        if start - (TAPS - 1) < before:  # some inputs are from before the step
            past = start + at
            value = tl.load(
                token + at[:, None] * stride + channel[None, :], mask=(past >= before)[:, None], other=0.0
            )
            old = ring + ((past + TAPS) % TAPS)[:, None] * width + channel[None, :]
            value += tl.load(old, mask=((past < before) & (past >= 0))[:, None], other=0.0)
        else:
            value = tl.load(token + at[:, None] * stride + channel[None, :])
        total += value.to(tl.float32) * of_tap[None, :]
    return silu(total).to(qkv.dtype.element_ty)


@triton.jit
def delta_inputs(
    q, k, v, qkv, conv_weight, conv_state, slots, q_starts, seq_lens, alive, state_from,
    qkv_stride, conv_stride, key_heads, rows, short,
    DK: tl.constexpr, DV: tl.constexpr, GROUP: tl.constexpr, TAPS: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """The convolution for rows of more than `short` tokens, and the norms of q (also times DK^-0.5) and k. Grid (2 key
    heads + value heads, T // C + 2 rows). Out, by token: q, k [T, key heads, DK], v [T, heads, DV]."""
    part, tile = tl.program_id(0), tl.program_id(1)
    row = _row_of(tile, q_starts, rows, C)
    slot, first, before, end, start = _chunk(tile, row, slots, q_starts, seq_lens, alive, rows, short, C)
    if start >= end:
        return
    heads = key_heads * GROUP
    width = 2 * key_heads * DK + heads * DV
    ring = conv_state + tl.load(state_from + slot).to(tl.int64) * conv_stride
    i = tl.arange(0, C)
    write = ((start + i >= before) & (start + i < end))[:, None]
    token = (first + start - before).to(
        tl.int64
    )  # of the chunk's first position; what follows are 32-bit offsets
    if part < 2 * key_heads:
        column = tl.arange(0, DK)
        channel = part * DK + column
        x = _convolved(channel, start, end, first, before, qkv, qkv_stride, ring, width, conv_weight, C, TAPS)
        wide = x.to(tl.float32)
        wide *= tl.rsqrt(tl.sum(wide * wide, 1) + 1e-6)[:, None]
        to, head = q, part
        if part >= key_heads:
            to, head = k, part - key_heads
        else:
            wide *= DK**-0.5
        to += (token * key_heads + head) * DK
        tl.store(to + i[:, None] * key_heads * DK + column[None, :], wide.to(x.dtype), mask=write)
    else:
        column = tl.arange(0, DV)
        head = part - 2 * key_heads
        channel = 2 * key_heads * DK + head * DV + column
        x = _convolved(channel, start, end, first, before, qkv, qkv_stride, ring, width, conv_weight, C, TAPS)
        to = v + (token * heads + head) * DV
        tl.store(to + i[:, None] * heads * DV + column[None, :], x, mask=write)


@triton.jit
def _inverse(m, C: tl.constexpr, LEVELS: tl.constexpr):
    """(I + m)^-1 of a strictly lower triangular m [C, C], C = 2^LEVELS, by products in float16: with unit keys and beta
    at most 1 nothing that is multiplied here exceeds 1.

    By blocks: where X holds the inverses of the diagonal blocks of some size, and B what m has below them in blocks of
    twice that size, the inverses of these are X - X B X.
    """
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    x = tl.where(i == j, 1.0, 0.0) - tl.where(i // 2 == j // 2, m, 0.0)
    half = m.to(tl.float16)
    for level in tl.static_range(1, LEVELS):
        inverse = x.to(tl.float16)
        below = (i >> (level + 1) == j >> (level + 1)) & (i >> level != j >> level)
        product = tl.dot(tl.where(below, half, 0.0), inverse)
        x -= tl.dot(inverse, product.to(tl.float16))
    return x


@triton.jit
def _fading(g, C: tl.constexpr):
    """D of a chunk from its g: [C, C]."""
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    return tl.exp(tl.where(i >= j, g[:, None] - g[None, :], -1.0e30))


@triton.jit
def delta_prepare(
    solved, scores, decays, q, k, ba, decay, dt_bias, slots, q_starts, seq_lens, alive, ba_stride, rows, short,
    DK: tl.constexpr, GROUP: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """What a chunk knows without the state, for rows of more than `short` tokens. Grid (heads, T // C + 2 rows, 2).

    Out, by token: solved [T, heads, C] by the one half of the programs, and by the other scores [T, heads, C] and
    decays float32 [T, heads] (G).
    """
    head, tile = tl.program_id(0), tl.program_id(1)
    heads = tl.num_programs(0)
    row = _row_of(tile, q_starts, rows, C)
    _, first, before, end, start = _chunk(tile, row, slots, q_starts, seq_lens, alive, rows, short, C)
    if start >= end:
        return
    i, ck = tl.arange(0, C), tl.arange(0, DK)
    inside = (start + i >= before) & (start + i < end)
    write = inside[:, None]
    token = (first + start - before).to(
        tl.int64
    )  # of the chunk's first position; what follows are 32-bit offsets
    gates = ba + token * ba_stride + head + i * ba_stride
    of_key = (token * (heads // GROUP) + head // GROUP) * DK
    by_key = i[:, None] * (heads // GROUP) * DK + ck[None, :]
    key = tl.load(k + of_key + by_key, mask=write, other=0.0)
    g = log_decay(
        tl.load(gates + heads, mask=inside, other=0.0), tl.load(decay + head), tl.load(dt_bias + head)
    )
    g = tl.cumsum(tl.where(inside, g, 0.0), 0)
    place = (token * heads + head) * C + i[:, None] * heads * C + i[None, :]
    dtype = key.dtype
    if tl.program_id(2) == 0:
        beta = sigmoid(tl.load(gates, mask=inside, other=0.0).to(tl.float32)).to(dtype).to(tl.float32)
        beta = tl.where(inside, beta, 0.0)
        system = tl.dot(key, tl.trans(key)) * _fading(g, C) * beta[:, None]
        inverse = _inverse(tl.where(i[:, None] > i[None, :], system, 0.0), C, LEVELS)
        tl.store(solved + place, (inverse * beta[None, :]).to(dtype), mask=write)
    else:
        query = tl.load(q + of_key + by_key, mask=write, other=0.0)
        score = tl.dot(query, tl.trans(key)) * _fading(g, C)
        tl.store(scores + place, score.to(dtype), mask=write)
        tl.store(decays + token * heads + head + i * heads, g, mask=inside)


@triton.jit
def _keep(channel, end, first, before, qkv, stride, old, new, width, TAPS: tl.constexpr):
    """The inputs of the last TAPS positions before `end` into the ring `new`, zeros for those before position 0."""
    for back in tl.static_range(TAPS):
        position = end - TAPS + back
        of_step = qkv + (first + position - before).to(tl.int64) * stride + channel
        ring_row = (position + TAPS) % TAPS * width + channel
        value = tl.load(of_step, mask=position >= before, other=0.0)
        value += tl.load(old + ring_row, mask=(position >= 0) & (position < before), other=0.0)
        tl.store(new + ring_row, value)


@triton.jit
def delta_scan(
    out, q, k, v, solved, scores, decays, qkv, conv_state, state, slots, q_starts, seq_lens, alive, state_from,
    state_to, snapshot_ends, snapshot_blocks, qkv_stride, conv_stride, state_stride, key_heads, snapshots, short,
    DK: tl.constexpr, DV: tl.constexpr, GROUP: tl.constexpr, TAPS: tl.constexpr, C: tl.constexpr, BV: tl.constexpr,
    SNAPSHOTS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The chunks of a row in order, for rows of more than `short` tokens: outputs [T, heads, DV], and the states at the
    row's end and where snapshots are due. Grid (DV // BV, heads, rows): BV columns of a state a program. SNAPSHOTS:
    `snapshots` (of a row) or the next power of two. The rest is what delta_prepare wrote."""
    part, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    heads = tl.num_programs(1)
    slot = tl.load(slots + row)
    first = tl.load(q_starts + row)
    count = tl.load(q_starts + row + 1) - first
    if count <= short or tl.load(alive + slot) == 0:
        return
    before = tl.load(seq_lens + slot)
    end = before + count
    source = tl.load(state_from + slot).to(tl.int64)
    which = tl.arange(0, SNAPSHOTS)
    ends = tl.load(snapshot_ends + row * snapshots + which, mask=which < snapshots, other=0)
    i, ck, cv = tl.arange(0, C), tl.arange(0, DK), part * BV + tl.arange(0, BV)
    place = (head * DK + ck[:, None]) * DV + cv[None, :]
    s = tl.load(state + source * state_stride + place, mask=before > 0, other=0.0)
    dtype = q.dtype.element_ty
    width = 2 * key_heads * DK + heads * DV
    reached = before
    while reached < end:  # to the next snapshot, or to the row's end
        upto = tl.minimum(end, tl.min(tl.where(ends > reached, ends, 1 << 30), 0))
        for start in tl.range(reached // C * C, upto, C, num_stages=STAGES):
            inside = (start + i >= before) & (start + i < end)
            load = inside[:, None]
            token = first + start - before
            token = token.to(tl.int64)
            of_head = token * heads + head
            by_head = i[:, None] * heads
            of_key = (token * key_heads + head // GROUP) * DK
            by_key = i[:, None] * key_heads * DK + ck[None, :]
            g = tl.load(decays + of_head + i * heads, mask=inside, other=0.0)
            last = tl.load(decays + of_head + (tl.minimum(start + C, end) - 1 - start) * heads)
            s16 = s.to(dtype)
            by_chunk = of_head * C + by_head * C + i[None, :]
            key = tl.load(k + of_key + by_key, mask=load, other=0.0)
            left = tl.load(v + of_head * DV + by_head * DV + cv[None, :], mask=load, other=0.0).to(tl.float32)
            grown = tl.exp(g)[:, None]
            left -= tl.dot(key, s16) * grown
            fresh = tl.dot(tl.load(solved + by_chunk, mask=load, other=0.0), left.to(dtype))
            o = tl.dot(tl.load(q + of_key + by_key, mask=load, other=0.0), s16) * grown
            o = tl.dot(tl.load(scores + by_chunk, mask=load, other=0.0), fresh.to(dtype), o)
            tl.store(out + of_head * DV + by_head * DV + cv[None, :], o.to(dtype), mask=load)
            rest = (fresh * tl.exp(last - g)[:, None]).to(dtype)
            s = tl.dot(tl.trans(key), rest, s * tl.exp(last))
        reached = upto
        due = ends == upto
        block = tl.load(snapshot_blocks + row * snapshots + which, mask=due & (which < snapshots), other=0)
        block = tl.max(block, 0).to(tl.int64)
        for leave in range(2):
            target = block
            if leave == 1:
                target = tl.load(state_to + slot).to(tl.int64)
            if (leave == 0 and block > 0) or (leave == 1 and upto == end):
                tl.store(state + target * state_stride + place, s)
                if part == 0:
                    old, new = conv_state + source * conv_stride, conv_state + target * conv_stride
                    of_v = 2 * key_heads * DK + head * DV + tl.arange(0, DV)
                    _keep(of_v, upto, first, before, qkv, qkv_stride, old, new, width, TAPS)
                    if head % GROUP == 0:
                        of_q = head // GROUP * DK + ck
                        _keep(of_q, upto, first, before, qkv, qkv_stride, old, new, width, TAPS)
                        _keep(
                            of_q + key_heads * DK, upto, first, before, qkv, qkv_stride, old, new, width, TAPS
                        )


@triton.jit
def delta_norm(
    out, o, z, norm_weight, slots, q_starts, alive, z_stride, rows, tokens, eps, short,
    DV: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """The gated norm of o [T, heads, DV] for rows of more than `short` tokens; zeros for those of dead rows and for the
    tokens after the last row. Grid (heads, T // C + 2 rows + 1)."""
    head, tile = tl.program_id(0), tl.program_id(1)
    heads = tl.num_programs(0)
    row = _row_of(tile, q_starts, rows, C)
    first = tl.load(q_starts + row)
    after = tokens
    if row < rows:
        after = tl.load(q_starts + row + 1)
    # By C tokens from the row's first: unlike in the other kernels, which token is in which tile means nothing here.
    begin = first + (tile - first // C - 2 * row) * C
    if begin >= after or (row < rows and after - first <= short):
        return
    token = begin + tl.arange(0, C)
    write = (token < after)[:, None]
    at = token.to(tl.int64)[:, None]
    j = tl.arange(0, DV)[None, :]
    place = (at * heads + head) * DV + j
    dtype = out.dtype.element_ty
    slot = tl.load(slots + tl.minimum(row, rows - 1))
    if row == rows or tl.load(alive + slot) == 0:
        tl.store(out + place, tl.zeros((C, DV), dtype), mask=write)
        return
    value = tl.load(o + place, mask=write, other=0.0).to(tl.float32)
    gate = tl.load(z + at * z_stride + head * DV + j, mask=write, other=0.0)
    tl.store(out + place, gated_norm(value, gate, tl.load(norm_weight + j), eps, DV, dtype), mask=write)
