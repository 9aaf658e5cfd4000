"""index_topk: the compressed entries that each token attends to, by the indexer's scores."""

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
    expect_columns,
    expect_cos_sin,
    f32,
    hadamard,
    q4,
    require,
    rounded,
)
from openinfer.recipes.deepseek_v4.ops import PAGE, rope, seen
from openinfer.recipes.deepseek_v4.sparse import IndexTopkArgs
from openinfer.tensor import Tensor, float32, int32


def _check(a: IndexTopkArgs[Tensor]) -> None:
    expect("q", a.q, (-1, -1, -1), *FLOATS)
    tokens, heads, dim = a.q.shape
    expect_columns("weights", a.weights, (tokens, heads), float32)
    expect("keys", a.keys, (-1, -1, dim), a.q.dtype, dense=False)
    expect("keys[0]", a.keys[0], a.keys.shape[1:])
    require(
        PAGE % a.keys.shape[1] == 0, f"keys has {a.keys.shape[1]} entries a page; that must divide {PAGE}"
    )
    expect("selected", a.selected, (tokens, -1), int32)
    expect_cos_sin(a.cos_sin, dim)
    expect("positions", a.positions, (tokens,), int32)
    expect("token_slots", a.token_slots, (tokens,), int32)
    expect("block_tables", a.block_tables, (-1, -1), int32)
    require(a.selected.shape[1] >= 1, "selected has no columns; at least one entry is chosen")
    require(dim & (dim - 1) == 0 and dim >= 32, f"q has heads of {dim}; it must be a power of two from 32")
    require(a.scale > 0, f"scale is {a.scale}; it must be positive")


def _reference(a: IndexTopkArgs[Array]) -> None:
    per_page, most = a.keys.shape[1], a.selected.shape[1]
    window = PAGE // per_page
    a.selected[:] = -1
    for token in np.flatnonzero(
        a.token_slots
    ):  # one query at a time: the result must not depend on the chunk
        sees = (a.positions[token] + 1) // window
        if sees <= most:
            a.selected[token, :sees] = np.arange(sees)
            continue
        pages = a.block_tables[a.token_slots[token], : -(-sees // per_page)]
        held = f32(a.keys[pages]).reshape(-1, a.keys.shape[2])[:sees]
        query = rounded(
            rope(f32(a.q[token : token + 1]), a.cos_sin, a.positions[token : token + 1]), a.q.dtype
        )[0]
        if a.quantized:
            query = q4(rounded(hadamard(query), a.q.dtype))
        scores = (a.weights[token] * np.float32(a.scale)) @ np.maximum(query @ held.T, 0)
        a.selected[token] = np.sort(np.argsort(-scores, kind="stable")[:most])


def _launches(target: Target, a: IndexTopkArgs[Tensor]) -> Iterator[Command]:
    a.require_kernel()
    yield from a.launches(a.tuning(target))


def _cost(workload: Workload, a: IndexTopkArgs[Tensor]) -> Cost:
    """Decode rows read all their keys; where many tokens of a row are in a step, its keys count once."""
    _, heads, dim = a.q.shape
    window = PAGE // a.keys.shape[1]
    held = workload.kv_tokens // window * dim * a.keys.itemsize
    tokens = workload.tokens * (heads * (dim * a.q.itemsize + 4) + a.selected.shape[1] * 4)
    pairs = int(workload.tokens * seen(workload) / window)
    return Cost(held + tokens, 2 * pairs * heads * dim)


index_topk = Op(
    "index_topk", IndexTopkArgs[Tensor], check=_check, reference=_reference, launches=_launches, cost=_cost
)
