"""accept: which rows go on to their next draft."""

# mypy: ignore-errors
import triton
import triton.language as tl


@triton.jit
def accept(
    follows, starts, result, accepted, slots, emits, num_drafts, drafts, seq_lens, last_tokens, alive, rows, width,
    place, BLOCK: tl.constexpr, STOP: tl.constexpr, DRAFTED_STOP: tl.constexpr,
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
    status = tl.load(result + row * 3 + 1, mask=right, other=0)
    tl.store(result + row * 3 + 1, DRAFTED_STOP, mask=right & (status == STOP))
    follow = (right & (tl.load(alive + slot, mask=right, other=0) != 0)).to(tl.int32)
    before = tl.load(accepted + slot, mask=inside & (place > 1), other=0)
    tl.store(accepted + slot, before + follow, mask=inside)
    tl.store(follows + row, follow, mask=inside)
    tl.store(starts, 0)
    tl.store(starts + 1 + row, tl.cumsum(follow, 0), mask=inside)
