"""norm_rope_attend: attention of a step from its qkv projection; qk_norm_rope_write and attend as one op."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from openinfer.kernels.attention.call import AttentionCall
from openinfer.kernels.attention.choose import NEW_PAIRS, choose, launches, new_tokens
from openinfer.kernels.attention.kv_cache import cached_bytes, expect_cache
from openinfer.kernels.op.contract import FLOATS, expect, expect_max_q_len, expect_rows, require
from openinfer.kernels.op.launch import Command, Scratch
from openinfer.kernels.op.op import Cost, Op, Workload
from openinfer.kernels.op.reference import Array
from openinfer.kernels.op.target import Target
from openinfer.kernels.ops.attend import attend, require_attention
from openinfer.kernels.ops.qk_norm_rope_write import expect_norms, norm_args, qk_norm_rope_write, write_launch
from openinfer.tensor import Tensor, float32, int32

WRITING = (
    "kv",
    "kv_scales",
    "qkv",
    "q_norm",
    "k_norm",
    "cos_sin",
    "positions",
    "token_slots",
    "block_tables",
    "eps",
)
"""The arguments of qk_norm_rope_write but q."""
ATTENDING = ("kv", "kv_scales", "slots", "q_starts", "seq_lens", "alive", "block_tables")
"""The tensors of attend but q and out."""


def _contract(
    *,
    out: Tensor,
    kv: Tensor,
    kv_scales: Tensor | None = None,
    qkv: Tensor,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    cos_sin: Tensor,
    positions: Tensor,
    token_slots: Tensor,
    slots: Tensor,
    q_starts: Tensor,
    seq_lens: Tensor,
    alive: Tensor,
    block_tables: Tensor,
    eps: float,
    scale: float,
    window: int,
    max_q_len: int,
) -> None:
    """qk_norm_rope_write of qkv [T, (A + 2 G) d] into kv, then attend with its queries to out [T, A * d].

    Arguments are those of the two ops; positions and token_slots are made by expand_rows from slots, q_starts, seq_lens
    and alive.
    """
    expect("out", out, (-1, -1), *FLOATS)
    expect_cache(kv, kv_scales, -1, out.dtype)
    _, _, kv_heads, page_size, dim = kv.shape
    tokens, heads = out.shape[0], out.shape[1] // dim
    require(
        heads * dim == out.shape[1] and heads % kv_heads == 0,
        f"out is {out.shape}: not a multiple of {kv_heads} heads of {dim}",
    )
    expect("qkv", qkv, (tokens, (heads + 2 * kv_heads) * dim), out.dtype)
    expect_norms(q_norm, k_norm, dim, out.dtype)
    expect("cos_sin", cos_sin, (-1, 2, dim // 2), float32)
    expect("positions", positions, (tokens,), int32)
    expect("token_slots", token_slots, (tokens,), int32)
    rows, size = expect_rows(slots, q_starts, seq_lens=seq_lens, alive=alive)
    expect("block_tables", block_tables, (size, -1), int32)
    require(page_size & (page_size - 1) == 0, f"page size is {page_size}; it must be a power of two")
    require(dim % 16 == 0, f"head size is {dim}; it must be a multiple of 16")
    require(eps > 0, f"eps is {eps}; it must be positive")
    require(scale > 0, f"scale is {scale}; it must be positive")
    require(window >= 0, f"window is {window}; it must be 0 (none) or positive")
    expect_max_q_len(max_q_len, tokens, rows)


def _reference(*, out: Array, scale: float, window: int, max_q_len: int, **rest: Any) -> None:
    dim = rest["kv"].shape[-1]
    q = np.empty((out.shape[0], out.shape[1] // dim, dim), out.dtype)
    qk_norm_rope_write.reference(q=q, **{name: rest.get(name) for name in WRITING})
    given = {name: rest.get(name) for name in ATTENDING}
    attend.reference(out=out, q=q, scale=scale, window=window, max_q_len=max_q_len, **given)


def _launches(
    target: Target, *, out: Tensor, scale: float, window: int, max_q_len: int, **rest: Any
) -> Iterator[Command]:
    kv, eps = rest["kv"], rest["eps"]
    dim, page_size = kv.shape[4], kv.shape[3]
    require_attention(out.dtype, dim, page_size)
    q = Scratch((out.shape[0], out.shape[1] // dim, dim), out.dtype)
    tensors: Mapping[str, Any] = {"out": out, "q": q, **{name: rest.get(name) for name in ATTENDING}}
    call = AttentionCall.of(tensors, scale, window)
    choice = choose(target, call)
    one = max_q_len == 1 and call.group <= NEW_PAIRS and not target.batch_invariant
    if one and choice.decode is None:
        norms, left_out = norm_args(rest.get("q_norm"), rest.get("k_norm"))
        new = {"qkv": rest["qkv"], **norms, "cos_sin": rest["cos_sin"]}
        yield new_tokens(call, choice, new, left_out, eps)
        return
    writing: Mapping[str, Any] = {name: rest.get(name) for name in WRITING}
    yield write_launch(target, q=q, early_behind=one and choice.decode is not None, **writing)
    yield from launches(call, choice, max_q_len)


def _cost(
    workload: Workload, *, out: Tensor, kv: Tensor, kv_scales: Tensor | None = None, qkv: Tensor, **_: object
) -> Cost:
    tokens = workload.tokens
    cached = (workload.kv_tokens + tokens) * cached_bytes(kv, kv_scales)
    moved = tokens * (qkv.shape[1] + out.shape[1]) * out.itemsize
    return Cost(cached + moved, 4 * workload.qk_pairs * out.shape[1] + 8 * tokens * qkv.shape[1])


norm_rope_attend = Op("norm_rope_attend", _contract, reference=_reference, launches=_launches, cost=_cost)
