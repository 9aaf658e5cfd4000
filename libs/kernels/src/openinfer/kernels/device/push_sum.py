"""Sums and columns that every rank pushes to its peers: no barrier, and 16 bytes at a time carry their own arrival.

A rank writes its row into a slot of its own in its peers' segments, and reads the peers' slots in its segment. A word
of +0 has not arrived: a rank sends -0 in place of +0, and clears what it has read. Two sets of slots take turns.
A rank that is a call ahead writes into the other set. No rank can be two ahead, because each call waits for all ranks.
Each program has one row. Slots must be clear before the next row tells peers so. The end of a kernel sees to that for
nothing; between rows of a program a fence would have to.

The table `peers`, int64: addresses of the ranks' segments and of the word that is not 0 once a rank is lost; then int32
counts of calls, by program, of columns and of sums. A segment has the slots of columns first, from BASE on those of
sums. A kernel loads all that it needs before it sends, because a load that waits its turn costs a third of a call.
"""

# mypy: ignore-errors
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


def loading(access):
    """Assembly that loads four words where $5 is not 0, and makes zeros elsewhere."""
    return tl.constexpr(f"""{{
        .reg .pred p;
        setp.ne.b32 p, $5, 0;
        mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;
        @p {access} {{$0, $1, $2, $3}}, [$4];
        }}""")


def storing(access):
    """Assembly that stores four words where $2 is not 0."""
    return tl.constexpr(f"""{{
        .reg .pred p;
        setp.ne.b32 p, $2, 0;
        @p {access} [$1], {{$3, $4, $5, $6}};
        mov.b32 $0, 0;
        }}""")


LOAD, PEEK = loading("ld.global.cg.v4.b32"), loading("ld.relaxed.sys.global.v4.b32")
STORE, PUT = storing("st.relaxed.sys.global.v4.b32"), storing("st.global.v4.b32")


