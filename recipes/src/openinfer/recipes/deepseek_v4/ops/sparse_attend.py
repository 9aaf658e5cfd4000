"""sparse_attend: attention over a window of raw vectors and chosen compressed entries, with sinks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from openinfer.kernels.authoring import (
    FLOATS,
    Array,
    Command,
    Cost,
    Op,
    Target,
    Workload,
    expect,
    expect_cos_sin,
    f32,
    require,
    rounded,
)
from openinfer.recipes.deepseek_v4.ops.common import PAGE, rope, seen, unit
from openinfer.recipes.deepseek_v4.sparse import Attention
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
    token_slots: Tensor,
    kv_tables: Tensor,
    entry_tables: Tensor,
    scale: float,
    eps: float,
    window: int,
) -> None:
    """out[t] = softmax(scale * q'[t] . X, sink) X over the vectors X that token t may see, rotated back.

    Token t is at position p = positions[t] of slot s = token_slots[t] (int32 [T], as expand_rows writes them). It sees
    the raw vectors of positions p - window < j <= p (its own is there already): kv [pages, 128, d], position j at
    kv_tables[s, j // 128], place j mod 128; and entries: none if `entries` is None, all w < (p + 1) // m if `selected`
    is None, or those that selected int32 [T, K] names: the first min(K, (p + 1) // m) of selected[t], in any order,
    each once. entries [pages, E, d] cover m = 128 / E tokens each, entry w at entry_tables[s, w // E], place w mod E.
    kv and entries are one layer, dense within a page, pages at any stride. Every vector is key and value at once, for
    all heads.

        q' = q / rms(q) of each head (with eps), rounded, its last r channels rotated in pairs (2i, 2i + 1) at
             positions[t], rounded
        p_i = exp(scale * q' . x_i - top);  o = sum of p_i x_i / (sum of p_i + exp(sinks[head] - top))    float32
        out = o rounded, its last r channels rotated at minus positions[t], rounded

    top: the largest of the logits and the sink. Probabilities are rounded to q's dtype before they meet the values; an
    implementation may leave out the roundings of q / rms(q) and of o before the rotations. q [T, A, d] and out [T, A d]
    of the dtype of kv; sinks float32 [A]; cos_sin float32 [P, 2, r / 2]; both tables int32 [S, B]. window is in
    [1, 128]. The output for tokens of slot 0, the padding slot, is finite and otherwise unspecified.
    """
    expect("q", q, (-1, -1, -1), *FLOATS)
    tokens, heads, dim = q.shape
    expect("out", out, (tokens, heads * dim), q.dtype)
    expect("kv", kv, (-1, PAGE, dim), q.dtype, dense=False)
    expect("kv[0]", kv[0], kv.shape[1:])
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
    expect("token_slots", token_slots, (tokens,), int32)
    expect("kv_tables", kv_tables, (-1, -1), int32)
    expect("entry_tables", entry_tables, (kv_tables.shape[0], -1), int32)
    require(scale > 0, f"scale is {scale}; it must be positive")
    require(eps > 0, f"eps is {eps}; it must be positive")
    require(1 <= window <= PAGE, f"window is {window}; it must be in [1, {PAGE}]")


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
    token_slots: Array,
    kv_tables: Array,
    entry_tables: Array,
    scale: float,
    eps: float,
    window: int,
) -> None:
    dtype = q.dtype
    turned = rounded(rope(rounded(unit(f32(q), eps), dtype), cos_sin, positions), dtype)
    o = np.zeros_like(turned)
    for token in np.flatnonzero(token_slots):  # one query at a time: the result must not depend on the chunk
        slot, p = token_slots[token], int(positions[token])
        position = np.arange(max(0, p + 1 - window), p + 1)
        parts = [f32(kv[kv_tables[slot, position // PAGE], position % PAGE])]
        if entries is not None:
            per_page = entries.shape[1]
            w = np.arange((p + 1) // (PAGE // per_page))
            if selected is not None:
                w = selected[token, : len(w)]
            parts.append(f32(entries[entry_tables[slot, w // per_page], w % per_page]))
        keys = np.concatenate(parts)
        logits = (turned[token] @ keys.T) * np.float32(scale)
        top = np.maximum(logits.max(axis=1), sinks)[:, None]
        weights = np.exp(logits - top)
        total = weights.sum(axis=1, keepdims=True) + np.exp(sinks[:, None] - top)
        o[token] = rounded(rounded(weights, dtype) @ keys / total, dtype)
    out[:] = rope(o, cos_sin, positions, back=True).reshape(out.shape)


def _launches(target: Target, **args: Any) -> Iterator[Command]:
    call = Attention(**args)
    call.check()
    yield from call.launches(call.tuning(target))


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


sparse_attend = Op("sparse_attend", _contract, reference=_reference, launches=_launches, cost=_cost)
