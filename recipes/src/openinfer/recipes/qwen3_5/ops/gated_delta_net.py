"""gated_delta_net: linear attention between its projections: causal convolution, gated delta rule, gated norm."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

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
    expect_bf16,
    expect_each,
    expect_max_q_len,
    expect_rows,
    f32,
    power_of_two,
    require,
    rounded,
    silu,
)
from openinfer.recipes.qwen3_5 import delta
from openinfer.recipes.qwen3_5.delta import DeltaArgs
from openinfer.tensor import Tensor, bfloat16, float32, int32

STATE_CHUNK = delta.CHUNK
"""Snapshots are taken only after multiples of this many tokens, because there kernels for long rows hold the state."""

L2_EPS = 1e-6
"""Inside the square root of the key and query norms; a constant of the published model."""


def _check(a: DeltaArgs[Tensor]) -> None:
    _expect_layer(a)
    tokens = a.qkv.shape[0]
    by_slot = {"seq_lens": a.seq_lens, "alive": a.alive, "state_from": a.state_from, "state_to": a.state_to}
    rows, size = expect_rows(a.slots, a.q_starts, **by_slot)
    expect("snapshot_ends", a.snapshot_ends, (rows, -1), int32)
    expect("snapshot_blocks", a.snapshot_blocks, a.snapshot_ends.shape, int32)
    if a.recent is not None and a.accepted is not None and a.num_drafts is not None:
        expect("recent", a.recent, (size, -1, a.qkv.shape[1] + a.ba.shape[1]), a.qkv.dtype, dense=False)
        expect("accepted", a.accepted, (size,), int32)
        expect("num_drafts", a.num_drafts, (rows,), int32)
        ring = a.recent.shape[1]
        require(ring == power_of_two(ring), f"recent has room for {ring} tokens; it must be a power of two")
    else:
        require(
            a.recent is a.accepted is a.num_drafts, "recent, accepted and num_drafts must be given together"
        )
    require(a.eps > 0, f"eps is {a.eps}; it must be positive")
    expect_max_q_len(a.max_q_len, tokens, rows)


def _expect_layer(a: DeltaArgs[Tensor]) -> None:
    """Check the arguments that do not belong to the batch: activations, weights and states."""
    expect("state", a.state, (-1, -1, -1, -1), float32, bfloat16, dense=False)
    expect("state[0]", a.state[0], a.state.shape[1:])
    _, heads, key_dim, value_dim = a.state.shape
    expect("qkv", a.qkv, (-1, -1), *FLOATS, dense=False)
    tokens, width = a.qkv.shape
    dtype = a.qkv.dtype
    key_width = width - heads * value_dim
    require(
        key_width > 0 and key_width % (2 * key_dim) == 0 and heads % (key_width // (2 * key_dim)) == 0,
        f"qkv has {width} columns: {heads} value heads of {value_dim} leave {key_width} for queries and keys, which "
        f"must be heads of {key_dim} that divide the value heads",
    )
    expect("z", a.z, (tokens, heads * value_dim), dtype, dense=False)
    expect("ba", a.ba, (tokens, 2 * heads), dtype, dense=False)
    for name, tensor in (("qkv", a.qkv), ("z", a.z), ("ba", a.ba)):
        require(tokens <= 1 or tensor.strides[1] == 1, f"the columns of {name} must be next to each other")
    expect("out", a.out, (tokens, heads * value_dim), dtype)
    expect("conv_weight", a.conv_weight, (width, -1), dtype)
    expect_each(a, (heads,), float32, "decay", "dt_bias")
    expect("norm_weight", a.norm_weight, (value_dim,), float32)
    expect("conv_state", a.conv_state, (a.state.shape[0], a.conv_weight.shape[1], width), dtype, dense=False)
    expect("conv_state[0]", a.conv_state[0], a.conv_state.shape[1:])


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


def _gated_norm(o: Array, z: Array, weight: Array, eps: float, dtype: np.dtype[np.generic]) -> Array:
    """RMS norm of o's last axis, times silu(z); rounded to `dtype` after the norm, its weight and at the end."""
    scale = np.float32(1) / np.sqrt(np.mean(o * o, axis=-1, keepdims=True) + np.float32(eps))
    normed = rounded(weight * rounded(o * scale, dtype), dtype)
    return rounded(normed * silu(f32(z)), dtype)


def _unit(x: Array) -> Array:
    return np.asarray(x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + np.float32(L2_EPS)))