@triton.jit
def load16(address, inside):
    """Four words; zeros where `inside` is 0. Not from this SM's first-level cache: a kernel that starts early has that
    of the kernel ahead."""
    return tl.inline_asm_elementwise(
        LOAD, "=&r,=&r,=&r,=&r,l,r", [address, inside],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def peek16(address, inside):
    """Four words of a slot, whether they have arrived or not; zeros where `inside` is 0."""
    return tl.inline_asm_elementwise(
        PEEK, "=&r,=&r,=&r,=&r,l,r", [address, inside],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def store16(address, inside, a, b, c, d):
    """Four words where `inside` is not 0, by an access that reaches other GPUs."""
    return tl.inline_asm_elementwise(
        STORE, "=r,l,r,r,r,r,r", [address, inside, a, b, c, d], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def put16(address, inside, a, b, c, d):
    """Four words where `inside` is not 0, for this GPU's later kernels."""
    return tl.inline_asm_elementwise(
        PUT, "=r,l,r,r,r,r,r", [address, inside, a, b, c, d], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def arrived(address, lost, inside, a, b, c, d):
    """Four words of a slot once none of them is 0, or once the word at `lost` is not 0; ones where `inside` is 0. a, b,
    c, d: an earlier peek at them, or zeros. Each thread waits for its own words, after a while with pauses, because its
    reads take the room of those that it waits for. It seldom reads the word at `lost`, which is in the host's memory:
    all threads together take a millisecond for that, and the other rank then waits so long that it does the same."""
    return tl.inline_asm_elementwise(
        """{
        .reg .pred p;
        .reg .b32 tries, word;
        mov.b32 $0, 1; mov.b32 $1, 1; mov.b32 $2, 1; mov.b32 $3, 1;
        setp.eq.b32 p, $6, 0;
        @p bra DONE;
        mov.b32 $0, $7; mov.b32 $1, $8; mov.b32 $2, $9; mov.b32 $3, $10;
        setp.ne.b32 p, $0, 0;
        setp.ne.and.b32 p, $1, 0, p;
        setp.ne.and.b32 p, $2, 0, p;
        setp.ne.and.b32 p, $3, 0, p;
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
        setp.lt.u32 p, tries, 64;
        @p bra AGAIN;
        nanosleep.u32 1000;
        and.b32 word, tries, 16383;
        setp.ne.b32 p, word, 0;
        @p bra AGAIN;
        ld.relaxed.sys.global.b32 word, [$5];
        setp.eq.b32 p, word, 0;
        @p bra AGAIN;
        DONE:
        }""",
        "=&r,=&r,=&r,=&r,l,l,r,r,r,r,r", [address, lost, inside, a, b, c, d],
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
    """Two float32 as a word of bf16. One instruction: the compiler's own for a single number runs at an eighth of the
    rate."""
    return tl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [first, second], dtype=tl.int32, is_pure=True, pack=1
    )


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
def seen_of(own, lost, rank, inside, RANKS: tl.constexpr, SLOT: tl.constexpr):
    """A peek at the words of each rank. Of several others, one is waited for first; then the loads of all are under way
    together, while a wait for one after the other would take a load's time for each."""
    none = tl.zeros(inside.shape, tl.int32)
    found = ()
    if RANKS == 2:
        found = ((none, none, none, none), (none, none, none, none))
    else:
        arrived(own + ((rank + 1) % RANKS) * SLOT, lost, inside, none, none, none, none)
        for other in tl.static_range(RANKS):
            found += (peek16(own + other * SLOT, inside),)
    return found


@triton.jit
def sum_of_slots(own, mine, old, lost, rank, inside, RANKS: tl.constexpr, SLOT: tl.constexpr):
    """`old` plus the words of all ranks, in their order: those in our slots, which are cleared, and `mine`."""
    none = tl.zeros(inside.shape, tl.int32)
    zero = tl.zeros(inside.shape, tl.float32)
    s = (zero, zero, zero, zero, zero, zero, zero, zero)
    seen = seen_of(own, lost, rank, inside, RANKS, SLOT)
    for other in tl.static_range(RANKS):
        a, b, c, d = mine
        if other != rank:
            e, f, g, h = seen[other]
            a, b, c, d = arrived(own + other * SLOT, lost, inside, e, f, g, h)
            store16(own + other * SLOT, inside, none, none, none, none)
        s = plus(s, (a, b, c, d))
    return plus(s, old)


@triton.jit
def others_of(peers, rank, RANKS: tl.constexpr):
    """The addresses of the segments of the RANKS - 1 ranks after this one, round about."""
    found = ()
    for step in tl.static_range(1, RANKS):
        found += (tl.load(peers + (rank + step) % RANKS),)
    return found


@triton.jit
def exchanged(mine, old, own, others, rank, lost, slot, inside, RANKS: tl.constexpr, SLOT: tl.constexpr):
    """`old` plus a row of all ranks, of which `mine` is ours; `slot`: bytes to the row's slot of rank 0."""
    a, b, c, d = mine
    for step in tl.static_range(RANKS - 1):
        store16(others[step] + slot + rank * SLOT, inside, a, b, c, d)
    return sum_of_slots(own + slot, mine, old, lost, rank, inside, RANKS, SLOT)


@triton.jit
def calls_of(peers, program, RANKS: tl.constexpr, COUNTS: tl.constexpr):
    """Where the count of a program's calls is; COUNTS: counts before those of its kind."""
    return (peers + RANKS + 2).to(tl.pointer_type(tl.int32)) + COUNTS + program


@triton.jit
def slot_of(
    call, program, index, BASE: tl.constexpr, RANKS: tl.constexpr, SLOT: tl.constexpr, WIDTH: tl.constexpr
):
    """Bytes from the start of a segment to the 16 bytes of each lane in the slot of rank 0."""
    return BASE + (call % 2).to(tl.int64) * (SLOT * RANKS) + program.to(tl.int64) * (WIDTH * 2) + index * 16


@triton.jit
def gain_words(gain, index, inside, WIDE: tl.constexpr):
    """The eight weights of a lane, of bf16 or, with WIDE, of float32, as words."""
    if WIDE:
        first = load16(gain.to(tl.int64) + index * 32, inside)
        return first, load16(gain.to(tl.int64) + index * 32 + 16, inside)
    else:  # noqa: RET505  a branch of the compiler's
        words = load16(gain.to(tl.int64) + index * 16, inside)
        return words, words


@triton.jit
def floats(words):
    """The float32 that four words are."""
    return (
        words[0].to(tl.float32, bitcast=True), words[1].to(tl.float32, bitcast=True),
        words[2].to(tl.float32, bitcast=True), words[3].to(tl.float32, bitcast=True),
    )  # fmt: skip


@triton.jit
def times(v, factor):
    """Eight float32 times a number."""
    return (
        v[0] * factor, v[1] * factor, v[2] * factor, v[3] * factor,
        v[4] * factor, v[5] * factor, v[6] * factor, v[7] * factor,
    )  # fmt: skip


@triton.jit
def normed_words(words, gain, eps, WIDTH: tl.constexpr, WIDE: tl.constexpr):
    """The RMS norm of a row of bf16, as norm.rms_norm makes it. gain: of gain_words."""
    v = wide(words)
    squares = v[0] * v[0] + v[1] * v[1] + v[2] * v[2] + v[3] * v[3]
    squares += v[4] * v[4] + v[5] * v[5] + v[6] * v[6] + v[7] * v[7]
    v = times(v, tl.rsqrt(tl.sum(squares, 0) / WIDTH + eps))
    if WIDE:
        a, b, c, d = floats(gain[0])
        e, f, g, h = floats(gain[1])
    else:
        v = wide(narrow(v))
        a, b, c, d, e, f, g, h = wide(gain[0])
    return narrow((v[0] * a, v[1] * b, v[2] * c, v[3] * d, v[4] * e, v[5] * f, v[6] * g, v[7] * h))


@triton.jit
def push_sum(
    x, y, normed, gain, peers, rank, first, eps,
    WIDTH: tl.constexpr, RANKS: tl.constexpr, SLOT: tl.constexpr, BASE: tl.constexpr, COUNTS: tl.constexpr,
    LANES: tl.constexpr, ADD: tl.constexpr, NORM: tl.constexpr, TWO_SHOT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """x[row] (+)= the sum of the y[row] of all ranks, in their order, in float32; normed[row] = its RMS norm, if NORM.
    bf16 rows of WIDTH; gain of bf16 or float32. Program p has row `first` + p, and all ranks have as many programs.

    One shot: every rank sends its row to all others, and adds up. Two shots (TWO_SHOT): the rank row % RANKS gets the
    row of all, adds up and sends the result back, with the same bits. SLOT: bytes of a rank's slot, with a row a
    program. LANES: at least WIDTH / 8.

    EARLY: the kernel may start before the one ahead has ended, for which it then waits, and the kernel behind before
    this one has (launch.Launch). All programs are on the GPU by then, so a kernel behind takes the place of none.
    """
    WIDE: tl.constexpr = gain.dtype.element_ty == tl.float32
    if EARLY:
        gdc_launch_dependents()
    index = tl.arange(0, LANES).to(tl.int64)
    inside = (index < WIDTH // 8).to(tl.int32)
    program = tl.program_id(0)
    none = tl.zeros([LANES], tl.int32)
    old, weights = (none, none, none, none), ((none, none, none, none), (none, none, none, none))
    if NORM:
        weights = gain_words(gain, index, inside, WIDE)
    own, others = tl.load(peers + rank), others_of(peers, rank, RANKS)
    lost = tl.load(peers + RANKS) + tl.zeros([LANES], tl.int64)
    if EARLY:
        gdc_wait()
    count = calls_of(peers, program, RANKS, COUNTS)
    call = tl.load(count, cache_modifier=".cg")
    row = first + program
    at = row.to(tl.int64) * (WIDTH * 2) + index * 16
    slot = slot_of(call, program, index, BASE, RANKS, SLOT, WIDTH)
    a, b, c, d = load16(y.to(tl.int64) + at, inside)
    if ADD:
        old = load16(x.to(tl.int64) + at, inside)
    mine = (sent(a), sent(b), sent(c), sent(d))
    if TWO_SHOT:
        owner = row % RANKS
        a, b, c, d = mine
        if owner == rank:
            a, b, c, d = narrow(sum_of_slots(own + slot, mine, old, lost, rank, inside, RANKS, SLOT))
            a, b, c, d = sent(a), sent(b), sent(c), sent(d)
            for step in tl.static_range(RANKS - 1):
                store16(others[step] + slot + rank * SLOT, inside, a, b, c, d)
        else:
            store16(tl.load(peers + owner) + slot + rank * SLOT, inside, a, b, c, d)
            a, b, c, d = arrived(own + slot + owner * SLOT, lost, inside, none, none, none, none)
            store16(own + slot + owner * SLOT, inside, none, none, none, none)
        words = (received(a), received(b), received(c), received(d))
    else:
        words = narrow(exchanged(mine, old, own, others, rank, lost, slot, inside, RANKS, SLOT))
    put16(x.to(tl.int64) + at, inside, words[0], words[1], words[2], words[3])
    if NORM:
        a, b, c, d = normed_words(words, weights, eps, WIDTH, WIDE)
        put16(normed.to(tl.int64) + at, inside, a, b, c, d)
    tl.store(count, call + 1)


@triton.jit
def push_columns(
    out, x, peers, rank, first, nbytes, part,
    WIDTH: tl.constexpr, RANKS: tl.constexpr, SLOT: tl.constexpr, BASE: tl.constexpr, COUNTS: tl.constexpr,
):  # fmt: skip
    """out[n] = the x[n] of all ranks side by side; -0 becomes +0. x of `nbytes`, `part` of them a row, multiples of
    16. A row here is 2 * WIDTH bytes of x, and programs, calls and slots are those of push_sum."""
    index = tl.arange(0, WIDTH // 8)
    program = tl.program_id(0)
    count = calls_of(peers, program, RANKS, COUNTS)
    call = tl.load(count)
    own, others = tl.load(peers + rank), others_of(peers, rank, RANKS)
    lost = tl.load(peers + RANKS) + tl.zeros([WIDTH // 8], tl.int64)
    none = tl.zeros([WIDTH // 8], tl.int32)
    at = (first + program) * (WIDTH * 2) + index * 16
    inside = (at < nbytes).to(tl.int32)
    slot = slot_of(call, program, index.to(tl.int64), BASE, RANKS, SLOT, WIDTH)
    a, b, c, d = load16(x.to(tl.int64) + at.to(tl.int64), inside)
    a, b, c, d = sent(a), sent(b), sent(c), sent(d)
    for step in tl.static_range(RANKS - 1):
        store16(others[step] + slot + rank * SLOT, inside, a, b, c, d)
    to = out.to(tl.int64) + (at // part).to(tl.int64) * (part * RANKS) + at % part
    put16(to + rank * part, inside, received(a), received(b), received(c), received(d))
    seen = seen_of(own + slot, lost, rank, inside, RANKS, SLOT)
    for other in tl.static_range(RANKS):
        if other != rank:
            a, b, c, d = seen[other]
            a, b, c, d = arrived(own + slot + other * SLOT, lost, inside, a, b, c, d)
            store16(own + slot + other * SLOT, inside, none, none, none, none)
            put16(to + other * part, inside, received(a), received(b), received(c), received(d))
    tl.store(count, call + 1)
