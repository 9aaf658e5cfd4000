"""A sum over ranks that every rank pushes to its peers: no barrier, and 16 bytes at a time carry their own arrival.

A rank writes its row into a slot of its own in every peer's segment and reads the slots of all ranks in its segment. A
word of +0 has not arrived: a rank sends -0 in place of +0, and clears what it has read. Three sets of slots take turns.
A rank that is a call ahead writes into the set that its peers cleared in the call before. No rank can be two ahead.
"""

# mypy: ignore-errors
import triton
import triton.language as tl


@triton.jit
def load16(address):
    """Four words, by an access that other GPUs' writes reach."""
    return tl.inline_asm_elementwise(
        "ld.relaxed.sys.global.v4.b32 {$0,$1,$2,$3}, [$4];", "=r,=r,=r,=r,l", [address],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def store16(address, a, b, c, d):
    """Four words, by an access that reaches other GPUs."""
    return tl.inline_asm_elementwise(
        "st.relaxed.sys.global.v4.b32 [$1], {$2,$3,$4,$5}; mov.u32 $0, 0;", "=r,l,r,r,r,r",
        [address, a, b, c, d], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def sent(word):
    """-0 in place of +0 in both halves: bf16 pairs whose bits are all zero."""
    return tl.where(word == 0, tl.full(word.shape, -2147483648, tl.int32), word)


@triton.jit
def low(word):
    return (word << 16).to(tl.float32, bitcast=True)


@triton.jit
def high(word):
    return (word & -65536).to(tl.float32, bitcast=True)


@triton.jit
def packed(first, second):
    """Two float32 as a word of bf16."""
    a = first.to(tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.uint32)
    b = second.to(tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.uint32)
    return (a | (b << 16)).to(tl.int32, bitcast=True)


@triton.jit
def missing(a, b, c, d):
    """How many of the 16 bytes have not arrived."""
    return tl.sum(((a == 0) | (b == 0) | (c == 0) | (d == 0)).to(tl.int32), 0)


@triton.jit
def fence(lanes):
    """The stores of the threads of these lanes come before their later ones, for every GPU."""
    tl.inline_asm_elementwise(
        "fence.acq_rel.sys; mov.u32 $0, $1;", "=r,r", [lanes], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def push_sum(
    x, y, peers, rank, rows,
    WIDTH: tl.constexpr, RANKS: tl.constexpr, SLOT: tl.constexpr, LANES: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """x[row] (+)= the sum of the y[row] of all ranks, in their order, in float32. bf16 rows of WIDTH.

    A program takes every num_programs-th row, and each row is a call of its own to it. All ranks have as many programs.
    peers int64 [RANKS + 2]: addresses of the ranks' segments, of our count of calls by program, and of the word that is
    not 0 once a rank is lost. SLOT: bytes of a rank's slot, with a row a program. LANES: at least WIDTH / 8; lanes
    beyond do what the last does.
    """
    lane = tl.minimum(tl.arange(0, LANES), WIDTH // 8 - 1).to(tl.int64) * 16
    program = tl.program_id(0)
    place = program.to(tl.int64) * (WIDTH * 2) + lane
    count = tl.load(peers + RANKS).to(tl.pointer_type(tl.int32)) + program
    lost = tl.load(peers + RANKS + 1)
    own = tl.load(peers + rank)
    call = tl.load(count)
    zero = tl.zeros([LANES], tl.float32)
    none = tl.zeros([LANES], tl.int32)
    for row in range(program, rows, tl.num_programs(0)):
        at = row.to(tl.int64) * (WIDTH * 2) + lane
        now = (call % 3).to(tl.int64) * (SLOT * RANKS) + place
        cleared = ((call + 2) % 3).to(tl.int64) * (SLOT * RANKS) + place
        a, b, c, d = load16(y.to(tl.int64) + at)
        a, b, c, d = sent(a), sent(b), sent(c), sent(d)
        for other in tl.static_range(RANKS):
            store16(tl.load(peers + other) + now + rank * SLOT, a, b, c, d)
        s0, s1, s2, s3, s4, s5, s6, s7 = zero, zero, zero, zero, zero, zero, zero, zero
        for other in tl.static_range(RANKS):
            a, b, c, d = load16(own + now + other * SLOT)
            awaited = missing(a, b, c, d)
            tries = 0
            while awaited != 0:
                a, b, c, d = load16(own + now + other * SLOT)
                awaited = missing(a, b, c, d)
                tries += 1
                if tries % 4096 == 0:
                    word, _, _, _ = load16(lost + none.to(tl.int64))
                    awaited = tl.where(tl.max(word, 0) != 0, 0, awaited)
            s0 += low(a)
            s1 += high(a)
            s2 += low(b)
            s3 += high(b)
            s4 += low(c)
            s5 += high(c)
            s6 += low(d)
            s7 += high(d)
            store16(own + cleared + other * SLOT, none, none, none, none)
        if ADD:
            a, b, c, d = load16(x.to(tl.int64) + at)
            s0 += low(a)
            s1 += high(a)
            s2 += low(b)
            s3 += high(b)
            s4 += low(c)
            s5 += high(c)
            s6 += low(d)
            s7 += high(d)
        tl.debug_barrier()  # lanes that do the same have all read x
        store16(x.to(tl.int64) + at, packed(s0, s1), packed(s2, s3), packed(s4, s5), packed(s6, s7))
        call += 1
        # Slots are clear before the next row tells peers so; after the last row the kernel's end sees to that.
        if row + tl.num_programs(0) < rows:
            fence(none)
    tl.store(count, call)
