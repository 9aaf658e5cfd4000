"""top_logprobs: `summarise` reads the logits once and in parallel, `pick` holds a tournament among groups."""

# mypy: ignore-errors
import triton
import triton.language as tl

from openinfer.sampler.gpu.device.filters import LARGEST, LOWEST


@triton.jit
def asked(row, slots, alive, emits, num_logprobs, K: tl.constexpr):
    """The number of alternatives that the row asks for."""
    slot = tl.load(slots + row)
    samples = (tl.load(emits + row) != 0) & (tl.load(alive + slot) != 0)
    return tl.where(samples, tl.minimum(tl.load(num_logprobs + slot), K), 0)


@triton.jit
def summarise(
    tops, sums, maxima, logits, slots, alive, emits, num_logprobs, vocabulary, groups,
    K: tl.constexpr, CHUNK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """The largest of CHUNK logits (inf in place of NaN), the sum of exp(logit - largest), and the maximum of each group
    of GROUP logits; grid (rows, parts)."""
    row, part = tl.program_id(0), tl.program_id(1)
    if asked(row, slots, alive, emits, num_logprobs, K) <= 0:
        return
    token = part * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row.to(tl.int64) * vocabulary + token, mask=token < vocabulary, other=float("-inf"))
    x = tl.where(x == x, x, float("inf"))
    top = tl.max(x, 0)
    out = row * tl.num_programs(1) + part
    tl.store(tops + out, top)
    tl.store(sums + out, tl.sum(tl.exp(x - tl.where(tl.abs(top) <= LARGEST, top, 0.0)), 0))
    group = part * (CHUNK // GROUP) + tl.arange(0, CHUNK // GROUP)
    tl.store(
        maxima + row * groups + group, tl.max(tl.reshape(x, (CHUNK // GROUP, GROUP)), 1), mask=group < groups
    )


@triton.jit
def pick(
    ids, values, tops, sums, maxima, logits, slots, alive, emits, num_logprobs, vocabulary, groups, parts,
    K: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """The best n logits of a row: n times the first of the best group, which then keeps only its later logits."""
    row = tl.program_id(0)
    column = tl.arange(0, COLUMNS)
    best_ids = tl.full((COLUMNS,), -1, tl.int32)
    best_values = tl.zeros((COLUMNS,), tl.float32)
    n = tl.minimum(asked(row, slots, alive, emits, num_logprobs, K), vocabulary)
    if n > 0:
        part = tl.arange(0, PARTS)
        at, has = row * parts + part, part < parts
        top = tl.load(tops + at, mask=has, other=float("-inf"))
        highest = tl.max(top, 0)
        if tl.abs(highest) <= LARGEST:
            mass = tl.sum(tl.load(sums + at, mask=has, other=0.0) * tl.exp(top - highest), 0)
            log_sum = highest + tl.log(mass)
            group = tl.arange(0, GROUPS)
            reach = tl.load(maxima + row * groups + group, mask=group < groups, other=float("-inf"))
            last, last_id = tl.full((), float("inf"), tl.float32), tl.full((), -1, tl.int32)
            for i in range(n):
                best = tl.max(reach, 0)
                winner = tl.min(tl.where(reach == best, group, GROUPS - 1), 0)
                token = winner * GROUP + tl.arange(0, GROUP)
                x = tl.load(
                    logits + row.to(tl.int64) * vocabulary + token,
                    mask=token < vocabulary,
                    other=float("-inf"),
                )
                # A group that won before with this very logit has given its ids up to the last.
                after = tl.where(best < last, -1, last_id)
                token_id = tl.min(tl.where((x == best) & (token > after), token, 2147483647), 0)
                left = tl.max(tl.where((x < best) | ((x == best) & (token > token_id)), x, float("-inf")), 0)
                reach = tl.where(group == winner, left, reach)
                possible = best >= LOWEST
                best_ids = tl.where(column == i, tl.where(possible, token_id, -1), best_ids)
                best_values = tl.where(column == i, tl.where(possible, best - log_sum, 0.0), best_values)
                last, last_id = best, token_id
    tl.store(ids + row * K + column, best_ids, mask=column < K)
    tl.store(values + row * K + column, best_values, mask=column < K)


@triton.jit
def weigh(tops, sums, larger, logits, targets, vocabulary, parts, CHUNK: tl.constexpr):
    """The largest of CHUNK logits (inf in place of NaN), the sum of exp(logit - largest), and how many are larger than
    the target's; grid (rows, parts)."""
    row, part = tl.program_id(0), tl.program_id(1)
    target = tl.load(targets + row)
    if target < 0:
        return
    logits += row.to(tl.int64) * vocabulary
    token = part * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + token, mask=token < vocabulary, other=float("-inf"))
    x = tl.where(x == x, x, float("inf"))
    top, out = tl.max(x, 0), row * parts + part
    tl.store(tops + out, top)
    tl.store(sums + out, tl.sum(tl.exp(x - tl.where(tl.abs(top) <= LARGEST, top, 0.0)), 0))
    tl.store(larger + out, tl.sum((x > tl.load(logits + target)).to(tl.int32), 0))


@triton.jit
def score(
    logprobs, ranks, tops, sums, larger, logits, targets, vocabulary, parts, PARTS: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0)
    target = tl.load(targets + row)
    logprob, rank = tl.zeros((), tl.float32), tl.zeros((), tl.int32)
    if target >= 0:
        part = tl.arange(0, PARTS)
        at, has = row * parts + part, part < parts
        top = tl.load(tops + at, mask=has, other=float("-inf"))
        highest = tl.max(top, 0)
        logprob = tl.full((), float("nan"), tl.float32)
        if tl.abs(highest) <= LARGEST:
            total = tl.sum(tl.load(sums + at, mask=has, other=0.0) * tl.exp(top - highest), 0)
            logprob = tl.load(logits + row.to(tl.int64) * vocabulary + target) - highest - tl.log(total)
            rank = 1 + tl.sum(tl.load(larger + at, mask=has, other=0), 0)
    tl.store(logprobs + row, logprob)
    tl.store(ranks + row, rank)
