"""follow, propose: what layers that draft need of a step that has sampled, and where their proposals go."""

# mypy: ignore-errors
import triton
import triton.language as tl


@triton.jit
def follow(
    next_ids, lens, ends, spans, token_ids, positions, slots, q_starts, emits, num_drafts, accepted, last_tokens,
    following, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (rows,): one row of any length."""
    row = tl.program_id(0)
    slot, first, after = tl.load(slots + row), tl.load(q_starts + row), tl.load(q_starts + row + 1)
    end = after - tl.load(num_drafts + row)
    length = after - first
    end = tl.where(length > 0, tl.minimum(end + tl.load(accepted + slot), after), after)
    last = tl.where(tl.load(emits + row) != 0, tl.load(last_tokens + slot), tl.load(following + row))
    tl.store(ends + row + 1, end)
    tl.store(spans + row + 1, row + 1)
    if row == 0:
        tl.store(ends, 0)
        tl.store(spans, 0)
    if (length > 0) & (slot > 0):
        tl.store(lens + slot, tl.load(positions + first))
    for start in range(0, length, BLOCK):
        token = first + start + tl.arange(0, BLOCK)
        inside = token < after
        value = tl.load(token_ids + token + 1, mask=token + 1 < end, other=0)
        value = tl.where(token + 1 == end, tl.maximum(last, 0), value)
        tl.store(next_ids + token, value, mask=inside)


@triton.jit
def propose(
    drafts, next_ids, positions, token_slots, lens, spans, tokens, slots, emits, alive, seq_lens, reserved, survival,
    floor, rows, width, place, BLOCK: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    """Grid (cdiv(rows, BLOCK),)."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    slot = tl.load(slots + row, mask=inside, other=0)
    token = tl.load(tokens + row, mask=inside, other=-1)
    length = tl.load(seq_lens + slot, mask=inside, other=0)
    live = inside & (token >= 0) & (tl.load(alive + slot, mask=inside, other=0) != 0)
    live &= tl.load(emits + row, mask=inside, other=0) != 0
    said = token
    if CUT:
        said = tl.where(tl.load(survival + row, mask=inside, other=0.0) < tl.load(floor), -1, token)
    tl.store(drafts + slot * width + (length + place) % width, said, mask=live)
    position = length + place - 1
    kept = live & (position < tl.load(reserved + slot, mask=inside, other=0))
    tl.store(next_ids + row, tl.where(live, token, 0), mask=inside)
    tl.store(positions + row, tl.where(kept, position, 0), mask=inside)
    tl.store(token_slots + row, tl.where(kept, slot, 0), mask=inside)
    tl.store(lens + slot, position, mask=live)
    tl.store(spans + row + 1, (row + 1) * (place + 1), mask=inside)


@triton.jit
def widen(out, logits, sources, vocabulary, width, BLOCK: tl.constexpr):
    """Grid (rows, cdiv(vocabulary, BLOCK))."""
    row, token = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocabulary
    source = tl.load(sources + token, mask=inside, other=-1)
    value = tl.load(logits + row * width + source, mask=source >= 0, other=-float("inf"))
    tl.store(out + row * vocabulary + token, value, mask=inside)