def _reference(a: DeltaArgs[Array]) -> None:
    dtype, (key_heads, heads, dk, dv), width = a.qkv.dtype, a.sizes, a.qkv.shape[1]
    a.out[:] = 0
    for row, slot in enumerate(a.slots):
        first, last = int(a.q_starts[row]), int(a.q_starts[row + 1])
        if first == last or not a.alive[slot]:
            continue
        start, source, target = int(a.seq_lens[slot]), int(a.state_from[slot]), int(a.state_to[slot])
        m, gates, drafts, replayed = a.qkv[first:last], a.ba[first:last], 0, 0
        if a.recent is not None and a.accepted is not None and a.num_drafts is not None:
            drafts, replayed = int(a.num_drafts[row]), int(a.accepted[slot])
            kept = a.recent[slot, np.arange(start - replayed, start) % a.recent.shape[1]]
            m, gates = np.concatenate([kept[:, :width], m]), np.concatenate([kept[:, width:], gates])
            positions = np.arange(start + last - first - drafts, start + last - first) % a.recent.shape[1]
            a.recent[slot, positions] = np.concatenate([m, gates], axis=1)[len(m) - drafts :]
            start -= replayed
        x = f32(gates[:, heads:]) + a.dt_bias
        g = a.decay * (np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x))))
        beta = rounded(sigmoid(f32(gates[:, :heads])), dtype)
        ends = {}
        if a.max_q_len > 1:
            ends = {
                int(e): int(b) for e, b in zip(a.snapshot_ends[row], a.snapshot_blocks[row], strict=True) if e
            }
        live = a.state[source].astype(np.float32) if start else np.zeros(a.state.shape[1:], np.float32)
        ring = a.conv_state[source].copy() if start else np.zeros(a.conv_state.shape[1:], dtype)
        # In pieces that end where a state is left; within one, one token after the other: the result does not depend
        # on how a row is cut into steps.
        count, o = len(m), np.empty((len(m), heads, dv), np.float32)
        cuts = sorted({*(end - start for end in ends), count - drafts, count})
        for low, high in zip([0, *cuts], cuts, strict=False):
            c = causal_conv1d(m[low:high], ring, a.conv_weight, start + low)
            q, k = (np.repeat(_unit(part.reshape(-1, key_heads, dk)), heads // key_heads, axis=1)
                    for part in (c[:, : key_heads * dk], c[:, key_heads * dk : 2 * key_heads * dk]))  # fmt: skip
            q = q * np.float32(dk**-0.5)
            v = c[:, 2 * key_heads * dk :].reshape(-1, heads, dv)
            for i in range(high - low):
                o[low + i] = delta_rule(q[i], k[i], v[i], beta[low + i], g[low + i], live)
                live = rounded(live, a.state.dtype)
            if start + high in ends:
                block = ends[start + high]
                a.state[block], a.conv_state[block] = live, ring
            if high == count - drafts:
                a.state[target], a.conv_state[target] = live, ring
        gate = a.z[first:last].reshape(-1, heads, dv)
        normed = _gated_norm(rounded(o[replayed:], dtype), gate, a.norm_weight, a.eps, dtype)
        a.out[first:last] = normed.reshape(last - first, -1)


def _launches(target: Target, a: DeltaArgs[Tensor]) -> Iterator[Command]:
    sizes, taps = a.sizes, a.conv_weight.shape[1]
    expect_bf16(a.qkv, "qkv")
    for name, size in (("key", sizes.key_dim), ("value", sizes.value_dim)):
        require(
            16 <= size == power_of_two(size),
            f"{name} heads are of {size}; on a GPU they are powers of two from 16",
        )
    require(taps == power_of_two(taps), f"the convolution has {taps} taps; on a GPU it has a power of two")
    yield from delta.delta_launches(a, delta.choose_tuning(target, sizes.value_heads, a.slots.shape[0]))


def _cost(workload: Workload, a: DeltaArgs[Tensor]) -> Cost:
    """The state of each row is read and written once; a token costs 8 dk dv FLOPs a head."""
    heads, key_dim, value_dim = a.state.shape[1:]
    states = (
        a.state.itemsize * heads * key_dim * value_dim
        + a.conv_state.shape[1] * a.conv_state.shape[2] * a.conv_state.itemsize
    )
    columns = a.qkv.shape[1] + 2 * heads * value_dim + 2 * heads
    flops = heads * 8 * key_dim * value_dim + a.qkv.shape[1] * 2 * a.conv_state.shape[1]
    return Cost(
        2 * workload.rows * states + workload.tokens * columns * a.out.itemsize, workload.tokens * flops
    )


gated_delta_net = Op(
    "gated_delta_net", DeltaArgs[Tensor], _check, _reference, _launches, _cost,
    writes=("out", "conv_state", "state", "recent"),
)  # fmt: skip


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

        def commands(a: DeltaArgs[Tensor], change: Mapping[str, Any] = change) -> Iterable[Command]:
            chosen = delta.choose_tuning(target, a.sizes.value_heads, a.slots.shape[0])
            return delta.delta_launches(a, replace(chosen, **change))

        yield name, commands
