"""Matrix products with INT8 weights (formats.int8): int8 [N, K], and float32 scales for each GROUP columns of a row; 0:
for the row. CHUNK columns at a time, of one group; codes are exact in bfloat16. (Products of int8 codes of activations
are those of device.coded_linear.)"""

# mypy: ignore-errors
import triton
import triton.language as tl

from openinfer.kernels.device.experts import pairs_of, store_rows, tile_of
from openinfer.kernels.device.formats import own_part
from openinfer.kernels.device.int4 import _sum_parts
from openinfer.kernels.device.norm import gated, wait_ahead


@triton.jit
def _sum_of_chunks(
    of_codes, of_scales, of_x, first, end, BN: tl.constexpr, BM: tl.constexpr, GROUP: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """float32 [BN, BM]: rows of the weight times columns of x, over the chunks first..end."""
    acc = tl.zeros((BN, BM), tl.float32)
    for k in range(first, end):
        product = tl.dot(tl.load(of_codes + k * CHUNK).to(tl.bfloat16), tl.load(of_x + k * CHUNK))
        if GROUP:
            product *= tl.load(of_scales + k * CHUNK // GROUP)[:, None]
        acc += product
    if not GROUP:
        acc *= tl.load(of_scales)[:, None]
    return acc


@triton.jit
def project_int8(
    out, x, weight, scales, partial, counter, M, N, K,
    BM: tl.constexpr, ROWS: tl.constexpr, SPLIT: tl.constexpr, ADD: tl.constexpr, GROUP: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """out [M, N] = x [M, K] @ weight^T, or out += with ADD; BM tokens and ROWS rows of the weight at a time. partial,
    counter: as for int4.project_int4. Grid (cdiv(N, ROWS), SPLIT, cdiv(M, BM))."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(2) * BM + tl.arange(0, BM)
    column = tl.arange(0, CHUNK)
    near = tl.minimum(row, N - 1).to(tl.int64)
    of_x = x + tl.minimum(token, M - 1).to(tl.int64)[None, :] * K + column[:, None]
    of_codes = weight + near[:, None] * K + column[None, :]
    of_scales = scales + near * (K // GROUP if GROUP else 1)
    first, end = own_part(K // CHUNK, SPLIT)
    acc = _sum_of_chunks(of_codes, of_scales, of_x, first, end, ROWS, BM, GROUP, CHUNK)
    _sum_parts(out, partial, counter, tl.trans(acc), token, row, M, N, SPLIT, ADD)


@triton.jit
def experts_product_int8(
    out, x, weight, scales, order, starts, N, K,
    CHOSEN: tl.constexpr, EXPERTS: tl.constexpr, E_BLOCK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    FIRST: tl.constexpr, FEW: tl.constexpr, GROUP: tl.constexpr, CHUNK: tl.constexpr,
    IDS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """experts.experts_product with codes int8 [EXPERTS, N, K], or 2 N rows if FIRST. Grid (cdiv(N, BN), tiles)."""
    wait_ahead(EARLY)
    expert, begin, end = tile_of(tl.program_id(1), starts, EXPERTS, E_BLOCK, BM, FEW, IDS)
    if begin >= end:
        return
    rows: tl.constexpr = 2 if FIRST else 1
    rn, rm = tl.program_id(0) * BN + tl.arange(0, BN), begin + tl.arange(0, BM)
    inside, source, target = pairs_of(order, expert, rm, end, CHOSEN, FIRST, IDS)
    column = tl.arange(0, CHUNK)
    row = expert.to(tl.int64) * rows * N + tl.minimum(rn, N - 1)
    groups = K // GROUP if GROUP else 1
    of_codes = weight + row[:, None] * K + column[None, :]
    of_scales = scales + row * groups
    of_x = x + source.to(tl.int64)[None, :] * K + column[:, None]
    acc = tl.trans(_sum_of_chunks(of_codes, of_scales, of_x, 0, K // CHUNK, BN, BM, GROUP, CHUNK))
    if FIRST:
        half = N.to(tl.int64)
        of_codes += half * K
        of_scales += half * groups
        up = _sum_of_chunks(of_codes, of_scales, of_x, 0, K // CHUNK, BN, BM, GROUP, CHUNK)
        acc = gated(acc, tl.trans(up), out.dtype.element_ty)
    store_rows(out, acc, target, rn, inside, N)


@triton.jit
def dequantize_int8(out, weight, scales, N, K, BN: tl.constexpr, GROUP: tl.constexpr, CHUNK: tl.constexpr):
    """out [N, K] = the values, rounded. Grid (cdiv(N, BN), K / CHUNK)."""
    row = tl.program_id(0) * BN + tl.arange(0, BN)
    chunk, column = tl.program_id(1), tl.arange(0, CHUNK)
    wide = tl.minimum(row, N - 1).to(tl.int64)
    place = wide[:, None] * K + chunk * CHUNK + column[None, :]
    scale = tl.load(scales + (wide * (K // GROUP) + chunk * CHUNK // GROUP if GROUP else wide))
    value = tl.load(weight + place).to(tl.float32) * scale[:, None]
    tl.store(out + place, value.to(out.dtype.element_ty), mask=(row < N)[:, None])
