"""Pages of an FP8 cache made bf16 for a step's prompts, so that attention_hopper.py reads them."""

# mypy: ignore-errors
import triton
import triton.language as tl

from openinfer.kernels.device.attention import cache_places, cache_scales, numbers


@triton.jit
def widen_pages(
    out, tables, fits, kv, kv_scales, slots, q_starts, seq_lens, alive, block_tables,
    table_width, page_stride, own_width, rows, short, capacity, kv_heads,
    D: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """The cached tokens of rows of more than `short` tokens, row after row, BLOCK tokens at a time.

    out: bf16 pages [capacity * BLOCK / PAGE, 2 kv_heads, PAGE, D]; zeros after a row's end. tables: int32 [S,
    own_width], the numbers of a slot's pages there. fits: int32 [S], 1 for the slots whose pages are all there; rows
    after the first that does not fit are not. rows <= ROWS. Grid: any number of programs.
    """
    r = tl.arange(0, ROWS)
    real = r < rows
    slot = tl.load(slots + r, mask=real, other=0)
    first = tl.load(q_starts + r, mask=real, other=0)
    count = tl.load(q_starts + r + 1, mask=real, other=0) - first
    stop = tl.load(seq_lens + slot) + count
    taken = real & (count > short) & (tl.load(alive + slot) != 0)
    blocks = tl.where(taken, tl.cdiv(stop, BLOCK), 0)
    end = tl.cumsum(blocks, 0)
    taken = taken & (end <= capacity)
    if tl.program_id(0) == 0:
        tl.store(fits + slot, taken.to(tl.int32), mask=real)
    heads = 2 * kv_heads
    i, column = tl.arange(0, BLOCK), tl.arange(0, D)
    pages: tl.constexpr = BLOCK // PAGE
    for item in range(tl.program_id(0), tl.max(tl.where(taken, end, 0), 0) * heads, tl.num_programs(0)):
        block, head = item // heads, item % heads
        mine = taken & (end - blocks <= block) & (block < end)
        row_slot = tl.sum(tl.where(mine, slot, 0), 0)
        n = (block - tl.sum(tl.where(mine, end - blocks, 0), 0)) * BLOCK
        last = tl.sum(tl.where(mine, stop, 0), 0)
        table = block_tables + row_slot.to(tl.int64) * table_width
        where = cache_places(table, n, last, page_stride, D, PAGE, BLOCK)[:, None] + column[None, :]
        written = (n + i < last)[:, None]
        codes = tl.load(kv + head * PAGE * D + where, mask=written, other=0.0)
        scale = cache_scales(kv_scales + head * PAGE, table, n, last, page_stride, PAGE, BLOCK)
        value = numbers(codes, out.dtype.element_ty, PAIRS).to(tl.float32) * scale[:, None]
        page = (block * pages + i // PAGE).to(tl.int64)
        place = ((page * heads + head) * PAGE + i % PAGE) * D
        tl.store(out + place[:, None] + column[None, :], value.to(out.dtype.element_ty))
        if head == 0:
            j = tl.arange(0, pages)
            tl.store(tables + row_slot.to(tl.int64) * own_width + n // PAGE + j, block * pages + j)
