"""advance: the end of a step for BLOCK rows a program."""

# mypy: ignore-errors
import triton
import triton.language as tl


@triton.jit
def advance(
    result, tokens, logprobs, slots, q_starts, emits, alive, seq_lens, last_tokens, limits, min_lens, stop_ids,
    adjusts, output_counts, recent_tokens, rows, stop_width, count_width, recent,
    BLOCK: tl.constexpr, UNSOUND: tl.constexpr, RUNNING: tl.constexpr, STOP: tl.constexpr, LENGTH: tl.constexpr,
    FAILED: tl.constexpr, PENALTIES: tl.constexpr, BAD_WORDS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    slot = tl.load(slots + row, mask=inside, other=0)
    q_len = tl.load(q_starts + row + 1, mask=inside, other=0) - tl.load(q_starts + row, mask=inside, other=0)
    live = inside & (tl.load(alive + slot, mask=inside, other=0) != 0) & (q_len > 0)
    length = tl.load(seq_lens + slot, mask=live, other=0) + q_len
    tl.store(seq_lens + slot, length, mask=live)

    emitting = live & (tl.load(emits + row, mask=live, other=0) != 0)
    token = tl.load(tokens + row, mask=emitting, other=-1)
    bits = tl.load(logprobs + row, mask=emitting, other=0.0).to(tl.int32, bitcast=True)
    stopped = tl.zeros((BLOCK,), tl.int1)
    for i in range(stop_width):
        stopped |= token == tl.load(stop_ids + slot * stop_width + i, mask=emitting, other=-1)
    stopped &= length >= tl.load(min_lens + slot, mask=emitting, other=0)
    full = length + 1 >= tl.load(limits + slot, mask=emitting, other=0)
    ended = tl.where(token == UNSOUND, FAILED, tl.where(stopped, STOP, tl.where(full, LENGTH, RUNNING)))
    status = tl.where(emitting, ended, tl.where(live, RUNNING, 0))
    tl.store(last_tokens + slot, token, mask=emitting & (token != UNSOUND))
    flags = tl.load(adjusts + slot, mask=emitting & (token != UNSOUND), other=0)
    counted = (flags & PENALTIES) != 0
    word = output_counts + slot.to(tl.int64) * count_width + token // 2
    pair = tl.load(word, mask=counted, other=0)
    shift = token % 2 * 16
    room = ((pair >> shift) & 0xFFFF) < 0xFFFF
    tl.store(word, pair + (1 << shift), mask=counted & room)
    tl.store(recent_tokens + slot * recent + length % recent, token, mask=(flags & BAD_WORDS) != 0)
    tl.store(alive + slot, 0, mask=status > RUNNING)
    tl.store(result + row * 3, token, mask=inside)
    tl.store(result + row * 3 + 1, status, mask=inside)
    tl.store(result + row * 3 + 2, bits, mask=inside)


@triton.jit
def accept(
    follows, starts, result, accepted, slots, emits, num_drafts, drafts, seq_lens, last_tokens, alive, rows, width,
    place, BLOCK: tl.constexpr, RUNNING: tl.constexpr, STOP: tl.constexpr, DRAFTED_STOP: tl.constexpr,
    UNTRIED: tl.constexpr,
):  # fmt: skip
    """All rows in one program, because `starts` is their running sum."""
    row = tl.arange(0, BLOCK)
    inside = row < rows
    slot = tl.load(slots + row, mask=inside, other=0)
    drafted = inside & (tl.load(emits + row, mask=inside, other=0) != 0)
    drafted &= tl.load(num_drafts + row, mask=drafted, other=0) >= place
    position = tl.load(seq_lens + slot, mask=drafted, other=0)
    draft = tl.load(drafts + slot * width + position % width, mask=drafted, other=-1)
    right = drafted & (draft == tl.load(last_tokens + slot, mask=drafted, other=-2))
    status = tl.load(result + row * 3 + 1, mask=drafted, other=0)
    tl.store(result + row * 3 + 1, UNTRIED, mask=drafted & (draft < 0) & (status == RUNNING))
    tl.store(result + row * 3 + 1, DRAFTED_STOP, mask=right & (status == STOP))
    follow = (right & (tl.load(alive + slot, mask=right, other=0) != 0)).to(tl.int32)
    before = tl.load(accepted + slot, mask=inside & (place > 1), other=0)
    tl.store(accepted + slot, before + follow, mask=inside)
    tl.store(follows + row, follow, mask=inside)
    tl.store(starts, 0)
    tl.store(starts + 1 + row, tl.cumsum(follow, 0), mask=inside)
