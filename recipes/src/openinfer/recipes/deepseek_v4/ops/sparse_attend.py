"""sparse_attend: attention over a window of raw vectors and chosen compressed entries, with sinks."""

from __future__ import annotations

import numpy as np

from openinfer.kernels import Cost, Op, Workload
from openinfer.kernels.contract import FLOATS, expect, require
from openinfer.kernels.reference import Array, f32, rounded
from openinfer.recipes.deepseek_v4.ops.common import (
    PAGE,
    expect_cos_sin,
    expect_longest,
    expect_rows,
    live_rows,
    rope,
    seen,
)
from openinfer.recipes.deepseek_v4.ops.pending import no_device_code
from openinfer.tensor import Tensor, float32, int32


def _contract(
    *,
    out: Tensor,
    q: Tensor,
    kv: Tensor,
    entries: Tensor | None,
    selected: Tensor | None,
    sinks: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    q_starts: Tensor,
    seq_lens: Tensor,
    alive: Tensor,
    kv_tables: Tensor,
    entry_tables: Tensor,
    scale: float,
    window: int,
    max_q_len: int,
) -> None:
    """out[t] = softmax(scale * q[t] . X, sink) X over the vectors X that token t may see, rotated back.

    Rows, slots, q_starts, seq_lens and alive as in expand_rows: token i of row r is at position p = seq_lens[slot] + i.
    It sees the raw vectors of positions p - window < j <= p (its own is there already): kv [pages, 128, d], position j
    of slot s at kv_tables[s, j // 128], place j mod 128; and entries: none if `entries` is None, all w < (p + 1) // m
    if `selected` is None, or those that selected int32 [T, K] names (-1: none; in any order, each once, all of them
    such). entries [pages, E, d] cover m = 128 / E tokens each, entry w at entry_tables[s, w // E], place w mod E. kv
    and entries are one layer, dense within a page, pages at any stride. Every vector is key and value at once, for all
    heads.

        p_i = exp(scale * q . x_i - top);  o = sum of p_i x_i / (sum of p_i + exp(sinks[head] - top))    float32
        out = o rounded, its last r channels rotated in pairs (2i, 2i + 1) at minus positions[t], rounded

    top: the largest of the logits and the sink. Probabilities are rounded to q's dtype before they meet the values; an
    implementation may leave out the rounding before the rotation. q [T, A, d] and out [T, A d] of the dtype of kv;
    sinks float32 [A]; cos_sin float32 [P, 2, r / 2]; positions int32 [T]; both tables int32 [S, B]. window is in
    [1, 128]. What is written for tokens of dead rows and for those past q_starts[R] is finite and otherwise
    unspecified. max_q_len: no row has more tokens than this (1 in a decode step).
    """
    expect("q", q, (-1, -1, -1), *FLOATS)
    tokens, heads, dim = q.shape
    expect("out", out, (tokens, heads * dim), q.dtype)
    expect("kv", kv, (-1, PAGE, dim), q.dtype, dense=False)
    expect("kv[0]", kv[0], kv.shape[1:])
    rows, size = expect_rows(slots, q_starts, seq_lens, alive)
    if entries is not None:
        expect("entries", entries, (-1, -1, dim), q.dtype, dense=False)
        expect("entries[0]", entries[0], entries.shape[1:])
        require(
            PAGE % entries.shape[1] == 0, f"entries has {entries.shape[1]} a page; that must divide {PAGE}"
        )
    if selected is not None:
        require(entries is not None, "selected is given, and no entries to select from")
        expect("selected", selected, (tokens, -1), int32)
    expect("sinks", sinks, (heads,), float32)
    expect_cos_sin(cos_sin, dim)
    expect("positions", positions, (tokens,), int32)
    expect("kv_tables", kv_tables, (size, -1), int32)
    expect("entry_tables", entry_tables, (size, -1), int32)
    require(scale > 0, f"scale is {scale}; it must be positive")
    require(1 <= window <= PAGE, f"window is {window}; it must be in [1, {PAGE}]")
    expect_longest(max_q_len, tokens, rows)


def _reference(
    *,
    out: Array,
    q: Array,
    kv: Array,
    entries: Array | None,
    selected: Array | None,
    sinks: Array,
    cos_sin: Array,
    positions: Array,
    slots: Array,
    q_starts: Array,
    seq_lens: Array,
    alive: Array,
    kv_tables: Array,
    entry_tables: Array,
    scale: float,
    window: int,
    max_q_len: int,
) -> None:
    dim, dtype = q.shape[2], q.dtype
    out[:] = 0
    for row in live_rows(slots, q_starts, seq_lens, alive):
        end = row.start + row.last - row.first
        low = max(0, row.start + 1 - window)
        position = np.arange(low, end)
        raw = f32(kv[kv_tables[row.slot, position // PAGE], position % PAGE])
        made = np.empty((0, dim), np.float32)
        if entries is not None:
            per_page = entries.shape[1]
            w = np.arange(end // (PAGE // per_page))
            made = f32(entries[entry_tables[row.slot, w // per_page], w % per_page])
        for token in range(
            row.first, row.last
        ):  # one query at a time: the result must not depend on the chunk
            p = row.start + token - row.first
            parts = [raw[max(0, p + 1 - window) - low : p + 1 - low]]
            if selected is not None:
                parts.append(made[selected[token][selected[token] >= 0]])
            elif entries is not None:
                parts.append(made[: (p + 1) // (PAGE // entries.shape[1])])
            keys = np.concatenate(parts)
            logits = (f32(q[token]) @ keys.T) * np.float32(scale)
            top = np.maximum(logits.max(axis=1), sinks)[:, None]
            weights = np.exp(logits - top)
            total = weights.sum(axis=1, keepdims=True) + np.exp(sinks[:, None] - top)
            o = rounded(rounded(weights, dtype) @ keys / total, dtype)
            turned = rope(o[None], cos_sin, positions[token : token + 1], back=True)
            out[token] = turned.reshape(-1)


def _cost(
    workload: Workload,
    *,
    q: Tensor,
    kv: Tensor,
    entries: Tensor | None,
    selected: Tensor | None,
    window: int,
    **rest: object,
) -> Cost:
    """A row's window and entries count once, or, where tokens choose their own, once a token (at most all of them)."""
    _, heads, dim = q.shape
    context = seen(workload)
    raw = workload.rows * window + workload.tokens - workload.rows
    pairs, held = workload.tokens * min(window, context), float(min(raw, workload.kv_tokens))
    if entries is not None:
        ratio = PAGE // entries.shape[1]
        each = context / ratio if selected is None else min(selected.shape[1], context / ratio)
        pairs += workload.tokens * each
        held += min(workload.kv_tokens / ratio, workload.tokens * each)
    moved = int(held) * dim * kv.itemsize + 2 * workload.tokens * heads * dim * q.itemsize
    chosen = 4 * workload.tokens * selected.shape[1] if selected is not None else 0
    return Cost(moved + chosen, int(4 * pairs * heads * dim))


sparse_attend = Op("sparse_attend", _contract, reference=_reference, launches=no_device_code, cost=_cost)
