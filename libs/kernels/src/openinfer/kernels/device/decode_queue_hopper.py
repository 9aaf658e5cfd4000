"""The warps that find the pieces of a decode step's attention and copy their keys and values: see
decode_attention_hopper, whose warpgroups they serve.
"""

# mypy: ignore-errors
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

SIDES = gl.constexpr(2)
"""Warps that copy, and warpgroups that multiply, in a program."""

FIELDS = gl.constexpr(8)
"""What the copying warp tells its warpgroup of a piece: kind, row, key head, part, parts, slot, first token, keys
before the new one."""

END = gl.constexpr(0)
DEAD = gl.constexpr(1)
LIVE = gl.constexpr(2)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _low(before, window, BN: gl.constexpr, WINDOWED: gl.constexpr):
    """The first key of the first block that is seen."""
    low = 0
    if WINDOWED:
        low = gl.maximum(before + 1 - window, 0) // BN * BN
    return low


@gluon.jit
def _parts(before, window, part_size, splits, BN: gl.constexpr, WINDOWED: gl.constexpr):
    """Into how many parts the keys of a row are dealt."""
    return gl.minimum((before + part_size - _low(before, window, BN, WINDOWED)) // part_size, splits)


@gluon.jit
def _piece(t, ends, total, slots, q_starts, seq_lens, alive, window, part_size, splits, rows, kv_heads,
           BN: gl.constexpr, WINDOWED: gl.constexpr):  # fmt: skip
    """The FIELDS of piece t. `ends`: how many parts the rows up to each have together."""
    unit = t // kv_heads
    row = gl.minimum(gl.sum((ends <= unit).to(gl.int32), 0), rows - 1)
    part = unit - gl.max(gl.where(ends <= unit, ends, 0), 0)
    slot = gl.load(slots + row)
    before = gl.load(seq_lens + slot)
    live = (gl.load(alive + slot) != 0).to(gl.int32)
    kind = (t < total * kv_heads).to(gl.int32) * (1 + live)
    parts = _parts(before, window, part_size, splits, BN, WINDOWED)
    return kind, row, t % kv_heads, part, parts, slot, gl.load(q_starts + row), before


@gluon.jit
def _tell(ring, told, read, turn, fields, SIDE: gl.constexpr):
    """Write the fields of a turn's piece into its slot of the ring."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    slot = SIDE * 2 + turn % 2
    mbarrier.wait(read.index(slot), (turn // 2 & 1) ^ 1)
    for i in gl.static_range(FIELDS):
        ring.index(slot * FIELDS + i).store(gl.full([1], 0, gl.int32, ONE) + fields[i])
    mbarrier.arrive(told.index(slot), count=1)


@gluon.jit
def _told(ring, told, read, turn, SIDE: gl.constexpr):
    """Wait for the fields of a turn's piece and read them."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    slot = SIDE * 2 + turn % 2
    mbarrier.wait(told.index(slot), turn // 2 & 1)
    fields = ()
    for i in gl.static_range(FIELDS):
        fields += (gl.max(ring.index(slot * FIELDS + i).load(ONE), 0),)
    gl.thread_barrier()
    mbarrier.arrive(read.index(slot), count=1)
    return fields


@gluon.jit
def _copy_block(kv, buffers, full, empty, done, table, n, before, key, value, page_rows, PAGE: gl.constexpr,
                BN: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, SIDE: gl.constexpr):  # fmt: skip
    """Keys n to n + BN - 1 and their values, page by page, 64 columns at a time."""
    CHUNK: gl.constexpr = kv.block_type.shape[0]
    CHUNKS: gl.constexpr = BN // CHUNK
    HALVES: gl.constexpr = D // 64
    heads = (key, value)
    pages = ()
    for c in gl.static_range(CHUNKS):
        at = n + c * CHUNK
        page = gl.load(table + at // PAGE, mask=at < before, other=0)
        pages += (page * page_rows + at % PAGE,)
    for i in gl.static_range(2):
        buffer = (SIDE * STAGES + done % STAGES) * 2 + i
        mbarrier.wait(empty.index(buffer), (done // STAGES & 1) ^ 1)
        mbarrier.expect(full.index(buffer), BN * D * 2)
        for c in gl.static_range(CHUNKS):
            for h in gl.static_range(HALVES):
                to = buffers.index((buffer * HALVES + h) * CHUNKS + c)
                tma.async_copy_global_to_shared(kv, [pages[c] + heads[i], h * 64], full.index(buffer), to)


@gluon.jit
def _produce(kv, buffers, full, empty, ring, told, read, queue, slots, q_starts, seq_lens, alive, block_tables,
             table_width, page_rows, window, part_size, splits, rows, kv_heads, D: gl.constexpr, PAGE: gl.constexpr,
             BN: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr, WINDOWED: gl.constexpr,
             SIDE: gl.constexpr):  # fmt: skip
    """The warp that takes pieces from the queue, a turn ahead, and copies their keys and values."""
    LANES: gl.constexpr = gl.BlockedLayout([ROWS // 32], [32], [1], [0])
    candidate = gl.arange(0, ROWS, LANES)
    real = candidate < rows
    slot = gl.load(slots + candidate, mask=real, other=0)
    count = gl.load(q_starts + candidate + 1, mask=real, other=0) - gl.load(
        q_starts + candidate, mask=real, other=0
    )
    parts = _parts(gl.load(seq_lens + slot), window, part_size, splits, BN, WINDOWED)
    parts = gl.where(gl.load(alive + slot) != 0, parts, 1)
    parts = gl.where(count > 0, parts, 0)
    ends = gl.associative_scan(parts, 0, _add)
    total = gl.sum(parts, 0)

    workers = gl.num_programs(0) * SIDES
    piece = _piece(SIDE * gl.num_programs(0) + gl.program_id(0), ends, total, slots, q_starts, seq_lens, alive, window,
                   part_size, splits, rows, kv_heads, BN, WINDOWED)  # fmt: skip
    _tell(ring, told, read, 0, piece, SIDE)
    kind, _, head, part, parts, slot, _, before = piece
    done = 0
    turn = 1
    while kind != END:
        begin = _low(before, window, BN, WINDOWED) + part * BN
        step = parts * BN
        blocks = gl.maximum(before - begin + step - 1, 0) // step * (kind == LIVE).to(gl.int32)
        stop = before
        table = block_tables + slot.to(gl.int64) * table_width
        key = head * PAGE
        value = key + kv_heads * PAGE
        full_after = gl.minimum(gl.maximum(blocks, 1), STAGES) - 1
        for j in range(gl.maximum(blocks, 1)):
            if j < blocks:
                _copy_block(kv, buffers, full, empty, done, table, begin + j * step, stop, key, value, page_rows, PAGE,
                            BN, D, STAGES, SIDE)  # fmt: skip
                done += 1
            if j == full_after:  # there is time now
                piece = _piece(workers + gl.atomic_add(queue, 1, sem="relaxed"), ends, total, slots, q_starts, seq_lens,
                               alive, window, part_size, splits, rows, kv_heads, BN, WINDOWED)  # fmt: skip
                _tell(ring, told, read, turn, piece, SIDE)
                kind, _, head, part, parts, slot, _, before = piece
        turn += 1
    if gl.atomic_add(queue + 1, 1, sem="acq_rel") == workers - 1:  # nobody will ask again
        gl.store(queue, 0)
        gl.store(queue + 1, 0)
