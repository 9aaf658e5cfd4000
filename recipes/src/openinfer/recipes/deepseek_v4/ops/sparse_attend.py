"""sparse_attend: attention over a window of raw vectors and chosen compressed entries, with sinks."""

from collections.abc import Iterator

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
    rms_norm,
    rotated_pairs,
    rounded,
)
from openinfer.recipes.deepseek_v4.ops import PAGE
from openinfer.recipes.deepseek_v4.sparse import SparseAttendArgs
from openinfer.tensor import Tensor, float32, int32


def _check(a: SparseAttendArgs[Tensor]) -> None:
    expect("q", a.q, (-1, -1, -1), *FLOATS)
    tokens, heads, dim = a.q.shape
    expect("out", a.out, (tokens, heads * dim), a.q.dtype)
    expect("kv", a.kv, (-1, PAGE, dim), a.q.dtype, dense=False)
    expect("kv[0]", a.kv[0], a.kv.shape[1:])
    if a.block and a.entries is not None:
        require(a.selected is None, "a block has its entries, of which none are selected")
        require(tokens % a.block == 0, f"{tokens} tokens cannot be divided into blocks of {a.block}")
        expect("entries", a.entries, (tokens, dim), a.q.dtype)
    elif a.entries is not None:
        expect("entries", a.entries, (-1, -1, dim), a.q.dtype, dense=False)
        expect("entries[0]", a.entries[0], a.entries.shape[1:])
        require(
            PAGE % a.entries.shape[1] == 0,
            f"entries has {a.entries.shape[1]} a page; that must divide {PAGE}",
        )
    if a.selected is not None:
        require(a.entries is not None, "selected is given, and no entries to select from")
        expect("selected", a.selected, (tokens, -1), int32)
    expect("sinks", a.sinks, (heads,), float32)
    expect_cos_sin(a.cos_sin, dim)
    expect("positions", a.positions, (tokens,), int32)
    expect("token_slots", a.token_slots, (tokens,), int32)
    expect("kv_tables", a.kv_tables, (-1, -1), int32)
    expect("entry_tables", a.entry_tables, (a.kv_tables.shape[0], -1), int32)
    require(a.scale > 0, f"scale is {a.scale}; it must be positive")
    require(a.eps > 0, f"eps is {a.eps}; it must be positive")
    require(not a.block or a.entries is not None, "a block has entries")
    require(1 <= a.window <= PAGE, f"window is {a.window}; it must be in [1, {PAGE}]")


def _reference(a: SparseAttendArgs[Array]) -> None:
    dtype = a.q.dtype
    unit = f32(rms_norm(a.q, np.ones(a.q.shape[2], np.float32), a.eps))
    turned = rounded(rotated_pairs(unit, a.cos_sin, a.positions), dtype)
    o = np.zeros_like(turned)
    for token in np.flatnonzero(a.token_slots):
        # One query at a time: the result must not depend on the chunk.
        slot, p = a.token_slots[token], int(a.positions[token])
        rows = len(o) // a.block if a.block else 1
        end = int(a.positions[token % rows]) if a.block else p + 1
        position = np.arange(max(0, end - a.window), end)
        parts = [f32(a.kv[a.kv_tables[slot, position // PAGE], position % PAGE])]
        if a.block and a.entries is not None:
            parts.append(f32(a.entries[token % rows :: rows]))
        elif a.entries is not None:
            per_page = a.entries.shape[1]
            w = np.arange((p + 1) // (PAGE // per_page))
            if a.selected is not None:
                w = a.selected[token, : len(w)]
            parts.append(f32(a.entries[a.entry_tables[slot, w // per_page], w % per_page]))
        keys = np.concatenate(parts)
        logits = (turned[token] @ keys.T) * np.float32(a.scale)
        top = np.maximum(logits.max(axis=1), a.sinks)[:, None]
        weights = np.exp(logits - top)
        total = weights.sum(axis=1, keepdims=True) + np.exp(a.sinks[:, None] - top)
        o[token] = rounded(rounded(weights, dtype) @ keys / total, dtype)
    a.out[:] = rotated_pairs(o, a.cos_sin, a.positions, back=True).reshape(a.out.shape)


def _launches(target: Target, a: SparseAttendArgs[Tensor]) -> Iterator[Command]:
    a.require_kernel()
    yield from a.launches(target, a.tuning(target))


def _cost(workload: Workload, a: SparseAttendArgs[Tensor]) -> Cost:
    """A row's window and entries count once, or, where tokens choose their own, once a token (at most all of them)."""
    _, heads, dim = a.q.shape
    context = workload.qk_pairs / max(1, workload.tokens)  # tokens that a query sees, on average
    raw = workload.rows * a.window + workload.tokens - workload.rows
    pairs, held = workload.tokens * min(a.window, context), float(min(raw, workload.kv_tokens))
    if a.block:
        pairs += workload.tokens * a.block
        held += workload.tokens
    elif a.entries is not None:
        ratio = PAGE // a.entries.shape[1]
        each = context / ratio if a.selected is None else min(a.selected.shape[1], context / ratio)
        pairs += workload.tokens * each
        held += min(workload.kv_tokens / ratio, workload.tokens * each)
    moved = int(held) * dim * a.kv.itemsize + 2 * workload.tokens * heads * dim * a.q.itemsize
    chosen = 4 * workload.tokens * a.selected.shape[1] if a.selected is not None else 0
    return Cost(moved + chosen, int(4 * pairs * heads * dim))


sparse_attend = Op(
    "sparse_attend",
    SparseAttendArgs[Tensor],
    check=_check,
    reference=_reference,
    launches=_launches,
    cost=_cost,
)
