"""Attention to latents for Hopper, in Gluon.

The result is that of latents.py. A program has 64 heads of a token and one part of what it sees. Four groups of four
warps run side by side in a program:

- One looks latents up and copies them, one block of BN after the other, into a ring.
- One multiplies the queries with a block and turns the scores into probabilities.
- Two multiply the probabilities with the block's latents, half of the numbers each.

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

LOW = gl.constexpr(-1.0e30)
"""The least maximum. It must be finite, so that its distance to a hidden score is not NaN."""

HEADS = gl.constexpr(64)
"""Heads of a program: the rows of a product."""

SLAB = gl.constexpr(64)
"""Numbers that lie together in shared memory, as many as are rotated; places of latents are counted in them."""

LOOK_UP = gl.constexpr(256)
"""Latents that are looked up at a time."""

SPREAD = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
"""How four warps read and write rows of numbers: 16 bytes a thread."""

COPY = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0]))
"""How four warps copy latents: neighbouring bytes are loaded together."""

SHARED = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=2))


@gluon.jit
def _sees(token, positions, token_slots, MOST: gl.constexpr, BN: gl.constexpr, SPLITS: gl.constexpr):
    """(slot, end, count) of a token: how many latents it sees, and how many blocks of them this program has."""
    slot = gl.load(token_slots + token)
    end = gl.load(positions + token) + 1
    if MOST > 0:
        end = gl.minimum(end, MOST)
    count = ((end + BN - 1) // BN - gl.program_id(0) + SPLITS - 1) // SPLITS
    return slot.to(gl.int64), end, gl.where(slot == 0, 0, gl.maximum(count, 0))


@gluon.jit
def _copy(kv, selected, positions, token_slots, block_tables, latents, keys, rows, full, empty, table_width,
          page_stride, C: gl.constexpr, PAGE_BITS: gl.constexpr, MOST: gl.constexpr, BN: gl.constexpr,
          STAGES: gl.constexpr, SPLITS: gl.constexpr):  # fmt: skip
    """The warps that look up LOOK_UP latents at a time, and copy them block by block as the ring has room."""
    AHEAD: gl.constexpr = LOOK_UP // BN
    LINE: gl.constexpr = gl.BlockedLayout([1, 1], [32 // min(BN, 32), min(BN, 32)], [4, 1], [1, 0])
    part, token = gl.program_id(0), gl.program_id(1).to(gl.int64)
    lane = gl.arange(0, BN, gl.SliceLayout(0, LINE))[None, :]
    number = (part + gl.arange(0, AHEAD, gl.SliceLayout(1, LINE))[:, None] * SPLITS) * BN + lane
    column = gl.arange(0, C, gl.SliceLayout(0, COPY))[None, :]
    turn = gl.arange(0, SLAB, gl.SliceLayout(0, SPREAD))[None, :]
    slot, end, count = _sees(token, positions, token_slots, MOST, BN, SPLITS)
    table = block_tables + slot * table_width
    whole = reinterpret(latents, gl.bfloat16, [STAGES, BN, C], SHARED)
    for group in range((count + AHEAD - 1) // AHEAD):
        live, at = number < end, number
        if MOST > 0:
            at = gl.load(selected + token * MOST + number, mask=live, other=0)
        page = gl.load(table + (at >> PAGE_BITS), mask=live, other=0)
        place = page * (page_stride // SLAB) + (at & ((1 << PAGE_BITS) - 1)) * (C // SLAB + 1)
        reinterpret(rows, gl.int32, [AHEAD, BN], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])).store(
            gl.where(live, place, -1)
        )
        number += AHEAD * SPLITS * BN
        for j in range(group * AHEAD, gl.minimum(count, group * AHEAD + AHEAD)):
            stage = j % STAGES
            where = rows.index(j % AHEAD).load(gl.SliceLayout(1, COPY))[:, None]
            of_key = rows.index(j % AHEAD).load(gl.SliceLayout(1, SPREAD))[:, None]
            mbarrier.wait(empty.index(stage), ((j // STAGES) & 1) ^ 1)
            # Zeros where there is nothing: what was never written may be NaN.
            load_elements(whole.index(stage), kv + where.to(gl.int64) * SLAB + column, mask=where >= 0)
            load_elements(keys.index(stage), kv + of_key.to(gl.int64) * SLAB + C + turn, mask=of_key >= 0)
            async_copy.mbarrier_arrive(full.index(stage), increment_count=False)


@gluon.jit
def _score(weight, positions, token_slots, qbuf, rbuf, pbuf, factors, latents, keys, full, asked, given, taken, heads,
           scale, C: gl.constexpr, MOST: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, SPLITS: gl.constexpr,
           TURNS: gl.constexpr):  # fmt: skip
    """The warps that make probabilities: of each block, and what the sums so far are to be multiplied with before it is
    added. After the last block, what they are to be multiplied with at the end."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    part, token = gl.program_id(0), gl.program_id(1).to(gl.int64)
    _, end, count = _sees(token, positions, token_slots, MOST, BN, SPLITS)
    query = reinterpret(qbuf, gl.bfloat16, [2, HEADS, C // 2], SHARED)
    mbarrier.wait(asked, 0)
    m = gl.full([HEADS], LOW, gl.float32, ROW)
    l = gl.zeros([HEADS], gl.float32, ROW)
    for j in range(count):
        stage = j % STAGES
        valid = end - (part + j * SPLITS) * BN
        mbarrier.wait(full.index(stage), (j // STAGES) & 1)
        fence_async_shared()  # copied by threads, read by the tensor cores
        score = gl.zeros([HEADS, BN], gl.float32, S_LAYOUT)
        score = warpgroup_mma(
            query.index(0), latents.index(stage * 2).permute((1, 0)), score, use_acc=False, is_async=True
        )
        score = warpgroup_mma(
            query.index(1), latents.index(stage * 2 + 1).permute((1, 0)), score, is_async=True
        )
        score = warpgroup_mma(rbuf, keys.index(stage).permute((1, 0)), score, is_async=True)
        score = warpgroup_mma_wait(0, deps=(score,)) * scale
        if valid < BN:
            key = gl.arange(0, BN, gl.SliceLayout(0, S_LAYOUT))[None, :]
            score = gl.where(key < valid, score, -float("inf"))
        top = gl.maximum(m, gl.max(score, 1))
        p = gl.exp2(score - top[:, None])
        decay = gl.exp2(m - top)
        l = l * decay + gl.sum(p, 1)
        m = top
        mbarrier.wait(taken.index(j % TURNS), ((j // TURNS) & 1) ^ 1)
        pbuf.index(j % TURNS).store(p.to(gl.bfloat16))
        factors.index(j % TURNS).store(decay)
        fence_async_shared()
        mbarrier.arrive(given.index(j % TURNS), count=1)
    if count > 0:
        mbarrier.wait(taken.index(count % TURNS), ((count // TURNS) & 1) ^ 1)
        factors.index(count % TURNS).store(1.0 / l)
        mbarrier.arrive(given.index(count % TURNS), count=1)
        if SPLITS > 1:
            head = gl.program_id(2) * HEADS + gl.arange(0, HEADS, ROW)
            gl.store(weight + (token * SPLITS + part) * heads + head, m + gl.log2(l))


@gluon.jit
def _weigh(out, q, turned, partial, positions, token_slots, qbuf, rbuf, pbuf, factors, latents, empty, asked, given,
           taken, heads, C: gl.constexpr, MOST: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
           SPLITS: gl.constexpr, TURNS: gl.constexpr, SIDE: gl.constexpr):  # fmt: skip
    """The warps that bring the queries, multiply probabilities with half of the latents' numbers, write the sums."""
    SLABS: gl.constexpr = C // 2 // SLAB
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    part, token = gl.program_id(0), gl.program_id(1).to(gl.int64)
    slot, _, count = _sees(token, positions, token_slots, MOST, BN, SPLITS)
    head = gl.program_id(2) * HEADS + gl.arange(0, HEADS, gl.SliceLayout(1, SPREAD))
    row = token * heads + head[:, None]
    number = gl.arange(0, SLAB, gl.SliceLayout(0, SPREAD))[None, :]
    column = SIDE * (C // 2) + number
    for slab in gl.static_range(SLABS):
        qbuf.index(SIDE * SLABS + slab).store(gl.load(q + row * C + column + slab * SLAB))
    if SIDE == 1:
        rbuf.store(gl.load(turned + row * SLAB + number))
    fence_async_shared()
    mbarrier.arrive(asked, count=1)
    acc = gl.zeros([HEADS, C // 2], gl.float32, O_LAYOUT)
    for j in range(count):
        stage = j % STAGES
        mbarrier.wait(given.index(j % TURNS), (j // TURNS) & 1)
        fence_async_shared()
        acc = acc * factors.index(j % TURNS).load(ROW)[:, None]
        acc = warpgroup_mma(pbuf.index(j % TURNS), latents.index(stage * 2 + SIDE), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index(stage), count=1)
        mbarrier.arrive(taken.index(j % TURNS), count=1)
    if count > 0:
        mbarrier.wait(given.index(count % TURNS), (count // TURNS) & 1)
        acc = acc * factors.index(count % TURNS).load(ROW)[:, None]
        to = out + row * C + column
        if SPLITS > 1:
            to = partial + ((token * SPLITS + part) * heads + head[:, None]) * C + column
        # The queries' memory, for they are not needed any more: rows of 16 bytes a thread come back.
        dtype: gl.constexpr = to.dtype.element_ty
        reinterpret(qbuf, dtype, [2, HEADS, C // 2], SHARED).index(SIDE).store(acc.to(dtype))
        slabs = reinterpret(qbuf, dtype, [2 * SLABS, HEADS, SLAB], SHARED)
        for slab in gl.static_range(SLABS):
            gl.store(to + slab * SLAB, slabs.index(SIDE * SLABS + slab).load(SPREAD))
    if SPLITS == 1 and slot == 0:
        for slab in gl.static_range(SLABS):
            gl.store(out + row * C + column + slab * SLAB, gl.zeros([HEADS, SLAB], gl.bfloat16, SPREAD))


@gluon.jit
def latent_attend_hopper(
    out, q, turned, kv, selected, block_tables, partial, weight, positions, token_slots, heads, table_width,
    page_stride, scale,
    C: gl.constexpr, BN: gl.constexpr, SPLITS: gl.constexpr, PAGE_BITS: gl.constexpr, MOST: gl.constexpr,
    STAGES: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """Grid (SPLITS, tokens, heads / HEADS). Arguments as of `latent_attend` in latents.py; C is a multiple of 128, SLAB
    numbers are rotated, and pages are a multiple of SLAB numbers apart. TURNS: blocks of probabilities in flight."""
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    qbuf = gl.allocate_shared_memory(gl.bfloat16, [C // SLAB, HEADS, SLAB], SHARED)
    rbuf = gl.allocate_shared_memory(gl.bfloat16, [HEADS, SLAB], SHARED)
    latents = gl.allocate_shared_memory(gl.bfloat16, [STAGES * 2, BN, C // 2], SHARED)
    keys = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BN, SLAB], SHARED)
    pbuf = gl.allocate_shared_memory(
        gl.bfloat16, [TURNS, HEADS, BN], gl.NVMMASharedLayout(2 * BN, 16, rank=2)
    )
    factors = gl.allocate_shared_memory(gl.float32, [TURNS, HEADS], PLAIN)
    rows = gl.allocate_shared_memory(gl.int32, [LOOK_UP // BN, BN], PLAIN)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    given = gl.allocate_shared_memory(gl.int64, [TURNS, 1], BARRIER)
    taken = gl.allocate_shared_memory(gl.int64, [TURNS, 1], BARRIER)
    asked = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=128)  # the threads that copy
        mbarrier.init(empty.index(stage), count=2)
    for turn in gl.static_range(TURNS):
        mbarrier.init(given.index(turn), count=1)
        mbarrier.init(taken.index(turn), count=2)
    mbarrier.init(asked, count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_weigh, (out, q, turned, partial, positions, token_slots, qbuf, rbuf, pbuf, factors, latents, empty,
                      asked, given, taken, heads, C, MOST, BN, STAGES, SPLITS, TURNS, 0)),
            (_weigh, (out, q, turned, partial, positions, token_slots, qbuf, rbuf, pbuf, factors, latents, empty,
                      asked, given, taken, heads, C, MOST, BN, STAGES, SPLITS, TURNS, 1)),
            (_score, (weight, positions, token_slots, qbuf, rbuf, pbuf, factors, latents, keys, full, asked, given,
                      taken, heads, scale, C, MOST, BN, STAGES, SPLITS, TURNS)),
            (_copy, (kv, selected, positions, token_slots, block_tables, latents, keys, rows, full, empty, table_width,
                     page_stride, C, PAGE_BITS, MOST, BN, STAGES, SPLITS)),
        ],
        [4, 4, 4],
        [176, 96, 64] if BN <= 32 else [168, 112, 64],
    )  # fmt: skip
