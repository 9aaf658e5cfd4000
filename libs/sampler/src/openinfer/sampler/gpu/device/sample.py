"""sample: `scan` reads the logits once and in parallel, `draw` finishes each row."""

# mypy: ignore-errors
import triton
import triton.language as tl

from openinfer.sampler.gpu.device.adjust import adjust
from openinfer.sampler.gpu.device.filters import (
    LOG2_E,
    LOWEST,
    kth_maximum,
    list_groups,
    logit_of,
    members,
    raise_bound,
    without,
)
from openinfer.sampler.gpu.device.noise import perturbed

LARGEST = tl.constexpr(3.4028234663852886e38)


@triton.jit
def first_maximum(values, ids):
    """The largest value and the lowest id that has it."""
    best = tl.max(values, 0)
    return best, tl.min(tl.where(values == best, ids, 2147483647), 0)


@triton.jit
def position_of(row, slot, q_starts, seq_lens):
    return tl.load(seq_lens + slot) + tl.load(q_starts + row + 1) - tl.load(q_starts + row)


@triton.jit
def is_filtered(top_k, top_p, min_p, vocabulary):
    return ((top_k > 0) & (top_k < vocabulary)) | (top_p < 1.0) | (min_p > 0.0)


@triton.jit
def scan(
    tops, sums, peaks, bests, masses, best_ids, maxima, adjusted, logits, slots, q_starts, seq_lens, alive, emits,
    temperatures, top_ks, top_ps, min_ps, seeds, min_lens, stop_ids, adjusts, vocabulary, stop_width, groups,
    prompt_lens, penalties, prompt_masks, output_counts, recent_tokens, allowed_masks, bias_ids, biases, bad_words,
    mask_width, count_width, bias_width, words, word_length,
    GREEDY: tl.constexpr, CHUNK: tl.constexpr, GROUP: tl.constexpr, BIASES: tl.constexpr, WORDS: tl.constexpr,
    ALLOWED: tl.constexpr, BAD_WORDS: tl.constexpr, BIAS: tl.constexpr, PENALTIES: tl.constexpr,
):  # fmt: skip
    """CHUNK logits of a row a program; grid (rows, parts). Rows that are adjusted leave their logits in `adjusted`.

    Of each part: its largest logit (inf in place of NaN) and the sum of exp(logit - largest); the largest of what may
    be drawn, adjusted; and the best candidate, unless the row is filtered: then the maximum of each group of GROUP
    logits, and the sum of exp((logit - largest) / temperature).
    """
    row, part = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + row)
    if (tl.load(emits + row) == 0) | (tl.load(alive + slot) == 0):
        return
    temperature, top_k = tl.load(temperatures + slot), tl.load(top_ks + slot)
    position = position_of(row, slot, q_starts, seq_lens)
    token = part * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row.to(tl.int64) * vocabulary + token, mask=token < vocabulary, other=float("-inf"))
    x = tl.where(x == x, x, float("inf"))
    top = tl.max(x, 0)
    out = row * tl.num_programs(1) + part
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
    if (temperature >= GREEDY) & (top_k != 1):
        if is_filtered(top_k, tl.load(top_ps + slot), tl.load(min_ps + slot), vocabulary):
            group = part * (CHUNK // GROUP) + tl.arange(0, CHUNK // GROUP)
            highest = tl.max(tl.reshape(x, (CHUNK // GROUP, GROUP)), 1)
            tl.store(maxima + row * groups + group, highest, mask=group < groups)
            shift = tl.where(tl.abs(best) <= LARGEST, best, 0.0)
            tl.store(masses + out, tl.sum(tl.exp2((x - shift) * (LOG2_E / temperature)), 0))
        else:
            value = perturbed(x, token, temperature, seeds + slot * 2, position)
            best, best_id = first_maximum(value, token)
    tl.store(bests + out, best)
    tl.store(best_ids + out, best_id)


@triton.jit
def draw(
    tokens, logprobs, tops, sums, peaks, bests, masses, best_ids, maxima, adjusted, listing, logits, slots,
    q_starts, seq_lens, alive, emits, temperatures, top_ks, top_ps, min_ps, seeds, min_lens, stop_ids, adjusts,
    vocabulary, stop_width, groups, parts,
    GREEDY: tl.constexpr, PARTS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr,
    RADIX: tl.constexpr,
):  # fmt: skip
    """The token and logprob of a row from what `scan` found; filtered rows find their bound and draw here."""
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    if (tl.load(emits + row) == 0) | (tl.load(alive + slot) == 0):
        tl.store(tokens + row, -1)
        tl.store(logprobs + row, 0.0)
        return
    part = tl.arange(0, PARTS)
    at, has = row * parts + part, part < parts
    top = tl.load(tops + at, mask=has, other=float("-inf"))
    part_peaks = tl.load(peaks + at, mask=has, other=float("-inf"))
    peak = tl.max(part_peaks, 0)
    temperature, top_k = tl.load(temperatures + slot), tl.load(top_ks + slot)
    temperature = tl.where((temperature < GREEDY) | (top_k == 1), 1.0, temperature)
    highest = tl.max(top, 0)
    scaled_peak = tl.div_rn(peak, temperature)
    if not ((tl.abs(highest) <= LARGEST) & (tl.abs(scaled_peak) <= LARGEST)):  # NaN of any origin too
        tl.store(tokens + row, -2)
        tl.store(logprobs + row, 0.0)
        return
    best = tl.load(bests + at, mask=has, other=float("-inf"))
    _, token = first_maximum(best, tl.load(best_ids + at, mask=has, other=2147483647))
    top_p, min_p = tl.load(top_ps + slot), tl.load(min_ps + slot)
    greedy = (tl.load(temperatures + slot) < GREEDY) | (top_k == 1)
    if (not greedy) & is_filtered(top_k, top_p, min_p, vocabulary):
        position = position_of(row, slot, q_starts, seq_lens)
        mass = tl.load(masses + at, mask=has, other=0.0) * tl.exp2(
            (part_peaks - peak) * (LOG2_E / temperature)
        )
        candidates = tl.where(tl.load(adjusts + slot) != 0, adjusted, logits) + row.to(tl.int64) * vocabulary
        token = draw_filtered(
            peak, scaled_peak, tl.sum(mass, 0), temperature, top_k, top_p, min_p, seeds + slot * 2, position,
            maxima + row * groups, listing + row * GROUPS, candidates, vocabulary, stop_ids + slot * stop_width,
            tl.where(position < tl.load(min_lens + slot), stop_width, 0), groups, GROUP, GROUPS, BLOCK, RADIX,
        )  # fmt: skip
    total = tl.sum(tl.load(sums + at, mask=has, other=0.0) * tl.exp(top - highest), 0)
    tl.store(tokens + row, token)
    logit = tl.load(logits + row.to(tl.int64) * vocabulary + token)
    tl.store(logprobs + row, logit - highest - tl.log(total))


@triton.jit
def draw_filtered(
    peak, scaled_peak, mass, temperature, top_k, top_p, min_p, seeds, position, maxima, listing, logits, vocabulary,
    stop_ids, stops, groups,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr, RADIX: tl.constexpr,
):  # fmt: skip
    """The id of the best perturbed logit among what the filters keep. `mass`: of all, in units of the peak's."""
    group = tl.arange(0, GROUPS)
    reach = tl.load(maxima + group, mask=group < groups, other=float("-inf"))
    bound = tl.full((), LOWEST, tl.float32)
    if min_p > 0.0:
        bound = tl.minimum(logit_of(scaled_peak + tl.log(min_p), temperature), peak)
    if (top_k > 0) & (top_k < vocabulary):
        bound = tl.maximum(bound, kth_maximum(reach, top_k))
        bound = raise_bound(
            bound, bound, top_k, 0.0, listing, reach, peak, temperature, logits, vocabulary, stop_ids, stops,
            False, GROUP, GROUPS, BLOCK, RADIX,
        )  # fmt: skip
    if top_p < 1.0:
        # All logits below the guess weigh less together than (1 - top_p) times the whole: enough lies above it.
        guess = tl.maximum(bound, peak - temperature * (tl.log(vocabulary / ((1.0 - top_p) * mass)) + 1.0))
        unbounded = bound == LOWEST
        bound = raise_bound(
            tl.where(unbounded, guess, bound), guess, top_p, tl.where(unbounded, mass, 0.0), listing, reach, peak,
            temperature, logits, vocabulary, stop_ids, stops, True, GROUP, GROUPS, BLOCK, RADIX,
        )  # fmt: skip
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    best_id = tl.full((BLOCK,), 2147483647, tl.int32)
    count = list_groups(listing, reach, bound, GROUPS)
    for start in range(0, count * GROUP, BLOCK):
        token, x = members(listing, count, start, logits, vocabulary, stop_ids, stops, GROUP, BLOCK)
        value = tl.where(x >= bound, perturbed(x, token, temperature, seeds, position), float("-inf"))
        best_id = tl.where(value > best, token, best_id)
        best = tl.maximum(best, value)
    _, token = first_maximum(best, best_id)
    return token
