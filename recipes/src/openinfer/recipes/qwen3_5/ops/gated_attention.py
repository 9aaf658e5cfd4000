"""gated_attention: from a step's qkv projection to the input of its output projection. sigmoid_gate: a gate alone."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic

import numpy as np

from openinfer.kernels import attend, norm_rope_attend, qk_norm_rope_write
from openinfer.kernels import authoring as op
from openinfer.kernels.authoring import Array, Command, Cost, Op, Scratch, T, Target, Workload
from openinfer.recipes.qwen3_5.ops.gated_delta_net import sigmoid
from openinfer.tensor import Tensor, float32


@dataclass(frozen=True, kw_only=True, slots=True)
class GateArgs(Generic[T]):
    """out *= sigmoid(gate), in place. out [T, A, d], gate [T, A, d] or [T, A, 1] (one for all of d), of one float
    dtype; the first two axes of gate are at any stride. The sigmoid is rounded, then the product."""

    out: T
    gate: T


def _gate_check(a: GateArgs[Tensor]) -> None:
    op.expect("out", a.out, (-1, -1, -1), *op.FLOATS)
    tokens, heads, dim = a.out.shape
    op.expect("gate", a.gate, (tokens, heads, -1), a.out.dtype, dense=False)
    fits = a.gate.shape[2] in (1, dim)
    op.require(fits, f"gate has {a.gate.shape[2]} columns a head; it must have 1 or {dim}")
    op.require(
        a.gate.shape[2] == 1 or a.gate.strides[2] == 1, "the columns of gate must be next to each other"
    )


def _gate_reference(a: GateArgs[Array]) -> None:
    a.out[:] = op.f32(a.out) * op.rounded(sigmoid(op.f32(a.gate)), a.out.dtype)


def _gate_launches(target: Target, a: GateArgs[Tensor]) -> Iterator[Command]:
    (tokens, heads, dim), block = a.out.shape, 1024
    by_token, by_head = (op.aligned(stride) for stride in a.gate.strides[:2])
    sizes = {"width": op.aligned(heads * dim), "token_stride": by_token, "head_stride": by_head}
    constants = {"DIM": dim, "GATES": a.gate.shape[2], "BLOCK": block}
    yield op.launch(
        "openinfer.recipes.qwen3_5.device.gates", "sigmoid_gate", (tokens, -(-heads * dim // block)),
        {**op.tensors(a), **sizes}, constants, early=target.starts_early,
    )  # fmt: skip


def _gate_cost(workload: Workload, a: GateArgs[Tensor]) -> Cost:
    heads, dim = a.out.shape[1:]
    numbers = workload.tokens * heads * (2 * dim + a.gate.shape[2])
    return Cost(numbers * a.out.itemsize, workload.tokens * heads * dim)


sigmoid_gate = Op("sigmoid_gate", GateArgs[Tensor], _gate_check, _gate_reference, _gate_launches, _gate_cost)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Args(op.QkvAttentionArgs[T], Generic[T]):
    """Three ops in one: qk_norm_rope_write, attend and sigmoid_gate.

    qk_norm_rope_write takes qkv [T, (2 A + 2 G) d] and writes kv. attend takes its queries and writes out [T, A * d].
    sigmoid_gate multiplies out by the sigmoid of the gates in qkv. Arguments are those of the three ops; positions and
    token_slots are made by expand_rows from slots, q_starts, seq_lens and alive.
    """

    q_norm: T
    k_norm: T


def _check(a: _Args[Tensor]) -> None:
    a.expect(gated=True)
    dim = a.kv.shape[4]
    op.expect("q_norm", a.q_norm, (dim,), a.out.dtype, float32)
    op.expect("k_norm", a.k_norm, (dim,), a.q_norm.dtype)
    op.expect_cos_sin(a.cos_sin, dim)


def _reference(a: _Args[Array]) -> None:
    dim = a.kv.shape[-1]
    shape = (a.out.shape[0], a.out.shape[1] // dim, dim)
    q = np.empty(shape, a.out.dtype)
    qk_norm_rope_write.reference(a.writing(q))
    attend.reference(a.attending(q, 0))
    gates = a.qkv[:, : 2 * shape[1] * dim].reshape(*shape[:2], 2, dim)[:, :, 1]
    sigmoid_gate.reference(GateArgs(out=a.out.reshape(shape), gate=gates))


def columns(wide: Tensor, first: int, shape: tuple[int, int], strides: tuple[int, int]) -> Tensor:
    """A view [T, *shape] of wide [T, N] that starts at column `first` of each row."""
    start, row = wide[:, first:], wide.strides[0]
    return Tensor(start.ptr, (wide.shape[0], *shape), wide.dtype, wide.device, (row, *strides), wide.owner)


def _launches(target: Target, a: _Args[Tensor]) -> Iterator[Command]:
    page_size, dim = a.kv.shape[3:]
    op.require_attention(a.out.dtype, dim, page_size)
    shape = (a.out.shape[0], a.out.shape[1] // dim, dim)
    q = Scratch(shape, a.out.dtype)
    call = op.AttentionCall.of(a.attending(q, 0))
    gates_of_heads = columns(a.qkv, dim, (shape[1], dim), (2 * dim, 1))
    if pairs := op.attend_pairs(target, call, a.max_q_len, gates_of_heads):
        yield op.write_launch(target, a.writing(q), early_behind=True)
        yield pairs
        return
    choice = op.choose_attention(target, call)
    rotary = 2 * a.cos_sin.shape[2]
    # With more programs than SMs nothing hides what a program does before its first page, and three kernels are faster.
    one_kernel = call.group <= op.NEW_PAIRS and call.rows * call.kv_heads <= target.num_sms
    if a.max_q_len == 1 and one_kernel and rotary >= 2 and not target.batch_invariant:
        new = op.tensors(a, "qkv", "q_norm", "k_norm", "cos_sin")
        yield op.new_tokens(call, choice, new, {}, a.eps, rotary=rotary, gated=True)
        return
    yield op.write_launch(target, a.writing(q))
    yield from op.attention_launches(call, choice, a.max_q_len)
    gates = GateArgs(out=a.out.reshape(*shape), gate=gates_of_heads)
    yield from sigmoid_gate.launches(target, gates)


gated_attention = Op(
    "gated_attention", _Args[Tensor], _check, _reference, _launches, norm_rope_attend.cost,
    writes=("out", "kv", "kv_scales"),
)  # fmt: skip
