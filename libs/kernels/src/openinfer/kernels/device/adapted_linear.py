"""A product of few tokens with what adapters (LoRA) add to it, in one kernel.

The low-rank products are more columns of K: x @ A^T, zero but for the columns of a token's own adapter, against B of
all adapters. The first programs make x @ A^T while the others multiply with the weight.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

from openinfer.kernels.device.linear import finish_small


@triton.jit
def _shrink(
    low, x, a, adapter, rm, M, K, a_stride, rows, BM: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """low [chunk] = x @ A^T over CHUNK columns, of BR rows of one adapter, for its tokens."""
    chunk = tl.program_id(0) % CHUNKS
    blocks = tl.cdiv(rows, BR)
    block = tl.program_id(0) // CHUNKS % blocks
    place = tl.program_id(0) // CHUNKS // blocks
    mine = adapter == place + 1
    if tl.max(mine.to(tl.int32), 0) > 0:
        rk = tl.arange(0, BK)
        row = block * BR + tl.arange(0, BR)
        matrix = a + place.to(tl.int64) * a_stride + tl.minimum(row, rows - 1)[:, None] * K + rk[None, :]
        column = x + rm[None, :] * K + rk[:, None]
        acc = tl.zeros((BR, BM), tl.float32)
        first = chunk * CHUNK
        for k in range(first, tl.minimum(first + CHUNK, K), BK):
            value = tl.load(column + k, mask=mine[None, :], other=0.0)
            acc = tl.dot(tl.load(matrix + k), value, acc)
        place_of = low + (chunk * BM + rm)[None, :] * rows + row[:, None]
        tl.store(place_of, acc, mask=mine[None, :] & (row < rows)[:, None])


@triton.jit
def _own(
    low, adapter, rm, first, part, rows, BM: tl.constexpr, CHUNKS: tl.constexpr, RANK: tl.constexpr,
    PLACES: tl.constexpr,
):  # fmt: skip
    """[PLACES * RANK, BM]: each token's sums of all chunks in the rows of its adapter, and zeros; `first`: the first
    place."""
    row = tl.arange(0, PLACES * RANK)
    place_of = low + rm[None, :] * rows + part * RANK + (row % RANK)[:, None]
    mine = adapter[None, :] == (first + row // RANK + 1)[:, None]
    total = tl.zeros((PLACES * RANK, BM), tl.float32)
    for c in tl.static_range(CHUNKS):  # .cg: not from this SM's first-level cache
        total += tl.load(place_of + c * BM * rows, mask=mine, other=0.0, cache_modifier=".cg")
    return total


@triton.jit
def _factors(b, b_stride, adapter, first, places, inside, RANK: tl.constexpr, PLACES: tl.constexpr):
    """Rows of B of PLACES adapters side by side, [BN, PLACES * RANK]; not read if no token has one of them. b: the
    first column of each row, [BN]."""
    column = tl.arange(0, PLACES * RANK)
    place = first + column // RANK
    here = tl.max(((adapter > first) & (adapter <= first + PLACES)).to(tl.int32), 0) > 0
    of_places = b[:, None] + place.to(tl.int64)[None, :] * b_stride + (column % RANK)[None, :]
    return tl.load(of_places, mask=inside[:, None] & (here & (place < places))[None, :], other=0.0)


@triton.jit
def gemm_small_adapted(
    out, x, weight, a, b, adapters, token_slots, low, state, partial, counter, M, N, K, a_stride, b_stride, places,
    rows, units, size0, size1, size2, size3,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr, PARTS: tl.constexpr,
    ADD: tl.constexpr, GATED: tl.constexpr, RANK: tl.constexpr, PLACES: tl.constexpr, BR: tl.constexpr,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """linear.gemm_small, with the low-rank products of ops.add_lora added to its sums.

    a [places, rows, K], b [places, N, RANK], GATED: [places, 2 N, RANK]. PLACES adapters at a time are multiplied.
    The part of a tile follows from the sizes, which are multiples of BN; rows of the weight after the last part have
    no adapters. The first `units` programs are those of _shrink. So they run or have run when another one waits.
    low: float32 [CHUNKS, BM, rows]. state: int32 [2], zero before and after: units that are done, and tiles.
    The last of PARTS programs of a tile has the adapters. With PARTS = SPLIT + 1 it has no columns of the weight.
    Grid (units + cdiv(N, BN) * PARTS,).
    """
    rm = tl.arange(0, BM)
    slot = tl.load(token_slots + rm, mask=rm < M, other=0)
    adapter = tl.load(adapters + slot, mask=rm < M, other=0)
    if tl.program_id(0) < units:
        _shrink(low, x, a, adapter, rm, M, K, a_stride, rows, BM, BK, BR, CHUNK, CHUNKS)
        tl.debug_barrier()  # every thread's sums are written before one of them says so
        tl.atomic_add(state, 1, sem="release")
    else:
        tiles = tl.cdiv(N, BN)
        tile = (tl.program_id(0) - units) % tiles
        part = (tl.program_id(0) - units) // tiles
        rn = tile * BN + tl.arange(0, BN)
        near = tl.minimum(rn, N - 1)
        rk = tl.arange(0, BK)
        row = weight + near.to(tl.int64)[:, None] * K + rk[None, :]
        up_row = row + N.to(tl.int64) * K
        steps = tl.cdiv(K // BK, SPLIT)
        first = part * steps * BK
        column = x + tl.minimum(rm, M - 1)[None, :] * K + rk[:, None]
        acc = tl.zeros((BN, BM), tl.float32)
        up = tl.zeros((BN, BM), tl.float32)
        for k in range(first, tl.minimum(first + steps * BK, K), BK):
            value = tl.load(column + k)
            acc = tl.dot(tl.load(row + k), value, acc)
            if GATED:
                up = tl.dot(tl.load(up_row + k), value, up)
        if part == PARTS - 1:
            on = tile * BN
            of = 0
            inside = rn < N
            if not GATED:
                of = (on >= size0).to(tl.int32) + (on >= size0 + size1) + (on >= size0 + size1 + size2)
                inside = rn < size0 + size1 + size2 + size3
                adapter = tl.where(on < size0 + size1 + size2 + size3, adapter, 0)
            of_b = b + near.to(tl.int64) * RANK
            of_up = of_b + N.to(tl.int64) * RANK
            factor = _factors(of_b, b_stride, adapter, 0, places, inside, RANK, PLACES)
            up_factor = factor
            if GATED:
                up_factor = _factors(of_up, b_stride, adapter, 0, places, inside, RANK, PLACES)
            while tl.atomic_add(state, 0, sem="acquire") < units:
                pass
            tl.debug_barrier()  # no thread reads sums before one of them has seen that they are there
            # One stage, because copies of several turns would fill shared memory.
            for place in tl.range(0, places, PLACES, num_stages=1):
                ahead = place + PLACES
                own = _own(low, adapter, rm, place, of, rows, BM, CHUNKS, RANK, PLACES)
                acc = tl.dot(factor, own.to(x.dtype.element_ty), acc)
                if GATED:
                    own = _own(low, adapter, rm, place, 1, rows, BM, CHUNKS, RANK, PLACES)
                    up = tl.dot(up_factor, own.to(x.dtype.element_ty), up)
                    up_factor = _factors(of_up, b_stride, adapter, ahead, places, inside, RANK, PLACES)
                factor = _factors(of_b, b_stride, adapter, ahead, places, inside, RANK, PLACES)
        acc, up = tl.trans(acc), tl.trans(up)
        finish_small(out, acc, up, partial, counter, tile, part, rm, rn, M, N, BM, BN, PARTS, ADD, GATED)
        if part == PARTS - 1:
            tl.debug_barrier()  # every thread has read the sums
            if tl.atomic_add(state + 1, 1, sem="relaxed") == tiles - 1:
                tl.store(state, 0)
                tl.store(state + 1, 0)
