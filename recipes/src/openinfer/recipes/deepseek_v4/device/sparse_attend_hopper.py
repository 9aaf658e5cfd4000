"""Attention of a token to its window and to compressed entries for Hopper, in Gluon.

The result is that of sparse_attend.py. A program has 64 heads of a token and one part of the vectors that it sees. Four
groups of four warps run side by side in a program:

- One looks vectors up and copies them, one block of BN after the other, into a ring.
- One multiplies the queries with a block and turns the scores into probabilities.
- Two multiply the probabilities with the block's vectors, half of the channels each.

Each group waits only for the block that it needs.
"""

# mypy: ignore-errors
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from openinfer.kernels.device.gluon_names import load_elements, reinterpret
from openinfer.kernels.device.norm import wait_ahead

LOW = gl.constexpr(-1.0e30)
"""The least maximum. It must be finite, so that its distance to a hidden score is not NaN."""

LOG2E = gl.constexpr(1.4426950408889634)

HEADS = gl.constexpr(64)
"""Heads of a program: the rows of a product."""

SLAB = gl.constexpr(64)
"""Channels that lie together in shared memory."""

LOOK_UP = gl.constexpr(256)
"""Vectors that are looked up at a time."""

SPREAD = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
"""How four warps read and write rows of channels: 16 bytes a thread."""

COPY = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0]))
"""How four warps copy vectors: neighbouring bytes are loaded together."""

SHARED = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=2))


@gluon.jit
def _sights(
    token, step, PAGE_BITS: gl.constexpr, ENTRY_BITS: gl.constexpr, BN: gl.constexpr, SPLITS: gl.constexpr
):
    """(slot, position, low, seen, of_entries, count) of a token.

    low: the position of the first raw vector that it sees. seen: the number of entries that it sees. of_entries: the
    blocks of these. count: the blocks of this program. Blocks of entries come first, because the place of their names
    depends on no other load.
    """
    positions, token_slots, window, most = step
    slot = gl.load(token_slots + token)
    position = gl.load(positions + token)
    low = gl.maximum(position + 1 - window, 0)
    seen = position * 0
    if ENTRY_BITS >= 0:
        seen = gl.minimum((position + 1) >> (PAGE_BITS - ENTRY_BITS), most)
    of_entries = (seen + BN - 1) // BN
    blocks = of_entries + (position + BN - low) // BN
    count = (blocks - gl.program_id(0) + SPLITS - 1) // SPLITS
    count = gl.where(slot == 0, 0, gl.maximum(count, 0))
    return slot.to(gl.int64), position, low, seen, of_entries, count


