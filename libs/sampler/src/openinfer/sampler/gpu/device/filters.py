"""The smallest logit that min_p, top_k and top_p keep, found by one program a row.

Bounds are raw logits: logits / temperature grows with the logit, so a bound on one is a bound on the other. A pass
counts (and weighs) the elements above RADIX pivots at once, and looks only into groups of GROUP elements whose maximum
reaches the bound so far; with a small top_k these are a few.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
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
def lowest_logit(start, scaled, temperature):
    """The smallest float whose quotient by the temperature reaches `scaled`; `start` does, by a few floats at most."""
    key = key_of(start)
    for _ in range(16):
        below = tl.div_rn(of_key(key - 1), temperature) >= scaled
        key = tl.where(below, key - 1, key)
    return of_key(key)


@triton.jit
def logit_of(scaled, temperature):
    """The smallest float whose quotient by the temperature reaches `scaled`."""
    near = of_key(key_of(scaled * temperature) + 4)  # the product is off by one float at most
    return lowest_logit(near, scaled, temperature)


@triton.jit
def kth_maximum(maxima, k):
    """A bound that at least k of the groups reach, and so at least k logits; the lowest float if there are fewer."""
    low = key_of(tl.full((), LOWEST, tl.float32))
    high = key_of(tl.max(maxima, 0)) + 1
    for _ in range(16):  # to bf16's resolution: a lower bound is all that is asked
        middle = (low + high) // 2
        enough = tl.sum((maxima >= of_key(middle)).to(tl.int32), 0) >= k
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    return of_key(low)


@triton.jit
def list_groups(listing, maxima, bound, GROUPS: tl.constexpr):
    """Write the groups that reach the bound to `listing`, in order; returns how many."""
    listed = (maxima >= bound).to(tl.int32)
    tl.debug_barrier()  # all warps are done with the list before
    tl.store(listing + tl.cumsum(listed, 0) - 1, tl.arange(0, GROUPS), mask=listed != 0)
    tl.debug_barrier()
    return tl.sum(listed, 0)


@triton.jit
def members(
    listing, count, start, logits, vocabulary, stop_ids, stops, GROUP: tl.constexpr, BLOCK: tl.constexpr
):
    """Ids and logits of BLOCK elements of the listed groups, from the `start`-th on; -inf past the end."""
    index = start // GROUP + tl.arange(0, BLOCK // GROUP)
    group = tl.load(listing + index, mask=index < count, other=0)
    token = tl.reshape(group[:, None] * GROUP + tl.arange(0, GROUP)[None, :], (BLOCK,))
    token = tl.max_contiguous(tl.multiple_of(token, 4), 4)  # GROUP is a multiple of it: wide loads
    inside = start + tl.arange(0, BLOCK) < count * GROUP
    found = tl.load(logits + token, mask=inside & (token < vocabulary), other=float("-inf"))
    return token, without(found, token, stop_ids, stops)


@triton.jit
def tally(
    listing, count, pivots, peak, rate, logits, vocabulary, stop_ids, stops,
    BY_MASS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, RADIX: tl.constexpr,
):  # fmt: skip
    """How many listed elements reach each pivot, and the sums of their exp2((logit - peak) * rate)."""
    counts = tl.zeros((RADIX, BLOCK), tl.int32)
    masses = tl.zeros((RADIX, BLOCK), tl.float32)
    for start in tl.range(0, count * GROUP, BLOCK, loop_unroll_factor=2):
        _, x = members(listing, count, start, logits, vocabulary, stop_ids, stops, GROUP, BLOCK)
        above = x[None, :] >= pivots[:, None]
        counts += above.to(tl.int32)
        if BY_MASS:
            masses += tl.where(above, tl.exp2((x - peak) * rate)[None, :], 0.0)
    return tl.sum(counts, 1), tl.sum(masses, 1)


@triton.jit
def raise_bound(
    bound, guess, wanted, total, listing, maxima, peak, temperature, logits, vocabulary, stop_ids, stops,
    BY_MASS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr, RADIX: tl.constexpr,
):  # fmt: skip
    """The largest bound that still keeps enough of what `bound` keeps: `wanted` elements, or that share of the mass
    `total` (0: not known yet).

    `guess` >= bound is believed to keep enough. Between keys `low`, which keeps enough, and `high`, which does not, lie
    `between` elements; each pass cuts the interval RADIX-fold, and it ends when one element is left.
    """
    rate = LOG2_E / temperature
    index = tl.arange(0, RADIX)
    fraction = tl.maximum(index - 1, 0).to(tl.float32) / (RADIX - 2)
    pivots = tl.where(index == 0, bound, guess + (peak - guess) * fraction)
    low, high = key_of(bound), key_of(peak) + 1
    above = tl.zeros((), tl.int32)  # elements that reach `high`
    searching = True
    while searching:
        count = list_groups(listing, maxima, of_key(low), GROUPS)
        counts, masses = tally(
            listing, count, pivots, peak, rate, logits, vocabulary, stop_ids, stops,
            BY_MASS, GROUP, BLOCK, RADIX,
        )  # fmt: skip
        if BY_MASS:
            total = tl.where(total > 0, total, tl.max(masses, 0))
            enough = masses >= wanted * total
        else:
            enough = counts >= wanted
        keys = key_of(pivots)
        low = tl.maximum(low, tl.max(tl.where(enough, keys, low), 0))
        high = tl.minimum(high, tl.min(tl.where(enough, high, keys), 0))
        above = tl.maximum(above, tl.max(tl.where(enough, 0, counts), 0))
        between = tl.min(tl.where(enough, counts, 2147483647), 0) - above
        # No pivot keeps enough: there was not enough to begin with, and the bound stays.
        searching = (high - low > 1) & (between > 1) & (tl.max(enough.to(tl.int32), 0) != 0)
        pivots = of_key(low + (high - low) * index // RADIX)
    return snapped(
        of_key(low), listing, maxima, temperature, logits, vocabulary, stop_ids, stops, GROUP, GROUPS, BLOCK
    )


@triton.jit
def snapped(
    bound, listing, maxima, temperature, logits, vocabulary, stop_ids, stops,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The bound at the smallest element that reaches it, and below at what ties with that once divided."""
    smallest = tl.full((BLOCK,), float("inf"), tl.float32)
    count = list_groups(listing, maxima, bound, GROUPS)
    for start in range(0, count * GROUP, BLOCK):
        _, x = members(listing, count, start, logits, vocabulary, stop_ids, stops, GROUP, BLOCK)
        smallest = tl.minimum(smallest, tl.where(x >= bound, x, float("inf")))
    least = tl.min(smallest, 0)
    return lowest_logit(least, tl.div_rn(least, temperature), temperature)
