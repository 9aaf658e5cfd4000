"""A sum over ranks that every rank pushes to its peers: no barrier, and 16 bytes at a time carry their own arrival.

A rank writes its row into a slot of its own in its peers' segments, and reads the peers' slots in its segment. A word
of +0 has not arrived: a rank sends -0 in place of +0, and clears what it has read. Two sets of slots take turns.
A rank that is a call ahead writes into the other set. No rank can be two ahead, because each call waits for all ranks.
"""

# mypy: ignore-errors
import triton
import triton.language as tl


@triton.jit
def load16(address, inside):
    """Four words; zeros where `inside` is 0."""
    return tl.inline_asm_elementwise(
        """{
        .reg .pred p;
        setp.ne.b32 p, $5, 0;
        mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;
        @p ld.global.v4.b32 {$0, $1, $2, $3}, [$4];
        }""",
        "=&r,=&r,=&r,=&r,l,r", [address, inside],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def store16(address, inside, a, b, c, d):
    """Four words where `inside` is not 0, by an access that reaches other GPUs."""
    return tl.inline_asm_elementwise(
        """{
        .reg .pred p;
        setp.ne.b32 p, $2, 0;
        @p st.relaxed.sys.global.v4.b32 [$1], {$3, $4, $5, $6};
        mov.b32 $0, 0;
        }""",
        "=r,l,r,r,r,r,r", [address, inside, a, b, c, d], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def arrived(address, lost, inside):
    """Four words of a slot once none of them is 0, or once the word at `lost` is not 0; ones where `inside` is 0. Each
    thread waits for its own words."""
    return tl.inline_asm_elementwise(
        """{
        .reg .pred p;
        .reg .b32 tries, word;
        mov.b32 $0, 1; mov.b32 $1, 1; mov.b32 $2, 1; mov.b32 $3, 1;
        setp.eq.b32 p, $6, 0;
        @p bra DONE;
        mov.b32 tries, 0;
        AGAIN:
        ld.relaxed.sys.global.v4.b32 {$0, $1, $2, $3}, [$4];
        setp.ne.b32 p, $0, 0;
        setp.ne.and.b32 p, $1, 0, p;
        setp.ne.and.b32 p, $2, 0, p;
        setp.ne.and.b32 p, $3, 0, p;
        @p bra DONE;
        add.u32 tries, tries, 1;
        and.b32 word, tries, 1023;
        setp.ne.b32 p, word, 0;
        @p bra AGAIN;
        ld.relaxed.sys.global.b32 word, [$5];
        setp.eq.b32 p, word, 0;
        @p bra AGAIN;
        DONE:
        }""",
        "=&r,=&r,=&r,=&r,l,l,r", [address, lost, inside],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def sent(word):
    """-0 in place of +0 in the upper half of a word whose bits are all zero."""
    return tl.where(word == 0, tl.full(word.shape, -2147483648, tl.int32), word)


@triton.jit
def received(word):
    """The opposite of `sent`: +0 where -0 came."""
    return tl.where(word == -2147483648, 0, word)


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
def wide(words):
    """The eight float32 of four words of bf16."""
    return (
        low(words[0]), high(words[0]), low(words[1]), high(words[1]),
        low(words[2]), high(words[2]), low(words[3]), high(words[3]),
    )  # fmt: skip


@triton.jit
def plus(s, words):
    """Eight float32 and the bf16 of four words."""
    v = wide(words)
    return (
        s[0] + v[0], s[1] + v[1], s[2] + v[2], s[3] + v[3], s[4] + v[4], s[5] + v[5], s[6] + v[6], s[7] + v[7]
    )  # fmt: skip


@triton.jit
def narrow(s):
    """Eight float32 as four words of bf16."""
    return packed(s[0], s[1]), packed(s[2], s[3]), packed(s[4], s[5]), packed(s[6], s[7])


@triton.jit
def fence(inside):
    """The stores of the threads come before their later ones, for every GPU."""
    tl.inline_asm_elementwise(
        "fence.acq_rel.sys; mov.u32 $0, $1;", "=r,r", [inside], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def sum_of_slots(own, mine, old, lost, rank, inside, RANKS: tl.constexpr, SLOT: tl.constexpr):
    """`old` plus the words of all ranks, in their order: those in our slots, which are cleared, and `mine`."""
    none = tl.zeros(inside.shape, tl.int32)
    zero = tl.zeros(inside.shape, tl.float32)
    s = (zero, zero, zero, zero, zero, zero, zero, zero)
    for other in tl.static_range(RANKS):
        a, b, c, d = mine
        if other != rank:
            a, b, c, d = arrived(own + other * SLOT, lost, inside)
            store16(own + other * SLOT, inside, none, none, none, none)
        s = plus(s, (a, b, c, d))
    return plus(s, old)


@triton.jit
def exchanged(mine, old, peers, rank, lost, slot, inside, RANKS: tl.constexpr, SLOT: tl.constexpr):
    """`old` plus a row of all ranks, of which `mine` is ours; `slot`: bytes to the row's slot of rank 0."""
    a, b, c, d = mine
    for step in tl.static_range(1, RANKS):
        other = tl.load(peers + (rank + step) % RANKS)
        store16(other + slot + rank * SLOT, inside, a, b, c, d)
    return sum_of_slots(tl.load(peers + rank) + slot, mine, old, lost, rank, inside, RANKS, SLOT)


@triton.jit
def calls_of(peers, program, RANKS: tl.constexpr):
    """Where the count of a program's calls is."""
    return (peers + RANKS + 2).to(tl.pointer_type(tl.int32)) + program


@triton.jit
def slot_of(call, program, index, RANKS: tl.constexpr, SLOT: tl.constexpr, WIDTH: tl.constexpr):
    """Bytes from the start of a segment to the 16 bytes of each lane in the slot of rank 0."""
    return (call % 2).to(tl.int64) * (SLOT * RANKS) + program.to(tl.int64) * (WIDTH * 2) + index * 16


@triton.jit
def gains(gain, index, inside, WIDE: tl.constexpr):
    """The eight weights of a lane in float32, of bf16 or, with WIDE, of float32."""
    if WIDE:
        a, b, c, d = load16(gain.to(tl.int64) + index * 32, inside)
        e, f, g, h = load16(gain.to(tl.int64) + index * 32 + 16, inside)
        return (
            a.to(tl.float32, bitcast=True), b.to(tl.float32, bitcast=True),
            c.to(tl.float32, bitcast=True), d.to(tl.float32, bitcast=True),
            e.to(tl.float32, bitcast=True), f.to(tl.float32, bitcast=True),
            g.to(tl.float32, bitcast=True), h.to(tl.float32, bitcast=True),
        )  # fmt: skip
    else:  # noqa: RET505  a branch of the compiler's
        return wide(load16(gain.to(tl.int64) + index * 16, inside))


@triton.jit
def weighted(value, scale, gain, WIDE: tl.constexpr):
    """value * scale times a weight as float32, rounded to bf16 between them unless the weight is float32."""
    unit = value * scale
    if not WIDE:
        unit = unit.to(tl.bfloat16).to(tl.float32)
    return unit * gain


@triton.jit
def normed_words(words, g, eps, WIDTH: tl.constexpr, WIDE: tl.constexpr):
    """The RMS norm of a row of bf16, as norm.rms_norm makes it, of weights `g`."""
    v = wide(words)
    squares = v[0] * v[0] + v[1] * v[1] + v[2] * v[2] + v[3] * v[3]
    squares += v[4] * v[4] + v[5] * v[5] + v[6] * v[6] + v[7] * v[7]
    scale = tl.rsqrt(tl.sum(squares, 0) / WIDTH + eps)
    return narrow((
        weighted(v[0], scale, g[0], WIDE), weighted(v[1], scale, g[1], WIDE),
        weighted(v[2], scale, g[2], WIDE), weighted(v[3], scale, g[3], WIDE),
        weighted(v[4], scale, g[4], WIDE), weighted(v[5], scale, g[5], WIDE),
        weighted(v[6], scale, g[6], WIDE), weighted(v[7], scale, g[7], WIDE),
    ))  # fmt: skip


@triton.jit
def push_sum(
    x, y, normed, gain, peers, rank, rows, eps,
    WIDTH: tl.constexpr, RANKS: tl.constexpr, SLOT: tl.constexpr, LANES: tl.constexpr,
    ADD: tl.constexpr, NORM: tl.constexpr, TWO_SHOT: tl.constexpr,
):  # fmt: skip
    """x[row] (+)= the sum of the y[row] of all ranks, in their order, in float32; normed[row] = its RMS norm, if NORM.
    bf16 rows of WIDTH; gain of bf16 or float32.

    One shot: every rank sends its row to all others, and adds up. Two shots (TWO_SHOT): the rank row % RANKS gets the
    row of all, adds up and sends the result back, with the same bits.

    A program takes every num_programs-th row, and each row is a call of its own to it. All ranks have as many programs.
    peers int64 [RANKS + 2 + ...]: addresses of the ranks' segments and of the word that is not 0 once a rank is lost;
    then int32 counts of calls, by program. SLOT: bytes of a rank's slot, with a row a program. LANES: at least
    WIDTH / 8.
    """
    WIDE: tl.constexpr = gain.dtype.element_ty == tl.float32
    index = tl.arange(0, LANES).to(tl.int64)
    inside = (index < WIDTH // 8).to(tl.int32)
    program = tl.program_id(0)
    count = calls_of(peers, program, RANKS)
    call = tl.load(count)
    own = tl.load(peers + rank)
    lost = tl.load(peers + RANKS) + tl.zeros([LANES], tl.int64)
    none = tl.zeros([LANES], tl.int32)
    if NORM:
        g = gains(gain, index, inside, WIDE)
    for row in range(program, rows, tl.num_programs(0)):
        at = (tl.zeros([LANES], tl.int64) + row) * (WIDTH * 2) + index * 16
        slot = slot_of(call, program, index, RANKS, SLOT, WIDTH)
        a, b, c, d = load16(y.to(tl.int64) + at, inside)
        mine = (sent(a), sent(b), sent(c), sent(d))
        old = (none, none, none, none)
        if TWO_SHOT:
            owner = row % RANKS
            a, b, c, d = mine
            if owner == rank:
                if ADD:
                    old = load16(x.to(tl.int64) + at, inside)
                s = sum_of_slots(own + slot, mine, old, lost, rank, inside, RANKS, SLOT)
                a, b, c, d = narrow(s)
                a, b, c, d = sent(a), sent(b), sent(c), sent(d)
                for step in tl.static_range(1, RANKS):
                    other = tl.load(peers + (rank + step) % RANKS)
                    store16(other + slot + rank * SLOT, inside, a, b, c, d)
            else:
                store16(tl.load(peers + owner) + slot + rank * SLOT, inside, a, b, c, d)
                a, b, c, d = arrived(own + slot + owner * SLOT, lost, inside)
                store16(own + slot + owner * SLOT, inside, none, none, none, none)
            words = (received(a), received(b), received(c), received(d))
        else:
            if ADD:
                old = load16(x.to(tl.int64) + at, inside)
            words = narrow(exchanged(mine, old, peers, rank, lost, slot, inside, RANKS, SLOT))
        store16(x.to(tl.int64) + at, inside, words[0], words[1], words[2], words[3])
        if NORM:
            a, b, c, d = normed_words(words, g, eps, WIDTH, WIDE)
            store16(normed.to(tl.int64) + at, inside, a, b, c, d)
        call += 1
        # Slots are clear before the next row tells peers so; after the last row the kernel's end sees to that.
        if row + tl.num_programs(0) < rows:
            fence(none)
    tl.store(count, call)
