"""Code that the kernels of a filtered row share: bounds as raw logits, and the row's filters.

logits / temperature grows with the logit. So a bound on the quotient is a bound on the logit, if the bound is
`smallest_reaching`: the smallest of the logits that have its quotient.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

from openinfer.sampler.gpu.device.noise import LOG2_E, first_maximum, least_likelihood, likelihood, perturbed

LARGEST = tl.constexpr(3.4028234663852886e38)
LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def key_of(x):
    """An int64 that orders as the float does; neighbouring floats have neighbouring keys."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def of_key(key):
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def without(logits, token, stop_ids, stops):
    """The logits with -inf at the first `stops` of stop_ids."""
    for i in range(stops):
        logits = tl.where(token == tl.load(stop_ids + i), float("-inf"), logits)
    return logits


@triton.jit
def smallest_reaching(x, scaled, temperature, STEPS: tl.constexpr = 4):
    """The smallest float whose quotient by the temperature reaches `scaled`; x does, and is at most STEPS floats above
    (two where `scaled` is its quotient)."""
    key = key_of(x)
    for _ in range(STEPS):
        below = tl.div_rn(of_key(key - 1), temperature) >= scaled
        key = tl.where(below, key - 1, key)
    return of_key(key)


@triton.jit
def logit_of(scaled, temperature):
    """The smallest float whose quotient by the temperature reaches `scaled`."""
    near = of_key(key_of(scaled * temperature) + 4)  # the product is off by one float at most
    return smallest_reaching(near, scaled, temperature, 12)


@triton.jit
def filters_of(
    row, slots, emits, alive, temperatures, top_ks, top_ps, min_ps, vocabulary, GREEDY: tl.constexpr
):
    """(slot, filtered, temperature, top_k, top_p, min_p) of a row; top_k is 0 where it keeps all."""
    slot = tl.load(slots + row)
    samples = (tl.load(emits + row) != 0) & (tl.load(alive + slot) != 0)
    temperature, k = tl.load(temperatures + slot), tl.load(top_ks + slot)
    top_p, min_p = tl.load(top_ps + slot), tl.load(min_ps + slot)
    top_k = tl.where((k > 0) & (k < vocabulary), k, 0)
    filtered = samples & (temperature >= GREEDY) & (k != 1)
    filtered &= (top_k > 0) | (top_p < 1.0) | (min_p > 0.0)
    return slot, filtered, temperature, top_k, top_p, min_p


@triton.jit
def largest_of_parts(peaks, row, parts, PARTS: tl.constexpr):
    part = tl.arange(0, PARTS)
    return tl.max(tl.load(peaks + row * parts + part, mask=part < parts, other=float("-inf")), 0)


@triton.jit
def mass_of_row(row, peaks, masses, peak, parts, temperature, PARTS: tl.constexpr):
    """The sum of exp((logit - peak) / temperature)."""
    part = tl.arange(0, PARTS)
    part_peaks = tl.load(peaks + row * parts + part, mask=part < parts, other=float("-inf"))
    mass = tl.load(masses + row * parts + part, mask=part < parts, other=0.0)
    return tl.sum(mass * tl.exp2((part_peaks - peak) * (LOG2_E / temperature)), 0)


@triton.jit
def sum_of_parts(values, row, parts, PARTS: tl.constexpr):
    part = tl.arange(0, PARTS)
    # From L2: other programs of this kernel may have written them.
    return tl.sum(tl.load(values + row * parts + part, mask=part < parts, other=0, cache_modifier=".cg"), 0)


@triton.jit
def least_by_min_p(peak, min_p, temperature):
    """The smallest logit that min_p keeps; the lowest float without it."""
    least = tl.full((), LOWEST, tl.float32)
    if min_p > 0.0:
        least = tl.minimum(logit_of(tl.div_rn(peak, temperature) + tl.log(min_p), temperature), peak)
    return least


@triton.jit
def best_from(
    bound,
    first,
    end,
    top,
    temperature,
    seeds,
    position,
    logits,
    vocabulary,
    stop_ids,
    stops,
    BLOCK: tl.constexpr,
):
    """The best candidate, (value, id), of logits [first, end) of a row that reach `bound`, BLOCK at a time, since noise
    takes many registers. top: the largest logit of the row, finite, and so is its quotient by the temperature."""
    # By likelihood first, keeping the best two of each lane.
    most, second = tl.full((BLOCK,), -1.0, tl.float32), tl.full((BLOCK,), -1.0, tl.float32)
    most_id = tl.full((BLOCK,), 2147483647, tl.int32)
    for start in tl.range(first, end, BLOCK, loop_unroll_factor=1):
        token = start + tl.arange(0, BLOCK)
        x = tl.load(logits + token, mask=token < vocabulary, other=float("-inf"))
        x = without(x, token, stop_ids, stops)
        likely = tl.where(x >= bound, likelihood(x, token, top, temperature, seeds, position), -1.0)
        second = tl.maximum(second, tl.minimum(most, likely))
        most_id = tl.where(likely > most, token, most_id)
        most = tl.maximum(most, likely)
    _, best_id = first_maximum(most, most_id)
    x = tl.load(logits + best_id, mask=best_id < vocabulary, other=float("-inf"))
    best = perturbed(x, best_id, temperature, seeds, position)
    least = least_likelihood(best, top, temperature)
    rivals = tl.sum((most >= least).to(tl.int32) + (second >= least).to(tl.int32), 0)
    if rivals > 1:
        best, best_id = exactly_best_from(
            bound, first, end, temperature, seeds, position, logits, vocabulary, stop_ids, stops, BLOCK
        )
    return best, best_id


@triton.jit
def exactly_best_from(
    bound, first, end, temperature, seeds, position, logits, vocabulary, stop_ids, stops, BLOCK: tl.constexpr
):
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    best_id = tl.full((BLOCK,), 2147483647, tl.int32)
    for start in tl.range(first, end, BLOCK, loop_unroll_factor=1):
        token = start + tl.arange(0, BLOCK)
        x = tl.load(logits + token, mask=token < vocabulary, other=float("-inf"))
        x = without(x, token, stop_ids, stops)
        value = tl.where(x >= bound, perturbed(x, token, temperature, seeds, position), float("-inf"))
        best_id = tl.where(value > best, token, best_id)
        best = tl.maximum(best, value)
    return first_maximum(best, best_id)
