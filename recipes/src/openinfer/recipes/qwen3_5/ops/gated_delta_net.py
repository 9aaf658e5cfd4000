"""gated_delta_net: linear attention between its projections: causal convolution, gated delta rule, gated norm."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, NamedTuple

import numpy as np

from openinfer.kernels import authoring as op
from openinfer.kernels.authoring import Arg, Array, Command, Cost, Launch, Op, Scratch, T, Target, Workload
from openinfer.tensor import Tensor, bfloat16, float32, int32

STATE_CHUNK = 64
"""Tokens of a chunk: its triangular system has this size. Kernels for long rows hold the state at multiples of it, so
snapshots are taken only there."""

TILED_ROWS, SCANNED_ROWS = 8, 2
"""Rows of many tokens that a step has programs for. In a step with more such rows, programs take several tiles, or
rows. A program without work is not free. A row's scan alone fills a GPU."""

VERIFIED_COLUMNS = 32
"""Columns of a state that a warp has in rows with drafts. A program has one warp, so that no sum crosses warps."""

ALONE_COLUMNS = 16
"""The same where rows of any length go token by token: a prompt alone then has a warp for every two or four parts of
an SM, and a row of a state is still 64 bytes of memory."""

TILE, DEALT = 16, 64
"""Positions that a program of the convolution takes at a time, more than MAX_DRAFTS and the taps; and programs of all
rows that share a head's tiles."""

_DEVICE = "openinfer.recipes.qwen3_5.device."
_TOKENS = _DEVICE + "delta_tokens"
_OF_ROWS = ("slots", "q_starts", "seq_lens", "alive")


@dataclass(frozen=True, slots=True)
class Tuning:
    """How the kernels are compiled. `step_columns`, `columns`: the columns of a state's DV that a program of the step,
    or of the scan, has."""

    step_columns: int = 128
    step_warps: int = 4
    step_registers: int = 0
    inputs_warps: int = 8
    inputs_registers: int = 80
    prepare_warps: int = 4
    prepare_registers: int = 168
    columns: int = 32
    scan_warps: int = 4
    scan_stages: int = 3
    norm_warps: int = 8
    beside: bool = False  # whether decode rows and prompts are branches of the graph
    early: bool = False  # whether the kernels of few tokens start before the one ahead has ended
    alone: bool = False  # whether every token goes by itself


def choose_tuning(target: Target, heads: int, rows: int, tokens: int) -> Tuning:
    """The tuning that was fastest on an H200.

    A few rows run in small parts, so that there are enough programs for the SMs. Decode rows run beside prompts only
    where they are many enough to take longer than a fork and a join of the graph.
    """
    if target.batch_invariant:
        return Tuning(alone=True)
    columns, beside = 32 if heads * rows <= 2 * target.num_sms else 128, heads * rows > 32 * target.num_sms
    return Tuning(step_columns=columns, beside=beside, early=target.early(tokens))


