"""A decode step's attention from its qkv projection, as in `attend_new` of decode_attention.py, for Hopper in Gluon.

It is bound by reading the cache, so the reading never stops: a program stays on its SM and has SIDES pairs of a warp,
which copies pages into shared memory by bulk tensor copies, and a warpgroup, which multiplies. The warp takes the next
piece of work, a row's part for one key head, from a queue, and copies its first blocks while the warpgroup is still at
the last piece.
"""

# mypy: ignore-errors
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from openinfer.kernels.device.attention_hopper import LOW, _clear
from openinfer.kernels.device.decode_queue_hopper import DEAD, END, FIELDS, SIDES, _low, _produce, _told


@gluon.jit
def _weighted(unit, gain):
    """Float32 `unit` times a weight, rounded before and after; only after if the weight is float32."""
    if gain.dtype == gl.float32:
        return (unit * gain).to(gl.bfloat16)
    return (unit.to(gl.bfloat16).to(gl.float32) * gain.to(gl.float32)).to(gl.bfloat16)


@gluon.jit
def _heads(source, q_norm, k_norm, cos_sin, head, heads, before, eps, GROUP: gl.constexpr, D: gl.constexpr):
    """The new token's query heads of a key head and, as row GROUP, its key: normalised, rotated and rounded, in halves
    [64, D / 2]. The other rows are zero."""
    HALF: gl.constexpr = D // 2
    SPREAD: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    pair = gl.arange(0, 64, gl.SliceLayout(1, SPREAD))
    column = gl.arange(0, HALF, gl.SliceLayout(0, SPREAD))
    place = gl.where(pair < GROUP, head * GROUP + pair, heads + head)[:, None] * D + column[None, :]
    inside = (pair <= GROUP)[:, None]
    a = gl.load(source + place, mask=inside, other=0.0).to(gl.float32)
    b = gl.load(source + place + HALF, mask=inside, other=0.0).to(gl.float32)
    angle = cos_sin + before.to(gl.int64) * D + column
    cos, sin = gl.load(angle)[None, :], gl.load(angle + HALF)[None, :]
    is_key = (pair == GROUP)[:, None]
    gain_a = gl.where(is_key, gl.load(k_norm + column)[None, :], gl.load(q_norm + column)[None, :])
    gain_b = gl.where(
        is_key, gl.load(k_norm + HALF + column)[None, :], gl.load(q_norm + HALF + column)[None, :]
    )
    square = gl.sum(a * a + b * b, 1) / D + eps
    scale = gl.rsqrt(square)[:, None]
    a = _weighted(a * scale, gain_a).to(gl.float32)
    b = _weighted(b * scale, gain_b).to(gl.float32)
    return (a * cos - b * sin).to(gl.bfloat16), (b * cos + a * sin).to(gl.bfloat16)


@gluon.jit
def _blocks(begin, blocks, step, done, query, buffers, kv, full, empty, m, l, acc, before, window, scale,
            BN: gl.constexpr, STAGES: gl.constexpr, WINDOWED: gl.constexpr, SIDE: gl.constexpr, S_LAYOUT: gl.constexpr,
            O_LAYOUT: gl.constexpr, P_LAYOUT: gl.constexpr):  # fmt: skip
    """The online softmax over cached keys, `blocks` times BN of them, `step` apart."""
    CHUNKS: gl.constexpr = BN // buffers.shape[1]
    HALVES: gl.constexpr = kv.shape[2] // 64
    for j in range(blocks):
        n = begin + j * step
        i = done + j
        buffer = (SIDE * STAGES + i % STAGES) * 2
        phase = i // STAGES & 1
        mbarrier.wait(full.index(buffer), phase)
        zero = gl.zeros([64, BN], gl.float32, S_LAYOUT)
        score = warpgroup_mma(query, kv.index(buffer).permute((1, 0)), zero, use_acc=False, is_async=True)
        score = warpgroup_mma_wait(0, deps=(score,))
        mbarrier.arrive(empty.index(buffer), count=1)
        number = n + gl.arange(0, BN, gl.SliceLayout(0, S_LAYOUT))
        seen = number < before
        if WINDOWED:
            seen = seen & (number > before - window)
        score = gl.where(seen[None, :], score, LOW)
        top = gl.maximum(m, gl.max(score, 1) * scale)
        weight = gl.exp2(score * scale - top[:, None])
        decay = gl.exp2(m - top)
        l = l * decay + gl.sum(weight, 1)
        m = top
        acc = acc * gl.convert_layout(decay, gl.SliceLayout(1, O_LAYOUT))[:, None]
        p = gl.convert_layout(weight.to(gl.bfloat16), P_LAYOUT)
        mbarrier.wait(full.index(buffer + 1), phase)
        if n + BN > before:
            _clear(buffers, buffer + 1, n, before, CHUNKS, HALVES)
        acc = warpgroup_mma(p, kv.index(buffer + 1), acc, is_async=True)
        acc, p = warpgroup_mma_wait(0, deps=(acc, p))
        mbarrier.arrive(empty.index(buffer + 1), count=1)
    return m, l, acc


