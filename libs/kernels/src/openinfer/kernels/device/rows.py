"""Kernels that move rows and words."""

# mypy: ignore-errors
import triton
import triton.language as tl


@triton.jit
def gather_rows(out, index, table, width, BLOCK: tl.constexpr):
    """out[i] = table[index[i]]; rows of `width`. Grid (rows, cdiv(width, BLOCK))."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(index + row).to(tl.int64)
    value = tl.load(table + source * width + column, mask=column < width)
    tl.store(out + row * width + column, value, mask=column < width)


@triton.jit
def gather_last(out, x, q_starts, width, BLOCK: tl.constexpr):
    """out[r] = x[max(q_starts[r + 1] - 1, 0)]; rows of `width`. Grid (rows, cdiv(width, BLOCK))."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = tl.maximum(tl.load(q_starts + row + 1) - 1, 0).to(tl.int64)
    value = tl.load(x + source * width + column, mask=column < width)
    tl.store(out + row * width + column, value, mask=column < width)


@triton.jit
def copy_words(out, x, count, BLOCK: tl.constexpr):
    """out = x, int32 [count]. Grid (cdiv(count, BLOCK),)."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, mask=i < count), mask=i < count)


@triton.jit
def scatter_words(words, writes, capacity, BLOCK: tl.constexpr):
    """words[index[i]] = value[i] for i < count. `writes`: count, capacity indices, capacity values."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    used = i < tl.load(writes)
    index = tl.load(writes + 1 + i, mask=used)
    value = tl.load(writes + 1 + capacity + i, mask=used)
    tl.store(words + index.to(tl.int64), value, mask=used)


@triton.jit
def expand_rows(
    token_ids, positions, token_slots, prompt, slots, q_starts, seq_lens, last_tokens, alive, drafts, tokens, rows,
    steps, BLOCK: tl.constexpr, DRAFTS: tl.constexpr,
):  # fmt: skip
    """Ids, positions and slots of BLOCK tokens a program. `steps`: cdiv(log2(rows)) halvings find a token's row.
    DRAFTS: proposed tokens of a slot, at their positions modulo DRAFTS; 0: none."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token < tokens
    # The last row whose first token is not after this one: empty rows before it share that first token.
    low = tl.zeros((BLOCK,), tl.int32)
    high = tl.zeros((BLOCK,), tl.int32) + rows - 1
    for _ in range(steps):
        middle = (low + high + 1) // 2
        after = tl.load(q_starts + middle) > token
        low = tl.where(after, low, middle)
        high = tl.where(after, middle - 1, high)
    slot = tl.load(slots + low)
    live = (tl.load(alive + slot) != 0) & (token < tl.load(q_starts + rows))
    place = token - tl.load(q_starts + low)
    position = tl.load(seq_lens + slot) + place
    given = tl.load(prompt + token, mask=inside, other=0)
    token_id = tl.load(last_tokens + slot)
    if DRAFTS:
        draft = tl.load(drafts + slot * DRAFTS + position % DRAFTS, mask=live & (place > 0), other=0)
        token_id = tl.where(place > 0, draft, token_id)
    token_id = tl.where(given >= 0, given, token_id)
    if DRAFTS:
        live &= token_id >= 0
    tl.store(token_ids + token, tl.where(live, token_id, 0), mask=inside)
    tl.store(positions + token, tl.where(live, position, 0), mask=inside)
    tl.store(token_slots + token, tl.where(live, slot, 0), mask=inside)


@triton.jit
def add_rows(x, y, count, BLOCK: tl.constexpr):
    """x += y, element by element; the sum is float32. Grid (cdiv(count, BLOCK),)."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(x + at, mask=at < count).to(tl.float32) + tl.load(y + at, mask=at < count).to(tl.float32)
    tl.store(x + at, total.to(x.dtype.element_ty), mask=at < count)


@triton.jit
def join_columns(out, parts, rows, width, ranks, BLOCK: tl.constexpr):
    """out [rows, ranks * width] of parts [ranks, rows, width]. Grid (ranks * rows, cdiv(width, BLOCK))."""
    part = tl.program_id(0)
    rank, row = part // rows, (part % rows).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(parts + part.to(tl.int64) * width + column, mask=column < width)
    tl.store(out + (row * ranks + rank) * width + column, value, mask=column < width)


@triton.jit
def keep_states(
    states, x, ids, places, token_ids, positions, token_slots, width, kept, BLOCK: tl.constexpr
):  # fmt: skip
    """states[slot, position % kept] = x[token], and the token's id and position beside it. Grid (tokens, cdiv(width,
    BLOCK))."""
    token = tl.program_id(0)
    position = tl.load(positions + token)
    at = tl.load(token_slots + token) * kept + position % kept
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + token.to(tl.int64) * width + column, mask=column < width)
    tl.store(states + at.to(tl.int64) * width + column, value, mask=column < width)
    if tl.program_id(1) == 0:
        tl.store(ids + at, tl.load(token_ids + token))
        tl.store(places + at, position)


@triton.jit
def take_states(
    x, states, next_ids, positions, token_slots, ids, places, slots, seq_lens, last_tokens, width, kept,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The last `kept` tokens of each row, zeros for one that was not kept. Grid (rows * kept, cdiv(width, BLOCK))."""
    token = tl.program_id(0)
    slot = tl.load(slots + token // kept)
    length = tl.load(seq_lens + slot)
    position = length - kept + token % kept
    at = slot * kept + tl.maximum(position, 0) % kept
    behind = slot * kept + tl.maximum(position + 1, 0) % kept
    last = position + 1 == length
    found = (slot > 0) & (position >= 0) & (tl.load(places + at) == position)
    found &= last | (tl.load(places + behind) == position + 1)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(states + at.to(tl.int64) * width + column, mask=found & (column < width), other=0.0)
    tl.store(x + token.to(tl.int64) * width + column, value, mask=column < width)
    if tl.program_id(1) == 0:
        following = tl.where(last, tl.load(last_tokens + slot), tl.load(ids + behind))
        tl.store(next_ids + token, tl.where(found, following, 0))
        tl.store(positions + token, tl.where(found, position, 0))
        tl.store(token_slots + token, tl.where(found, slot, 0))
