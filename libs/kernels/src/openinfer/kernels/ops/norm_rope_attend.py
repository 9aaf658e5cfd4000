"""norm_rope_attend: attention of a step from its qkv projection; qk_norm_rope_write and attend as one op."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, Generic

import numpy as np

from openinfer.kernels.attention import NEW_PAIRS, attention_launches, choose_attention, new_tokens
from openinfer.kernels.attention.call import AttendArgs, AttentionCall
from openinfer.kernels.attention.kv_cache import cached_bytes, expect_cache
from openinfer.kernels.op.contract import FLOATS, expect, expect_each, expect_max_q_len, expect_rows, require
from openinfer.kernels.op.launch import Command, Scratch
from openinfer.kernels.op.op import Cost, Op, T, Workload, tensors
from openinfer.kernels.op.reference import Array
from openinfer.kernels.op.target import Target
from openinfer.kernels.ops.attend import attend, require_attention
from openinfer.kernels.ops.qk_norm_rope_write import (
    WriteArgs,
    expect_norms,
    left_out,
    qk_norm_rope_write,
    write_launch,
)
from openinfer.tensor import Tensor, float32, int32


@cache
def _shared(kind: type) -> tuple[str, ...]:
    """The arguments of an op that norm_rope_attend has too."""
    return tuple(field.name for field in fields(kind) if field.name not in ("q", "window"))


@dataclass(frozen=True, kw_only=True, slots=True)
class QkvAttentionArgs(Generic[T]):
    """Attention of a step from its qkv projection: the arguments of qk_norm_rope_write and attend but q and window."""

    out: T
    kv: T
    kv_scales: T | None = None
    qkv: T
    q_norm: T | None = None
    k_norm: T | None = None
    cos_sin: T
    positions: T
    token_slots: T
    slots: T
    q_starts: T
    seq_lens: T
    alive: T
    block_tables: T
    eps: float
    scale: float
    max_q_len: int

    def writing(self, q: Any) -> WriteArgs[T]:
        """The arguments of qk_norm_rope_write; q may be scratch."""
        return WriteArgs(q=q, **self._of(WriteArgs))

    def attending(self, q: Any, window: int) -> AttendArgs[T]:
        """The arguments of attend; q may be scratch."""
        return AttendArgs(q=q, window=window, **self._of(AttendArgs))

    def expect(self: "QkvAttentionArgs[Tensor]", *, gated: bool) -> None:
        """Raise ContractError for arguments, but the norms and the angles, that cannot be. gated: qkv has a gate for
        each query head."""
        expect("out", self.out, (-1, -1), *FLOATS)
        expect_cache(self.kv, self.kv_scales, -1, self.out.dtype)
        _, _, kv_heads, page_size, dim = self.kv.shape
        tokens, heads = self.out.shape[0], self.out.shape[1] // dim
        even = heads * dim == self.out.shape[1] and heads % kv_heads == 0
        require(even, f"out is {self.out.shape}: not a multiple of {kv_heads} heads of {dim}")
        expect("qkv", self.qkv, (tokens, ((1 + gated) * heads + 2 * kv_heads) * dim), self.out.dtype)
        expect_each(self, (tokens,), int32, "positions", "token_slots")
        rows, size = expect_rows(self.slots, self.q_starts, seq_lens=self.seq_lens, alive=self.alive)
        expect("block_tables", self.block_tables, (size, -1), int32)
        require(page_size & (page_size - 1) == 0, f"page size is {page_size}; it must be a power of two")
        require(dim % 16 == 0, f"head size is {dim}; it must be a multiple of 16")
        require(self.eps > 0, f"eps is {self.eps}; it must be positive")
        require(self.scale > 0, f"scale is {self.scale}; it must be positive")
        expect_max_q_len(self.max_q_len, tokens, rows)

    def _of(self, kind: type) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _shared(kind)}


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeAttentionArgs(QkvAttentionArgs[T], Generic[T]):
    """qk_norm_rope_write of qkv [T, (A + 2 G) d] into kv, then attend with its queries to out [T, A * d].

    Arguments are those of the two ops; positions and token_slots are made by expand_rows from slots, q_starts, seq_lens
    and alive.
    """

    window: int


def _check(a: RopeAttentionArgs[Tensor]) -> None:
    a.expect(gated=False)
    dim = a.kv.shape[4]
    expect_norms(a.q_norm, a.k_norm, dim, a.out.dtype)
    expect("cos_sin", a.cos_sin, (-1, 2, dim // 2), float32)
    require(a.window >= 0, f"window is {a.window}; it must be 0 (none) or positive")


def _reference(a: RopeAttentionArgs[Array]) -> None:
    dim = a.kv.shape[-1]
    q = np.empty((a.out.shape[0], a.out.shape[1] // dim, dim), a.out.dtype)
    qk_norm_rope_write.reference(a.writing(q))
    attend.reference(a.attending(q, a.window))


def _launches(target: Target, a: RopeAttentionArgs[Tensor]) -> Iterator[Command]:
    dim, page_size = a.kv.shape[4], a.kv.shape[3]
    require_attention(a.out.dtype, dim, page_size)
    q = Scratch((a.out.shape[0], a.out.shape[1] // dim, dim), a.out.dtype)
    call = AttentionCall.of(a.attending(q, a.window))
    choice = choose_attention(target, call)
    one = a.max_q_len == 1 and call.group <= NEW_PAIRS and not target.batch_invariant
    if one and choice.decode is None:
        new = tensors(a, "qkv", "q_norm", "k_norm", "cos_sin")
        yield new_tokens(call, choice, new, left_out(a, "q_norm", "k_norm"), a.eps, rotary=dim)
        return
    yield write_launch(target, a.writing(q), early_behind=one and choice.decode is not None)
    yield from attention_launches(call, choice, a.max_q_len)


def _cost(workload: Workload, a: QkvAttentionArgs[Tensor]) -> Cost:
    tokens = workload.tokens
    cached = (workload.kv_tokens + tokens) * cached_bytes(a.kv, a.kv_scales)
    moved = tokens * (a.qkv.shape[1] + a.out.shape[1]) * a.out.itemsize
    return Cost(cached + moved, 4 * workload.qk_pairs * a.out.shape[1] + 8 * tokens * a.qkv.shape[1])


norm_rope_attend = Op(
    "norm_rope_attend", RopeAttentionArgs[Tensor], _check, _reference, _launches, _cost,
    writes=("out", "kv", "kv_scales"),
)  # fmt: skip
