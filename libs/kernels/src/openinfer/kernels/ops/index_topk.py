"""index_topk: the cached entries that each token attends to, by the scores of an indexer."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic

import numpy as np

from openinfer.kernels.linear.problem import expect_bf16
from openinfer.kernels.op.contract import FLOATS, expect, expect_columns, expect_cos_sin, expect_each, require
from openinfer.kernels.op.launch import Aligned, Arg, Command, Launch, Scratch, aligned, launch, power_of_two
from openinfer.kernels.op.op import Cost, Op, T, Workload, tensors
from openinfer.kernels.op.reference import Array, f32, rotated_pairs, rounded
from openinfer.kernels.op.rounding import hadamard, q4
from openinfer.kernels.op.target import Target
from openinfer.tensor import Tensor, float32, int32

_DEVICE = "openinfer.kernels.device.index_topk"

SCORES_BYTES = 64 << 20
"""Bytes of the scores that are in memory at once; steps with more scores take turns."""
MERGED_CANDIDATES = 16384
"""Candidates of a token's segments that a program chooses from at a time."""


@dataclass(frozen=True, slots=True)
class IndexTuning:
    """`block` keys at a time in `parts` of a token's; `segment`: the scores that a program selects from, `small`: those
    of a token that sees few; `tokens` that have scores in memory at once."""

    parts: int
    tokens: int
    block: int = 128
    segment: int = 8192
    small: int = 1024
    stages: int = 2
    warps: int = 4
    select_warps: int = 8


