"""A mixture of experts with INT4 weights: their products. The other steps are those of device.experts."""

# mypy: ignore-errors
import triton
import triton.language as tl

from openinfer.kernels.device.experts import tile_of
from openinfer.kernels.device.int4 import sum_of_groups
from openinfer.kernels.device.norm import gated


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
    acc = tl.trans(sum_of_groups(of_codes, of_words, of_x, 0, K // GROUP, GROUP, BN, BM))
    target = pair
    if FIRST:
        half = N.to(tl.int64)
        of_codes += half * (K // 2)
        of_words += half * (K // GROUP)
        up = sum_of_groups(of_codes, of_words, of_x, 0, K // GROUP, GROUP, BN, BM)
        acc = gated(acc, tl.trans(up), out.dtype.element_ty)
        target = rm
    to = out + target.to(tl.int64)[:, None] * N + rn[None, :]
    tl.store(to, acc.to(out.dtype.element_ty), mask=inside[:, None] & (rn < N)[None, :])
