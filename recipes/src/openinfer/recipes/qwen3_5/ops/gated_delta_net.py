"""gated_delta_net: linear attention between its projections: causal convolution, gated delta rule, gated norm."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from openinfer.kernels.authoring import (
    FLOATS,
    Array,
    CaseRows,
    Command,
    Commands,
    Cost,
    Memory,
    Op,
    OpCase,
    Target,
    Workload,
    expect,
    expect_max_q_len,
    expect_rows,
    f32,
    power_of_two,
    require,
    rounded,
    silu,
)
from openinfer.recipes.qwen3_5 import delta
from openinfer.tensor import Tensor, bfloat16, float32, int32

STATE_CHUNK = delta.CHUNK
"""Snapshots are taken only after multiples of this many tokens, because there kernels for long rows hold the state."""

L2_EPS = 1e-6
"""Inside the square root of the key and query norms; a constant of the published model."""


class Sizes(NamedTuple):
    """Sizes that follow from the shapes of a call."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int


def _sizes(qkv: Tensor | Array, state: Tensor | Array) -> Sizes:
    value_heads, key_dim, value_dim = state.shape[1:]
    key_heads = (qkv.shape[1] - value_heads * value_dim) // (2 * key_dim)
    return Sizes(key_heads, value_heads, key_dim, value_dim)


def _contract(
    *,
    out: Tensor,
    qkv: Tensor,
    z: Tensor,
    ba: Tensor,
    conv_weight: Tensor,
    decay: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    conv_state: Tensor,
    state: Tensor,
    slots: Tensor,
    q_starts: Tensor,
    seq_lens: Tensor,
    alive: Tensor,
    state_from: Tensor,
    state_to: Tensor,
    snapshot_ends: Tensor,
    snapshot_blocks: Tensor,
    eps: float,
    max_q_len: int,
    recent: Tensor | None = None,
    accepted: Tensor | None = None,
    num_drafts: Tensor | None = None,
) -> None:
    """out[t] = gated norm of the delta rule's output for token t, whose state is carried from token to token of a row.

    Rows, slots, q_starts, seq_lens and alive as in expand_rows. With m = qkv[t] of a row's tokens in order:

        c = silu(sum over j of conv_weight[:, j] * m at position p - (K - 1) + j)    rounded; zeros before position 0
        q, k, v = c split into Hk heads of dk, Hk heads of dk and Hv heads of dv; all below in float32:
        q = q / sqrt(sum(q^2) + 1e-6) / sqrt(dk);  k = k / sqrt(sum(k^2) + 1e-6)
        each value head h has q and k of key head h // (Hv / Hk), and S [dk, dv] of its own:
        beta = sigmoid(b), rounded;  g = decay * softplus(a + dt_bias)
        S = exp(g) * S;  u = beta * (v - S^T k);  S = S + k u^T;  o = S^T q, rounded
        out = norm_weight * (o / rms(o)) rounded, * silu(z), rounded                 rms over dv, with eps

    qkv [T, 2 Hk dk + Hv dv], z [T, Hv dv], ba [T, 2 Hv] (b of all heads, then a): one float dtype, rows at any stride.
    out [T, Hv dv] and conv_weight [2 Hk dk + Hv dv, K] of that dtype. decay, dt_bias float32 [Hv], norm_weight float32
    [dv].

    State of a sequence is kept in blocks: state float32 [B, Hv, dk, dv] is S; conv_state [B, K, 2 Hk dk + Hv dv] is a
    ring, m of position p at p % K, that holds the last K positions. Blocks may be at any stride, and further apart than
    2^31 elements. A row reads the block state_from[slot], unless seq_lens[slot] == 0: then both states are zeros,
    whatever memory holds. The row's new states go to the block state_to[slot]. state_from and state_to are int32 [S]
    and may name the same block.

    snapshot_ends, snapshot_blocks int32 [R, M]: when row r has seen snapshot_ends[r, i] tokens in all, its two states
    also go to the block snapshot_blocks[r, i]. An end is 0 (none) or a multiple of STATE_CHUNK that the row reaches in
    this step. With max_q_len == 1 both are ignored.

    With recent, accepted and num_drafts, the last num_drafts[r] (int32 [R]) tokens of a row are drafts, which may be
    wrong. The states that the row leaves are those before its drafts. The inputs of the drafts, qkv and ba side by
    side, go to recent [S, L, 2 Hk dk + Hv dv + 2 Hv]: those of position p to recent[slot, p % L]. The row's next step
    knows how many of them were accepted: accepted[slot] (int32 [S]). It takes these from `recent` before its own
    tokens, so seq_lens[slot] counts them, and the states are those of position seq_lens[slot] - accepted[slot]. L is a
    power of two, at least 2 D + 2 where rows have up to D drafts.

    Dead rows and tokens past q_starts[R] change no state but that of block 0, which no row reads. Their elements of
    `out` are finite and otherwise unspecified. max_q_len: no row has more tokens than this (1 in a decode step).
    """
    _expect_layer(out, qkv, z, ba, conv_weight, decay, dt_bias, norm_weight, conv_state, state)
    tokens = qkv.shape[0]
    by_slot = {"seq_lens": seq_lens, "alive": alive, "state_from": state_from, "state_to": state_to}
    rows, size = expect_rows(slots, q_starts, **by_slot)
    expect("snapshot_ends", snapshot_ends, (rows, -1), int32)
    expect("snapshot_blocks", snapshot_blocks, snapshot_ends.shape, int32)
    if recent is not None and accepted is not None and num_drafts is not None:
        expect("recent", recent, (size, -1, qkv.shape[1] + ba.shape[1]), qkv.dtype, dense=False)
        expect("accepted", accepted, (size,), int32)
        expect("num_drafts", num_drafts, (rows,), int32)
        ring = recent.shape[1]
        require(ring == power_of_two(ring), f"recent has room for {ring} tokens; it must be a power of two")
    else:
        require(recent is accepted is num_drafts, "recent, accepted and num_drafts must be given together")
    require(eps > 0, f"eps is {eps}; it must be positive")
    expect_max_q_len(max_q_len, tokens, rows)


