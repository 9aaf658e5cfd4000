"""The largest logit of a row: `scan_greedy` reads the logits once, `take_greedy` compares the parts of a row."""

# mypy: ignore-errors
import triton
import triton.language as tl

from openinfer.sampler.gpu.device.filters import LARGEST, without
from openinfer.sampler.gpu.device.noise import first_maximum


@triton.jit
def scan_greedy(
    tops, bests, best_ids, logits, slots, q_starts, seq_lens, alive, emits, min_lens, stop_ids, vocabulary, stop_width,
    parts, CHUNK: tl.constexpr,
):  # fmt: skip
    """CHUNK logits of a row a program; grid (rows, parts). Of each part: its largest logit (inf in place of NaN), and
    the largest one that may be taken, with its id."""
    row, part = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + row)
    if (tl.load(emits + row) == 0) | (tl.load(alive + slot) == 0):
        return
    position = tl.load(seq_lens + slot) + tl.load(q_starts + row + 1) - tl.load(q_starts + row)
    token = part * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row.to(tl.int64) * vocabulary + token, mask=token < vocabulary, other=float("-inf"))
    x = tl.where(x == x, x, float("inf"))
    out = row * parts + part
    tl.store(tops + out, tl.max(x, 0))
    early = position < tl.load(min_lens + slot)
    x = without(x, token, stop_ids + slot * stop_width, tl.where(early, stop_width, 0))
    best, best_id = first_maximum(x, token)
    tl.store(bests + out, best)
    tl.store(best_ids + out, best_id)


@triton.jit
def take_greedy(
    tokens, logprobs, tops, bests, best_ids, slots, alive, emits, parts, NO_TOKEN: tl.constexpr, UNSOUND: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """The token of a row; grid (rows,)."""
    row = tl.program_id(0)
    tl.store(logprobs + row, float("nan"))
    if (tl.load(emits + row) == 0) | (tl.load(alive + tl.load(slots + row)) == 0):
        tl.store(tokens + row, NO_TOKEN)
        return
    part = tl.arange(0, PARTS)
    at, has = row * parts + part, part < parts
    highest = tl.max(tl.load(tops + at, mask=has, other=float("-inf")), 0)
    best, token = first_maximum(
        tl.load(bests + at, mask=has, other=float("-inf")), tl.load(best_ids + at, mask=has, other=2147483647)
    )
    sound = (tl.abs(highest) <= LARGEST) & (tl.abs(best) <= LARGEST)
    tl.store(tokens + row, tl.where(sound, token, UNSOUND))