@gluon.jit
def _merge(out, partial, weight, parts, place, GROUP: gl.constexpr, D: gl.constexpr):
    """The parts' results in one, in a fixed order, to out + place."""
    PAIRS: gl.constexpr = _power_of_two(GROUP)
    SPREAD: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    pair = gl.arange(0, PAIRS, gl.SliceLayout(1, SPREAD))
    where = pair[:, None] * D + gl.arange(0, D, gl.SliceLayout(0, SPREAD))[None, :]
    live = pair < GROUP
    m = gl.full([PAIRS], LOW, gl.float32, gl.SliceLayout(1, SPREAD))
    l = gl.zeros([PAIRS], gl.float32, gl.SliceLayout(1, SPREAD))
    acc = gl.zeros([PAIRS, D], gl.float32, SPREAD)
    for s in range(parts):
        # .cg: not from this SM's first-level cache
        share = gl.load(weight + s * GROUP + pair, mask=live, other=LOW, cache_modifier=".cg")
        result = gl.load(partial + s * GROUP * D + where, mask=live[:, None], other=0.0, cache_modifier=".cg")
        top = gl.maximum(m, share)
        share = gl.exp2(share - top)
        decay = gl.exp2(m - top)
        acc = acc * decay[:, None] + result * share[:, None]
        l = l * decay + share
        m = top
    gl.store(out + place + where, (acc / l[:, None]).to(gl.bfloat16), mask=live[:, None])


@gluon.constexpr_function
def _power_of_two(n):
    return 1 << (n - 1).bit_length()


@gluon.jit
def _write_new(source, to, a, b, heads, kv_heads, head, GROUP: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr,
               O_LAYOUT: gl.constexpr):  # fmt: skip
    """Write the new key, row GROUP of a | b, and its value to the cache; returns what the queries score with the key,
    float32 [64], and the value, float32 [D]."""
    HALF: gl.constexpr = D // 2
    SPREAD: gl.constexpr = a.type.layout
    wide = gl.arange(0, D, gl.SliceLayout(0, O_LAYOUT))
    value = gl.load(source + (heads + kv_heads + head) * D + wide)
    is_key = gl.arange(0, 64, gl.SliceLayout(1, SPREAD))[:, None] == GROUP
    column = gl.zeros([64, HALF], gl.int32, SPREAD) + gl.arange(0, HALF, gl.SliceLayout(0, SPREAD))[None, :]
    gl.store(to + column, a, mask=is_key)
    gl.store(to + HALF + column, b, mask=is_key)
    gl.store(to + kv_heads * PAGE * D + wide, value)
    a, b = a.to(gl.float32), b.to(gl.float32)
    key_a = gl.sum(gl.where(is_key, a, 0.0), 0)[None, :]
    key_b = gl.sum(gl.where(is_key, b, 0.0), 0)[None, :]
    return gl.sum(a * key_a + b * key_b, 1), value.to(gl.float32)


