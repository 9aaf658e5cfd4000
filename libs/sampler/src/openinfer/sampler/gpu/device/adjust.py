"""Adjustments of a row's logits: openinfer.sampler.adjust on a device."""

# mypy: ignore-errors
import triton
import triton.language as tl


@triton.jit
def banned(bad_words, recent, position, prompt_len, words, length, WORDS: tl.constexpr):
    """The last id of each word that the output has come to, -1 for the others."""
    word = tl.arange(0, WORDS)
    inside = word < words
    matched = inside
    for i in range(length - 1):
        at = position - (length - 1) + i
        token = tl.load(recent + at % length, mask=at >= prompt_len, other=-2)
        expected = tl.load(bad_words + word * length + i, mask=inside, other=-1)
        matched &= (expected == -1) | (expected == token)
    last = tl.load(bad_words + word * length + length - 1, mask=inside, other=-1)
    return tl.where(matched, last, -1)


@triton.jit
def penalised(
    x, token, is_first, slot, vocabulary, penalties, prompt_masks, output_counts, mask_width, count_width
):
    inside = token < vocabulary
    pair = tl.load(output_counts + slot * count_width + token // 2, mask=inside & (not is_first), other=0)
    count = (pair >> (token % 2 * 16)) & 0xFFFF
    mask = tl.load(prompt_masks + slot * mask_width + token // 32, mask=inside, other=0)
    repetition = tl.load(penalties + slot * 3)
    seen = (count > 0) | (((mask >> (token % 32)) & 1) != 0)
    x = tl.where(seen, tl.where(x > 0, tl.div_rn(x, repetition), x * repetition), x)
    x -= tl.load(penalties + slot * 3 + 1) * count.to(tl.float32)
    return x - tl.where(count > 0, tl.load(penalties + slot * 3 + 2), 0.0)


@triton.jit
def adjust(
    out, logits, part, flags, position, slot, vocabulary,
    prompt_lens, penalties, prompt_masks, output_counts, recent_tokens, allowed_masks, bias_ids, biases, bad_words,
    mask_width, count_width, bias_width, words, word_length,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, BIASES: tl.constexpr, WORDS: tl.constexpr,
    ALLOWED: tl.constexpr, BAD_WORDS: tl.constexpr, BIAS: tl.constexpr, PENALTIES: tl.constexpr,
):  # fmt: skip
    """CHUNK logits of a row, adjusted, from `logits` to `out`, BLOCK at a time. slot: int64.

    The logits go through memory for two reasons. Rows without adjustments should not pay for them with registers. The
    few ids of bad words and biases find the threads that hold their logits."""
    first, end = part * CHUNK, tl.minimum(part * CHUNK + CHUNK, vocabulary)
    is_first = position == tl.load(prompt_lens + slot)
    for start in range(first, end, BLOCK):
        token = start + tl.arange(0, BLOCK)
        x = tl.load(logits + token, mask=token < vocabulary, other=float("-inf"))
        if flags & ALLOWED:
            mask = tl.load(allowed_masks + slot * mask_width + token // 32, mask=token < vocabulary, other=0)
            x = tl.where(((mask >> (token % 32)) & 1) != 0, x, float("-inf"))
        tl.store(out + token, x, mask=token < vocabulary)
    tl.debug_barrier()
    if flags & BAD_WORDS:
        last = banned(
            bad_words + slot * words * word_length, recent_tokens + slot * word_length, position,
            tl.load(prompt_lens + slot), words, word_length, WORDS,
        )  # fmt: skip
        here = (last >= first) & (last < end)
        tl.store(out + last, tl.full((WORDS,), float("-inf"), tl.float32), mask=here)
        tl.debug_barrier()
    if flags & BIAS:
        pair = tl.arange(0, BIASES)
        biased = tl.load(bias_ids + slot * bias_width + pair, mask=pair < bias_width, other=-1)
        bias = tl.load(biases + slot * bias_width + pair, mask=pair < bias_width, other=0.0)
        here = (biased >= first) & (biased < end)
        tl.store(out + biased, tl.load(out + biased, mask=here, other=0.0) + bias, mask=here)
        tl.debug_barrier()
    if flags & PENALTIES:
        for start in range(first, end, BLOCK):
            token = start + tl.arange(0, BLOCK)
            x = penalised(
                tl.load(out + token, mask=token < vocabulary, other=float("-inf")), token, is_first, slot,
                vocabulary, penalties, prompt_masks, output_counts, mask_width, count_width,
            )  # fmt: skip
            tl.store(out + token, x, mask=token < vocabulary)
            if is_first:  # the slot still has the counts of its previous sequence
                word = start // 2 + tl.arange(0, BLOCK // 2)
                counts = output_counts + slot * count_width + word
                tl.store(counts, tl.zeros((BLOCK // 2,), tl.int32), mask=word < count_width)
        tl.debug_barrier()
