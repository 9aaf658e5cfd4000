"""Attention of rows of many tokens as commands."""

from __future__ import annotations

from typing import TYPE_CHECKING

from openinfer.kernels.attention_tiles import HopperTile, Tile
from openinfer.kernels.launch import INT32_MAX, Launch, Scratch, TensorMap, launch, power_of_two
from openinfer.kernels.target import Target
from openinfer.tensor import Tensor, float32, int32

if TYPE_CHECKING:
    from openinfer.kernels.attention import Call, Choice

SPLIT_TOKENS = 512
"""Steps of fewer tokens read their long rows in parts. The tiles of more tokens fill the GPU."""

MERGED_BY_WARP = 2048
"""Float32 numbers of parts that a warp holds while it merges them: 64 registers a thread."""

LEAST_KEYS = 512
"""The fewest keys of a part of a long row: a program reads them in less time than a merge takes."""

_DEVICE = "openinfer.kernels.device.attention"
_HOPPER = "openinfer.kernels.device.attention_hopper"
_SPLIT = "openinfer.kernels.device.split_attention"


def hopper_tile(target: Target, call: Call) -> HopperTile | None:
    """The tile for rows of many tokens where the kernel for Hopper takes the call, else None."""
    if (
        not _is_matrix(target, call)
        or target.batch_invariant
        or (call.tokens < HOPPER_TOKENS and call.dim < 256)
        or call.dim not in (64, 128, 256)
        or call.group > HopperTile.bm
    ):
        return None
    return HopperTile(128 if call.dim <= 128 else 64, 2, in_turn=False, resident=True)


HOPPER_TOKENS = 512
"""The fewest tokens of a step for which the kernel for Hopper is the faster one with heads of up to 128. With heads of
256 it is faster with 128 tokens already (docs/lessons.md)."""


def _is_matrix(target: Target, call: Call) -> bool:
    """Whether a kernel for Hopper can copy pages of this cache: as rows of a matrix with `dim` columns. No product
    takes codes beside queries in bfloat16."""
    page_stride = call.kv.strides[0]
    return (
        target.arch == 90
        and not target.interpreted
        and "kv_scales" not in call.args
        and call.page_size >= 8
        and page_stride % call.dim == 0
        and call.kv.shape[0] * page_stride // call.dim <= INT32_MAX
    )


def long_rows(call: Call, choice: Choice, *, short: int) -> Launch:
    """Rows of more than `short` tokens, and the tokens after the last row."""
    tile = choice.long
    tiles = call.tokens // (tile.bm // call.group) + call.rows + 1
    if isinstance(tile, HopperTile):
        return _by_hopper(call, tile, tiles, choice.num_sms, short)
    if call.tokens < SPLIT_TOKENS and not choice.only_long:
        return _in_parts(call, tile, choice, short)
    return launch(
        _DEVICE,
        "attend_long",
        (call.kv_heads, tiles),
        {**call.args, "rows": call.rows, "tokens": call.tokens, "short": short},
        {**call.constants(tile), **call.without, "PAIRS": choice.pairs},
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def _in_parts(call: Call, tile: Tile, choice: Choice, short: int) -> Launch:
    """Tiles whose keys are dealt to as many programs as the GPU has SMs."""
    room = max(1, choice.num_sms // call.kv_heads)
    tiles = call.tokens // (tile.bm // call.group) + min(call.rows, call.tokens // (short + 1))
    places = (call.kv_heads, 2 * room)
    return launch(
        _SPLIT,
        "attend_split",
        (call.kv_heads, tiles + room),
        {
            **call.args,
            "partial": Scratch((*places, tile.bm, call.dim), float32),
            "weight": Scratch((*places, tile.bm), float32),
            "arrived": Scratch(places, int32, zeroed=True),
            "rows": call.rows,
            "tokens": call.tokens,
            "short": short,
            "room": room,
            "least": -(-LEAST_KEYS // tile.bn) * tile.bn,
        },
        {
            **call.constants(tile),
            "MERGE": max(1, MERGED_BY_WARP * tile.warps // (tile.bm * call.dim)),
            "SEARCH": power_of_two(call.rows),
            **call.without,
            "PAIRS": choice.pairs,
        },
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def _by_hopper(call: Call, tile: HopperTile, tiles: int, num_sms: int, short: int) -> Launch:
    items = call.kv_heads * tiles
    named = ("out", "q", "kv", "slots", "q_starts", "seq_lens", "alive", "block_tables", "table_width")
    return launch(
        _HOPPER,
        "attend_prompt",
        (min(items, num_sms) if tile.resident else items,),
        {
            **{name: call.args[name] for name in named},
            "kv": _matrix(call, tile.bn),
            "page_rows": call.kv.strides[0] // call.dim,
            "window": call.args["window"],
            "scale": call.args["scale"],
            "rows": call.rows,
            "tokens": call.tokens,
            "short": short,
            "kv_heads": call.kv_heads,
            "items": items,
        },
        {**call.constants(tile), "STAGES": tile.stages, "IN_TURN": tile.in_turn},
        num_warps=4,
    )


def _matrix(call: Call, bn: int) -> TensorMap:
    """A layer's pages in a matrix of `dim` columns, with other layers' rows between them."""
    page_rows = call.kv.strides[0] // call.dim
    shape = ((call.kv.shape[0] - 1) * page_rows + 2 * call.kv_heads * call.page_size, call.dim)
    matrix = Tensor(call.kv.ptr, shape, call.kv.dtype, call.kv.device, (call.dim, 1), call.kv)
    return TensorMap(matrix, (min(call.page_size, bn), 64))
