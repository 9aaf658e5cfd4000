"""sample: `scan` reads the logits once, `spread` and `sift` (of `search`) those of filtered rows, `draw` finishes."""

# mypy: ignore-errors
import triton
import triton.language as tl

from openinfer.sampler.gpu.device.adjust import adjust
from openinfer.sampler.gpu.device.filters import (
    LARGEST,
    LOWEST,
    filters_of,
    largest_of_parts,
    mass_of_row,
    sum_of_parts,
    without,
)
from openinfer.sampler.gpu.device.noise import LOG2_E, first_maximum, likely_best, perturbed
from openinfer.sampler.gpu.device.settle import searched, settled


@triton.jit
def scan(
    tops, sums, peaks, masses, bests, best_ids, floors, bins, arrived, listed, adjusted, logits, slots, q_starts,
    seq_lens, alive, emits, temperatures, top_ks, top_ps, min_ps, seeds, min_lens, stop_ids, adjusts, vocabulary,
    stop_width, parts,
    prompt_lens, penalties, prompt_masks, output_counts, recent_tokens, allowed_masks, bias_ids, biases, bad_words,
    mask_width, count_width, bias_width, words, word_length,
    GREEDY: tl.constexpr, CHUNK: tl.constexpr, BINS: tl.constexpr, BIASES: tl.constexpr, WORDS: tl.constexpr,
    ALLOWED: tl.constexpr, BAD_WORDS: tl.constexpr, BIAS: tl.constexpr, PENALTIES: tl.constexpr,
):  # fmt: skip
    """CHUNK logits of a row a program; grid (rows, parts). Rows that are adjusted leave their logits in `adjusted`.

    Of each part: its largest logit (inf in place of NaN) and the sum of exp(logit - largest); the largest of what may
    be drawn, adjusted; and the best candidate, unless the row is filtered: then the smallest finite logit and the sum
    of exp((logit - largest) / temperature).
    """
    row, part = tl.program_id(0), tl.program_id(1)
    slot, filtered, temperature, _, _, _ = filters_of(
        row, slots, emits, alive, temperatures, top_ks, top_ps, min_ps, vocabulary, GREEDY
    )
    if (tl.load(emits + row) == 0) | (tl.load(alive + slot) == 0):
        return
    position = tl.load(seq_lens + slot) + tl.load(q_starts + row + 1) - tl.load(q_starts + row)
    token = part * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row.to(tl.int64) * vocabulary + token, mask=token < vocabulary, other=float("-inf"))
    x = tl.where(x == x, x, float("inf"))
    top = tl.max(x, 0)
    out = row * parts + part
    tl.store(tops + out, top)
    tl.store(sums + out, tl.sum(tl.exp(x - tl.where(tl.abs(top) <= LARGEST, top, 0.0)), 0))
    flags = tl.load(adjusts + slot)
    if flags != 0:
        row_adjusted = adjusted + row.to(tl.int64) * vocabulary
        adjust(
            row_adjusted, logits + row.to(tl.int64) * vocabulary, part, flags, position, slot.to(tl.int64),
            vocabulary, prompt_lens, penalties, prompt_masks, output_counts, recent_tokens, allowed_masks, bias_ids,
            biases, bad_words, mask_width, count_width, bias_width, words, word_length,
            CHUNK, min(CHUNK, 512), BIASES, WORDS, ALLOWED, BAD_WORDS, BIAS, PENALTIES,
        )  # fmt: skip
        x = tl.load(row_adjusted + token, mask=token < vocabulary, other=float("-inf"))
    early = position < tl.load(min_lens + slot)
    x = without(x, token, stop_ids + slot * stop_width, tl.where(early, stop_width, 0))
    best, best_id = first_maximum(x, token)
    tl.store(peaks + out, best)
    if filtered:
        tl.store(floors + out, tl.min(tl.where(x >= LOWEST, x, float("inf")), 0))
        shift = tl.where(tl.abs(best) <= LARGEST, best, 0.0)
        tl.store(masses + out, tl.sum(tl.exp2((x - shift) * (LOG2_E / temperature)), 0))
        if part == 0:
            tl.store(bins + row * BINS + tl.arange(0, BINS), tl.zeros((BINS,), tl.int32))
            tl.store(arrived + row, 0)
            tl.store(listed + row, 0)
    else:
        drawn = (temperature >= GREEDY) & (tl.load(top_ks + slot) != 1)
        if drawn & (tl.abs(tl.div_rn(best, tl.where(drawn, temperature, 1.0))) <= LARGEST):
            best, best_id, is_best = likely_best(x, token, best, temperature, seeds + slot * 2, position)
            if not is_best:
                value = perturbed(x, token, temperature, seeds + slot * 2, position)
                best, best_id = first_maximum(value, token)
        tl.store(bests + out, best)
        tl.store(best_ids + out, best_id)


