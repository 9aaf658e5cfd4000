"""The draw of a filtered row: from the list that `sift` made, or from the whole row where the list will not do."""

# mypy: ignore-errors
import triton
import triton.language as tl

from openinfer.sampler.gpu.device.filters import LOWEST, best_from, key_of, logit_of, of_key, without
from openinfer.sampler.gpu.device.noise import LOG2_E, first_maximum, perturbed

UNIT = tl.constexpr(
    1099511627776.0
)  # 2^40: masses as int64 add up to the same whatever the order of the list


@triton.jit
def highest_bound(scaled, amounts, above, wanted, low, high):
    """The largest float of a key in [low, high) from which on the amounts, and what lies above them, reach `wanted`."""
    while high - low > 1:
        middle = (low + high) // 2
        enough = above + tl.sum(tl.where(scaled >= of_key(middle), amounts, 0), 0) >= wanted
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    return of_key(low)


@triton.jit
def settled(
    peak, temperature, top_k, top_p, bounds, count, mass, p_mass, best, best_id, list_logits, list_ids, length, seeds,
    position, BLOCK: tl.constexpr,
):  # fmt: skip
    """(whether the brackets held the bounds, the token). Above them lie `count` logits, of `mass` and of `p_mass`, and
    the best candidate; `length` <= BLOCK within."""
    k_low, k_high = tl.load(bounds), tl.load(bounds + 1)
    p_low, p_high = tl.load(bounds + 2), tl.load(bounds + 3)
    index = tl.arange(0, BLOCK)
    has = index < length
    x = tl.load(list_logits + index, mask=has, other=float("-inf"))
    token = tl.load(list_ids + index, mask=has, other=2147483647)
    scaled = tl.div_rn(x, temperature)
    weights = (tl.exp2((x - peak) * (LOG2_E / temperature)) * UNIT).to(tl.int64)
    top = key_of(tl.div_rn(peak, temperature)) + 1
    proven = length >= 0
    bound = tl.div_rn(p_low, temperature)
    kept = (mass * UNIT).to(tl.int64)
    if k_low < k_high:
        ones = (has & (x < k_high)).to(tl.int64)
        proven = (count < top_k) & (count + tl.sum(ones, 0) >= top_k)
        high = tl.minimum(key_of(tl.div_rn(k_high, temperature)), top)
        low = key_of(tl.div_rn(k_low, temperature))
        bound = highest_bound(scaled, ones, count.to(tl.int64), top_k.to(tl.int64), low, high)
        kept += tl.sum(tl.where((ones != 0) & (scaled >= bound), weights, 0), 0)
    if top_p < 1.0:
        amounts = tl.where(has & (x >= p_low) & (x < p_high), weights, 0)
        above = (p_mass * UNIT).to(tl.int64)
        wanted = (top_p.to(tl.float64) * kept.to(tl.float64)).to(tl.int64)
        proven &= (above < wanted) & (above + tl.sum(amounts, 0) >= wanted)
        high = tl.minimum(key_of(tl.div_rn(p_high, temperature)), top)
        bound = highest_bound(scaled, amounts, above, wanted, key_of(tl.div_rn(p_low, temperature)), high)
    value = tl.where(
        has & (scaled >= bound), perturbed(x, token, temperature, seeds, position), float("-inf")
    )
    listed, listed_id = first_maximum(value, token)
    better = (listed > best) | ((listed == best) & (listed_id < best_id))
    return proven, tl.where(better, listed_id, best_id)


@triton.jit
def amount_from(
    bound, peak, temperature, logits, vocabulary, stop_ids, stops, BY_MASS: tl.constexpr, BLOCK: tl.constexpr
):
    """How many logits of a row reach `bound` once divided, or how much they weigh."""
    amounts = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocabulary, BLOCK):
        token = start + tl.arange(0, BLOCK)
        x = tl.load(logits + token, mask=token < vocabulary, other=float("-inf"))
        x = without(x, token, stop_ids, stops)
        amount = tl.exp2((x - peak) * (LOG2_E / temperature)) if BY_MASS else 1.0
        amounts += tl.where(tl.div_rn(x, temperature) >= bound, amount, 0.0)
    return tl.sum(amounts, 0)


@triton.jit
def highest_bound_of_row(
    wanted, low, high, peak, temperature, logits, vocabulary, stop_ids, stops,
    BY_MASS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    while high - low > 1:
        middle = (low + high) // 2
        found = amount_from(
            of_key(middle), peak, temperature, logits, vocabulary, stop_ids, stops, BY_MASS, BLOCK
        )
        low = tl.where(found >= wanted, middle, low)
        high = tl.where(found >= wanted, high, middle)
    return of_key(low)


@triton.jit
def searched(
    peak, temperature, top_k, top_p, min_p, logits, vocabulary, stop_ids, stops, seeds, position, BLOCK: tl.constexpr
):  # fmt: skip
    """The token of a row by bisection over all of it, for rows whose list will not do: thousands of equal logits."""
    highest = tl.div_rn(peak, temperature)
    bound, end = tl.full((), LOWEST, tl.float32), key_of(highest) + 1
    if min_p > 0.0:
        bound = highest + tl.log(min_p)
    if top_k > 0:
        bound = highest_bound_of_row(
            top_k.to(tl.float32), key_of(bound), end, peak, temperature, logits, vocabulary, stop_ids, stops, False,
            BLOCK,
        )  # fmt: skip
    if top_p < 1.0:
        mass = amount_from(bound, peak, temperature, logits, vocabulary, stop_ids, stops, True, BLOCK)
        bound = highest_bound_of_row(
            top_p * mass,
            key_of(bound),
            end,
            peak,
            temperature,
            logits,
            vocabulary,
            stop_ids,
            stops,
            True,
            BLOCK,
        )
    _, token = best_from(
        logit_of(bound, temperature), 0, vocabulary, peak, temperature, seeds, position, logits, vocabulary, stop_ids,
        stops, BLOCK,
    )  # fmt: skip
    return token
