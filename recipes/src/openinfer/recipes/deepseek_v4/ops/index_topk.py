"""index_topk: the compressed entries that each token attends to, by the indexer's scores."""

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
    expect_columns,
    expect_cos_sin,
    f32,
    hadamard,
    q4,
    require,
    rounded,
)
from openinfer.recipes.deepseek_v4.ops.common import PAGE, rope, seen
from openinfer.recipes.deepseek_v4.sparse import Index
from openinfer.tensor import Tensor, float32, int32


def _contract(
    *,
    selected: Tensor,
    q: Tensor,
    weights: Tensor,
    keys: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    token_slots: Tensor,
    block_tables: Tensor,
    scale: float,
    quantized: bool,
) -> None:
    """selected[t] = the K entries with the largest scores among those that token t sees, in any order; where it sees
    fewer, all of them first and then -1.

    Token t is at position p = positions[t] of slot s = token_slots[t] (int32 [T], as expand_rows writes them). keys
    [pages, E, d]: one layer of the entry pages, dense within a page, pages at any stride; entry w is at
    block_tables[s, w // E], place w mod E (int32 [S, B]), and covers m = 128 / E tokens; the token sees the entries
    w < (p + 1) // m. They are there already.

        q' = q with the last r channels of each head rotated at positions[t] (pairs 2i, 2i + 1), rounded
        quantized: q' = q4(hadamard(q') rounded), over d                                    (formats; keys are so too)
        score[w] = sum over heads h of weights[t, h] * scale * relu(q'[h] . key_w)          float32

    q [T, H, d] and keys of one float dtype; weights float32 [T, H], rows at any stride; cos_sin float32 [P, 2, r / 2];
    selected int32 [T, K]. Of equal scores the lower entry comes first. Tokens of slot 0, the padding slot, get -1.
    """
    expect("q", q, (-1, -1, -1), *FLOATS)
    tokens, heads, dim = q.shape
    expect_columns("weights", weights, (tokens, heads), float32)
    expect("keys", keys, (-1, -1, dim), q.dtype, dense=False)
    expect("keys[0]", keys[0], keys.shape[1:])
    require(PAGE % keys.shape[1] == 0, f"keys has {keys.shape[1]} entries a page; that must divide {PAGE}")
    expect("selected", selected, (tokens, -1), int32)
    expect_cos_sin(cos_sin, dim)
    expect("positions", positions, (tokens,), int32)
    expect("token_slots", token_slots, (tokens,), int32)
    expect("block_tables", block_tables, (-1, -1), int32)
    require(selected.shape[1] >= 1, "selected has no columns; at least one entry is chosen")
    require(dim & (dim - 1) == 0 and dim >= 32, f"q has heads of {dim}; it must be a power of two from 32")
    require(scale > 0, f"scale is {scale}; it must be positive")


def _reference(
    *,
    selected: Array,
    q: Array,
    weights: Array,
    keys: Array,
    cos_sin: Array,
    positions: Array,
    token_slots: Array,
    block_tables: Array,
    scale: float,
    quantized: bool,
) -> None:
    per_page, most = keys.shape[1], selected.shape[1]
    window = PAGE // per_page
    selected[:] = -1
    for token in np.flatnonzero(token_slots):  # one query at a time: the result must not depend on the chunk
        sees = (positions[token] + 1) // window
        if sees <= most:
            selected[token, :sees] = np.arange(sees)
            continue
        pages = block_tables[token_slots[token], : -(-sees // per_page)]
        held = f32(keys[pages]).reshape(-1, keys.shape[2])[:sees]
        query = rounded(rope(f32(q[token : token + 1]), cos_sin, positions[token : token + 1]), q.dtype)[0]
        if quantized:
            query = q4(rounded(hadamard(query), q.dtype))
        scores = (weights[token] * np.float32(scale)) @ np.maximum(query @ held.T, 0)
        selected[token] = np.sort(np.argsort(-scores, kind="stable")[:most])


def _launches(target: Target, **args: Any) -> Iterator[Command]:
    call = Index(**args)
    call.check()
    yield from call.launches(call.tuning(target))


def _cost(workload: Workload, *, q: Tensor, keys: Tensor, selected: Tensor, **rest: object) -> Cost:
    """Decode rows read all their keys; where many tokens of a row are in a step, its keys count once."""
    _, heads, dim = q.shape
    window = PAGE // keys.shape[1]
    held = workload.kv_tokens // window * dim * keys.itemsize
    tokens = workload.tokens * (heads * (dim * q.itemsize + 4) + selected.shape[1] * 4)
    pairs = int(workload.tokens * seen(workload) / window)
    return Cost(held + tokens, 2 * pairs * heads * dim)


index_topk = Op("index_topk", _contract, reference=_reference, launches=_launches, cost=_cost)