class Sizes(NamedTuple):
    """Sizes that follow from the shapes of a call."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaArgs(Generic[T]):
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

    State of a sequence is kept in blocks. state [B, Hv, dk, dv] is S, float32 or bfloat16; bfloat16 is rounded after
    each token, in kernels for many tokens after each chunk. conv_state [B, K, 2 Hk dk + Hv dv] is a ring, m of position
    p at p % K, that holds the last K positions. Blocks may be at any stride, and further apart than 2^31 elements. A
    row reads the block state_from[slot], unless seq_lens[slot] == 0: then both states are zeros, whatever memory holds.
    The row's new states go to the block state_to[slot]. state_from and state_to are int32 [S] and may name the same
    block.

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

    out: T
    qkv: T
    z: T
    ba: T
    conv_weight: T
    decay: T
    dt_bias: T
    norm_weight: T
    conv_state: T
    state: T
    slots: T
    q_starts: T
    seq_lens: T
    alive: T
    state_from: T
    state_to: T
    snapshot_ends: T
    snapshot_blocks: T
    eps: float
    max_q_len: int
    recent: T | None = None
    accepted: T | None = None
    num_drafts: T | None = None

    @property
    def sizes(self: "DeltaArgs[Any]") -> Sizes:
        value_heads, key_dim, value_dim = self.state.shape[1:]
        key_heads = (self.qkv.shape[1] - value_heads * value_dim) // (2 * key_dim)
        return Sizes(key_heads, value_heads, key_dim, value_dim)


def _sizes(a: DeltaArgs[Tensor]) -> dict[str, int]:
    key_heads, heads, dk, dv = a.sizes
    return {"KEYS": key_heads, "DK": dk, "DV": dv, "GROUP": heads // key_heads}


def _taps(a: DeltaArgs[Tensor]) -> dict[str, int]:
    return {"TAPS": a.conv_weight.shape[1]}


def _strides(a: DeltaArgs[Tensor], *names: str) -> dict[str, Arg]:
    """Elements from one token or block of a tensor to the next, as `<name>_stride`."""
    given = op.tensors(a, *names).items()
    return {f"{name}_stride".replace("_state_", "_"): op.aligned(tensor.strides[0]) for name, tensor in given}


def delta_launches(a: DeltaArgs[Tensor], tuning: Tuning) -> Iterator[Command]:
    """The launches of a call. Rows of one token go to one kernel. Other rows go in chunks through four kernels. A step
    may have both; many rows of one token are then a branch beside the four kernels.

    Batch-invariant kernels take every token by itself, prompts too: however a prompt is cut, whichever prefix was
    cached and whichever tokens were drafts, the state went through the same roundings.

    Where rows have drafts, rows of a few tokens go to kernels of their own, rows without drafts too: such a row may
    have accepted some in the step before."""
    tokens, rows = a.out.shape[0], a.slots.shape[0]
    if tuning.alone:
        yield from _token_by_token(a, tokens, alone=True, early=False)
    elif a.recent is not None:
        short = a.recent.shape[1] // 2
        if a.max_q_len > short:
            yield from _chunks(a, tuning, short)
        every = a.max_q_len <= short
        yield from _token_by_token(a, tokens if every else 0, alone=False, early=tuning.early and every)
    elif a.max_q_len == 1:
        yield _step(a, tuning, tokens)
    elif rows == 1:  # a prompt: that it may have one token left is not worth a launch in every step
        yield from _chunks(a, tuning, 0)
    elif tuning.beside:
        yield from op.beside(_chunks(a, tuning, 1), [_step(a, tuning, 0)])
    else:
        yield from (*_chunks(a, tuning, 1), _step(a, tuning, 0))


def _step(a: DeltaArgs[Tensor], tuning: Tuning, tokens: int) -> Launch:
    """Rows of one token, and zeros for the tokens from the last row's end to `tokens`."""
    (_, heads, _, dv), rows = a.state.shape, a.slots.shape[0]
    columns = min(tuning.step_columns, dv)
    own = ("out", "qkv", "z", "ba", "conv_weight", "decay", "dt_bias", "norm_weight", "conv_state", "state")
    args: dict[str, Arg] = {**op.tensors(a, *own, *_OF_ROWS, "state_from", "state_to")}
    args["partial"] = Scratch((rows, heads, dv), float32)
    args["arrived"] = Scratch((rows, heads), int32, zeroed=True)
    args |= {**_strides(a, "qkv", "z", "ba", "conv_state", "state"), "eps": a.eps, "tokens": tokens}
    grid, constants = (heads * (dv // columns), rows), _sizes(a) | _taps(a) | {"BV": columns}
    warps, registers = tuning.step_warps, tuning.step_registers
    name, early = "delta_step", tuning.early and a.max_q_len == 1
    spec = _DEVICE + name, name, grid, args, constants
    return op.launch(*spec, num_warps=warps, max_registers=registers, early=early)


def _token_by_token(a: DeltaArgs[Tensor], tokens: int, *, alone: bool, early: bool) -> Iterator[Launch]:
    """Zeros for the tokens from the last row's end to `tokens`, and rows of at most half the places of `recent`. alone:
    rows of any length, by kernels that are the same for every step."""
    (_, heads, dk, dv), (rows, snapshots) = a.state.shape, a.snapshot_ends.shape
    width, ring = a.qkv.shape[1], a.recent.shape[1] if a.recent is not None else 0
    short, places = (tokens, tokens + rows * ring // 2) if alone else (ring // 2, rows * ring)
    rest = op.tensors(a, *_OF_ROWS, "state_from", "state_to", "snapshot_ends", "snapshot_blocks")
    rest |= {"recent": a.recent or a.qkv, "accepted": a.accepted or a.seq_lens}
    rest["num_drafts"] = a.num_drafts or a.slots
    made: dict[str, Arg] = {
        "recent_stride": op.aligned(0 if a.recent is None else a.recent.strides[0]),
        "made": Scratch((places, width), float32), "snapshots": snapshots if a.max_q_len > 1 else 0,
        "short": short, "ring_size": ring,
    }  # fmt: skip
    tile, constants = TILE if alone else ring, {**_sizes(a), "BY_ROW": not alone}
    args: dict[str, Arg] = {**op.tensors(a, "qkv", "ba", "conv_weight", "conv_state"), **rest}
    args |= {**_strides(a, "qkv", "ba", "conv_state"), **made}
    inputs = constants | _taps(a) | {"TILE": tile, "WIDE": max(dk, dv), "GATES": op.power_of_two(2 * heads)}
    programs = 2 * a.sizes.key_heads + heads + 1, rows, max(1, min(-(-short // tile), DEALT // rows))
    yield op.launch(_TOKENS, "delta_token_inputs", programs, args, inputs, early=early)
    constants |= {"SNAPSHOTS": op.power_of_two(snapshots)}
    columns = min(ALONE_COLUMNS if alone else VERIFIED_COLUMNS, dv)
    out = Scratch((tokens, heads, dv), a.out.dtype) if alone else a.out
    without, sums = dict.fromkeys(["partial", "arrived"]) if alone else {}, dict[str, Arg]()
    if not alone:
        sums["partial"] = Scratch((rows, heads, short, dv), float32)
        sums["arrived"] = Scratch((rows, heads), int32, zeroed=True)
    own = op.tensors(a, "z", "ba", "decay", "dt_bias", "norm_weight", "state")
    args = {"out": out, **own, **rest, **_strides(a, "z", "ba", "state"), **made, **sums}
    args |= {"eps": a.eps, "tokens": tokens}
    grid = (heads * (dv // columns), rows)
    spec = _TOKENS, "delta_tokens", grid, args, constants | {"BV": columns, **without}
    yield op.launch(*spec, num_warps=1, early=early)
    if alone:
        args = {"out": a.out, "o": out, **op.tensors(a, "z", "norm_weight"), **_strides(a, "z"), "eps": a.eps}
        yield op.launch(_TOKENS, "delta_token_norm", (tokens, heads), args, {"DV": dv}, num_warps=1)


_CHUNKS = _DEVICE + "delta_chunks"


def _chunks(a: DeltaArgs[Tensor], tuning: Tuning, short: int) -> Iterator[Launch]:
    """Rows of more than `short` tokens, and zeros for the tokens after the last row."""
    (_, heads, dk, dv), (tokens, _), rows = (a.state.shape, a.out.shape, a.slots.shape[0])
    dtype = a.out.dtype
    q, k = (Scratch((tokens, a.sizes.key_heads, dk), dtype) for _ in range(2))
    v, o = (Scratch((tokens, heads, dv), dtype) for _ in range(2))
    solved, scores = (Scratch((tokens, heads, STATE_CHUNK), dtype) for _ in range(2))
    made: dict[str, Arg] = {"solved": solved, "scores": scores, "decays": Scratch((heads, tokens), float32)}
    common: dict[str, Arg] = {"rows": rows, "short": short}
    tiles, loop = tokens // STATE_CHUNK + 2 * min(rows, TILED_ROWS), rows > TILED_ROWS
    sizes = _sizes(a) | {"C": STATE_CHUNK}
    args: dict[str, Arg] = {"q": q, "k": k, "v": v}
    args |= op.tensors(a, "qkv", "conv_weight", "conv_state", *_OF_ROWS, "state_from")
    args |= _strides(a, "qkv", "conv_state") | common
    yield op.launch(
        _CHUNKS, "delta_inputs", (2 * a.sizes.key_heads + heads, tiles), args, sizes | _taps(a) | {"LOOP": loop},
        num_warps=tuning.inputs_warps, max_registers=128 if loop else tuning.inputs_registers,
    )  # fmt: skip
    args = {**made, "q": q, "k": k, **op.tensors(a, "ba", "decay", "dt_bias", *_OF_ROWS), **_strides(a, "ba")}
    constants = {name: sizes[name] for name in ("KEYS", "DK", "GROUP", "C")}
    constants |= {"LEVELS": STATE_CHUNK.bit_length() - 1, "LOOP": loop}
    yield op.launch(
        _CHUNKS, "delta_prepare", (heads, tiles, 2), {**args, "tokens": tokens, **common}, constants,
        num_warps=tuning.prepare_warps, max_registers=0 if loop else tuning.prepare_registers,
    )  # fmt: skip
    snapshots, columns = a.snapshot_ends.shape[1], min(2 * tuning.columns if loop else tuning.columns, dv)
    args = {"out": o, "q": q, "k": k, "v": v, **made}
    args |= op.tensors(a, "qkv", "conv_state", "state", *_OF_ROWS, "state_from", "state_to")
    args |= op.tensors(a, "snapshot_ends", "snapshot_blocks") | _strides(a, "qkv", "conv_state", "state")
    args |= {"snapshots": snapshots, "tokens": tokens, **common}
    constants = sizes | _taps(a) | {"BV": columns, "SNAPSHOTS": op.power_of_two(snapshots)}
    constants |= {"STAGES": tuning.scan_stages, "LOOP": loop}
    grid = (dv // columns, heads, SCANNED_ROWS if loop else rows)
    yield op.launch(_CHUNKS, "delta_scan", grid, args, constants, num_warps=tuning.scan_warps)
    args = {"out": a.out, "o": o, **op.tensors(a, "z", "norm_weight", "slots", "q_starts", "alive")}
    args |= _strides(a, "z") | {"rows": rows, "tokens": tokens, "eps": a.eps, "short": short}
    constants = {"HEADS": heads, "DV": dv, "C": STATE_CHUNK}
    yield op.launch(_CHUNKS, "delta_norm", (heads, tiles), args, constants, num_warps=tuning.norm_warps)


L2_EPS = 1e-6
"""Inside the square root of the key and query norms; a constant of the published model."""


def _check(a: DeltaArgs[Tensor]) -> None:
    op.expect_columns("state", a.state, (-1, -1, -1, -1), float32, bfloat16)
    _, heads, key_dim, value_dim = a.state.shape
    op.expect_columns("qkv", a.qkv, (-1, -1), *op.FLOATS)
    tokens, width = a.qkv.shape
    dtype = a.qkv.dtype
    key_width = width - heads * value_dim
    op.require(
        key_width > 0 and key_width % (2 * key_dim) == 0 and heads % (key_width // (2 * key_dim)) == 0,
        f"qkv has {width} columns: {heads} value heads of {value_dim} leave {key_width} for queries and keys, which "
        f"must be heads of {key_dim} that divide the value heads",
    )
    op.expect_columns("z", a.z, (tokens, heads * value_dim), dtype)
    op.expect_columns("ba", a.ba, (tokens, 2 * heads), dtype)
    op.expect("out", a.out, (tokens, heads * value_dim), dtype)
    op.expect("conv_weight", a.conv_weight, (width, -1), dtype)
    op.expect_each(a, (heads,), float32, "decay", "dt_bias")
    op.expect("norm_weight", a.norm_weight, (value_dim,), float32)
    op.expect_columns("conv_state", a.conv_state, (a.state.shape[0], a.conv_weight.shape[1], width), dtype)
    by_slot = {"seq_lens": a.seq_lens, "alive": a.alive, "state_from": a.state_from, "state_to": a.state_to}
    rows, size = op.expect_rows(a.slots, a.q_starts, **by_slot)
    op.expect("snapshot_ends", a.snapshot_ends, (rows, -1), int32)
    op.expect("snapshot_blocks", a.snapshot_blocks, a.snapshot_ends.shape, int32)
    if a.recent is not None and a.accepted is not None and a.num_drafts is not None:
        op.expect("recent", a.recent, (size, -1, a.qkv.shape[1] + a.ba.shape[1]), a.qkv.dtype, dense=False)
        op.expect("accepted", a.accepted, (size,), int32)
        op.expect("num_drafts", a.num_drafts, (rows,), int32)
        ring = a.recent.shape[1]
        op.require(
            ring == op.power_of_two(ring), f"recent has room for {ring} tokens; it must be a power of two"
        )
    else:
        together = a.recent is a.accepted is a.num_drafts
        op.require(together, "recent, accepted and num_drafts must be given together")
    op.require(a.eps > 0, f"eps is {a.eps}; it must be positive")
    op.expect_max_q_len(a.max_q_len, tokens, rows)


def causal_conv1d(m: Array, ring: Array, weight: Array, start: int) -> Array:
    """The convolution and its silu for tokens m [n, C] at positions start, start + 1, ...; `ring` [K, C] holds the K
    positions before them and is moved on. Float32 values of m's dtype."""
    taps = weight.shape[1]
    before = np.zeros((taps - 1, m.shape[1]), np.float32)
    for back in range(1, min(taps - 1, start) + 1):
        before[-back] = op.f32(ring[(start - back) % taps])
    padded = np.concatenate([before, op.f32(m)])
    total = np.zeros(m.shape, np.float32)
    for j in range(taps):
        total += op.f32(weight[:, j]) * padded[j : j + len(m)]
    for position in range(max(start, start + len(m) - taps), start + len(m)):
        ring[position % taps] = m[position - start]
    return op.rounded(op.silu(total), m.dtype)


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
    normed = op.rounded(weight * op.rounded(o * scale, dtype), dtype)
    return op.rounded(normed * op.silu(op.f32(z)), dtype)


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
        x = op.f32(gates[:, heads:]) + a.dt_bias
        g = a.decay * (np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x))))
        beta = op.rounded(sigmoid(op.f32(gates[:, :heads])), dtype)
        left = zip(a.snapshot_ends[row], a.snapshot_blocks[row], strict=True) if a.max_q_len > 1 else ()
        ends = {int(end): int(block) for end, block in left if end}
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
                live = op.rounded(live, a.state.dtype)
            if start + high in ends:
                block = ends[start + high]
                a.state[block], a.conv_state[block] = live, ring
            if high == count - drafts:
                a.state[target], a.conv_state[target] = live, ring
        gate = a.z[first:last].reshape(-1, heads, dv)
        normed = _gated_norm(op.rounded(o[replayed:], dtype), gate, a.norm_weight, a.eps, dtype)
        a.out[first:last] = normed.reshape(last - first, -1)


def _launches(target: Target, a: DeltaArgs[Tensor]) -> Iterator[Command]:
    sizes, taps = a.sizes, a.conv_weight.shape[1]
    op.expect_bf16(a.qkv, "qkv")
    for name, size in (("key", sizes.key_dim), ("value", sizes.value_dim)):
        fits = 16 <= size == op.power_of_two(size)
        op.require(fits, f"{name} heads are of {size}; on a GPU they are powers of two from 16")
    op.require(
        taps == op.power_of_two(taps), f"the convolution has {taps} taps; on a GPU it has a power of two"
    )
    yield from delta_launches(a, choose_tuning(target, sizes.value_heads, a.slots.shape[0], a.out.shape[0]))


def _cost(workload: Workload, a: DeltaArgs[Tensor]) -> Cost:
    """The state of each row is read and written once; a token costs 8 dk dv FLOPs a head."""
    heads, key_dim, value_dim = a.state.shape[1:]
    rings = a.conv_state.shape[1] * a.conv_state.shape[2] * a.conv_state.itemsize
    states = a.state.itemsize * heads * key_dim * value_dim + rings
    columns = a.qkv.shape[1] + 2 * heads * value_dim + 2 * heads
    flops = heads * 8 * key_dim * value_dim + a.qkv.shape[1] * 2 * a.conv_state.shape[1]
    moved = 2 * workload.rows * states + workload.tokens * columns * a.out.itemsize
    return Cost(moved, workload.tokens * flops)


gated_delta_net = Op(
    "gated_delta_net", DeltaArgs[Tensor], _check, _reference, _launches, _cost,
    writes=("out", "conv_state", "state", "recent"),
)  # fmt: skip


def cases(memory: op.Memory) -> Iterator[op.OpCase]:
    """Layers of Qwen3.5-4B: decode, prompts and a chunk beside decode rows."""
    heads, key_heads, dim, taps, layers = 32, 16, 128, 4, 4
    width = (2 * key_heads + heads) * dim
    steps = {f"decode {rows}": op.CaseRows([1] * rows, [1000] * rows) for rows in (1, 8, 32, 128, 256)}
    steps |= {f"prompt {n}": op.CaseRows([n], [0]) for n in (128, 1024, 4096, 8192)}
    steps["chunk 1984 and 64 rows"] = op.CaseRows([1984] + [1] * 64, [0] + [1000] * 64)
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
        yield op.OpCase(f"4B {name}", gated_delta_net, copies, rows.workload)


def variants(target: Target, case: op.OpCase) -> Iterator[tuple[str, op.Commands]]:
    """Other shares of a state for a program, stages and registers."""
    a: DeltaArgs[Tensor] = case.calls[0]
    changes: dict[str, dict[str, Any]] = {
        "scan of 64 columns": {"columns": 64},
        "scan of 2 stages": {"scan_stages": 2},
        "inputs with any registers": {"inputs_registers": 0},
        "prepare with any registers": {"prepare_registers": 0},
    }
    if a.max_q_len == 1:
        changes = {
            f"step of {columns} columns, {warps} warps": {"step_columns": columns, "step_warps": warps}
            for columns in (32, 64, 128)
            for warps in (1, 2, 4)
        }
    chosen = choose_tuning(target, a.sizes.value_heads, a.slots.shape[0], a.out.shape[0])
    for name, change in changes.items():
        yield name, partial(delta_launches, tuning=replace(chosen, **change))
