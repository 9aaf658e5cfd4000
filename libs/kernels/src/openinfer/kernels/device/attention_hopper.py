"""Causal attention of prompts over the paged cache for Hopper, in Gluon.

The result, and the tiles that rows are cut into, are those of `attend_long` in attention.py. A program has three parts
that run side by side: one warp copies pages into shared memory by bulk tensor copies, and two warpgroups multiply,
BM // 2 (token, query head) pairs each. Keys are visited from the last block down, so that the blocks that need a mask
come first. The softmax of a block runs while the tensor cores multiply the weights of the block before with its values.
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

from openinfer.kernels.device.gluon_names import load_tile, reinterpret

LOW = gl.constexpr(-1.0e30)
"""The least maximum. It must be finite, so that its distance to a hidden score is not NaN."""

HIDDEN = gl.constexpr(-float("inf"))
"""The score of a key that a query does not see. attention.py says why it must not be a large finite number."""

SEARCH = gl.constexpr(128)
"""Rows looked at together for the row of a tile."""


@gluon.jit
def _tile(turn, step, GROUP: gl.constexpr, BM: gl.constexpr):
    """The work of a program's turn, as a tuple; `step`: of attend_prompt.

    The key head; the first token; the number of tokens to write; how many of these are before the row's end; the slot;
    the position of the first token; whether the tokens see any key."""
    kv_heads, items, slots, q_starts, seq_lens, alive, rows, tokens, short = step
    BQ: gl.constexpr = BM // GROUP
    LANES: gl.constexpr = gl.BlockedLayout([SEARCH // 32], [32], [gl.num_warps()], [0])
    programs = gl.num_programs(0)
    place = gl.program_id(0)
    if turn % 2 == 1:  # to and fro: the program with the longest tile of a turn gets the shortest of the next
        place = programs - 1 - place
    item = turn * programs + place
    head = item % kv_heads
    tile = items // kv_heads - 1 - item // kv_heads  # the tiles with most keys first
    passed = gl.zeros([SEARCH], gl.int32, LANES)
    for r in range(0, rows + 1, SEARCH):
        candidate = r + gl.arange(0, SEARCH, LANES)
        start = gl.load(q_starts + candidate, mask=candidate <= rows, other=1 << 30)
        passed += (start // BQ + candidate <= tile).to(gl.int32)
    row = gl.maximum(gl.sum(passed, 0) - 1, 0)
    first = gl.load(q_starts + row)
    real = row < rows
    after = gl.load(q_starts + row + 1, mask=real, other=tokens)
    begin = first + (tile - first // BQ - row) * BQ
    count = gl.maximum(gl.minimum(after - begin, BQ), 0)
    if (item >= items) | (real & (after - first <= short)):
        count = count * 0
    slot = gl.load(slots + gl.minimum(row, rows - 1))
    seen = real & (count > 0)
    seen = seen & (gl.load(alive + slot) != 0)
    before = gl.load(seq_lens + slot)
    return head, begin, count, slot, before + begin - first, before + after - first, seen


@gluon.jit
def _range(position, count, window, BN: gl.constexpr):
    """First block, first block in everyone's window, first block that needs a mask for what comes later, last block."""
    stop = position + count
    low = gl.maximum(position + 1 - window, 0) // BN
    last = (stop - 1) // BN
    inner = gl.minimum((gl.maximum(stop - window, 0) + BN - 1) // BN, last)
    whole = gl.maximum(gl.minimum((position + 1) // BN, last), inner)
    return low, inner, whole, last


@gluon.jit
def _produce(kv, ring, step, block_tables, table_width, page_rows, window, GROUP: gl.constexpr, D: gl.constexpr,
             PAGE: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """The warp that copies keys and values, page by page, 64 columns at a time."""
    kbuf, vbuf, kfull, kempty, vfull, vempty = ring
    kv_heads, items = step[0], step[1]
    CHUNK: gl.constexpr = kv.block_type.shape[0]
    CHUNKS: gl.constexpr = BN // CHUNK
    HALVES: gl.constexpr = D // 64
    done = 0
    for turn in range(gl.cdiv(items, gl.num_programs(0))):
        head, _, count, slot, position, end, seen = _tile(turn, step, GROUP, BM)
        if seen:
            low, _, _, last = _range(position, count, window, BN)
            table = block_tables + slot.to(gl.int64) * table_width
            key = head * PAGE
            value = key + kv_heads * PAGE
            for j in range(last - low + 1):
                n = (last - j) * BN
                pages = ()
                for c in gl.static_range(CHUNKS):
                    at = n + c * CHUNK
                    page = gl.load(table + at // PAGE, mask=at < end, other=0)
                    pages += (page * page_rows + at % PAGE,)
                stage = done % STAGES
                phase = ((done // STAGES) & 1) ^ 1
                mbarrier.wait(kempty.index(stage), phase)
                mbarrier.expect(kfull.index(stage), BN * D * 2)
                for c in gl.static_range(CHUNKS):
                    for h in gl.static_range(HALVES):
                        to = kbuf.index((stage * HALVES + h) * CHUNKS + c)
                        load_tile(kv, [pages[c] + key, h * 64], kfull.index(stage), to)
                mbarrier.wait(vempty.index(stage), phase)
                mbarrier.expect(vfull.index(stage), BN * D * 2)
                for c in gl.static_range(CHUNKS):
                    for h in gl.static_range(HALVES):
                        to = vbuf.index((stage * HALVES + h) * CHUNKS + c)
                        load_tile(kv, [pages[c] + value, h * 64], vfull.index(stage), to)
                done += 1


@gluon.jit
def _clear(vbuf, stage, n, end, CHUNKS: gl.constexpr, HALVES: gl.constexpr):
    """Zeros in place of the values from `end` on: what was never written may be NaN."""
    CHUNK: gl.constexpr = vbuf.shape[1]
    SPREAD: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    for c in range(CHUNKS):
        if n + (c + 1) * CHUNK > end:
            for h in gl.static_range(HALVES):
                part = vbuf.index((stage * HALVES + h) * CHUNKS + c)
                written = n + c * CHUNK + gl.arange(0, CHUNK, gl.SliceLayout(1, SPREAD)) < end
                x = part.load(SPREAD)
                part.store(gl.where(written[:, None], x, gl.zeros_like(x)))
    fence_async_shared()


@gluon.jit
def _mask(score, n, position, window, BN: gl.constexpr, LAYOUT: gl.constexpr):
    key = n + gl.arange(0, BN, gl.SliceLayout(0, LAYOUT))[None, :]
    seen = (key <= position[:, None]) & (key > position[:, None] - window)
    return gl.where(seen, score, HIDDEN)


@gluon.jit
def _pack(weight):
    """float32 [M, N] as pairs of bfloat16 in one word: int32 [M, N // 2]."""
    M: gl.constexpr = weight.shape[0]
    N: gl.constexpr = weight.shape[1]
    even, odd = gl.split(gl.reshape(weight, [M, N // 2, 2]))
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [even, odd], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _unpack(p, LAYOUT: gl.constexpr):
    """The left operand of a product, from the registers that `_pack` made."""
    M: gl.constexpr = p.shape[0]
    N: gl.constexpr = p.shape[1]
    even, odd = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [p], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=1
    )
    return gl.convert_layout(gl.reshape(gl.join(even, odd), [M, 2 * N]), LAYOUT, assert_trivial=True)


@gluon.jit
def _blocks(first, until, tile, pipeline, sums, MASKED: gl.constexpr, SIDE: gl.constexpr, IN_TURN: gl.constexpr,
            S_LAYOUT: gl.constexpr, P_LAYOUT: gl.constexpr):  # fmt: skip
    """Blocks first, first - 1 ... until. On entry and exit the values of one block, with weights p, are yet to be
    added to the sums. `done`: blocks that the pipeline had seen before the tile."""
    last, done, rounds, query, position, window, scale = tile
    k, v, kfull, kempty, vfull, vempty, turns = pipeline
    p, m, l, acc = sums
    ROWS: gl.constexpr = query.shape[0]
    STAGES: gl.constexpr = k.shape[0]
    BN: gl.constexpr = k.shape[1]
    for block in range(first - until + 1):
        b = first - block
        i = done + last - b
        stage = i % STAGES
        mbarrier.wait(kfull.index(stage), (i // STAGES) & 1)
        if IN_TURN:
            mbarrier.wait(turns.index(SIDE), (rounds + last - b + SIDE) & 1)
        zero = gl.zeros([ROWS, BN], gl.float32, S_LAYOUT)
        score = warpgroup_mma(query, k.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
        before = (i - 1) % STAGES
        a = _unpack(p, P_LAYOUT)
        acc = warpgroup_mma(a, v.index(before), acc, is_async=True)
        if IN_TURN:
            mbarrier.arrive(turns.index(1 - SIDE), count=1)
        score = warpgroup_mma_wait(1, deps=(score,))
        mbarrier.arrive(kempty.index(stage), count=1)
        if MASKED:
            score = _mask(score, b * BN, position, window, BN, S_LAYOUT)
        top = gl.maximum(m, gl.max(score, 1) * scale)
        weight = gl.exp2(score * scale - top[:, None])
        decay = gl.exp2(m - top)
        l = l * decay + gl.sum(weight, 1)
        m = top
        following = _pack(weight)
        # Waiting for the values here, a block early, keeps the assembler from moving the softmax behind the next line.
        mbarrier.wait(vfull.index(stage), (i // STAGES) & 1)
        acc, a = warpgroup_mma_wait(0, deps=(acc, a))
        mbarrier.arrive(vempty.index(before), count=1)
        p = following
        acc = acc * gl.convert_layout(decay, gl.SliceLayout(1, P_LAYOUT.parent))[:, None]
    return p, m, l, acc


@gluon.jit
def _consume(out, q, qbuf, ring, turns, step, window, scale, GROUP: gl.constexpr, D: gl.constexpr, BM: gl.constexpr,
             BN: gl.constexpr, STAGES: gl.constexpr, IN_TURN: gl.constexpr, SIDE: gl.constexpr):  # fmt: skip
    """A warpgroup that multiplies: pairs SIDE * BM // 2 and up of each tile."""
    kbuf, vbuf, kfull, kempty, vfull, vempty = ring
    kv_heads, items = step[0], step[1]
    ROWS: gl.constexpr = BM // 2
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    SPREAD: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    CHUNKS: gl.constexpr = BN // vbuf.shape[1]
    k = reinterpret(kbuf, gl.bfloat16, [STAGES, BN, D], SHARED)
    v = reinterpret(vbuf, gl.bfloat16, [STAGES, BN, D], SHARED)
    pipeline = (k, v, kfull, kempty, vfull, vempty, turns)
    query = qbuf.index(SIDE)
    heads = kv_heads * GROUP
    column = gl.arange(0, D, gl.SliceLayout(0, SPREAD))[None, :]
    pair = SIDE * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, SPREAD))
    mine = SIDE * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, S_LAYOUT))
    done = 0
    rounds = 0
    for turn in range(gl.cdiv(items, gl.num_programs(0))):
        head, begin, count, _, place, end, seen = _tile(turn, step, GROUP, BM)
        row = (begin + pair // GROUP).to(gl.int64) * heads + head * GROUP + pair % GROUP
        where = row[:, None] * D + column
        inside = (pair < count * GROUP)[:, None]
        if seen:
            low, inner, whole, last = _range(place, count, window, BN)
            query.store(gl.load(q + where, mask=inside, other=0.0))
            fence_async_shared()
            position = place + mine // GROUP
            stage = done % STAGES
            phase = (done // STAGES) & 1
            mbarrier.wait(kfull.index(stage), phase)
            zero = gl.zeros([ROWS, BN], gl.float32, S_LAYOUT)
            score = warpgroup_mma(query, k.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
            score = warpgroup_mma_wait(0, deps=(score,))
            mbarrier.arrive(kempty.index(stage), count=1)
            score = _mask(score, last * BN, position, window, BN, S_LAYOUT)
            # The tile's first tokens may see no key of this block.
            m = gl.maximum(gl.max(score, 1) * scale, LOW)
            weight = gl.exp2(score * scale - m[:, None])
            l = gl.sum(weight, 1)
            p = _pack(weight)
            acc = gl.zeros([ROWS, D], gl.float32, O_LAYOUT)
            mbarrier.wait(vfull.index(stage), phase)
            if last * BN + BN > end:
                _clear(vbuf, stage, last * BN, end, CHUNKS, D // 64)
            tile, sums = (last, done, rounds, query, position, window, scale), (p, m, l, acc)
            sums = _blocks(last - 1, whole, tile, pipeline, sums, True, SIDE, IN_TURN, S_LAYOUT, P_LAYOUT)
            sums = _blocks(
                gl.minimum(whole, last) - 1, inner, tile, pipeline, sums, False, SIDE, IN_TURN, S_LAYOUT, P_LAYOUT
            )  # fmt: skip
            p, m, l, acc = _blocks(
                gl.minimum(inner, last) - 1, low, tile, pipeline, sums, True, SIDE, IN_TURN, S_LAYOUT, P_LAYOUT
            )  # fmt: skip
            stage = (done + last - low) % STAGES
            a = _unpack(p, P_LAYOUT)
            acc = warpgroup_mma(a, v.index(stage), acc, is_async=True)
            acc, a = warpgroup_mma_wait(0, deps=(acc, a))
            mbarrier.arrive(vempty.index(stage), count=1)
            done += last - low + 1
            rounds += last - low
            acc = acc * (1.0 / gl.convert_layout(l, gl.SliceLayout(1, O_LAYOUT)))[:, None]
            query.store(acc.to(gl.bfloat16))
            gl.store(out + where, query.load(SPREAD), mask=inside)
        else:
            gl.store(out + where, gl.zeros([ROWS, D], gl.bfloat16, SPREAD), mask=inside)


@gluon.jit
def attend_prompt(
    out, q, kv, slots, q_starts, seq_lens, alive, block_tables,
    table_width, page_rows, window, scale, rows, tokens, short, kv_heads, items,
    GROUP: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
    STAGES: gl.constexpr, IN_TURN: gl.constexpr,
):  # fmt: skip
    """Rows of more than `short` tokens, and zeros for the tokens after the last row.

    kv: a layer of the cache as a matrix of D columns, `page_rows` rows from one page to the next. Tiles as in
    attend_long; `items` = kv_heads * (tokens // (BM // GROUP) + rows + 1) of them. Grid: any number of programs; each
    takes a tile of every turn.
    """
    CHUNK: gl.constexpr = kv.block_type.shape[0]
    BUFFERS: gl.constexpr = STAGES * (D // 64) * (BN // CHUNK)
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    qbuf = gl.allocate_shared_memory(gl.bfloat16, [2, BM // 2, D], SHARED)
    kbuf = gl.allocate_shared_memory(gl.bfloat16, [BUFFERS, CHUNK, 64], kv.layout)
    vbuf = gl.allocate_shared_memory(gl.bfloat16, [BUFFERS, CHUNK, 64], kv.layout)
    kfull = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    kempty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    vfull = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    vempty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(kfull.index(i), count=1)
        mbarrier.init(kempty.index(i), count=2)
        mbarrier.init(vfull.index(i), count=1)
        mbarrier.init(vempty.index(i), count=2)
    mbarrier.init(turns.index(0), count=1)
    mbarrier.init(turns.index(1), count=1)
    fence_async_shared()
    ring = (kbuf, vbuf, kfull, kempty, vfull, vempty)
    step = (kv_heads, items, slots, q_starts, seq_lens, alive, rows, tokens, short)
    gl.warp_specialize(
        [
            (_consume, (out, q, qbuf, ring, turns, step, window, scale, GROUP, D, BM, BN, STAGES, IN_TURN, 0)),
            (_consume, (out, q, qbuf, ring, turns, step, window, scale, GROUP, D, BM, BN, STAGES, IN_TURN, 1)),
            (_produce, (kv, ring, step, block_tables, table_width, page_rows, window, GROUP, D, PAGE, BM, BN, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
