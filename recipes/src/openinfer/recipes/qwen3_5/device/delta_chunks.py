"""Many tokens a row through a gated delta-rule layer, in chunks that end at positions divisible by C.

G is the running sum of the log decays inside a chunk; D[i, j] = exp(G[i] - G[j]) for i >= j. A chunk's tokens update
the state S by V'. The rows of V' depend on each other only through a triangular system:

    (I + strictly_lower(diag(beta) K K^T . D)) V' = diag(beta) (V - diag(exp G) K S)

- `delta_inputs` makes Q, K and V.
- `delta_prepare` inverts the system of each chunk by itself. It writes the inverse times diag(beta) as `solved`, and
  Q K^T . D as `scores`.
- `delta_scan` goes through a row's chunks in order, carries S, and writes the outputs
  diag(exp G) Q S + (Q K^T . D) V'.
- `delta_norm` is the gated norm.

The kernels must not compute exp(-G), because it overflows. They take exp of differences, which are at most 0.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

from openinfer.recipes.qwen3_5.device.gates import gated_norm, log_decay, sigmoid, silu


@triton.jit
def _find(n, q_starts, rows, short, C: tl.constexpr):
    """(row, number in the row, count of all pieces) of the n-th piece of work.

    Only rows of more than `short` tokens have pieces. A row has a tile a chunk. That is up to two tiles more than its
    tokens fill, because the tokens need not begin or end with a chunk. With C = 0 a row has one piece. Beyond the last
    piece the row is `rows`."""
    SEARCH: tl.constexpr = 256
    row, before, total = 0, 0, 0
    for r in range(0, rows, SEARCH):
        candidate = r + tl.arange(0, SEARCH)
        inside = candidate < rows
        count = tl.load(q_starts + candidate + 1, mask=inside, other=0)
        count -= tl.load(q_starts + candidate, mask=inside, other=0)
        pieces = (count > short).to(tl.int32)
        if C > 0:
            pieces *= count // C + 2
        passed = (total + tl.cumsum(pieces, 0) <= n) & inside
        row += tl.sum(passed.to(tl.int32), 0)
        before += tl.sum(tl.where(passed, pieces, 0), 0)
        total += tl.sum(pieces, 0)
    return row, n - before, total


@triton.jit
def _chunk(tile, batch, C: tl.constexpr):
    """(slot, first, before, end, start) of a tile.

    slot, first: the slot and the first token of its row. before, end: the row's position before and after the step.
    start: the position at which the tile's chunk starts; start >= end if the tile has nothing to do.
    """
    slots, q_starts, seq_lens, alive, rows, short = batch
    row, number, _ = _find(tile, q_starts, rows, short, C)
    inside = tl.minimum(row, rows - 1)
    first = tl.load(q_starts + inside)
    count = tl.load(q_starts + inside + 1) - first
    slot = tl.load(slots + inside)
    before = tl.load(seq_lens + slot)
    start = (before // C + number) * C
    end = before + count
    if (row == rows) | (tl.load(alive + slot) == 0):
        start = end
    return slot, first, before, end, start


@triton.jit
def _convolved(channel, step, C: tl.constexpr, TAPS: tl.constexpr):
    """silu of the causal convolution of channels [N] at positions from `start`, rounded: [C, N]. Positions outside the
    step's, `before` to `end`, get anything."""
    start, end, first, before, qkv, stride, ring, width, weight = step
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
def _inputs(
    part, tile, q, k, v, conv, batch,
    KEYS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, GROUP: tl.constexpr, TAPS: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """The work of delta_inputs for one head of one tile."""
    qkv, qkv_stride, conv_weight, conv_state, conv_stride, state_from = conv
    slot, first, before, end, start = _chunk(tile, batch, C)
    if start < end:
        heads: tl.constexpr = KEYS * GROUP
        width: tl.constexpr = 2 * KEYS * DK + heads * DV
        ring = conv_state + tl.load(state_from + slot).to(tl.int64) * conv_stride
        step = (start, end, first, before, qkv, qkv_stride, ring, width, conv_weight)
        i = tl.arange(0, C)
        write = ((start + i >= before) & (start + i < end))[:, None]
        token = (first + start - before).to(tl.int64)  # the chunk's first; what follows are 32-bit offsets
        if part < 2 * KEYS:
            column = tl.arange(0, DK)
            x = _convolved(part * DK + column, step, C, TAPS)
            wide = x.to(tl.float32)
            wide *= tl.rsqrt(tl.sum(wide * wide, 1) + 1e-6)[:, None]
            to, head = q, part
            if part >= KEYS:
                to, head = k, part - KEYS
            else:
                wide *= DK**-0.5
            to += (token * KEYS + head) * DK
            tl.store(to + i[:, None] * KEYS * DK + column[None, :], wide.to(x.dtype), mask=write)
        else:
            column = tl.arange(0, DV)
            head = part - 2 * KEYS
            x = _convolved(2 * KEYS * DK + head * DV + column, step, C, TAPS)
            to = v + (token * heads + head) * DV
            tl.store(to + i[:, None] * heads * DV + column[None, :], x, mask=write)


@triton.jit
def delta_inputs(
    q, k, v, qkv, conv_weight, conv_state, slots, q_starts, seq_lens, alive, state_from,
    qkv_stride, conv_stride, rows, short,
    KEYS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, GROUP: tl.constexpr, TAPS: tl.constexpr, C: tl.constexpr,
    LOOP: tl.constexpr,
):  # fmt: skip
    """The convolution for rows of more than `short` tokens, and the norms of q (also times DK^-0.5) and k. Grid (2 key
    heads + value heads, tiles; with LOOP any number). Out, by token: q, k [T, key heads, DK], v [T, heads, DV]."""
    part, tile = tl.program_id(0), tl.program_id(1)
    conv = (qkv, qkv_stride, conv_weight, conv_state, conv_stride, state_from)
    batch = (slots, q_starts, seq_lens, alive, rows, short)
    if LOOP:
        for at in range(tile, _find(tile, q_starts, rows, short, C)[2], tl.num_programs(1)):
            _inputs(part, at, q, k, v, conv, batch, KEYS, DK, DV, GROUP, TAPS, C)
    else:
        _inputs(part, tile, q, k, v, conv, batch, KEYS, DK, DV, GROUP, TAPS, C)


@triton.jit
def _inverse(m, C: tl.constexpr, LEVELS: tl.constexpr):
    """(I + m)^-1 of a strictly lower triangular m [C, C], C = 2^LEVELS, by products in float16.

    float16 is wide enough: with unit keys and beta at most 1, no factor exceeds 1.

    The inverse grows by blocks. X holds the inverses of the diagonal blocks of some size. B is the part of m below
    them, inside diagonal blocks of twice that size. The inverses of the larger blocks are X - X B X.
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
def _prepared(
    head, tile, made, of_gates, batch, tokens,
    KEYS: tl.constexpr, DK: tl.constexpr, GROUP: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """The work of delta_prepare for one head of one tile."""
    solved, scores, decays, q, k = made
    ba, ba_stride, decay, dt_bias = of_gates
    _, first, before, end, start = _chunk(tile, batch, C)
    if start < end:
        i, ck = tl.arange(0, C), tl.arange(0, DK)
        inside = (start + i >= before) & (start + i < end)
        write = inside[:, None]
        token = (first + start - before).to(tl.int64)  # the chunk's first; what follows are 32-bit offsets
        heads: tl.constexpr = KEYS * GROUP
        gates = ba + token * ba_stride + head + i * ba_stride
        of_key = (token * KEYS + head // GROUP) * DK
        by_key = i[:, None] * KEYS * DK + ck[None, :]
        key = tl.load(k + of_key + by_key, mask=write, other=0.0)
        a = tl.load(gates + heads, mask=inside, other=0.0)
        g = log_decay(a, tl.load(decay + head), tl.load(dt_bias + head))
        g = tl.cumsum(tl.where(inside, g, 0.0), 0)
        place = (token * heads + head) * C + i[:, None] * heads * C + i[None, :]
        dtype = key.dtype
        if tl.program_id(2) == 0:
            b = tl.load(gates, mask=inside, other=0.0).to(tl.float32)
            beta = tl.where(inside, sigmoid(b).to(dtype).to(tl.float32), 0.0)
            system = tl.dot(key, tl.trans(key)) * _fading(g, C) * beta[:, None]
            inverse = _inverse(tl.where(i[:, None] > i[None, :], system, 0.0), C, LEVELS)
            tl.store(solved + place, (inverse * beta[None, :]).to(dtype), mask=write)
        else:
            query = tl.load(q + of_key + by_key, mask=write, other=0.0)
            score = tl.dot(query, tl.trans(key)) * _fading(g, C)
            tl.store(scores + place, score.to(dtype), mask=write)
            tl.store(decays + tokens.to(tl.int64) * head + token + i, g, mask=inside)


@triton.jit
def delta_prepare(
    solved, scores, decays, q, k, ba, decay, dt_bias, slots, q_starts, seq_lens, alive, ba_stride, tokens, rows, short,
    KEYS: tl.constexpr, DK: tl.constexpr, GROUP: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr,
    LOOP: tl.constexpr,
):  # fmt: skip
    """The part of a chunk that does not need the state, for rows of more than `short` tokens.

    Grid (heads, tiles, 2); with LOOP any number of programs may stand for the tiles.

    Out, by token. One half of the programs writes solved [T, heads, C]. The other half writes scores [T, heads, C] and
    decays (G), float32 [heads, T].
    """
    head, tile = tl.program_id(0), tl.program_id(1)
    made, of_gates = (solved, scores, decays, q, k), (ba, ba_stride, decay, dt_bias)
    batch = (slots, q_starts, seq_lens, alive, rows, short)
    if LOOP:
        for at in tl.range(tile, _find(tile, q_starts, rows, short, C)[2], tl.num_programs(1), num_stages=1):
            _prepared(head, at, made, of_gates, batch, tokens, KEYS, DK, GROUP, C, LEVELS)
    else:
        _prepared(head, tile, made, of_gates, batch, tokens, KEYS, DK, GROUP, C, LEVELS)


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
def _leave(
    s, target, upto, part, head, first, before, source, kept, place,
    KEYS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, GROUP: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    """Write a row's states after position `upto` into block `target`: its part of S, and its head's of the ring."""
    width: tl.constexpr = 2 * KEYS * DK + KEYS * GROUP * DV
    qkv, conv_state, state, qkv_stride, conv_stride, state_stride = kept
    tl.store(state + target * state_stride + place, s)
    if part == 0:
        old, new = conv_state + source * conv_stride, conv_state + target * conv_stride
        of_v = 2 * KEYS * DK + head * DV + tl.arange(0, DV)
        _keep(of_v, upto, first, before, qkv, qkv_stride, old, new, width, TAPS)
        if head % GROUP == 0:
            of_q = head // GROUP * DK + tl.arange(0, DK)
            _keep(of_q, upto, first, before, qkv, qkv_stride, old, new, width, TAPS)
            _keep(of_q + KEYS * DK, upto, first, before, qkv, qkv_stride, old, new, width, TAPS)


@triton.jit
def _scanned(
    part, head, row, call,
    KEYS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, GROUP: tl.constexpr, TAPS: tl.constexpr, C: tl.constexpr,
    BV: tl.constexpr, SNAPSHOTS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The work of delta_scan for one part of one head of one row."""
    out, made, kept, batch, blocks, tokens = call
    q, k, v, solved, scores, decays = made
    _, _, state, _, _, state_stride = kept
    slots, q_starts, seq_lens, alive = batch
    state_from, state_to, snapshot_ends, snapshot_blocks, snapshots = blocks
    heads: tl.constexpr = KEYS * GROUP
    slot, first = tl.load(slots + row), tl.load(q_starts + row)
    before = tl.load(seq_lens + slot)
    end = before + tl.load(q_starts + row + 1) - first
    source = tl.load(state_from + slot).to(tl.int64)
    which = tl.arange(0, SNAPSHOTS)
    ends = tl.load(snapshot_ends + row * snapshots + which, mask=which < snapshots, other=0)
    i, ck, cv = tl.arange(0, C), tl.arange(0, DK), part * BV + tl.arange(0, BV)
    place = (head * DK + ck[:, None]) * DV + cv[None, :]
    s = tl.load(state + source * state_stride + place, mask=before > 0, other=0.0).to(tl.float32)
    dtype = q.dtype.element_ty
    reached = before
    if tl.load(alive + slot) == 0:
        reached = end
    while reached < end:  # to the next snapshot, or to the row's end
        upto = tl.minimum(end, tl.min(tl.where(ends > reached, ends, 1 << 30), 0))
        for start in tl.range(reached // C * C, upto, C, num_stages=STAGES):
            inside = (start + i >= before) & (start + i < end)
            load = inside[:, None]
            token = (first + start - before).to(tl.int64)
            of_head = token * heads + head
            by_head = i[:, None] * heads
            of_key = (token * KEYS + head // GROUP) * DK
            by_key = i[:, None] * KEYS * DK + ck[None, :]
            of_g = decays + tokens.to(tl.int64) * head + token
            g = tl.load(of_g + i, mask=inside, other=0.0)
            last = tl.load(of_g + tl.minimum(start + C, end) - 1 - start)
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
            s = s.to(state.dtype.element_ty).to(tl.float32)  # a snapshot changes no token that follows it
        reached = upto
        due = (ends == upto) & (which < snapshots)
        block = tl.max(tl.load(snapshot_blocks + row * snapshots + which, mask=due, other=0), 0)
        for leave in range(2):
            target = block
            if leave == 1:
                target = tl.load(state_to + slot)
            if (leave == 0 and block > 0) or (leave == 1 and upto == end):
                at = target.to(tl.int64)
                _leave(s, at, upto, part, head, first, before, source, kept, place, KEYS, DK, DV, GROUP, TAPS)


@triton.jit
def delta_scan(
    out, q, k, v, solved, scores, decays, qkv, conv_state, state, slots, q_starts, seq_lens, alive, state_from,
    state_to, snapshot_ends, snapshot_blocks, qkv_stride, conv_stride, state_stride, snapshots, tokens, rows, short,
    KEYS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, GROUP: tl.constexpr, TAPS: tl.constexpr, C: tl.constexpr,
    BV: tl.constexpr, SNAPSHOTS: tl.constexpr, STAGES: tl.constexpr, LOOP: tl.constexpr,
):  # fmt: skip
    """The chunks of a row in order, for rows of more than `short` tokens: outputs [T, heads, DV], and the states at the
    row's end and where snapshots are due. Grid (DV // BV, heads, rows; with LOOP any number): BV columns of a state a
    program. SNAPSHOTS: `snapshots` (of a row) or the next power of two. The rest is what delta_prepare wrote."""
    part, head, n = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    made, batch = (q, k, v, solved, scores, decays), (slots, q_starts, seq_lens, alive)
    kept = (qkv, conv_state, state, qkv_stride, conv_stride, state_stride)
    blocks = (state_from, state_to, snapshot_ends, snapshot_blocks, snapshots)
    call = (out, made, kept, batch, blocks, tokens)
    if LOOP:
        for at in tl.range(n, _find(n, q_starts, rows, short, 0)[2], tl.num_programs(2), num_stages=1):
            row, _, _ = _find(at, q_starts, rows, short, 0)
            _scanned(part, head, row, call, KEYS, DK, DV, GROUP, TAPS, C, BV, SNAPSHOTS, STAGES)
    elif tl.load(q_starts + n + 1) - tl.load(q_starts + n) > short:
        _scanned(part, head, n, call, KEYS, DK, DV, GROUP, TAPS, C, BV, SNAPSHOTS, STAGES)


@triton.jit
def delta_norm(
    out, o, z, norm_weight, slots, q_starts, alive, z_stride, rows, tokens, eps, short,
    HEADS: tl.constexpr, DV: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """The gated norm of o [T, heads, DV] for rows of more than `short` tokens; zeros for those of dead rows and for the
    tokens after the last row. Grid (heads, any number of programs for the tiles)."""
    head, tile = tl.program_id(0), tl.program_id(1)
    j = tl.arange(0, DV)[None, :]
    dtype = out.dtype.element_ty
    end = tl.load(q_starts + rows)
    for at in range(
        tile, _find(tile, q_starts, rows, short, C)[2] + tl.cdiv(tokens - end, C), tl.num_programs(1)
    ):
        row, number, _ = _find(at, q_starts, rows, short, C)
        first, after, live = end, tokens, False
        if row < rows:
            first, after = tl.load(q_starts + row), tl.load(q_starts + row + 1)
            live = tl.load(alive + tl.load(slots + row)) != 0
        # Tiles are of C tokens from the row's first. They need not be the chunks of the other kernels.
        token = first + number * C + tl.arange(0, C)
        write = (token < after)[:, None]
        where = token.to(tl.int64)[:, None]
        place = (where * HEADS + head) * DV + j
        value = tl.load(o + place, mask=write & live, other=0.0).to(tl.float32)
        gate = tl.load(z + where * z_stride + head * DV + j, mask=write & live, other=0.0)
        tl.store(out + place, gated_norm(value, gate, tl.load(norm_weight + j), eps, DV, dtype), mask=write)
