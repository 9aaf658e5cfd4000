"""qk_norm_rope_write: per-head norms, rotary embedding, and the write into the paged cache."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Generic

import numpy as np

from openinfer.kernels.attention.kv_cache import cached_bytes, expect_cache
from openinfer.kernels.linear.choices import releases
from openinfer.kernels.op.contract import FLOATS, expect, expect_cos_sin, expect_each, require
from openinfer.kernels.op.launch import Aligned, Arg, Command, Launch, launch, power_of_two
from openinfer.kernels.op.op import Cost, Op, T, Workload, tensors
from openinfer.kernels.op.reference import Array, f32, rms_norm
from openinfer.kernels.op.rounding import q8_codes
from openinfer.kernels.op.target import Target
from openinfer.tensor import Tensor, bfloat16, float32, int32


@dataclass(frozen=True, kw_only=True, slots=True)
class WriteArgs(Generic[T]):
    """Split qkv into heads; normalise q and k per head (rms_norm with q_norm, k_norm); rotate both; write q, and k
    and v to the cache.

    qkv [T, (A + 2 G) d]: A query heads, G key heads, G value heads; or [T, (2 A + 2 G) d]: each query head is followed
    by d columns of its output gate, which are not read here. q out [T, A, d]. kv out [pages, 2, G, page_size, d], and
    kv_scales out of an FP8 cache: one layer of the cache (K, then V; kv_cache.expect_cache). Codes are those of the
    values rounded to q's dtype (rounding.q8_codes). q_norm, k_norm [d]. All but an FP8 cache of one float dtype; q_norm
    and k_norm may both be float32 (as in norm_linear), or both be left out: then q and k are rotated without a norm.
    cos_sin float32 [P, 2, r/2]: cosines and sines by position, P > every position; of each head the
    first r <= d elements are rotated, element i with i + r/2. positions, token_slots int32 [T]; block_tables int32
    [S, B]: the page of position p of slot s is block_tables[s, p // page_size]. Slot 0's table names page 0, the
    padding page, which no row reads, so tokens of slot 0 may write there or not at all. d is a multiple of 16.
    Without q the step attends to nothing: A is 0, and qkv [T, 2 G d] has keys and values.
    """

    q: T | None
    kv: T
    kv_scales: T | None = None
    qkv: T
    q_norm: T | None = None
    k_norm: T | None = None
    cos_sin: T
    positions: T
    token_slots: T
    block_tables: T
    eps: float


def _check(a: WriteArgs[Tensor]) -> None:
    tokens, heads, dim = _shape(a)
    if a.q is not None:
        expect("q", a.q, (-1, -1, -1), *FLOATS)
    expect_cache(a.kv, a.kv_scales, dim, a.qkv.dtype)
    kv_heads, page_size = a.kv.shape[2:4]
    gated = heads > 0 and a.qkv.shape[-1] == 2 * (heads + kv_heads) * dim
    width, dtype = ((1 + gated) * heads + 2 * kv_heads) * dim, (a.qkv if a.q is None else a.q).dtype
    expect("qkv", a.qkv, (tokens, width), dtype)
    expect_norms(a.q_norm, a.k_norm, dim, a.qkv.dtype, float32)
    expect_cos_sin(a.cos_sin, dim)
    expect_each(a, (tokens,), int32, "positions", "token_slots")
    expect("block_tables", a.block_tables, (-1, -1), int32)
    require(heads % kv_heads == 0, f"{heads} query heads cannot share {kv_heads} key heads evenly")
    require(dim % 16 == 0, f"head size is {dim}; it must be a multiple of 16")
    require(page_size & (page_size - 1) == 0, f"page size is {page_size}; it must be a power of two")


def _shape(a: WriteArgs[Any]) -> tuple[int, int, int]:
    """Tokens, query heads and the size of a head."""
    tokens, heads, dim = (a.qkv.shape[0], 0, a.kv.shape[-1]) if a.q is None else a.q.shape
    return tokens, heads, dim


def expect_norms(q_norm: Tensor | None, k_norm: Tensor | None, dim: int, *dtypes: np.dtype[Any]) -> None:
    """Raise ContractError unless both norms are [dim], of one of the dtypes, or neither is given."""
    if q_norm is not None and k_norm is not None:
        expect("q_norm", q_norm, (dim,), *dtypes)
        expect("k_norm", k_norm, (dim,), q_norm.dtype)
    else:
        require(q_norm is k_norm, "q_norm and k_norm must both be given, or neither")


def _rope(x: Array, cos: Array, sin: Array) -> Array:
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)


def _reference(a: WriteArgs[Array]) -> None:
    tokens, heads, dim = _shape(a)
    kv_heads, page_size = a.kv.shape[2:4]
    split = a.qkv.reshape(tokens, -1, dim)
    step = 2 if split.shape[1] == 2 * (heads + kv_heads) else 1
    first = step * heads  # of the key heads
    cos, sin = a.cos_sin[a.positions, 0][:, None], a.cos_sin[a.positions, 1][:, None]
    queries, keys = split[:, :first:step], split[:, first : first + kv_heads]
    if a.q_norm is not None and a.k_norm is not None:
        queries, keys = rms_norm(queries, a.q_norm, a.eps), rms_norm(keys, a.k_norm, a.eps)
    turned = _rope(f32(np.concatenate((queries, keys), axis=1)), cos, sin)
    if a.q is not None:
        a.q[:] = turned[:, :heads]
    live = np.flatnonzero(a.token_slots)
    position = a.positions[live]
    page = a.block_tables[a.token_slots[live], position // page_size]
    key = turned[live, heads:].astype(a.qkv.dtype, copy=False)
    for part, vectors in enumerate((key, split[live, first + kv_heads :])):
        if a.kv_scales is None:
            a.kv[page, part, :, position % page_size] = vectors
        else:
            codes, scales = q8_codes(f32(vectors))
            a.kv[page, part, :, position % page_size] = codes
            a.kv_scales[page, part, :, position % page_size] = scales


def left_out(a: Any, *names: str) -> dict[str, None]:
    """The constants in place of the tensors of these names that a call does not have."""
    return {name: None for name in names if getattr(a, name) is None}


def write_launch(target: Target, a: WriteArgs[Any], *, early_behind: bool = False) -> Launch:
    """The op's kernel; q may be scratch. early_behind: the kernel behind it starts early."""
    (tokens, heads, dim), dtype = _shape(a), a.qkv.dtype
    kv_heads, page_size = a.kv.shape[2:4]
    require(dtype == bfloat16, f"qkv is {dtype.name}; on a GPU it is bfloat16 (float32: the cpu pack)")
    # Heads a program: many small programs hide latency, large ones cost less. Sums are ordered by it.
    block = 4 if tokens <= 128 and not target.batch_invariant else 16
    rotary = 2 * a.cos_sin.shape[2]
    # With no query heads nothing is written to q.
    args: dict[str, Arg] = {"q": a.qkv if a.q is None else a.q, **tensors(a), "heads": heads}
    args |= {"kv_heads": kv_heads, "table_width": a.block_tables.shape[1]}
    args |= {"page_stride": Aligned(a.kv.strides[0]), "eps": a.eps}
    constants = {"DIM": dim, "ROTARY": rotary, "HALF_BLOCK": power_of_two(rotary // 2)}
    constants |= {"REST_BLOCK": power_of_two(dim - rotary) if rotary < dim else 0, "HEADS": block}
    constants |= {"PAGE": page_size, "GATED": a.qkv.shape[1] != (heads + 2 * kv_heads) * dim}
    without, early = left_out(a, "q_norm", "k_norm", "kv_scales"), early_behind or releases(target, tokens)
    grid, warps = (tokens, -(-(heads + 2 * kv_heads) // block)), max(1, block * power_of_two(dim) // 512)
    kernel = "openinfer.kernels.device.qk_norm_rope_write", "qk_norm_rope_write", grid
    return launch(*kernel, args, {**constants, **without}, num_warps=warps, early=early)


def _launches(target: Target, a: WriteArgs[Tensor]) -> Iterator[Command]:
    yield write_launch(target, a)


def _cost(workload: Workload, a: WriteArgs[Tensor]) -> Cost:
    queries = 0 if a.q is None else a.q.shape[1] * a.q.shape[2] * a.q.itemsize
    moved = a.qkv.shape[1] * a.qkv.itemsize + queries + cached_bytes(a.kv, a.kv_scales)
    return Cost(workload.tokens * moved, 8 * workload.tokens * a.qkv.shape[1])


qk_norm_rope_write = Op(
    "qk_norm_rope_write", WriteArgs[Tensor], _check, _reference, _launches, _cost,
    writes=("q", "kv", "kv_scales"),
)  # fmt: skip
