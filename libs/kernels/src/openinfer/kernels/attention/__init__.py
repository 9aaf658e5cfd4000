"""Attention as commands: the division of a step's queries and keys among a GPU's programs."""

import dataclasses
import math
from collections.abc import Mapping

from openinfer.kernels.attention.call import ROWS, AttentionCall, AttentionChoice
from openinfer.kernels.attention.long import (
    hopper_tile,
    in_parts,
    is_matrix,
    long_rows,
    rows_of_cache,
    single_tokens,
)
from openinfer.kernels.attention.tiles import Tile, coded_attention_tile, long_tile, short_tile
from openinfer.kernels.linear.choices import RING_TOKENS, releases
from openinfer.kernels.op.contract import require
from openinfer.kernels.op.launch import Arg, Launch, Scratch, beside, launch, launch_cuda, power_of_two
from openinfer.kernels.op.target import Target, shared_bytes
from openinfer.tensor import Tensor, float32, int32

SHORT_PAIRS = 64
"""A row of this many (token, query head) pairs or fewer is split over its keys. After a prefix hit, a prompt has few
tokens left, and these look back on very many keys."""

MERGED_AT_ONCE = 8192
"""Float32 numbers of the parts of a split row that a program holds while it merges them: 64 registers a thread."""
MERGED_BY_FEW = 16384
"""The same where rows leave SMs idle, and nothing hides a second turn of a merge (docs/lessons/attention.md)."""
RELEASING_STAGES = 3
"""The compiler's stages of decode attention that has a ring beside it: the ring then has more memory."""

NEW_PAIRS = 64
"""Query heads that share a key head, at most, for the kernel that does a decode step's whole attention."""

CODED_KEYS, CODED_WARPS, COPIERS = 128, 8, 4
"""Keys of a block, warps that multiply and warps that copy, of device/attend_codes.cu, which has these numbers too."""
CODED_ROWS = 256
"""Rows that all steps of few rows have room for, so that they share a kernel."""
CODED_GROUP = 8
"""The most query heads that share a key head: columns of the tensor cores' operand."""

PAIRS_KEYS, PAIRS_THREADS = 64, 160
"""Keys of a block and threads of device/attend_pairs.cu, which has these numbers too."""
MOST_PAIRS = 32
"""Of a row in that kernel. It has room for 64, but more than 32 have not run on a GPU yet."""
PAIRS_SMS = 8
"""The fewest SMs for each key head of a row: with fewer, other kernels are as fast (docs/lessons/attention.md)."""

_DEVICE = "openinfer.kernels.device.attention"
_DECODE = "openinfer.kernels.device.decode_attention"


MOST_PARTS = 16
LARGE_PART = 4096
"""Keys of a part where the rows alone fill the GPU. Only long rows are split then, because other rows would wait."""
SPARE_PARTS = 32
"""Extra parts for long rows in a decode step whose rows fill the GPU already. They must be few, because a program
without work still takes one of the few places on an SM for a while (docs/lessons/attention.md)."""
FEWEST_SPARE_PARTS = 8


def spare_parts(choice: AttentionChoice, call: AttentionCall) -> int:
    """Extra parts of a decode step: those that make one wave of three programs an SM, if they are enough."""
    places = 3 * choice.num_sms // call.kv_heads - call.rows
    return places if FEWEST_SPARE_PARTS <= places < SPARE_PARTS else SPARE_PARTS


