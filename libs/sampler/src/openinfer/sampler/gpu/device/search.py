"""The smallest logit that min_p, top_k and top_p keep, by all programs of a row.

A bound is guessed and then proved:

 1. `spread` counts the logits in BINS bins, and the last program of a row reads two brackets off the counts: where the
    last logit of top_k should be, and where the mass of top_p should be reached (masses by the middle of a bin).
 2. `sift` counts and weighs exactly the logits above the brackets, lists the logits within, and draws among the logits
    above.
 3. `draw` checks that the brackets hold the bounds, finds them in the list (`settled`), and draws. Where a bracket was
    guessed wrong or its list is too long (thousands of equal logits), it searches the whole row instead, slowly.

So only the time depends on the quality of the guess.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

from openinfer.sampler.gpu.device.filters import (
    LARGEST,
    LOWEST,
    best_from,
    filters_of,
    largest_of_parts,
    least_by_min_p,
    mass_of_row,
    smallest_reaching,
    sum_of_parts,
    without,
)
from openinfer.sampler.gpu.device.noise import LOG2_E


@triton.jit
def place_of(count, upto, bins):
    """The place among the bins, from the bottom, below which `count` logits lie, if each bin is filled evenly."""
    index = tl.sum((upto <= count).to(tl.int32), 0)
    here = tl.arange(0, bins.shape[0]) == index
    inside = tl.sum(tl.where(here, bins, 0), 0)
    before = tl.sum(tl.where(here, upto - bins, 0), 0)
    share = (count - before) / tl.maximum(inside, 1).to(tl.float32)
    return index + tl.where(inside > 0, tl.minimum(tl.maximum(share, 0.0), 1.0), 0.0)


@triton.jit
def logit_at(place, low, width, temperature, BINS: tl.constexpr):
    """The aligned logit at a place among the bins; infinite at their end, `low` at their beginning."""
    x = tl.where(place > 0, low + place * width, low)
    return tl.where(place < BINS, smallest_reaching(x, tl.div_rn(x, temperature), temperature), float("inf"))


@triton.jit
def brackets(
    bins, low, width, peak, mass, below, temperature, top_k, top_p, min_p,
    BINS: tl.constexpr, SLACK: tl.constexpr,
):  # fmt: skip
    """(k_low, k_high, p_low, p_high): the bound of top_k should be in [k_low, k_high), that of top_p in [p_low,
    p_high). bins int32 [BINS]: the logits from `low` up; mass: of all logits, below: of those below `low`."""
    index = tl.arange(0, BINS)
    upto, total = tl.cumsum(bins, 0), tl.sum(bins, 0)
    weights = bins.to(tl.float32) * tl.exp2((low + (index + 0.5) * width - peak) * (LOG2_E / temperature))
    lighter = tl.cumsum(weights, 0) - weights
    binds = (top_k > 0) & (top_k < total)
    least = tl.where((top_k > 0) | (min_p > 0.0), low, LOWEST)
    k_low, k_high = least, least
    kept = tl.where(min_p > 0.0, mass - below, mass)
    reach = mass - below - lighter  # the mass from each bin up: few heavy logits at the top do not blur it
    if binds:
        cut = (total - top_k).to(tl.float32)
        place = place_of(cut, upto, bins)
        first = tl.floor(place)
        k_low = logit_at(
            tl.maximum(place_of(cut - SLACK, upto, bins), first - 0.01), low, width, temperature, BINS
        )
        k_high = logit_at(place_of(cut + SLACK, upto, bins), low, width, temperature, BINS)
        k_high = tl.where(k_high > k_low, k_high, float("inf"))
        reach = tl.sum(weights, 0) - lighter  # what is kept may be a small part of the whole
        at_cut = index == tl.minimum(first, BINS - 1).to(tl.int32)
        kept = tl.sum(tl.where(at_cut, reach - (place - first) * weights, 0.0), 0)
    p_low, p_high = k_high, k_high
    if top_p < 1.0:
        wanted = top_p * kept
        last = tl.maximum(tl.sum((reach >= wanted).to(tl.int32), 0) - 1, 0)
        here = index == last
        surplus = tl.sum(tl.where(here, reach - wanted, 0.0), 0)
        share = surplus / tl.maximum(tl.sum(tl.where(here, weights, 0.0), 0), 1e-30)
        before = tl.sum(tl.where(here, upto - bins, 0), 0).to(tl.float32)
        cut = before + tl.minimum(tl.maximum(share, 0.0), 1.0) * tl.sum(tl.where(here, bins, 0), 0)
        p_low = tl.maximum(logit_at(place_of(cut - SLACK, upto, bins), low, width, temperature, BINS), k_low)
        p_high = logit_at(place_of(cut + SLACK, upto, bins), low, width, temperature, BINS)
        if binds & (p_low <= k_high):
            k_high = tl.maximum(k_high, p_high)
            p_low, p_high = k_low, k_high
    return k_low, k_high, p_low, p_high


@triton.jit
def kth_peak(peaks, row, parts, k, PARTS: tl.constexpr):
    """A bound that at least k parts reach, and so at least k logits; the lowest float without one, or without k."""
    bound = tl.full((), LOWEST, tl.float32)
    if PARTS > 128:  # all pairs would be too many
        return bound
    if (k > 0) & (k <= parts):
        part = tl.arange(0, PARTS)
        x = tl.load(peaks + row * parts + part, mask=part < parts, other=float("-inf"))
        reaching = tl.sum((x[None, :] >= x[:, None]).to(tl.int32), 1)
        bound = tl.maximum(tl.max(tl.where((reaching >= k) & (part < parts), x, LOWEST), 0), LOWEST)
    return bound


@triton.jit
def spread(
    bounds, bins, below, arrived, peaks, masses, floors, adjusted, logits, slots, q_starts, seq_lens, alive, emits,
    temperatures, top_ks, top_ps, min_ps, seeds, min_lens, stop_ids, adjusts, vocabulary, stop_width, parts,
    GREEDY: tl.constexpr, CHUNK: tl.constexpr, PARTS: tl.constexpr, BINS: tl.constexpr, SLACK: tl.constexpr,
):  # fmt: skip
    """Count CHUNK logits of a filtered row in bins; the last program of a row writes bounds[row], its two brackets.
    Grid (rows, parts)."""
    row, part = tl.program_id(0), tl.program_id(1)
    slot, filtered, temperature, top_k, top_p, min_p = filters_of(
        row, slots, emits, alive, temperatures, top_ks, top_ps, min_ps, vocabulary, GREEDY
    )
    if not filtered:
        return
    peak = largest_of_parts(peaks, row, parts, PARTS)
    if not (tl.abs(tl.div_rn(peak, temperature)) <= LARGEST):
        return
    mass = mass_of_row(row, peaks, masses, peak, parts, temperature, PARTS)
    low = least_by_min_p(peak, min_p, temperature)
    searched = (top_k > 0) | (top_p < 1.0)
    index = tl.arange(0, BINS)
    width, last = tl.zeros((), tl.float32), part == 0
    if searched:
        every = tl.arange(0, PARTS)
        floor = tl.min(tl.load(floors + row * parts + every, mask=every < parts, other=float("inf")), 0)
        if (top_k == 0) & (min_p <= 0.0):
            # All logits below weigh less together than (1 - top_p) times the whole.
            low = peak - temperature * (tl.log(vocabulary / ((1.0 - top_p) * mass)) + 1.0)
        low = tl.minimum(tl.maximum(low, floor), peak)
        part_peak = tl.load(peaks + row * parts + part)
        lighter_mass = tl.zeros((), tl.float32)
        crest = kth_peak(peaks, row, parts, top_k, PARTS)
        low = tl.maximum(low, crest)
        width = peak / BINS - low / BINS
        if (part_peak >= low) | (crest == LOWEST):  # what lies below matters to top_p alone
            token = part * CHUNK + tl.arange(0, CHUNK)
            candidates = (
                tl.where(tl.load(adjusts + slot) != 0, adjusted, logits) + row.to(tl.int64) * vocabulary
            )
            x = tl.load(candidates + token, mask=token < vocabulary, other=float("-inf"))
            position = tl.load(seq_lens + slot) + tl.load(q_starts + row + 1) - tl.load(q_starts + row)
            early = position < tl.load(min_lens + slot)
            x = without(x, token, stop_ids + slot * stop_width, tl.where(early, stop_width, 0))
            lighter_mass = tl.sum(tl.where(x < low, tl.exp2((x - peak) * (LOG2_E / temperature)), 0.0), 0)
            if part_peak >= low:
                per_bin = 1.0 / tl.maximum(width, 1e-37)
                bin_of = tl.minimum((x - low) * per_bin, BINS - 1.0).to(tl.int32)
                found = tl.histogram(tl.where(x >= low, bin_of, 0), BINS, mask=x >= low)
                tl.atomic_add(bins + row * BINS + index, found, mask=found > 0, sem="relaxed")
        tl.store(below + row * parts + part, lighter_mass)
        tl.debug_barrier()
        last = tl.atomic_add(arrived + row, 1, sem="acq_rel") == parts - 1
    if last:
        counts = tl.load(bins + row * BINS + index, cache_modifier=".cg")
        k_low, k_high, p_low, p_high = brackets(
            counts, low, width, peak, mass, sum_of_parts(below, row, parts, PARTS), temperature, top_k, top_p,
            min_p, BINS, SLACK,
        )  # fmt: skip
        tl.store(bounds + row * 4, k_low)
        tl.store(bounds + row * 4 + 1, k_high)
        tl.store(bounds + row * 4 + 2, p_low)
        tl.store(bounds + row * 4 + 3, p_high)


@triton.jit
def sift(
    counts, k_masses, p_masses, bests, best_ids, listed, list_logits, list_ids, bounds, peaks, adjusted, logits, slots,
    q_starts, seq_lens, alive, emits, temperatures, top_ks, top_ps, min_ps, seeds, min_lens, stop_ids, adjusts,
    vocabulary, stop_width, parts,
    GREEDY: tl.constexpr, CHUNK: tl.constexpr, PARTS: tl.constexpr, LIST: tl.constexpr,
    FEW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Count CHUNK logits of a filtered row against the guessed bounds.

    It finds the number and the mass of the logits that reach k_high. Of the logits that reach p_high it finds the mass
    and the best candidate. Logits inside the brackets are appended to the row's list. Logits that reach p_high are
    appended too, if they are at most FEW."""
    row, part = tl.program_id(0), tl.program_id(1)
    slot, filtered, temperature, _, _, _ = filters_of(
        row, slots, emits, alive, temperatures, top_ks, top_ps, min_ps, vocabulary, GREEDY
    )
    if not filtered:
        return
    peak = largest_of_parts(peaks, row, parts, PARTS)
    if not (tl.abs(tl.div_rn(peak, temperature)) <= LARGEST):
        return
    k_low, k_high = tl.load(bounds + row * 4), tl.load(bounds + row * 4 + 1)
    p_low, p_high = tl.load(bounds + row * 4 + 2), tl.load(bounds + row * 4 + 3)
    out = row * parts + part
    part_peak = tl.load(peaks + out)
    best, best_id = tl.full((), float("-inf"), tl.float32), tl.full((), 2147483647, tl.int32)
    count, k_mass, p_mass = tl.zeros((), tl.int32), tl.zeros((), tl.float32), tl.zeros((), tl.float32)
    if part_peak >= tl.where(k_low > LOWEST, k_low, p_low):
        token = part * CHUNK + tl.arange(0, CHUNK)
        candidates = tl.where(tl.load(adjusts + slot) != 0, adjusted, logits) + row.to(tl.int64) * vocabulary
        x = tl.load(candidates + token, mask=token < vocabulary, other=float("-inf"))
        position = tl.load(seq_lens + slot) + tl.load(q_starts + row + 1) - tl.load(q_starts + row)
        stops = tl.where(position < tl.load(min_lens + slot), stop_width, 0)
        x = without(x, token, stop_ids + slot * stop_width, stops)
        weight = tl.exp2((x - peak) * (LOG2_E / temperature))
        count = tl.sum((x >= k_high).to(tl.int32), 0)
        k_mass = tl.sum(tl.where(x >= k_high, weight, 0.0), 0)
        p_mass = tl.sum(tl.where(x >= p_high, weight, 0.0), 0)
        few = tl.sum((x >= p_high).to(tl.int32), 0) <= FEW  # then noise in the list is cheaper than here
        within = ((x >= p_high) & few) | ((x >= k_low) & (x < k_high)) | ((x >= p_low) & (x < p_high))
        found = tl.sum(within.to(tl.int32), 0)
        if found > 0:
            at = tl.atomic_add(listed + row, found, sem="relaxed") + tl.cumsum(within.to(tl.int32), 0) - 1
            tl.store(list_logits + row * LIST + at, x, mask=within & (at < LIST))
            tl.store(list_ids + row * LIST + at, token, mask=within & (at < LIST))
        if not few:
            best, best_id = best_from(
                p_high, part * CHUNK, part * CHUNK + CHUNK, peak, temperature, seeds + slot * 2, position, candidates,
                vocabulary, stop_ids + slot * stop_width, stops, BLOCK,
            )  # fmt: skip
    tl.store(counts + out, count)
    tl.store(k_masses + out, k_mass)
    tl.store(p_masses + out, p_mass)
    tl.store(bests + out, best)
    tl.store(best_ids + out, best_id)
