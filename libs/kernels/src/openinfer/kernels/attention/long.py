"""Attention of rows of many tokens as commands."""

import math
from collections.abc import Mapping

from openinfer.kernels.attention.call import ROWS, AttentionCall, AttentionChoice
from openinfer.kernels.attention.tiles import HopperTile, Tile
from openinfer.kernels.op.launch import INT32_MAX, Arg, Launch, Scratch, TensorMap, launch, power_of_two
from openinfer.kernels.op.target import Target
from openinfer.tensor import Tensor, bfloat16, int32

SPLIT_TOKENS = 512
"""Steps of fewer tokens read their long rows in parts. The tiles of more tokens fill the GPU, and the kernel for Hopper
is faster for them (docs/lessons/attention.md)."""

FEW_TOKENS = Tile(64, 64, 4, 5)
"""The tile of parts in steps of several rows and at most 64 tokens: a program then merges half as many numbers."""

MERGED_BY_WARP = 2048
"""Float32 numbers of parts that a warp holds while it merges them: 64 registers a thread."""

LEAST_KEYS = 512
"""The fewest keys of a part of a long row: a program reads them in less time than a merge takes."""

MOST_PARTS = 16
"""The most parts of a tile of a long row: one program merges them, one after the other."""

_DEVICE = "openinfer.kernels.device.attention"
_HOPPER = "openinfer.kernels.device.attention_hopper"
_SPLIT = "openinfer.kernels.device.split_attention"


def hopper_tile(target: Target, call: AttentionCall) -> HopperTile | None:
    """The tile for rows of many tokens where the kernel for Hopper takes the call, else None."""
    fits = call.tokens >= SPLIT_TOKENS and call.dim in (64, 128, 256) and call.group <= HopperTile.bm
    if target.batch_invariant or not fits or not is_matrix(target, call):
        return None
    return HopperTile(128 if call.dim <= 128 else 64)


def is_matrix(target: Target, call: AttentionCall) -> bool:
    """Whether a kernel for Hopper can copy pages of this cache: as rows of a matrix with `dim` columns. No product
    takes codes beside queries in bfloat16, so pages of codes are widened first."""
    page_stride = call.kv.strides[0]
    if target.arch != 90 or target.interpreted or call.page_size < 8:
        return False
    if call.form.scaled:
        return call.page_size <= BLOCK
    return page_stride % call.dim == 0 and call.kv.shape[0] * page_stride // call.dim <= INT32_MAX


def in_parts(call: AttentionCall, choice: AttentionChoice) -> bool:
    """Whether the keys of long rows are dealt to several programs."""
    return call.tokens < SPLIT_TOKENS and not choice.only_long and not isinstance(choice.long, HopperTile)


def long_rows(call: AttentionCall, choice: AttentionChoice, *, short: int) -> list[Launch]:
    """Rows of more than `short` tokens, and the tokens after the last row. Codes are widened for the kernel for Hopper;
    the rows that did not fit come after it."""
    tile = choice.long
    if not isinstance(tile, HopperTile):
        if in_parts(call, choice):
            return [_in_parts(call, tile, choice, short)]
        return [_anywhere(call, tile, choice, short, None)]
    if not call.form.scaled:
        page_rows = call.kv.strides[0] // call.dim
        own: dict[str, Arg] = {"kv": rows_of_cache(call, tile.bn)}
        return [_by_hopper(call, tile, page_rows, choice.num_sms, short, own)]
    return _widened(call, tile, choice, short)


def _tiles(call: AttentionCall, tile: Tile | HopperTile) -> int:
    return call.tokens // (tile.bm // call.group) + call.rows + 1


def _anywhere(
    call: AttentionCall, tile: Tile, choice: AttentionChoice, short: int, done: Scratch | None
) -> Launch:
    """`done`: the slots that are left out."""
    args, constants = dict(call.args), {**call.constants(tile), **call.without, "PAIRS": choice.pairs}
    if done is None:
        constants["done"] = None
    else:
        args["done"] = done
    args |= {"rows": call.rows, "tokens": call.tokens, "short": short}
    grid, warps, stages = (call.kv_heads, _tiles(call, tile)), tile.warps, tile.stages
    return launch(_DEVICE, "attend_long", grid, args, constants, num_warps=warps, num_stages=stages)