def _split(target: Target, rows: int, kv_heads: int, table_tokens: int, bn: int) -> tuple[int, int]:
    """(the most parts of a short row's keys, the fewest keys of a part).

    Two programs an SM fill the GPU once; more than MOST_PARTS cost more to merge than they gain. Where the rows alone
    fill it, a split costs up to 10 %, and so may parts that do not exist (docs/lessons/attention.md).
    """
    filling = min(2 * target.num_sms // (rows * kv_heads), MOST_PARTS)
    if filling > 1:
        return min(filling, -(-table_tokens // bn)), bn
    return min(MOST_PARTS, -(-table_tokens // LARGE_PART)), LARGE_PART


def choose_attention(target: Target, call: AttentionCall) -> AttentionChoice:
    """The choice for a call. The choice depends on static sizes, never on lengths. Raises ContractError for an FP8
    cache on a GPU that has no instructions for it."""
    able = target.arch >= call.form.arch
    require(able, f"the cache is FP8; that takes sm_{call.form.arch} or newer, and this is sm_{target.arch}")
    of_short = coded_attention_tile if call.form.scaled else short_tile
    short = of_short(target, call.rows * call.kv_heads, call.group, call.dim)
    parts = _split(target, call.rows, call.kv_heads, call.table_tokens, short.bn)
    codes = long_tile(target, call.group, call.dim)
    long = hopper_tile(target, call) or codes
    # For sm_100 Triton 3.6.0 does not compile products whose operand is made by assembly ("PassManager::run failed").
    assembly = target.arch >= 90 and target.arch // 10 != 10 and not target.interpreted
    pairs = call.form.scaled and assembly
    release = releases(target, call.tokens)
    decode = _attend_codes(target, call) if _takes_codes(target, call) else None
    return AttentionChoice(
        short, long, codes, *parts, target.num_sms, target.batch_invariant, pairs, release, decode
    )


def attention_launches(call: AttentionCall, choice: AttentionChoice, max_q_len: int) -> list[Launch]:
    """The launches of a call.

    Where all rows have few tokens, one kernel splits their keys. Else rows of one token and other rows are two launches
    side by side, of which the second zeroes the tokens after the last row. Programs for prompts take a whole SM each.
    So programs of decode rows go first, and programs of prompts take the SMs that the last wave of these leaves.
    Parts of long rows go first instead, because they take longest, and programs of decode rows fit beside them.
    """
    if choice.only_long:
        return long_rows(call, choice, short=0)
    if max_q_len == 1 and choice.decode is not None:
        return [choice.decode]
    pairs = power_of_two(max_q_len * call.group)
    if pairs <= SHORT_PAIRS:
        tile = dataclasses.replace(choice.short, bm=max(choice.short.bm, pairs))
        return [_short_rows(call, choice, tile, max_q_len)]
    if call.rows == 1:  # a prompt: that it may have one token left is not worth a second launch in every step
        return long_rows(call, choice, short=0)
    short, long = [single_tokens(call, choice)], long_rows(call, choice, short=1)
    return list(beside(long, short) if in_parts(call, choice) else beside(short, long))


def _short_rows(call: AttentionCall, choice: AttentionChoice, tile: Tile, short: int) -> Launch:
    """Rows of at most `short` tokens, and the tokens after the last row."""
    pairs, heads = short * call.group, (call.rows, call.kv_heads)
    merged, grid = power_of_two(pairs), (*heads, choice.splits)
    args = {**call.args, **call.parts((*grid, pairs), heads)}
    args |= {"tokens": call.tokens, "short": short, "part_size": choice.part_size}
    constants = {**call.constants(tile), "MR": merged, "MERGE": max(1, MERGED_AT_ONCE // (merged * call.dim))}
    constants |= {**call.without, "PAIRS": choice.pairs}
    warps, stages, early = tile.warps, tile.stages, choice.release
    return launch(
        _DEVICE, "attend_short", grid, args, constants, num_warps=warps, num_stages=stages, early=early
    )


def new_tokens(
    call: AttentionCall,
    choice: AttentionChoice,
    new: Mapping[str, Arg],
    left_out: Mapping[str, None],
    eps: float,
    *,
    rotary: int,
    gated: bool = False,
) -> Launch:
    """All of a decode step's attention: `new` has qkv, q_norm, k_norm and cos_sin; `left_out` the norms that are None.
    rotary: the columns of a head that are rotated. gated: qkv has a gate behind each query head, whose
    sigmoid multiplies the head's output.

    Rows that fill the GPU have a part each. If a row can be longer than a part, long ones share SPARE_PARTS more. Where
    rows do not fill it, each has its parts.
    """
    group, merged = call.group, power_of_two(call.group)
    filling = choice.part_size == LARGE_PART and choice.splits > 1
    items = (call.rows + spare_parts(choice, call), 1) if filling else (call.rows, choice.splits)
    at_once = max(1, MERGED_AT_ONCE // (merged * call.dim))
    if choice.part_size != LARGE_PART:
        at_once = max(at_once, min(MOST_PARTS, MERGED_BY_FEW // (merged * call.dim)))
    parts = (call.kv_heads, math.prod(items), group)
    args = {"out": call.args["out"], **call.cache, **new, **call.some(*ROWS)}
    args |= {**call.some("table_width", "page_stride", "window", "scale"), "eps": eps}
    args |= call.parts(parts, (call.rows, call.kv_heads))
    args |= {"tokens": call.tokens, "rows": call.rows, "part_size": choice.part_size}
    constants = {**call.constants(choice.short), "MR": merged, "MERGE": at_once, "WINDOWED": call.windowed}
    constants |= {"SEARCH": power_of_two(call.rows) if filling else 0, **left_out, **call.without}
    constants |= {"PAIRS": choice.pairs, "RELEASE": choice.release, "ROTARY": rotary, "GATED": gated}
    tile, grid = choice.short, (call.kv_heads, *items)
    beside_ring = choice.release and call.tokens <= RING_TOKENS
    warps, stages = tile.warps, RELEASING_STAGES if beside_ring else tile.stages
    if (tile.bn, tile.stages) == (64, 5) and choice.splits == 1 and call.dim <= 128:
        warps = 2  # half of the threads are enough between one and two programs an SM (docs/lessons)
    return launch(_DECODE, "attend_new", grid, args, constants, num_warps=warps, num_stages=stages)


def attend_pairs(target: Target, call: AttentionCall, max_q_len: int, gates: Tensor) -> Launch | None:
    """The launch of attend_pairs, whose result is multiplied by the sigmoid of `gates` [T, A, d]; None for a call that
    it does not take or that others do faster: the cache is in bf16, a row has few pairs, and rows leave SMs idle. What
    is read early is written as for _attend_codes."""
    known = target.nvrtc and not target.interpreted and not target.batch_invariant
    fits = call.dim in (128, 256) and call.page_size >= 16 and max_q_len * call.group <= MOST_PAIRS
    rows = target.num_sms // PAIRS_SMS
    idle = call.rows * call.kv_heads <= rows
    if not (known and fits and idle and is_matrix(target, call)) or call.form.scaled or call.windowed:
        return None
    pairs, dim, programs = -(-max_q_len * call.group // 8) * 8, call.dim, target.num_sms
    stage, other = 2 * PAIRS_KEYS * 2 * dim, 2 * pairs * dim + (5 * rows + 1) * 4
    stages = (shared_bytes(target.arch) - other) // (stage + 16)
    args = {**call.some("out", "q"), "cache": rows_of_cache(call, PAIRS_KEYS), **call.some(*ROWS)}
    args["partial"] = Scratch((2 * programs, pairs, dim), float32)
    args["weights"] = Scratch((2 * programs, pairs, 2), float32)
    args["arrived"] = Scratch((call.rows * call.kv_heads,), int32, zeroed=True)
    args |= {"gates": gates, "gate_stride": gates.strides[0], **call.some("table_width")}
    args |= {"page_rows": call.kv.strides[0] // dim, **call.some("scale"), "rows": call.rows}
    args |= {"tokens": call.tokens, "heads": call.kv_heads}
    constants = {"D": dim, "GROUP": call.group, "PAGE": call.page_size, "PAIRS": pairs}
    constants |= {"ROWS": rows, "STAGES": stages}
    kernel = "openinfer.kernels.device", "attend_pairs.cu", "attend_pairs", (programs,)
    shared = stages * (stage + 16) + other
    return launch_cuda(*kernel, args, constants, threads=PAIRS_THREADS, shared=shared, early=True)


def _takes_codes(target: Target, call: AttentionCall) -> bool:
    """Whether attend_codes takes a decode step over an FP8 cache: one token a row, which sees all of it."""
    known = target.nvrtc and target.arch == 90 and not target.interpreted and not target.batch_invariant
    fits = call.dim in (128, 256) and call.group <= CODED_GROUP and call.page_size % 16 == 0
    return known and fits and call.form.scaled and not call.windowed


def _attend_codes(target: Target, call: AttentionCall) -> Launch:
    """The launch of attend_codes. The kernel ahead puts the keys and values of the step's tokens into the cache. The
    rest of the cache and the tensors of rows are read before that kernel ends. So they are written before the last
    launch that is not early, or before the step."""
    merged = CODED_WARPS * call.group * (call.dim + 2) * 4
    rows = max(CODED_ROWS, power_of_two(call.rows))
    stage = CODED_KEYS * (2 * call.dim + 2)
    other = merged + (5 * rows + 3) * 4
    stages = (shared_bytes(target.arch) - other) // (stage + 16)
    programs, parts = target.num_sms, 2 * target.num_sms
    args = {**call.some("out", "q"), **call.cache, **call.some(*ROWS)}
    args["partial"] = Scratch((parts, call.group, call.dim), float32)
    args["weights"] = Scratch((parts, call.group, 2), float32)
    args["arrived"] = Scratch((call.rows * call.kv_heads,), int32, zeroed=True)
    args |= call.some("table_width", "page_stride", "scale")
    args |= {"rows": call.rows, "tokens": call.tokens, "heads": call.kv_heads}
    constants = {"D": call.dim, "GROUP": call.group, "PAGE": call.page_size, "ROWS": rows, "STAGES": stages}
    kernel = "openinfer.kernels.device", "attend_codes.cu", "attend_codes", (programs,)
    threads, shared = 32 * (CODED_WARPS + COPIERS), stages * (stage + 16) + other
    return launch_cuda(*kernel, args, constants, threads=threads, shared=shared, early=True)
