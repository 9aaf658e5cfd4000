"""score: `weigh` reads the logits once and in parallel, `score` adds up a row."""

# mypy: ignore-errors
import triton
import triton.language as tl

from openinfer.sampler.gpu.device.filters import LARGEST


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