def single_tokens(call: AttentionCall, choice: AttentionChoice) -> Launch:
    """Rows of one token beside rows of more. Their keys are dealt on the device, because a bucket has many more rows
    than most of its steps. So the tile is that of many rows."""
    tile = choice.short if call.dim > 128 or choice.short.stages < 5 else Tile(choice.short.bm, 128, 4, 3)
    room = max(1, 2 * choice.num_sms // call.kv_heads)
    return _split(call, tile, choice, call.rows, call.group, tokens=0, over=0, most=1, room=room, least=256)


def _in_parts(call: AttentionCall, tile: Tile, choice: AttentionChoice, short: int) -> Launch:
    """Tiles whose keys are dealt to as many programs as the GPU has SMs."""
    few = call.rows > 1 and call.tokens <= FEW_TOKENS.bm and call.group <= FEW_TOKENS.bm
    if few and (tile.bm, tile.stages) == (128, 5) and not call.form.scaled:
        tile = FEW_TOKENS
    room = max(1, choice.num_sms // call.kv_heads)
    tiles, tokens = call.tokens // (tile.bm // call.group), call.tokens
    tiles += min(call.rows, tokens // (short + 1))
    limits = {"tokens": tokens, "over": short, "most": tokens, "room": room, "least": LEAST_KEYS}
    return _split(call, tile, choice, tiles, tile.bm, **limits)


def _split(
    call: AttentionCall, tile: Tile, choice: AttentionChoice, tiles: int, pairs: int, **limits: int
) -> Launch:
    """The launch that divides the keys of rows of more than `over` and at most `most` tokens: into `room` more items
    than there are tiles, of at least `least` keys, at most MOST_PARTS of a tile. pairs: of a tile at most. limits: the
    kernel's tokens, over, most, room and least."""
    places, pairs = (call.kv_heads, 2 * limits["room"]), power_of_two(pairs)
    args = {**call.args, **call.parts((*places, tile.bm), places), "rows": call.rows, **limits}
    args |= {"least": -(-limits["least"] // tile.bn) * tile.bn, "most_parts": MOST_PARTS}
    merge = max(1, MERGED_BY_WARP * tile.warps // (pairs * min(call.dim, 128)))
    constants = {**call.constants(tile), "MR": pairs, "MERGE": merge, "SEARCH": power_of_two(call.rows)}
    constants |= {**call.without, "PAIRS": choice.pairs}
    grid, warps, stages = (call.kv_heads, tiles + limits["room"]), tile.warps, tile.stages
    return launch(_SPLIT, "attend_split", grid, args, constants, num_warps=warps, num_stages=stages)


def _by_hopper(
    call: AttentionCall, tile: HopperTile, page_rows: int, num_sms: int, short: int, own: Mapping[str, Arg]
) -> Launch:
    """`own`: what replaces the call's arguments: the pages as a matrix, and what widened pages change besides."""
    items = call.kv_heads * _tiles(call, tile)
    args = {**call.some("out", "q", "kv", *ROWS, "table_width"), **own, "page_rows": page_rows}
    args |= {**call.some("window", "scale"), "rows": call.rows, "tokens": call.tokens}
    args |= {"short": short, "kv_heads": call.kv_heads, "items": items}
    constants = {**call.constants(tile), "STAGES": 2, "IN_TURN": False}
    return launch(_HOPPER, "attend_prompt", (min(items, num_sms),), args, constants, num_warps=4)


def rows_of_cache(call: AttentionCall, bn: int) -> TensorMap:
    """A layer's pages in a matrix of `dim` columns, with other layers' rows between them."""
    page_rows = call.kv.strides[0] // call.dim
    shape = ((call.kv.shape[0] - 1) * page_rows + 2 * call.kv_heads * call.page_size, call.dim)
    matrix = Tensor(call.kv.ptr, shape, call.kv.dtype, call.kv.device, (call.dim, 1), call.kv)
    return TensorMap(matrix, (min(call.page_size, bn), 64))


BLOCK = 128
"""Tokens that a program widens at once. A row's pages begin at a multiple of it."""
MOST_BYTES = 256 << 20
"""Bytes of scratch for widened pages. Rows that do not fit are read as codes."""
PROGRAMS = 4
"""Programs an SM."""

_WIDEN = "openinfer.kernels.device.widened"


def _widened(call: AttentionCall, tile: HopperTile, choice: AttentionChoice, short: int) -> list[Launch]:
    """The pages of rows with more than `short` tokens in bf16, as a matrix of heads' tokens [pages * 2 G * page_size,
    d], page numbers by slot, and which slots are there (int32, 1 or 0). Then the kernel for Hopper, and the kernel that
    reads codes for slots that are not."""
    kv_heads, dim, slots = call.kv_heads, call.dim, call.args["seq_lens"]
    longest = -(-call.table_tokens // BLOCK)
    wanted = longest * min(call.rows, max(1, call.tokens // (short + 1)))
    vectors = BLOCK * 2 * kv_heads
    capacity = min(wanted, max(1, MOST_BYTES // (vectors * dim * bfloat16.itemsize)))
    width = longest * BLOCK // call.page_size
    size = math.prod(slots.shape) if isinstance(slots, Tensor) else 0
    pages = Scratch((capacity * vectors, dim), bfloat16)
    tables, fits = Scratch((size, width), int32), Scratch((size,), int32)
    given: dict[str, Arg] = {"out": pages, "tables": tables, "fits": fits, **call.cache}
    given |= {**call.some(*ROWS, "table_width", "page_stride"), "own_width": width, "rows": call.rows}
    given |= {"short": short, "capacity": capacity, "kv_heads": kv_heads}
    constants = {"D": dim, "PAGE": call.page_size, "BLOCK": BLOCK, "ROWS": power_of_two(call.rows)}
    constants["PAIRS"] = choice.pairs
    items = min(PROGRAMS * choice.num_sms, capacity * 2 * kv_heads)
    matrix = TensorMap(pages, (min(call.page_size, tile.bn), 64))
    own: dict[str, Arg] = {"kv": matrix, "alive": fits, "block_tables": tables, "table_width": width}
    found = [
        launch(_WIDEN, "widen_pages", (items,), given, constants, num_warps=8),
        _by_hopper(call, tile, 2 * kv_heads * call.page_size, choice.num_sms, short, own),
    ]
    if capacity < wanted:
        found.append(_anywhere(call, choice.codes, choice, short, fits))
    return found
