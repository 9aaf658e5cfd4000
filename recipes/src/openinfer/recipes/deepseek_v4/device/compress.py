"""Windows of tokens into entries: a softmax a channel, carried from token to token; norm, rotation, rounding."""

# mypy: ignore-errors
import triton
import triton.language as tl

from openinfer.kernels.device.norm import wait_ahead
from openinfer.kernels.device.rounding import hadamard, hadamard_row, q4, q8_plain, rotated

EMPTY = tl.constexpr(float("-inf"))


@triton.jit
def _row_of(tile, q_starts, rows, PAGE: tl.constexpr):
    """The row that a tile belongs to; `rows` for a tile after those of the last row.

    Row r has the tiles from q_starts[r] // PAGE + 2 r on, a page each. These are two more than its tokens fill, because
    the tokens need not begin or end with a page."""
    SEARCH: tl.constexpr = 128
    passed = tl.zeros((SEARCH,), tl.int32)
    for r in range(0, rows + 1, SEARCH):
        candidate = r + tl.arange(0, SEARCH)
        start = tl.load(q_starts + candidate, mask=candidate <= rows, other=1 << 30)
        passed += (start // PAGE + 2 * candidate <= tile).to(tl.int32)
    return tl.sum(passed, 0) - 1


@triton.jit
def _taken(old, a, z):
    """An accumulation (largest z, s, v) with one more token."""
    most = tl.maximum(old[0], z)
    shrink, weight = tl.exp(old[0] - most), tl.exp(z - most)
    return most, old[1] * shrink + weight, old[2] * shrink + weight * a


@triton.jit
def _either(mask, one, other):
    """The accumulation `one` where `mask`, else `other`."""
    top, s, v = one
    return tl.where(mask, top, other[0]), tl.where(mask, s, other[1]), tl.where(mask, v, other[2])


@triton.jit
def _merged(p, b):
    """v / s of two accumulations together, of which the second is not empty."""
    top = tl.maximum(p[0], b[0])
    one, two = tl.exp(p[0] - top), tl.exp(b[0] - top)
    return (p[2] * one + b[2] * two) / (p[1] * one + b[1] * two)


@triton.jit
def _finished(
    e, to, mask, gain, cos_sin, position, eps, D: tl.constexpr, ROTARY: tl.constexpr, ROUNDING: tl.constexpr,
):  # fmt: skip
    """Norm, rotation at `position` (or [N, 1] positions) and rounding of e [N, D], written to `to` [N, D]."""
    dtype = to.dtype.element_ty
    e = e.to(dtype).to(tl.float32)
    y = e * tl.rsqrt(tl.sum(e * e, 1) / D + eps)[:, None] * gain
    y = rotated(y.to(dtype).to(tl.float32), cos_sin, position, 1.0, D, ROTARY).to(dtype).to(tl.float32)
    if ROUNDING == "q8":
        y = q8_plain(y, ROTARY)
    if ROUNDING == "hadamard_q4":
        y = y.to(dtype)
        y = hadamard_row(y.to(tl.float32), D) if y.shape[0] == 1 else hadamard(y, D)
        y = q4(y.to(dtype).to(tl.float32))
    tl.store(to, y.to(dtype), mask=mask)


@triton.jit
def _old(state, which, mask, D: tl.constexpr):
    """Accumulations [N, D] of the state before the step: the which[N, 1]-th, empty where not `mask`."""
    place = state + which * 3 * D + tl.arange(0, D)[None, :]
    top = tl.load(place, mask=mask, other=EMPTY)
    return top, tl.load(place + D, mask=mask, other=0.0), tl.load(place + 2 * D, mask=mask, other=0.0)


@triton.jit
def compress_windows(
    entries, state, az, ape, norm_weight, cos_sin, slots, q_starts, seq_lens, alive, state_tables, entry_tables,
    recent, recent_stride, az_stride, state_stride, entry_stride, state_width, entry_width, rows, eps,
    D: tl.constexpr, ROTARY: tl.constexpr, WINDOW: tl.constexpr, PAGE: tl.constexpr, ROUNDING: tl.constexpr,
    RING: tl.constexpr, WINDOWS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The entries of overlapping windows that end in the step, side by side; the state is left to `compress`. A program
    takes WINDOWS of a row. Grid T // (WINDOWS * WINDOW) + 2 rows."""
    wait_ahead(EARLY)
    COLUMNS: tl.constexpr = 2 * D
    TILE: tl.constexpr = WINDOWS * WINDOW
    row = _row_of(tl.program_id(0), q_starts, rows, TILE)
    if row >= rows:
        return
    first = tl.load(q_starts + row)
    slot = tl.load(slots + row).to(tl.int64)
    start = tl.load(seq_lens + slot)
    end = start + tl.load(q_starts + row + 1) - first
    tile = start // TILE + tl.program_id(0) - first // TILE - 2 * row
    if (tl.load(alive + slot) == 0) | (end == start) | (tile * TILE >= end):
        return
    window = tile * WINDOWS + tl.arange(0, WINDOWS)[:, None]
    done = ((window + 1) * WINDOW <= end) & ((window + 1) * WINDOW > start)
    column = tl.arange(0, D)[None, :]
    before = tl.maximum(start - 1, 0) // PAGE
    old = state + tl.load(state_tables + slot * state_width + before).to(tl.int64) * state_stride
    if RING > 0:  # noqa: SIM102
        if (end - start <= RING // 2) & (start % PAGE != 0):
            old = recent + slot * recent_stride + (start - 1) % RING * 9 * D
    # A row's first window goes on where the state is; the A half of the window before is A once that one is complete.
    part, ordinal = start % WINDOW > 0, window - start // WINDOW
    has_a = (start > 0) & done & ((ordinal == 0) | ((ordinal == 1) & part))
    p = _old(old, tl.where((ordinal == 0) & part, 0, 1), has_a, D)
    b = _old(old, ordinal * 0 + 2, (start > 0) & done & (ordinal == 0) & part, D)
    for place in tl.static_range(WINDOW):
        position = window * WINDOW + place
        bias = ape + place * COLUMNS + column + window * 0  # in the shape of what it is added to
        known = done & (position - WINDOW >= start)
        here = az + (first + position - WINDOW - start).to(tl.int64) * az_stride + column
        a = tl.load(here, mask=known, other=0.0)
        z = tl.load(here + COLUMNS, mask=known, other=0.0) + tl.load(bias)
        p = _either(known, _taken(p, a, z), p)
        known = done & (position >= start)
        here += WINDOW * az_stride.to(tl.int64) + D
        a = tl.load(here, mask=known, other=0.0)
        z = tl.load(here + COLUMNS, mask=known, other=0.0) + tl.load(bias + D)
        b = _either(known, _taken(b, a, z), b)
    page = tl.load(entry_tables + slot * entry_width + window * WINDOW // PAGE, mask=done, other=0)
    to = entries + page.to(tl.int64) * entry_stride + window % (PAGE // WINDOW) * D + column
    e = _merged(p, (tl.where(done, b[0], 0.0), tl.where(done, b[1], 1.0), b[2]))
    gain = tl.load(norm_weight + column)
    _finished(e, to, done, gain, cos_sin, window * WINDOW, eps, D, ROTARY, ROUNDING)


@triton.jit
def _accumulation(old, D: tl.constexpr):
    """One of a state."""
    top, s = tl.load(old, cache_modifier=".cg"), tl.load(old + D, cache_modifier=".cg")
    return top, s, tl.load(old + 2 * D, cache_modifier=".cg")


@triton.jit
def _leave(new, p, a, b, D: tl.constexpr, OVERLAP: tl.constexpr):
    """The accumulations of a state to `new` and the places after it."""
    kept = b
    if OVERLAP:
        kept = p + a + b
    for n in tl.static_range(len(kept)):
        tl.store(new + n * D, kept[n])


@triton.jit
def compress(
    entries, state, az, ape, norm_weight, cos_sin, slots, q_starts, seq_lens, alive, state_tables, entry_tables,
    recent, recent_stride, az_stride, state_stride, entry_stride, state_width, entry_width, rows, eps,
    D: tl.constexpr, ROTARY: tl.constexpr, WINDOW: tl.constexpr, OVERLAP: tl.constexpr, PAGE: tl.constexpr,
    ROUNDING: tl.constexpr, RING: tl.constexpr, SINGLE: tl.constexpr, STAGES: tl.constexpr, ENTRIES: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """A program takes a page's tokens of a row in order; the entries only if ENTRIES. Grid: SINGLE (no row has more
    than one token) rows, else T // PAGE + 2 rows.

    Only a row's first program reads the state before the step, and no other program writes the page that has it. The
    programs of later pages begin a window early (OVERLAP), because they need no state then. Where that window is not
    whole in the step, the first program takes the second page too. Where there is a page a row, all but az is read
    before the wait.
    """
    COLUMNS: tl.constexpr = 2 * D if OVERLAP else D
    STATE: tl.constexpr = 9 * D if OVERLAP else 3 * D
    LOOK: tl.constexpr = WINDOW if OVERLAP else 0
    row, tile = tl.program_id(0), 0
    if not SINGLE:
        wait_ahead(EARLY)
        row = _row_of(tl.program_id(0), q_starts, rows, PAGE)
        if row >= rows:
            return
        tile = tl.program_id(0) - tl.load(q_starts + row) // PAGE - 2 * row
    first = tl.load(q_starts + row, cache_modifier=".cg")
    slot = tl.load(slots + row, cache_modifier=".cg").to(tl.int64)
    start = tl.load(seq_lens + slot, cache_modifier=".cg")
    end = start + tl.load(q_starts + row + 1, cache_modifier=".cg") - first
    page = start // PAGE + tile
    stop = tl.minimum(end, (page + 1) * PAGE)
    if (tile == 0) & ((page + 1) * PAGE - LOOK < start):
        stop = tl.minimum(end, (page + 2) * PAGE)
    begin = tl.maximum(start, page * PAGE - LOOK)
    if (tl.load(alive + slot, cache_modifier=".cg") == 0) | (end == start) | (page * PAGE >= end):
        if SINGLE:
            wait_ahead(EARLY)
        return
    if (tile > 0) & (page * PAGE - LOOK < start):
        return
    few = end - start <= RING // 2  # whether the state after each token is kept
    if OVERLAP and not ENTRIES:  # a state is of two windows
        early = (stop - 1) // WINDOW * WINDOW - WINDOW
        if RING > 0:
            early = tl.where(few, begin, early)
        begin = tl.maximum(begin, tl.where(stop <= (page + 1) * PAGE, early, begin))
    column = tl.arange(0, D)
    empty, zero = tl.full((D,), EMPTY, tl.float32), tl.zeros((D,), tl.float32)
    b = (empty, zero, zero)
    a = (empty, zero, zero)
    p = (empty, zero, zero)  # of the window before
    if (tile == 0) & (start > 0):
        of_state = state_tables + slot * state_width + (start - 1) // PAGE
        old = state + tl.load(of_state, cache_modifier=".cg").to(tl.int64) * state_stride + column
        if RING > 0:  # noqa: SIM102
            if few & (start % PAGE != 0):
                old = recent + slot * recent_stride + (start - 1) % RING * STATE + column
        if OVERLAP:
            p = _accumulation(old, D)
            old += 3 * D
            a = _accumulation(old, D)
            old += 3 * D
        b = _accumulation(old, D)
    gain = tl.load(norm_weight + column)[None, :]
    if SINGLE:
        bias = ape + start % WINDOW * COLUMNS + column
        of_first = tl.load(bias), tl.load(bias + COLUMNS - D)
        wait_ahead(EARLY)
    token = az + (first - start).to(tl.int64) * az_stride + column
    for step in tl.range(0, stop - begin, num_stages=STAGES):
        position = begin + step
        here = token + position.to(tl.int64) * az_stride
        place = position % WINDOW
        if SINGLE:
            one, two = of_first
        else:
            bias = ape + place * COLUMNS + column
            one, two = tl.load(bias), tl.load(bias + COLUMNS - D)
        if OVERLAP:
            of_a, z_a = tl.load(here), tl.load(here + COLUMNS) + one
            here += D
        of_b, z_b = tl.load(here), tl.load(here + COLUMNS) + two
        fresh = place == 0
        if OVERLAP:
            p = _either(fresh, a, p)
            a = _taken(_either(fresh, (EMPTY, 0.0, 0.0), a), of_a, z_a)
        b = _taken(_either(fresh, (EMPTY, 0.0, 0.0), b), of_b, z_b)
        if ENTRIES & (place == WINDOW - 1) & (position >= page * PAGE):
            e = b[2] / b[1]
            if OVERLAP:
                e = _merged(p, b)
            at = tl.load(entry_tables + slot * entry_width + position // PAGE).to(tl.int64) * entry_stride
            to = entries + at + position % PAGE // WINDOW * D + column[None, :]
            written = (column < D)[None, :]
            _finished(e[None, :], to, written, gain, cos_sin, position - place, eps, D, ROTARY, ROUNDING)
        if (position + 1 == end) | ((position >= page * PAGE) & (position % PAGE == PAGE - 1)):
            at = tl.load(state_tables + slot * state_width + position // PAGE).to(tl.int64) * state_stride
            new = state + at + column
            _leave(new, p, a, b, D, OVERLAP)
        if RING > 0:  # noqa: SIM102
            if (position + 1 == end) | (few & (position >= page * PAGE)):
                new = recent + slot * recent_stride + position % RING * STATE + column
                _leave(new, p, a, b, D, OVERLAP)
