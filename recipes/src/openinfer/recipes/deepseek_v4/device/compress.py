"""Windows of tokens into entries: a softmax a channel, carried from token to token; norm, rotation, rounding."""

# mypy: ignore-errors
import triton
import triton.language as tl

from openinfer.recipes.deepseek_v4.device.rounding import hadamard, q4, q8_plain, rotated

EMPTY = tl.constexpr(float("-inf"))


@triton.jit
def _row_of(tile, q_starts, rows, PAGE: tl.constexpr):
    """The row that a tile belongs to. Row r has the tiles from q_starts[r] // PAGE + 2 r on, a page each: two more than
    its tokens fill, since they need not begin or end with a page. `rows` for a tile after the last row's."""
    SEARCH: tl.constexpr = 128
    passed = tl.zeros((SEARCH,), tl.int32)
    for r in range(0, rows + 1, SEARCH):
        candidate = r + tl.arange(0, SEARCH)
        start = tl.load(q_starts + candidate, mask=candidate <= rows, other=1 << 30)
        passed += (start // PAGE + 2 * candidate <= tile).to(tl.int32)
    return tl.sum(passed, 0) - 1


@triton.jit
def _taken(top, s, v, a, z):
    """An accumulation with one more token."""
    most = tl.maximum(top, z)
    shrink, weight = tl.exp(top - most), tl.exp(z - most)
    return most, s * shrink + weight, v * shrink + weight * a


@triton.jit
def _finished(
    e, to, norm_weight, cos_sin, position, eps, D: tl.constexpr, ROTARY: tl.constexpr, ROUNDING: tl.constexpr
):
    """Norm, rotation at `position` and rounding of e [1, D], written to `to`."""
    dtype = to.dtype.element_ty
    column = tl.arange(0, D)[None, :]
    e = e.to(dtype).to(tl.float32)
    y = e * tl.rsqrt(tl.sum(e * e, 1) / D + eps)[:, None] * tl.load(norm_weight + column)
    y = rotated(y.to(dtype).to(tl.float32), cos_sin, position, 1.0, D, ROTARY).to(dtype).to(tl.float32)
    if ROUNDING == "q8":
        y = q8_plain(y, ROTARY)
    if ROUNDING == "hadamard_q4":
        # Sixteen equal rows: products take no fewer.
        y = tl.max(hadamard(tl.broadcast_to(y, (16, D)).to(dtype), D), 0)[None, :]
        y = q4(y.to(dtype).to(tl.float32))
    tl.store(to + column, y.to(dtype))


@triton.jit
def compress(
    entries, state, az, ape, norm_weight, cos_sin, slots, q_starts, seq_lens, alive, state_tables, entry_tables,
    az_stride, state_stride, entry_stride, state_width, entry_width, rows, eps,
    D: tl.constexpr, ROTARY: tl.constexpr, WINDOW: tl.constexpr, OVERLAP: tl.constexpr, PAGE: tl.constexpr,
    ROUNDING: tl.constexpr, SINGLE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A program takes a page's tokens of a row in order. Grid: SINGLE (no row has more than one token) rows, else
    T // PAGE + 2 rows.

    Only a row's first program reads the state before the step, and no other writes the page that has it: the programs
    of later pages begin a window early (OVERLAP), with what no state is needed for; where that window is not whole in
    the step, the first program takes the second page too.
    """
    COLUMNS: tl.constexpr = 2 * D if OVERLAP else D
    LOOK: tl.constexpr = WINDOW if OVERLAP else 0
    row, tile = tl.program_id(0), 0
    if not SINGLE:
        row = _row_of(tl.program_id(0), q_starts, rows, PAGE)
        if row >= rows:
            return
        tile = tl.program_id(0) - tl.load(q_starts + row) // PAGE - 2 * row
    first = tl.load(q_starts + row)
    slot = tl.load(slots + row).to(tl.int64)
    start = tl.load(seq_lens + slot)
    end = start + tl.load(q_starts + row + 1) - first
    page = start // PAGE + tile
    stop = tl.minimum(end, (page + 1) * PAGE)
    if (tile == 0) & ((page + 1) * PAGE - LOOK < start):
        stop = tl.minimum(end, (page + 2) * PAGE)
    begin = tl.maximum(start, page * PAGE - LOOK)
    if (tl.load(alive + slot) == 0) | (end == start) | (page * PAGE >= end):
        return
    if (tile > 0) & (page * PAGE - LOOK < start):
        return
    column = tl.arange(0, D)
    empty, zero = tl.full((D,), EMPTY, tl.float32), tl.zeros((D,), tl.float32)
    b_top, b_s, b_v = empty, zero, zero
    a_top, a_s, a_v = empty, zero, zero
    p_top, p_s, p_v = empty, zero, zero  # of the window before
    if (tile == 0) & (start > 0):
        old = (
            tl.load(state_tables + slot * state_width + (start - 1) // PAGE).to(tl.int64) * state_stride
            + state
            + column
        )
        if OVERLAP:
            p_top, p_s, p_v = tl.load(old), tl.load(old + D), tl.load(old + 2 * D)
            old += 3 * D
            a_top, a_s, a_v = tl.load(old), tl.load(old + D), tl.load(old + 2 * D)
            old += 3 * D
        b_top, b_s, b_v = tl.load(old), tl.load(old + D), tl.load(old + 2 * D)
    token = az + (first - start).to(tl.int64) * az_stride + column
    for step in tl.range(0, stop - begin, num_stages=STAGES):
        position = begin + step
        here = token + position.to(tl.int64) * az_stride
        place = position % WINDOW
        bias = ape + place * COLUMNS + column
        if OVERLAP:
            a, z = tl.load(here), tl.load(here + COLUMNS) + tl.load(bias)
            a2, z2 = tl.load(here + D), tl.load(here + COLUMNS + D) + tl.load(bias + D)
            fresh = place == 0
            p_top, p_s, p_v = (
                tl.where(fresh, a_top, p_top),
                tl.where(fresh, a_s, p_s),
                tl.where(fresh, a_v, p_v),
            )
            a_top, a_s, a_v = _taken(
                tl.where(fresh, EMPTY, a_top), tl.where(fresh, 0.0, a_s), tl.where(fresh, 0.0, a_v), a, z
            )
        else:
            a2, z2 = tl.load(here), tl.load(here + COLUMNS) + tl.load(bias)
            fresh = place == 0
        b_top, b_s, b_v = _taken(
            tl.where(fresh, EMPTY, b_top), tl.where(fresh, 0.0, b_s), tl.where(fresh, 0.0, b_v), a2, z2
        )
        if (place == WINDOW - 1) & (position >= page * PAGE):
            e = b_v / b_s
            if OVERLAP:
                top = tl.maximum(p_top, b_top)
                one, two = tl.exp(p_top - top), tl.exp(b_top - top)
                e = (p_v * one + b_v * two) / (p_s * one + b_s * two)
            at = tl.load(entry_tables + slot * entry_width + position // PAGE).to(tl.int64) * entry_stride
            to = entries + at + position % PAGE // WINDOW * D
            _finished(e[None, :], to, norm_weight, cos_sin, position - place, eps, D, ROTARY, ROUNDING)
        if (position + 1 == end) | ((position >= page * PAGE) & (position % PAGE == PAGE - 1)):
            new = (
                tl.load(state_tables + slot * state_width + position // PAGE).to(tl.int64) * state_stride
                + state
                + column
            )
            if OVERLAP:
                tl.store(new, p_top)
                tl.store(new + D, p_s)
                tl.store(new + 2 * D, p_v)
                new += 3 * D
                tl.store(new, a_top)
                tl.store(new + D, a_s)
                tl.store(new + 2 * D, a_v)
                new += 3 * D
            tl.store(new, b_top)
            tl.store(new + D, b_s)
            tl.store(new + 2 * D, b_v)