@gluon.jit
def _hand_in(out, partial, weight, arrived, tile, splits, part, parts, place, acc, top, GROUP: gl.constexpr,
             D: gl.constexpr, O_LAYOUT: gl.constexpr):  # fmt: skip
    """Leave a part's result for the last part to arrive, which merges them."""
    group = gl.arange(0, 64, gl.SliceLayout(1, O_LAYOUT))
    within = group[:, None] * D + gl.arange(0, D, gl.SliceLayout(0, O_LAYOUT))[None, :]
    partial += (tile * splits).to(gl.int64) * GROUP * D
    weight += tile * splits * GROUP
    gl.store(partial + part * GROUP * D + within, acc, mask=(group < GROUP)[:, None])
    gl.store(weight + part * GROUP + group, top, mask=group < GROUP)
    gl.thread_barrier()  # every thread's part is written before one of them says so
    if gl.atomic_add(arrived + tile, 1, sem="acq_rel") == parts - 1:
        _merge(out, partial, weight, parts, place, GROUP, D)
        gl.store(arrived + tile, 0)


@gluon.jit
def _fill(
    out, within, inside, first, tokens, heads, GROUP: gl.constexpr, D: gl.constexpr, O_LAYOUT: gl.constexpr
):
    """Zeros for this warpgroup's share of the tokens after the last row."""
    for token in range(first + gl.program_id(0), tokens, SIDES * gl.num_programs(0)):
        for head in range(heads // GROUP):
            zeros = gl.zeros([64, D], gl.bfloat16, O_LAYOUT)
            place = (token.to(gl.int64) * heads + head * GROUP) * D
            gl.store(out + place + within, zeros, mask=inside)


@gluon.jit
def _consume(out, kv_pages, qkv, q_norm, k_norm, cos_sin, qbuf, buffers, full, empty, ring, told, read, q_starts,
             block_tables, table_width, page_stride, window, scale, eps, partial, weight, arrived, splits, rows, tokens,
             kv_heads, GROUP: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
             WINDOWED: gl.constexpr, SIDE: gl.constexpr):  # fmt: skip
    """The warpgroup that multiplies."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    kv = buffers._reinterpret(gl.bfloat16, [SIDES * STAGES * 2, BN, D], SHARED)
    query = qbuf._reinterpret(gl.bfloat16, [SIDES, 64, D], SHARED).index(SIDE)
    heads = kv_heads * GROUP
    wide = gl.arange(0, D, gl.SliceLayout(0, O_LAYOUT))
    group = gl.arange(0, 64, gl.SliceLayout(1, O_LAYOUT))
    inside = (group < GROUP)[:, None]
    within = group[:, None] * D + wide[None, :]
    unused = gl.load(q_starts + rows) + SIDE * gl.num_programs(0)
    _fill(out, within, inside, unused, tokens, heads, GROUP, D, O_LAYOUT)

    done = 0
    turn = 1
    kind, row, head, part, parts, slot, first, before = _told(ring, told, read, 0, SIDE)
    while kind != END:
        place = (first.to(gl.int64) * heads + head * GROUP) * D
        if kind == DEAD:
            gl.store(out + place + within, gl.zeros([64, D], gl.bfloat16, O_LAYOUT), mask=inside)
        else:
            low = _low(before, window, BN, WINDOWED)
            begin = low + part * BN
            step = parts * BN
            blocks = gl.maximum(before - begin + step - 1, 0) // step
            source = qkv + first.to(gl.int64) * (heads + 2 * kv_heads) * D
            a, b = _heads(source, q_norm, k_norm, cos_sin, head, heads, before, eps, GROUP, D)
            qbuf.index(SIDE * 2).store(a)
            qbuf.index(SIDE * 2 + 1).store(b)
            fence_async_shared()
            gl.thread_barrier()
            m = gl.full([64], LOW, gl.float32, gl.SliceLayout(1, S_LAYOUT))
            l = gl.zeros([64], gl.float32, gl.SliceLayout(1, S_LAYOUT))
            acc = gl.zeros([64, D], gl.float32, O_LAYOUT)
            if (before - low) // BN % parts == part:
                page = gl.load(block_tables + slot.to(gl.int64) * table_width + before // PAGE).to(gl.int64)
                to = kv_pages + page * page_stride + (head * PAGE + before % PAGE) * D
                score, value = _write_new(source, to, a, b, heads, kv_heads, head, GROUP, D, PAGE, O_LAYOUT)
                m = gl.convert_layout(score * scale, gl.SliceLayout(1, S_LAYOUT))
                l = l + 1.0
                acc = acc + value[None, :]
            m, l, acc = _blocks(begin, blocks, step, done, query, buffers, kv, full, empty, m, l, acc, before, window,
                                scale, BN, STAGES, WINDOWED, SIDE, S_LAYOUT, O_LAYOUT, P_LAYOUT)  # fmt: skip
            done += blocks
            total = gl.convert_layout(l, gl.SliceLayout(1, O_LAYOUT))
            acc = acc * (1.0 / total)[:, None]
            if parts == 1:
                gl.store(out + place + within, acc.to(gl.bfloat16), mask=inside)
            else:
                top = gl.convert_layout(m, gl.SliceLayout(1, O_LAYOUT)) + gl.log2(total)
                _hand_in(out, partial, weight, arrived, row * kv_heads + head, splits, part, parts, place, acc, top,
                         GROUP, D, O_LAYOUT)  # fmt: skip
        kind, row, head, part, parts, slot, first, before = _told(ring, told, read, turn, SIDE)
        turn += 1


@gluon.jit
def attend_new_hopper(
    out, kv, kv_pages, qkv, q_norm, k_norm, cos_sin, slots, q_starts, seq_lens, alive, block_tables,
    table_width, page_rows, page_stride, window, scale, eps, partial, weight, arrived, queue,
    part_size, splits, rows, tokens, kv_heads,
    GROUP: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
    ROWS: gl.constexpr, WINDOWED: gl.constexpr,
):  # fmt: skip
    """One token a row; a row's keys are dealt to its parts, and what is written where, as in attend_new.

    kv: a layer of the cache as a matrix of D columns, `page_rows` rows from one page to the next; kv_pages: the same
    memory. queue: int32 [2], zero before and after. ROWS: `rows` or the next power of two, at least 32. Grid: any
    number of programs.
    """
    CHUNK: gl.constexpr = kv.block_type.shape[0]
    BUFFERS: gl.constexpr = SIDES * STAGES * 2
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    qbuf = gl.allocate_shared_memory(
        gl.bfloat16, [SIDES * 2, 64, D // 2], gl.NVMMASharedLayout(128, 16, rank=2)
    )
    buffers = gl.allocate_shared_memory(
        gl.bfloat16, [BUFFERS * (D // 64) * (BN // CHUNK), CHUNK, 64], kv.layout
    )
    full = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], BARRIER)
    told = gl.allocate_shared_memory(gl.int64, [SIDES * 2, 1], BARRIER)
    read = gl.allocate_shared_memory(gl.int64, [SIDES * 2, 1], BARRIER)
    ring = gl.allocate_shared_memory(gl.int32, [SIDES * 2 * FIELDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    for i in gl.static_range(BUFFERS):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    for i in gl.static_range(SIDES * 2):
        mbarrier.init(told.index(i), count=1)
        mbarrier.init(read.index(i), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume, (out, kv_pages, qkv, q_norm, k_norm, cos_sin, qbuf, buffers, full, empty, ring, told, read,
                        q_starts, block_tables, table_width, page_stride, window, scale, eps, partial, weight,
                        arrived, splits, rows, tokens, kv_heads, GROUP, D, PAGE, BN, STAGES, WINDOWED, 0)),
            (_consume, (out, kv_pages, qkv, q_norm, k_norm, cos_sin, qbuf, buffers, full, empty, ring, told, read,
                        q_starts, block_tables, table_width, page_stride, window, scale, eps, partial, weight,
                        arrived, splits, rows, tokens, kv_heads, GROUP, D, PAGE, BN, STAGES, WINDOWED, 1)),
            (_produce, (kv, buffers, full, empty, ring, told, read, queue, slots, q_starts, seq_lens, alive,
                        block_tables, table_width, page_rows, window, part_size, splits, rows, kv_heads, D, PAGE, BN,
                        STAGES, ROWS, WINDOWED, 0)),
            (_produce, (kv, buffers, full, empty, ring, told, read, queue, slots, q_starts, seq_lens, alive,
                        block_tables, table_width, page_rows, window, part_size, splits, rows, kv_heads, D, PAGE, BN,
                        STAGES, ROWS, WINDOWED, 1)),
        ],
        [4, 1, 1],
        [216, 72, 72],
    )  # fmt: skip
