"""gated_attention: attention of a step from its qkv projection to the input of its output projection."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from openinfer.kernels import attend, norm_rope_attend, qk_norm_rope_write
from openinfer.kernels.authoring import (
    ATTENDING,
    FLOATS,
    MERGED_AT_ONCE,
    NEW_PAIRS,
    WRITING,
    Arg,
    Array,
    AttentionCall,
    AttentionChoice,
    Command,
    Op,
    Scratch,
    Target,
    attention_launches,
    choose_attention,
    expect,
    expect_cache,
    expect_cos_sin,
    expect_max_q_len,
    expect_rows,
    launch,
    power_of_two,
    require,
    require_attention,
    write_launch,
)
from openinfer.recipes.qwen3_5.ops.sigmoid_gate import sigmoid_gate
from openinfer.tensor import Tensor, float32, int32


def _contract(
    *,
    out: Tensor,
    kv: Tensor,
    kv_scales: Tensor | None = None,
    qkv: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
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
    max_q_len: int,
) -> None:
    """Three ops in one: qk_norm_rope_write, attend and sigmoid_gate.

    qk_norm_rope_write takes qkv [T, (2 A + 2 G) d] and writes kv. attend takes its queries and writes out [T, A * d].
    sigmoid_gate multiplies out by the sigmoid of the gates in qkv. Arguments are those of the three ops; positions and
    token_slots are made by expand_rows from slots, q_starts, seq_lens and alive.
    """
    expect("out", out, (-1, -1), *FLOATS)
    expect_cache(kv, kv_scales, -1, out.dtype)
    _, _, kv_heads, page_size, dim = kv.shape
    tokens, heads = out.shape[0], out.shape[1] // dim
    require(
        heads * dim == out.shape[1] and heads % kv_heads == 0,
        f"out is {out.shape}: not a multiple of {kv_heads} heads of {dim}",
    )
    expect("qkv", qkv, (tokens, 2 * (heads + kv_heads) * dim), out.dtype)
    expect("q_norm", q_norm, (dim,), out.dtype, float32)
    expect("k_norm", k_norm, (dim,), q_norm.dtype)
    expect_cos_sin(cos_sin, dim)
    expect("positions", positions, (tokens,), int32)
    expect("token_slots", token_slots, (tokens,), int32)
    rows, size = expect_rows(slots, q_starts, seq_lens=seq_lens, alive=alive)
    expect("block_tables", block_tables, (size, -1), int32)
    require(page_size & (page_size - 1) == 0, f"page size is {page_size}; it must be a power of two")
    require(dim % 16 == 0, f"head size is {dim}; it must be a multiple of 16")
    require(eps > 0 and scale > 0, f"eps is {eps} and scale {scale}; both must be positive")
    expect_max_q_len(max_q_len, tokens, rows)


def _reference(*, out: Array, qkv: Array, scale: float, max_q_len: int, **rest: Any) -> None:
    dim = rest["kv"].shape[-1]
    shape = (out.shape[0], out.shape[1] // dim, dim)
    q = np.empty(shape, out.dtype)
    qk_norm_rope_write.reference(q=q, qkv=qkv, **{name: rest.get(name) for name in WRITING if name != "qkv"})
    given = {name: rest.get(name) for name in ATTENDING}
    attend.reference(out=out, q=q, scale=scale, window=0, max_q_len=max_q_len, **given)
    gates = qkv[:, : 2 * shape[1] * dim].reshape(*shape[:2], 2, dim)[:, :, 1]
    sigmoid_gate.reference(out=out.reshape(shape), gate=gates)


def gates_of(qkv: Tensor, heads: int, dim: int) -> Tensor:
    """A view [T, heads, dim] of the gates in qkv: of each query head's 2 dim columns the last."""
    start, row = qkv[:, dim:], qkv.strides[0]
    shape = (qkv.shape[0], heads, dim)
    return Tensor(start.ptr, shape, qkv.dtype, qkv.device, (row, 2 * dim, 1), start.owner)


def _launches(
    target: Target, *, out: Tensor, qkv: Tensor, scale: float, max_q_len: int, **rest: Any
) -> Iterator[Command]:
    kv, eps = rest["kv"], rest["eps"]
    page_size, dim = kv.shape[3:]
    require_attention(out.dtype, dim, page_size)
    shape = (out.shape[0], out.shape[1] // dim, dim)
    q = Scratch(shape, out.dtype)
    tensors: Mapping[str, Any] = {"out": out, "q": q, **{name: rest.get(name) for name in ATTENDING}}
    call = AttentionCall.of(tensors, scale, 0)
    choice = choose_attention(target, call)
    rotary = 2 * rest["cos_sin"].shape[2]
    one_kernel = call.group <= NEW_PAIRS and call.rows * call.kv_heads <= target.num_sms
    if max_q_len == 1 and one_kernel and rotary >= 2 and not target.batch_invariant:
        new = {"qkv": qkv, **{name: rest[name] for name in ("q_norm", "k_norm", "cos_sin")}}
        yield _decode(call, choice, new, eps, rotary)
        return
    writing: Mapping[str, Any] = {name: rest.get(name) for name in WRITING if name != "qkv"}
    yield write_launch(target, q=q, qkv=qkv, **writing)
    yield from attention_launches(call, choice, max_q_len)
    yield from sigmoid_gate.launches(target, out=out.reshape(*shape), gate=gates_of(qkv, shape[1], dim))


def _decode(
    call: AttentionCall, choice: AttentionChoice, new: Mapping[str, Arg], eps: float, rotary: int
) -> Command:
    """All of a decode step's attention in one kernel.

    This pays only where there are fewer programs than SMs. With more, the work of a program before its first page is
    not hidden, and three separate kernels are faster. docs/lessons/attention.md has the times on an H200.
    """
    splits, group, tile = choice.splits, call.group, choice.short
    merged = power_of_two(group)
    heads, parts = (call.rows, call.kv_heads), (call.rows, call.kv_heads, splits, group)
    args: dict[str, Arg] = {
        "out": call.args["out"],
        **call.cache,
        **new,
        **{name: call.args[name] for name in ("slots", "q_starts", "seq_lens", "alive", "block_tables")},
        **{name: call.args[name] for name in ("table_width", "page_stride", "scale")},
        "eps": eps,
        "partial": Scratch((*parts, call.dim), float32),
        "weight": Scratch(parts, float32),
        "arrived": Scratch(heads, int32, zeroed=True),
        "tokens": call.tokens,
        "part_size": choice.part_size,
    }
    constants = {
        **call.constants(tile),
        "ROTARY": rotary,
        "MR": merged,
        "MERGE": max(1, MERGED_AT_ONCE // (merged * call.dim)),
        **call.without,
        "PAIRS": choice.pairs,
    }
    return launch(
        "openinfer.recipes.qwen3_5.device.gated_attention",
        "attend_gated",
        (*heads, splits),
        args,
        constants,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


gated_attention = Op(
    "gated_attention", _contract, reference=_reference, launches=_launches, cost=norm_rope_attend.cost
)