def index_tuning(target: Target, tokens: int, width: int, topk: int) -> IndexTuning:
    """For tokens that see at most `width` entries: four programs an SM."""
    at_once = max(1, SCORES_BYTES // (4 * width))
    # Slices of tensors start where addresses are aligned.
    at_once = min(tokens, at_once // 16 * 16 or at_once)
    block = 128
    if target.early(tokens):  # registers hold keys that are read ahead
        block = 32 if tokens * -(-width // 32) <= 2 * target.num_sms else 64
    parts = max(1, min(4 * target.num_sms // at_once, -(-width // block)))
    segment = max(16, min(8192, power_of_two(width)))
    small = min(max(1024, power_of_two(topk)), segment // 2)
    return IndexTuning(parts, at_once, block, segment, small)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Args(Generic[T]):
    """selected[t] = the K entries with the largest scores among those that token t sees, in the order of their numbers;
    where it sees fewer, all of them first and then -1.

    Token t is at position p = positions[t] of slot s = token_slots[t] (int32 [T], as expand_rows writes them). keys
    [pages, E, d]: one layer of the entry pages, dense within a page, pages at any stride; entry w is at
    block_tables[s, w // E], place w mod E (int32 [S, B]), and covers m = `window` tokens; the token sees the entries
    w < (p + 1) // m. They are there already. On a GPU those that ended before the step's tokens are read while kernels
    ahead may still run.

        q' = q with the last r channels of each head rotated at positions[t] (pairs 2i, 2i + 1), rounded
        quantized: q' = q4(hadamard(q') rounded), over d                                    (formats; keys are so too)
        score[w] = sum over heads h of weights[t, h] * scale * relu(q'[h] . key_w)          float32

    q [T, H, d] and keys of one float dtype; weights float32 [T, H], rows at any stride; cos_sin float32 [P, 2, r / 2];
    selected int32 [T, K]. Of equal scores the lower entry comes first. Tokens of slot 0, the padding slot, get -1.
    """

    selected: T
    q: T
    weights: T
    keys: T
    cos_sin: T
    positions: T
    token_slots: T
    block_tables: T
    scale: float
    window: int
    quantized: bool = False

    @property
    def width(self: "_Args[Tensor]") -> int:
        """Entries that a token sees, at most."""
        return self.block_tables.shape[1] * self.keys.shape[1]

    def tuning(self: "_Args[Tensor]", target: Target) -> IndexTuning:
        return index_tuning(target, self.q.shape[0], self.width, self.selected.shape[1])

    def launches(self: "_Args[Tensor]", target: Target, tuning: IndexTuning) -> Iterator[Launch]:
        """For as many tokens at a time as have scores in memory: the scores, the chosen entries of each segment of
        them, and of several segments the chosen ones of all."""
        (tokens, heads, dim), topk, per_page = self.q.shape, self.selected.shape[1], self.keys.shape[1]
        size, early = min(tuning.tokens, tokens), target.early(tokens)
        segments = -(-self.width // tuning.segment)
        lists = min(segments, max(2, MERGED_CANDIDATES // topk))
        scores = Scratch((size, self.width), float32)
        found = Scratch((size, segments, topk) if segments > 1 else (1,), int32)
        order = Scratch(found.shape, int32)
        for first in range(0, tokens, size):
            part = slice(first, min(first + size, tokens))
            count, selected = part.stop - first, self.selected[part]
            by_token = {name: getattr(self, name)[part] for name in ("positions", "token_slots")}
            if self.width > topk:
                args: dict[str, Arg] = {"scores": scores, "q": self.q[part], "weights": self.weights[part]}
                args |= {**tensors(self, "keys", "cos_sin"), **by_token, "block_tables": self.block_tables}
                args |= {"width": self.width, "table_width": self.block_tables.shape[1]}
                args["page_stride"] = Aligned(self.keys.strides[0])
                args |= {"weight_stride": self.weights.strides[0], "heads": aligned(heads), "topk": topk}
                args |= {"scale": self.scale, "tokens": tokens}
                constants = {"D": dim, "ROTARY": 2 * self.cos_sin.shape[2], "PAGE": self.window * per_page}
                constants |= {"ENTRIES": per_page, "HEADS": max(16, power_of_two(heads)), "BN": tuning.block}
                constants["QUANTIZED"] = self.quantized
                kernel, warps, stages = (_DEVICE, "index_scores"), tuning.warps, tuning.stages
                grid = count, tuning.parts
                yield launch(*kernel, grid, args, constants, num_warps=warps, num_stages=stages, early=early)
            choices: dict[str, Arg] = {"found": found, "found_order": order, **by_token}
            sizes = {"topk": topk, "ratio": self.window}
            warps = tuning.select_warps
            args = {"selected": selected, "scores": scores, **choices, "width": self.width, **sizes}
            constants = {"BLOCK": tuning.segment, "SMALL": tuning.small, "FILL": power_of_two(topk)}
            grid = count, segments
            yield launch(_DEVICE, "select_entries", grid, args, constants, num_warps=warps, early=early)
            if segments > 1:
                args = {"selected": selected, **choices, **sizes, "segments": segments, "lists": lists}
                constants = {"SEGMENT": tuning.segment, "BLOCK": power_of_two(lists * topk)}
                yield launch(_DEVICE, "select_found", (count,), args, constants, num_warps=warps, early=early)


def _check(a: _Args[Tensor]) -> None:
    expect("q", a.q, (-1, -1, -1), *FLOATS)
    tokens, heads, dim = a.q.shape
    expect_columns("weights", a.weights, (tokens, heads), float32)
    expect_columns("keys", a.keys, (-1, -1, dim), a.q.dtype)
    expect("selected", a.selected, (tokens, -1), int32)
    expect_cos_sin(a.cos_sin, dim)
    expect_each(a, (tokens,), int32, "positions", "token_slots")
    expect("block_tables", a.block_tables, (-1, -1), int32)
    require(a.window >= 1, f"window is {a.window}; an entry covers at least one token")
    require(a.selected.shape[1] >= 1, "selected has no columns; at least one entry is chosen")
    require(dim & (dim - 1) == 0 and dim >= 32, f"q has heads of {dim}; it must be a power of two from 32")
    require(a.scale > 0, f"scale is {a.scale}; it must be positive")


def _reference(a: _Args[Array]) -> None:
    per_page, most = a.keys.shape[1], a.selected.shape[1]
    a.selected[:] = -1
    for token in np.flatnonzero(a.token_slots):
        # One query at a time: the result must not depend on the chunk.
        sees = (a.positions[token] + 1) // a.window
        if sees <= most:
            a.selected[token, :sees] = np.arange(sees)
            continue
        pages = a.block_tables[a.token_slots[token], : -(-sees // per_page)]
        held = f32(a.keys[pages]).reshape(-1, a.keys.shape[2])[:sees]
        one = slice(token, token + 1)
        query = rounded(rotated_pairs(f32(a.q[one]), a.cos_sin, a.positions[one]), a.q.dtype)[0]
        if a.quantized:
            query = q4(rounded(hadamard(query), a.q.dtype))
        scores = (a.weights[token] * np.float32(a.scale)) @ np.maximum(query @ held.T, 0)
        a.selected[token] = np.sort(np.argsort(-scores, kind="stable")[:most])


def _launches(target: Target, a: _Args[Tensor]) -> Iterator[Command]:
    expect_bf16(a.q, "q")
    yield from a.launches(target, a.tuning(target))


def _cost(workload: Workload, a: _Args[Tensor]) -> Cost:
    """Decode rows read all their keys; where many tokens of a row are in a step, its keys count once."""
    _, heads, dim = a.q.shape
    held = workload.kv_tokens // a.window * dim * a.keys.itemsize
    tokens = workload.tokens * (heads * (dim * a.q.itemsize + 4) + a.selected.shape[1] * 4)
    return Cost(held + tokens, 2 * int(workload.qk_pairs / a.window) * heads * dim)


index_topk = Op("index_topk", _Args[Tensor], _check, _reference, _launches, _cost, writes=("selected",))
