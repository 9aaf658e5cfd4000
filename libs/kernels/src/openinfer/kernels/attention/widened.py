"""An FP8 cache for prompts: the cached tokens of a step's long rows are made bf16 in scratch memory, once a layer."""

import math
from collections.abc import Mapping
from typing import NamedTuple

from openinfer.kernels.op.launch import Arg, Launch, Scratch, launch, power_of_two
from openinfer.tensor import Tensor, bfloat16, int32

BLOCK = 128
"""Tokens that a program widens at once. A row's pages begin at a multiple of it."""
MOST_BYTES = 256 << 20
"""Bytes of scratch for widened pages. Rows that do not fit are read as codes."""
PROGRAMS = 4
"""Programs an SM."""

_DEVICE = "openinfer.kernels.device.widened"
_ROWS = ("slots", "q_starts", "seq_lens", "alive", "block_tables", "table_width", "page_stride")


class Widened(NamedTuple):
    """The command; pages as a matrix of heads' tokens, [pages * 2 G * page_size, d]; page numbers by slot; which slots
    are there (int32, 1 or 0), and whether all slots always are."""

    command: Launch
    pages: Scratch
    tables: Scratch
    fits: Scratch
    whole: bool


def widened(
    args: Mapping[str, Arg],
    kv: Tensor,
    table_tokens: int,
    rows: int,
    tokens: int,
    short: int,
    *,
    programs: int,
    pairs: bool,
) -> Widened:
    """The pages of rows with more than `short` of the step's `tokens`. `args`: of an attention call over an FP8 cache;
    `pairs`: by assembly; `programs`: of the GPU at once."""
    _, _, kv_heads, page_size, dim = kv.shape
    longest = -(-table_tokens // BLOCK)
    wanted = longest * min(rows, max(1, tokens // (short + 1)))
    vectors = BLOCK * 2 * kv_heads
    capacity = min(wanted, max(1, MOST_BYTES // (vectors * dim * bfloat16.itemsize)))
    slots, width = args["seq_lens"], longest * BLOCK // page_size
    size = math.prod(slots.shape) if isinstance(slots, Tensor) else 0
    pages = Scratch((capacity * vectors, dim), bfloat16)
    tables, fits = Scratch((size, width), int32), Scratch((size,), int32)
    given: dict[str, Arg] = {
        "out": pages,
        "tables": tables,
        "fits": fits,
        "kv": args["kv"],
        "kv_scales": args["kv_scales"],
        **{name: args[name] for name in _ROWS},
        "own_width": width,
        "rows": rows,
        "short": short,
        "capacity": capacity,
        "kv_heads": kv_heads,
    }
    constants = {"D": dim, "PAGE": page_size, "BLOCK": BLOCK, "ROWS": power_of_two(rows), "PAIRS": pairs}
    items = min(programs, capacity * 2 * kv_heads)
    return Widened(
        launch(_DEVICE, "widen_pages", (items,), given, constants, num_warps=8),
        pages,
        tables,
        fits,
        capacity == wanted,
    )
