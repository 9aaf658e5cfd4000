"""A block of drafts: its tokens, and the Markov head's part of the logits of one draft."""

# mypy: ignore-errors
import triton
import triton.language as tl


@triton.jit
def start_block(
    token_ids, positions, token_slots, slots, emits, alive, last_tokens, seq_lens, tokens, rows, noise,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (cdiv(tokens, BLOCK),): token i of row r is number i * rows + r."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token < tokens
    row, place = token % rows, token // rows
    slot = tl.load(slots + row, mask=inside, other=0)
    live = (tl.load(emits + row, mask=inside, other=0) != 0) & (
        tl.load(alive + slot, mask=inside, other=0) != 0
    )
    value = tl.where(place == 0, tl.load(last_tokens + slot, mask=inside, other=0), noise)
    position = tl.load(seq_lens + slot, mask=inside, other=0) + place
    tl.store(token_ids + token, tl.where(live, value, 0), mask=inside)
    tl.store(positions + token, tl.where(live, position, 0), mask=inside)
    tl.store(token_slots + token, tl.where(live, slot, 0), mask=inside)


@triton.jit
def markov_logits(
    logits, token_ids, before, after, rows, vocabulary, rank, BV: tl.constexpr, RANK: tl.constexpr
):
    """logits[r] += before[token_ids[r]] @ after^T, 16 rows and BV columns a program; rank <= RANK.
    Grid (cdiv(vocabulary, BV), cdiv(rows, 16))."""
    row, column = tl.program_id(1) * 16 + tl.arange(0, 16), tl.program_id(0) * BV + tl.arange(0, BV)
    k = tl.arange(0, RANK)
    real, inside = row < rows, column < vocabulary
    token = tl.load(token_ids + row, mask=real, other=0).to(tl.int64)
    e = tl.load(
        before + token[:, None] * rank + k[None, :], mask=real[:, None] & (k < rank)[None, :], other=0.0
    )
    right = after + column.to(tl.int64)[None, :] * rank + k[:, None]
    w = tl.load(right, mask=inside[None, :] & (k < rank)[:, None], other=0.0)
    place = logits + row.to(tl.int64)[:, None] * vocabulary + column[None, :]
    both = real[:, None] & inside[None, :]
    tl.store(place, tl.dot(e, w) + tl.load(place, mask=both, other=0.0), mask=both)


@triton.jit
def markov_survival(
    survival, hidden, token_ids, before, confidence, width, rank,
    FIRST: tl.constexpr, BLOCK: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    """survival[r] (1 if FIRST) times the confidence in the row's draft. Grid (rows,); width <= BLOCK, rank <= RANK."""
    row = tl.program_id(0).to(tl.int64)
    column, k = tl.arange(0, BLOCK), tl.arange(0, RANK)
    token = tl.load(token_ids + row).to(tl.int64)
    h = tl.load(hidden + row * width + column, mask=column < width, other=0.0).to(tl.float32)
    e = tl.load(before + token * rank + k, mask=k < rank, other=0.0).to(tl.float32)
    score = tl.sum(h * tl.load(confidence + column, mask=column < width, other=0.0), 0)
    score += tl.sum(e * tl.load(confidence + width + k, mask=k < rank, other=0.0), 0)
    sure = 1.0 / (1.0 + tl.exp(-score))
    if not FIRST:
        sure *= tl.load(survival + row)
    tl.store(survival + row, sure)