@triton.jit
def draw(
    tokens, logprobs, tops, sums, peaks, masses, bests, best_ids, bounds, counts, k_masses, p_masses, listed,
    list_logits, list_ids, adjusted, logits, slots, q_starts, seq_lens, alive, emits, temperatures, top_ks, top_ps,
    min_ps, seeds, min_lens, stop_ids, adjusts, vocabulary, stop_width, parts,
    GREEDY: tl.constexpr, PARTS: tl.constexpr, LIST: tl.constexpr, SHORT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The token and logprob of a row from what the parts found; grid (rows,)."""
    row = tl.program_id(0)
    slot, filtered, temperature, top_k, top_p, min_p = filters_of(
        row, slots, emits, alive, temperatures, top_ks, top_ps, min_ps, vocabulary, GREEDY
    )
    if (tl.load(emits + row) == 0) | (tl.load(alive + slot) == 0):
        tl.store(tokens + row, -1)
        tl.store(logprobs + row, 0.0)
        return
    part = tl.arange(0, PARTS)
    at, has = row * parts + part, part < parts
    top = tl.load(tops + at, mask=has, other=float("-inf"))
    greedy = (temperature < GREEDY) | (tl.load(top_ks + slot) == 1)
    temperature = tl.where(greedy, 1.0, temperature)
    peak = largest_of_parts(peaks, row, parts, PARTS)
    highest = tl.max(top, 0)
    if not ((tl.abs(highest) <= LARGEST) & (tl.abs(tl.div_rn(peak, temperature)) <= LARGEST)):  # NaN too
        tl.store(tokens + row, -2)
        tl.store(logprobs + row, 0.0)
        return
    best = tl.load(bests + at, mask=has, other=float("-inf"))
    best, token = first_maximum(best, tl.load(best_ids + at, mask=has, other=2147483647))
    if filtered:
        position = tl.load(seq_lens + slot) + tl.load(q_starts + row + 1) - tl.load(q_starts + row)
        length = tl.load(listed + row)
        proven = length < 0
        if length <= LIST:
            mass = mass_of_row(row, peaks, masses, peak, parts, temperature, PARTS)
            if (top_k > 0) | (min_p > 0.0):
                mass = sum_of_parts(k_masses, row, parts, PARTS)
            count = sum_of_parts(counts, row, parts, PARTS)
            p_mass = sum_of_parts(p_masses, row, parts, PARTS)
            if length <= SHORT:
                proven, found = settled(
                    peak, temperature, top_k, top_p, bounds + row * 4, count, mass, p_mass, best, token,
                    list_logits + row * LIST, list_ids + row * LIST, length, seeds + slot * 2, position, SHORT,
                )  # fmt: skip
            else:
                proven, found = settled(
                    peak, temperature, top_k, top_p, bounds + row * 4, count, mass, p_mass, best, token,
                    list_logits + row * LIST, list_ids + row * LIST, length, seeds + slot * 2, position, LIST,
                )  # fmt: skip
            token = found
        if not proven:
            candidates = (
                tl.where(tl.load(adjusts + slot) != 0, adjusted, logits) + row.to(tl.int64) * vocabulary
            )
            token = searched(
                peak, temperature, top_k, top_p, min_p, candidates, vocabulary, stop_ids + slot * stop_width,
                tl.where(position < tl.load(min_lens + slot), stop_width, 0), seeds + slot * 2, position, BLOCK,
            )  # fmt: skip
    total = tl.sum(tl.load(sums + at, mask=has, other=0.0) * tl.exp(top - highest), 0)
    tl.store(tokens + row, token)
    logit = tl.load(logits + row.to(tl.int64) * vocabulary + token)
    tl.store(logprobs + row, logit - highest - tl.log(total))