def _expect_layer(
    out: Tensor,
    qkv: Tensor,
    z: Tensor,
    ba: Tensor,
    conv_weight: Tensor,
    decay: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    conv_state: Tensor,
    state: Tensor,
) -> None:
    """Check the arguments that do not belong to the batch: activations, weights and states."""
    expect("state", state, (-1, -1, -1, -1), float32, dense=False)
    expect("state[0]", state[0], state.shape[1:])
    _, heads, key_dim, value_dim = state.shape
    expect("qkv", qkv, (-1, -1), *FLOATS, dense=False)
    tokens, width = qkv.shape
    dtype = qkv.dtype
    key_width = width - heads * value_dim
    require(
        key_width > 0 and key_width % (2 * key_dim) == 0 and heads % (key_width // (2 * key_dim)) == 0,
        f"qkv has {width} columns: {heads} value heads of {value_dim} leave {key_width} for queries and keys, which "
        f"must be heads of {key_dim} that divide the value heads",
    )
    expect("z", z, (tokens, heads * value_dim), dtype, dense=False)
    expect("ba", ba, (tokens, 2 * heads), dtype, dense=False)
    for name, tensor in (("qkv", qkv), ("z", z), ("ba", ba)):
        require(tokens <= 1 or tensor.strides[1] == 1, f"the columns of {name} must be next to each other")
    expect("out", out, (tokens, heads * value_dim), dtype)
    expect("conv_weight", conv_weight, (width, -1), dtype)
    expect("decay", decay, (heads,), float32)
    expect("dt_bias", dt_bias, (heads,), float32)
    expect("norm_weight", norm_weight, (value_dim,), float32)
    expect("conv_state", conv_state, (state.shape[0], conv_weight.shape[1], width), dtype, dense=False)
    expect("conv_state[0]", conv_state[0], conv_state.shape[1:])


def causal_conv1d(m: Array, ring: Array, weight: Array, start: int) -> Array:
    """The convolution and its silu for tokens m [n, C] at positions start, start + 1, ...; `ring` [K, C] holds the K
    positions before them and is moved on. Float32 values of m's dtype."""
    taps = weight.shape[1]
    before = np.zeros((taps - 1, m.shape[1]), np.float32)
    for back in range(1, min(taps - 1, start) + 1):
        before[-back] = f32(ring[(start - back) % taps])
    padded = np.concatenate([before, f32(m)])
    total = np.zeros(m.shape, np.float32)
    for j in range(taps):
        total += f32(weight[:, j]) * padded[j : j + len(m)]
    for position in range(max(start, start + len(m) - taps), start + len(m)):
        ring[position % taps] = m[position - start]
    return rounded(silu(total), m.dtype)


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)) in float32."""
    return np.asarray(np.float32(0.5) * (np.float32(1) + np.tanh(x * np.float32(0.5))), np.float32)


def delta_rule(q: Array, k: Array, v: Array, beta: Array, g: Array, state: Array) -> Array:
    """One token of all heads, in float32: q, k [H, dk], v [H, dv], beta, g [H]; moves state [H, dk, dv] on and returns
    o [H, dv]."""
    state *= np.exp(g)[:, None, None]
    u = beta[:, None] * (v - np.matmul(k[:, None, :], state)[:, 0])
    state += k[:, :, None] * u[:, None, :]
    return np.asarray(np.matmul(q[:, None, :], state)[:, 0])


def gated_norm(o: Array, z: Array, weight: Array, eps: float, dtype: np.dtype[np.generic]) -> Array:
    """RMS norm of o over its last axis, times silu(z); rounded to `dtype` after the norm, after its weight
    and at the end."""
    scale = np.float32(1) / np.sqrt(np.mean(o * o, axis=-1, keepdims=True) + np.float32(eps))
    normed = rounded(weight * rounded(o * scale, dtype), dtype)
    return rounded(normed * silu(f32(z)), dtype)


def _unit(x: Array) -> Array:
    return np.asarray(x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + np.float32(L2_EPS)))


def _reference(
    *,
    out: Array,
    qkv: Array,
    z: Array,
    ba: Array,
    conv_weight: Array,
    decay: Array,
    dt_bias: Array,
    norm_weight: Array,
    conv_state: Array,
    state: Array,
    slots: Array,
    q_starts: Array,
    seq_lens: Array,
    alive: Array,
    state_from: Array,
    state_to: Array,
    snapshot_ends: Array,
    snapshot_blocks: Array,
    eps: float,
    max_q_len: int,
    recent: Array | None = None,
    accepted: Array | None = None,
    num_drafts: Array | None = None,
) -> None:
    dtype, (key_heads, heads, dk, dv), width = qkv.dtype, _sizes(qkv, state), qkv.shape[1]
    out[:] = 0
    for row, slot in enumerate(slots):
        first, last = int(q_starts[row]), int(q_starts[row + 1])
        if first == last or not alive[slot]:
            continue
        start, source, target = int(seq_lens[slot]), int(state_from[slot]), int(state_to[slot])
        m, gates, drafts, replayed = qkv[first:last], ba[first:last], 0, 0
        if recent is not None and accepted is not None and num_drafts is not None:
            drafts, replayed = int(num_drafts[row]), int(accepted[slot])
            kept = recent[slot, np.arange(start - replayed, start) % recent.shape[1]]
            m, gates = np.concatenate([kept[:, :width], m]), np.concatenate([kept[:, width:], gates])
            positions = np.arange(start + last - first - drafts, start + last - first) % recent.shape[1]
            recent[slot, positions] = np.concatenate([m, gates], axis=1)[len(m) - drafts :]
            start -= replayed
        a = f32(gates[:, heads:]) + dt_bias
        g = decay * (np.maximum(a, 0) + np.log1p(np.exp(-np.abs(a))))
        beta = rounded(sigmoid(f32(gates[:, :heads])), dtype)
        ends = {}
        if max_q_len > 1:
            ends = {
                int(e): int(b) for e, b in zip(snapshot_ends[row], snapshot_blocks[row], strict=True) if e
            }
        live = state[source].copy() if start else np.zeros(state.shape[1:], np.float32)
        ring = conv_state[source].copy() if start else np.zeros(conv_state.shape[1:], dtype)
        # In pieces that end where a state is left; within one, one token after the other: the result does not depend
        # on how a row is cut into steps.
        count, o = len(m), np.empty((len(m), heads, dv), np.float32)
        cuts = sorted({*(end - start for end in ends), count - drafts, count})
        for low, high in zip([0, *cuts], cuts, strict=False):
            c = causal_conv1d(m[low:high], ring, conv_weight, start + low)
            q, k = (np.repeat(_unit(part.reshape(-1, key_heads, dk)), heads // key_heads, axis=1)
                    for part in (c[:, : key_heads * dk], c[:, key_heads * dk : 2 * key_heads * dk]))  # fmt: skip
            q = q * np.float32(dk**-0.5)
            v = c[:, 2 * key_heads * dk :].reshape(-1, heads, dv)
            for i in range(high - low):
                o[low + i] = delta_rule(q[i], k[i], v[i], beta[low + i], g[low + i], live)
            if start + high in ends:
                block = ends[start + high]
                state[block], conv_state[block] = live, ring
            if high == count - drafts:
                state[target], conv_state[target] = live, ring
        gate = z[first:last].reshape(-1, heads, dv)
        normed = gated_norm(rounded(o[replayed:], dtype), gate, norm_weight, eps, dtype)
        out[first:last] = normed.reshape(last - first, -1)


def _launches(
    target: Target, *, qkv: Tensor, state: Tensor, eps: float, max_q_len: int, **given: Tensor | None
) -> Iterator[Command]:
    tensors = {name: tensor for name, tensor in given.items() if tensor is not None}
    require(
        not target.batch_invariant,
        "the delta rule has no batch-invariant kernels: what a step computes of a prompt at once changes its rounding",
    )
    sizes, taps = _sizes(qkv, state), tensors["conv_weight"].shape[1]
    require(
        qkv.dtype == bfloat16, f"qkv is {qkv.dtype.name}; on a GPU it is bfloat16 (float32: the cpu pack)"
    )
    for name, size in (("key", sizes.key_dim), ("value", sizes.value_dim)):
        require(
            16 <= size == power_of_two(size),
            f"{name} heads are of {size}; on a GPU they are powers of two from 16",
        )
    require(taps == power_of_two(taps), f"the convolution has {taps} taps; on a GPU it has a power of two")
    call = delta.Call({"qkv": qkv, "state": state, **tensors}, sizes.key_heads, eps)
    tuning = delta.choose(target, sizes.value_heads, tensors["slots"].shape[0])
    yield from delta.launches(call, max_q_len, tuning)


def _cost(
    workload: Workload, *, out: Tensor, qkv: Tensor, state: Tensor, conv_state: Tensor, **rest: object
) -> Cost:
    """The state of each row is read and written once; a token costs 8 dk dv FLOPs a head."""
    heads, key_dim, value_dim = state.shape[1:]
    states = 4 * heads * key_dim * value_dim + conv_state.shape[1] * conv_state.shape[2] * conv_state.itemsize
    columns = qkv.shape[1] + 2 * heads * value_dim + 2 * heads
    flops = heads * 8 * key_dim * value_dim + qkv.shape[1] * 2 * conv_state.shape[1]
    return Cost(
        2 * workload.rows * states + workload.tokens * columns * out.itemsize, workload.tokens * flops
    )


gated_delta_net = Op("gated_delta_net", _contract, reference=_reference, launches=_launches, cost=_cost)


def cases(memory: Memory) -> Iterator[OpCase]:
    """Layers of Qwen3.5-4B: decode, prompts and a chunk beside decode rows."""
    heads, key_heads, dim, taps, layers = 32, 16, 128, 4, 4
    width = (2 * key_heads + heads) * dim
    steps = {f"decode {rows}": CaseRows([1] * rows, [1000] * rows) for rows in (1, 8, 32, 128, 256)}
    steps |= {f"prompt {n}": CaseRows([n], [0]) for n in (128, 1024, 4096, 8192)}
    steps["chunk 1984 and 64 rows"] = CaseRows([1984] + [1] * 64, [0] + [1000] * 64)
    for name, rows in steps.items():
        blocks, tokens = len(rows.lengths), rows.tokens
        mixed = memory.normal(tokens, width + heads * dim + 2 * heads)
        state = memory.normal(blocks, layers, heads, dim, dim, dtype=float32, scale=0.3)
        rings = memory.normal(blocks, layers, taps, width)
        own = memory.ints(np.arange(blocks))
        args = {
            "out": memory.empty(tokens, heads * dim),
            "qkv": mixed[:, :width],
            "z": mixed[:, width : width + heads * dim],
            "ba": mixed[:, width + heads * dim :],
            "conv_weight": memory.normal(width, taps, scale=0.5),
            "decay": memory.of(-np.exp(memory.rng.uniform(-3, 1, heads)).astype(np.float32)),
            "dt_bias": memory.of((memory.rng.standard_normal(heads) - 2).astype(np.float32)),
            "norm_weight": memory.of(np.ones(dim, np.float32)),
            **rows.fields(memory),
            "state_from": own,
            "state_to": own,
            "snapshot_ends": memory.ints(np.zeros((blocks, 2))),
            "snapshot_blocks": memory.ints(np.zeros((blocks, 2))),
            "eps": 1e-6,
            "max_q_len": max(rows.lengths),
        }
        copies = [{**args, "conv_state": rings[:, n], "state": state[:, n]} for n in range(layers)]
        yield OpCase(f"4B {name}", gated_delta_net, copies, rows.workload)


def variants(target: Target, case: OpCase) -> Iterator[tuple[str, Commands]]:
    """Other shares of a state for a program, stages and registers."""
    step = case.args[0]["max_q_len"] == 1
    changes: dict[str, dict[str, Any]] = {
        "scan of 64 columns": {"columns": 64},
        "scan of 2 stages": {"scan_stages": 2},
        "inputs with any registers": {"inputs_registers": 0},
        "prepare with any registers": {"prepare_registers": 0},
    }
    if step:
        changes = {
            f"step of {columns} columns, {warps} warps": {"step_columns": columns, "step_warps": warps}
            for columns in (32, 64, 128)
            for warps in (1, 2, 4)
        }
    for name, change in changes.items():

        def commands(args: Mapping[str, Any], change: Mapping[str, Any] = change) -> Iterable[Command]:
            sizes = _sizes(args["qkv"], args["state"])
            chosen = delta.choose(target, sizes.value_heads, args["slots"].shape[0])
            tensors = {name: value for name, value in args.items() if isinstance(value, Tensor)}
            call = delta.Call(tensors, sizes.key_heads, args["eps"])
            return delta.launches(call, args["max_q_len"], replace(chosen, **change))

        yield name, commands
