"""A mixture of experts with INT4 weights: their products. The other steps are those of device.experts."""

# mypy: ignore-errors
import triton
import triton.language as tl

from openinfer.kernels.device.experts import tile_of
from openinfer.kernels.device.int4 import number, scale_of
from openinfer.kernels.device.norm import gated


@triton.jit
def _sum_of_groups(of_codes, of_words, of_x, K, GROUP: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr):
    """[BN, BM]: rows of an INT4 weight times columns of x, group by group."""
    acc = tl.zeros((BN, BM), tl.float32)
    for group in range(K // GROUP):
        codes = tl.load(of_codes + group * (GROUP // 2))
        word = tl.load(of_words + group)
        zero = number(word & 15)[:, None]
        low, high = tl.load(of_x + group * GROUP), tl.load(of_x + group * GROUP + 16)
        total = tl.dot(number(codes & 15) - zero, low)
        total = tl.dot(number(codes >> 4) - zero, high, total)
        acc += total * scale_of(word)[:, None]
    return acc


@triton.jit
def experts_product_int4(
    out, x, weight, words, order, starts, N, K,
    CHOSEN: tl.constexpr, EXPERTS: tl.constexpr, E_BLOCK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    GROUP: tl.constexpr, FIRST: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    """experts_product with codes uint8 [EXPERTS, N, K / 2], or 2 N rows if FIRST, and words int32 [.., K / GROUP].
    Grid (cdiv(N, BN), tiles)."""
    expert, begin, end = tile_of(tl.program_id(1), starts, EXPERTS, E_BLOCK, BM, FEW)
    if begin >= end:
        return
    rows: tl.constexpr = 2 if FIRST else 1
    rn, rm = tl.program_id(0) * BN + tl.arange(0, BN), begin + tl.arange(0, BM)
    inside = rm < end
    pair = tl.load(order + rm, mask=inside, other=0)
    source = tl.minimum(rm, end - 1)
    if FIRST:
        source = tl.load(order + source) // CHOSEN
    byte = tl.arange(0, GROUP // 2)
    column = byte // 16 * 32 + byte % 16
    row = expert.to(tl.int64) * rows * N + tl.minimum(rn, N - 1)
    of_codes = weight + row[:, None] * (K // 2) + byte[None, :]
    of_words = words + row * (K // GROUP)
    of_x = x + source.to(tl.int64)[None, :] * K + column[:, None]
    acc = tl.trans(_sum_of_groups(of_codes, of_words, of_x, K, GROUP, BN, BM))
    target = pair
    if FIRST:
        half = N.to(tl.int64)
        up = _sum_of_groups(
            of_codes + half * (K // 2), of_words + half * (K // GROUP), of_x, K, GROUP, BN, BM
        )
        acc = gated(acc, tl.trans(up), out.dtype.element_ty)
        target = rm
    to = out + target.to(tl.int64)[:, None] * N + rn[None, :]
    tl.store(to, acc.to(out.dtype.element_ty), mask=inside[:, None] & (rn < N)[None, :])