@gluon.jit
def _rotated(x, cos_sin, position, sign: gl.constexpr):
    """x [rows, SLAB] with its channels turned in pairs at `position`, forwards or (sign -1) back, float32."""
    ROWS: gl.constexpr = x.shape[0]
    even, odd = gl.split(gl.reshape(x.to(gl.float32), [ROWS, SLAB // 2, 2]))
    pair = gl.arange(0, SLAB // 2, gl.SliceLayout(0, even.type.layout))
    angle = cos_sin + position.to(gl.int64) * SLAB + pair
    cos, sin = gl.load(angle)[None, :], gl.load(angle + SLAB // 2)[None, :] * sign
    turned = gl.reshape(gl.join(even * cos - odd * sin, odd * cos + even * sin), [ROWS, SLAB])
    return gl.convert_layout(turned, x.type.layout)


@gluon.jit
def _copy(kv, entries, selected, step, kv_tables, entry_tables, buffers, rows, full, empty, kv_width, entry_width,
          kv_stride, entry_stride, most, D: gl.constexpr, PAGE_BITS: gl.constexpr, ENTRY_BITS: gl.constexpr,
          SELECTED: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, SPLITS: gl.constexpr):  # fmt: skip
    """The warps that look up LOOK_UP vectors at a time, and copy them block by block as the ring has room."""
    AHEAD: gl.constexpr = LOOK_UP // BN
    LINE: gl.constexpr = gl.BlockedLayout([1, 1], [32 // min(BN, 32), min(BN, 32)], [4, 1], [1, 0])
    part, token = gl.program_id(0), gl.program_id(1).to(gl.int64)
    turn = gl.arange(0, AHEAD, gl.SliceLayout(1, LINE))[:, None]
    lane = gl.arange(0, BN, gl.SliceLayout(0, LINE))[None, :]
    column = gl.arange(0, D, gl.SliceLayout(0, COPY))[None, :]
    block = part + turn * SPLITS
    number = block * BN + lane
    named = number
    if SELECTED:  # asked for before it is known how many there are
        named = gl.load(selected + token * most + number, mask=number < most, other=0)
    slot, position, low, seen, of_entries, count = _sights(token, step, PAGE_BITS, ENTRY_BITS, BN, SPLITS)
    kv_table, entry_table = kv_tables + slot * kv_width, entry_tables + slot * entry_width
    whole = reinterpret(buffers, gl.bfloat16, [STAGES, BN, D], SHARED)
    for group in range((count + AHEAD - 1) // AHEAD):
        raw = block >= of_entries
        past = number - of_entries * BN
        live = gl.where(raw, past < position + 1 - low, number < seen)
        at = past + low
        table, bits, stride = kv_table, PAGE_BITS, kv_stride // D
        if ENTRY_BITS >= 0:
            at = gl.where(raw, at, named)
            table, bits = gl.where(raw, kv_table, entry_table), gl.where(raw, PAGE_BITS, ENTRY_BITS)
            stride = gl.where(raw, kv_stride // D, entry_stride // D)
        row = gl.load(table + (at >> bits), mask=live, other=0) * stride + (at & ((1 << bits) - 1))
        reinterpret(rows, gl.int32, [AHEAD, BN], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])).store(
            gl.where(live, row, -1)
        )
        block += AHEAD * SPLITS
        number = block * BN + lane
        named = number
        if SELECTED:
            named = gl.load(selected + token * most + number, mask=number < most, other=0)
        for j in range(group * AHEAD, gl.minimum(count, group * AHEAD + AHEAD)):
            stage = j % STAGES
            place = rows.index(j % AHEAD).load(gl.SliceLayout(1, COPY))[:, None]
            base = kv
            if ENTRY_BITS >= 0:
                base = gl.where(part + j * SPLITS >= of_entries, kv, entries)
            key = base + place.to(gl.int64) * D + column
            mbarrier.wait(empty.index(stage), ((j // STAGES) & 1) ^ 1)
            # Zeros where there is nothing: what was never written may be NaN.
            load_elements(whole.index(stage), key, mask=place >= 0)
            async_copy.mbarrier_arrive(full.index(stage), increment_count=False)


@gluon.jit
def _score(weight, sinks, step, qbuf, squares, pbuf, factors, buffers, full, asked, given, taken, heads, scale, eps,
           D: gl.constexpr, PAGE_BITS: gl.constexpr, ENTRY_BITS: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
           SPLITS: gl.constexpr):  # fmt: skip
    """The warps that make probabilities: of each block, and what the sums so far are to be multiplied with before it is
    added. After the last block, what they are to be multiplied with at the end."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    part, token = gl.program_id(0), gl.program_id(1).to(gl.int64)
    _, position, low, seen, of_entries, count = _sights(token, step, PAGE_BITS, ENTRY_BITS, BN, SPLITS)
    head = gl.program_id(2) * HEADS + gl.arange(0, HEADS, ROW)
    sink = gl.load(sinks + head) * LOG2E
    query = reinterpret(qbuf, gl.bfloat16, [2, HEADS, D // 2], SHARED)
    mbarrier.wait(asked, 0)
    # The norm is a factor of a head's scores, so that the queries stay as they came.
    factor = gl.rsqrt((squares.index(0).load(ROW) + squares.index(1).load(ROW)) / D + eps) * scale
    m = gl.full([HEADS], LOW, gl.float32, ROW)
    l = gl.zeros([HEADS], gl.float32, ROW)
    for j in range(count):
        stage = j % STAGES
        block = part + j * SPLITS
        valid = gl.where(
            block < of_entries, seen - block * BN, position + 1 - low - (block - of_entries) * BN
        )
        mbarrier.wait(full.index(stage), (j // STAGES) & 1)
        fence_async_shared()  # copied by threads, read by the tensor cores
        zero = gl.zeros([HEADS, BN], gl.float32, S_LAYOUT)
        score = warpgroup_mma(query.index(0), buffers.index(stage * 2).permute((1, 0)), zero, use_acc=False,
                              is_async=True)  # fmt: skip
        score = warpgroup_mma(
            query.index(1), buffers.index(stage * 2 + 1).permute((1, 0)), score, is_async=True
        )
        score = warpgroup_mma_wait(0, deps=(score,))
        score = score * factor[:, None]
        if valid < BN:
            key = gl.arange(0, BN, gl.SliceLayout(0, S_LAYOUT))[None, :]
            score = gl.where(key < valid, score, -float("inf"))
        top = gl.maximum(m, gl.max(score, 1))
        p = gl.exp2(score - top[:, None])
        decay = gl.exp2(m - top)
        l = l * decay + gl.sum(p, 1)
        m = top
        mbarrier.wait(taken.index(j % 2), ((j // 2) & 1) ^ 1)
        pbuf.index(j % 2).store(p.to(gl.bfloat16))
        factors.index(j % 2).store(decay)
        fence_async_shared()
        mbarrier.arrive(given.index(j % 2), count=1)
    if count > 0:
        less = 1.0 / l
        if SPLITS == 1:
            top = gl.maximum(m, sink)
            own = gl.exp2(m - top)
            less = own / (l * own + gl.exp2(sink - top))
        mbarrier.wait(taken.index(count % 2), ((count // 2) & 1) ^ 1)
        factors.index(count % 2).store(less)
        mbarrier.arrive(given.index(count % 2), count=1)
        if SPLITS > 1:
            gl.store(weight + (token * SPLITS + part) * heads + head, m + gl.log2(l))


@gluon.jit
def _ask(q, token, heads, cos_sin, position, qbuf, squares, asked, D: gl.constexpr, SIDE: gl.constexpr):
    """Half of the queries' channels, the last ones rotated, and the sums of their squares, to shared memory."""
    SLABS: gl.constexpr = D // 2 // SLAB
    head = gl.program_id(2) * HEADS + gl.arange(0, HEADS, gl.SliceLayout(1, SPREAD))
    column = SIDE * (D // 2) + gl.arange(0, SLAB, gl.SliceLayout(0, SPREAD))[None, :]
    place = q + (token * heads + head[:, None]) * D + column
    loaded = ()
    for slab in gl.static_range(SLABS):
        loaded += (gl.load(place + slab * SLAB),)
    total = gl.zeros([HEADS], gl.float32, gl.SliceLayout(1, SPREAD))
    for slab in gl.static_range(SLABS):
        x = loaded[slab]
        wide = x.to(gl.float32)
        total += gl.sum(wide * wide, 1)
        if SIDE == 1 and slab == SLABS - 1:
            x = _rotated(x, cos_sin, position, 1.0).to(gl.bfloat16)
        qbuf.index(SIDE * SLABS + slab).store(x)
    squares.index(SIDE).store(total)
    fence_async_shared()
    mbarrier.arrive(asked, count=1)


@gluon.jit
def _weigh(out, q, partial, cos_sin, step, qbuf, squares, pbuf, factors, buffers, empty, asked, given, taken, heads,
           D: gl.constexpr, PAGE_BITS: gl.constexpr, ENTRY_BITS: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
           SPLITS: gl.constexpr, SIDE: gl.constexpr):  # fmt: skip
    """The warps that multiply probabilities with one half of the vectors' channels, and write these."""
    SLABS: gl.constexpr = D // 2 // SLAB
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    part, token = gl.program_id(0), gl.program_id(1).to(gl.int64)
    slot, position, _, _, _, count = _sights(token, step, PAGE_BITS, ENTRY_BITS, BN, SPLITS)
    _ask(q, token, heads, cos_sin, position, qbuf, squares, asked, D, SIDE)
    acc = gl.zeros([HEADS, D // 2], gl.float32, O_LAYOUT)
    for j in range(count):
        stage = j % STAGES
        mbarrier.wait(given.index(j % 2), (j // 2) & 1)
        fence_async_shared()
        acc = acc * factors.index(j % 2).load(ROW)[:, None]
        acc = warpgroup_mma(pbuf.index(j % 2), buffers.index(stage * 2 + SIDE), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index(stage), count=1)
        mbarrier.arrive(taken.index(j % 2), count=1)
    head = gl.program_id(2) * HEADS + gl.arange(0, HEADS, gl.SliceLayout(1, SPREAD))
    column = SIDE * (D // 2) + gl.arange(0, SLAB, gl.SliceLayout(0, SPREAD))[None, :]
    if count > 0:
        mbarrier.wait(given.index(count % 2), (count // 2) & 1)
        acc = acc * factors.index(count % 2).load(ROW)[:, None]
        if SPLITS > 1:
            to = partial + ((token * SPLITS + part) * heads + head[:, None]) * D + column
        else:
            to = out + (token * heads + head[:, None]) * D + column
        # The queries' memory, for they are not needed any more: rows of 16 bytes a thread come back.
        dtype: gl.constexpr = to.dtype.element_ty
        reinterpret(qbuf, dtype, [2, HEADS, D // 2], SHARED).index(SIDE).store(acc.to(dtype))
        slabs = reinterpret(qbuf, dtype, [2 * SLABS, HEADS, SLAB], SHARED)
        for slab in gl.static_range(SLABS):
            x = slabs.index(SIDE * SLABS + slab).load(SPREAD)
            if SPLITS == 1 and SIDE == 1 and slab == SLABS - 1:
                x = _rotated(x, cos_sin, position, -1.0).to(dtype)
            gl.store(to + slab * SLAB, x)
    if SPLITS == 1 and slot == 0:
        for slab in gl.static_range(SLABS):
            place = out + (token * heads + head[:, None]) * D + column + slab * SLAB
            gl.store(place, gl.zeros([HEADS, SLAB], gl.bfloat16, SPREAD))


@gluon.jit
def sparse_attend_hopper(
    out, q, kv, entries, selected, sinks, cos_sin, positions, token_slots, kv_tables, entry_tables, partial, weight,
    kv_width, entry_width, kv_stride, entry_stride, heads, window, most, scale, eps,
    D: gl.constexpr, PAGE_BITS: gl.constexpr, ENTRY_BITS: gl.constexpr, SELECTED: gl.constexpr, BN: gl.constexpr,
    SPLITS: gl.constexpr, STAGES: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Grid (SPLITS, tokens, heads / HEADS). Arguments as of `sparse_attend` in sparse_attend.py; D is a multiple of
    128, the last SLAB channels rotate, and pages are any number of vectors apart."""
    wait_ahead(EARLY)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    qbuf = gl.allocate_shared_memory(gl.bfloat16, [D // SLAB, HEADS, SLAB], SHARED)
    buffers = gl.allocate_shared_memory(gl.bfloat16, [STAGES * 2, BN, D // 2], SHARED)
    pbuf = gl.allocate_shared_memory(gl.bfloat16, [2, HEADS, BN], gl.NVMMASharedLayout(2 * BN, 16, rank=2))
    factors = gl.allocate_shared_memory(gl.float32, [2, HEADS], PLAIN)
    squares = gl.allocate_shared_memory(gl.float32, [2, HEADS], PLAIN)
    rows = gl.allocate_shared_memory(gl.int32, [LOOK_UP // BN, BN], PLAIN)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    given = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    taken = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    asked = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=128)  # the threads that copy
        mbarrier.init(empty.index(stage), count=2)
    for turn in gl.static_range(2):
        mbarrier.init(given.index(turn), count=1)
        mbarrier.init(taken.index(turn), count=2)
    mbarrier.init(asked, count=2)
    fence_async_shared()
    step = (positions, token_slots, window, most)
    gl.warp_specialize(
        [
            (_weigh, (out, q, partial, cos_sin, step, qbuf, squares, pbuf, factors, buffers, empty, asked, given, taken,
                      heads, D, PAGE_BITS, ENTRY_BITS, BN, STAGES, SPLITS, 0)),
            (_weigh, (out, q, partial, cos_sin, step, qbuf, squares, pbuf, factors, buffers, empty, asked, given, taken,
                      heads, D, PAGE_BITS, ENTRY_BITS, BN, STAGES, SPLITS, 1)),
            (_score, (weight, sinks, step, qbuf, squares, pbuf, factors, buffers, full, asked, given, taken, heads,
                      scale, eps, D, PAGE_BITS, ENTRY_BITS, BN, STAGES, SPLITS)),
            (_copy, (kv, entries, selected, step, kv_tables, entry_tables, buffers, rows, full, empty, kv_width,
                     entry_width, kv_stride, entry_stride, most, D, PAGE_BITS, ENTRY_BITS, SELECTED, BN, STAGES,
                     SPLITS)),
        ],
        [4, 4, 4],
        [176, 96, 64] if BN <= 32 else [168, 112, 64],
    )  # fmt: skip
