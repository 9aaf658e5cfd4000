"""hc_pre, hc_head: one vector of the residual streams, for a sublayer and after the last.

hc_post, spread, mean_streams: a sublayer's output, or an embedding, into the streams, and their mean.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic

import numpy as np

from openinfer.kernels import authoring as op
from openinfer.kernels.authoring import Arg, Array, Coded, Command, Cost, Op, Scratch, T, Target, Workload
from openinfer.tensor import Tensor, float32

_DEVICE = "openinfer.recipes.deepseek_v4.device.hyper_connections"


@dataclass(frozen=True, kw_only=True, slots=True)
class _MixingArgs(Generic[T]):
    """One vector of the streams, and the numbers that make it."""

    out: T
    streams: T
    fn: T
    base: T
    scale: T
    eps: float
    hc_eps: float


def _mixing_launches(target: Target, a: _MixingArgs[Tensor]) -> Iterator[Command]:
    """The kernels that make one of the streams; for hc_pre its norm, and mix. The columns of few tokens are spread over
    SMs."""
    pre = a if isinstance(a, _PreArgs) else None
    coded = pre.rounded_out if pre is not None else None
    op.expect_bf16(a.streams)
    op.expect_q8(target, coded is not None)
    (tokens, width), columns, n = a.out.shape, a.fn.shape[1], a.streams.shape[1]
    op.require(n == 4, f"there are {n} streams; kernels for hyper-connections take 4")
    bt = 16 if tokens <= 64 or target.batch_invariant else 64
    tiles, bk = -(-tokens // bt), op.depth(columns, 128)
    split, programs = 1, target.num_sms // 2 if bt == 16 else 3 * target.num_sms
    while split < 128 and 2 * split * bk <= columns:
        if tiles * split >= programs and not target.batch_invariant:
            break
        split *= 2
    partial = Scratch((split, tokens, 32), float32)
    own, early = {"NUMBERS": a.fn.shape[0], "SPLIT": split}, target.early(tokens)
    args: dict[str, Arg] = {"partial": partial, **op.tensors(a, "streams", "fn"), "tokens": tokens}
    constants = own | {"BT": bt, "BK": bk, "STEPS": -(-columns // (bk * split))}
    grid = (split, tiles)
    yield op.launch(_DEVICE, "hc_numbers", grid, args | {"K": op.Aligned(columns)}, constants, early=early)
    codes, scales = (a.out, a.out) if coded is None else (coded.codes, coded.scales)
    mix, norm_weight = (a.base, a.base) if pre is None else (pre.mix, pre.norm_weight)
    args = {"out": a.out, "codes": codes, "scales": scales, "mix": mix, "streams": a.streams}
    args |= {"partial": partial, **op.tensors(a, "base", "scale"), "norm_weight": norm_weight}
    args |= {"tokens": tokens, "width": op.Aligned(width), "eps": a.eps, "hc_eps": a.hc_eps}
    constants = own | {"BLOCKS": op.power_of_two(-(-width // 128)), "NORM": pre is not None}
    constants["CODED"], warps = coded is not None, 8 if width > 2048 else 4
    yield op.launch(_DEVICE, "hc_collapse", (tokens,), args, constants, num_warps=warps, early=early)


def _mixing_check(a: _MixingArgs[Tensor]) -> None:
    op.expect("streams", a.streams, (-1, -1, -1), *op.FLOATS)
    tokens, n, width = a.streams.shape
    numbers, scales = (2 * n + n * n, 3) if isinstance(a, _PreArgs) else (n, 1)
    op.expect("out", a.out, (tokens, width), a.streams.dtype)
    op.expect("fn", a.fn, (numbers, n * width), float32)
    op.expect("base", a.base, (numbers,), float32)
    op.expect("scale", a.scale, (scales,), float32)
    op.require(a.eps > 0 and a.hc_eps > 0, f"eps is {a.eps} and hc_eps {a.hc_eps}; both must be positive")


@dataclass(frozen=True, kw_only=True, slots=True)
class _PreArgs(_MixingArgs[T], Generic[T]):
    """Make a sublayer's input from the n streams, and the logits of the numbers by which hc_post mixes its output into
    them.

    With f = streams[t] flattened, in float32:

        m = (f @ fn^T) / rms(f)                                   rms with eps; n + n + n * n numbers
        pre_s = sigmoid(m[s] * scale[0] + base[s]) + hc_eps
        out = norm_weight * y / rms(y), with y = sum_s pre_s * streams[t, s] rounded; rounded once
        rounded_out = out through q8, unless it is None
        mix = m[n : 2n] * scale[1] + base[n : 2n], then m[2n :] * scale[2] + base[2n :]

    streams [T, n, D], out [T, D] of one float dtype, rounded_out of the same values Coded; fn float32 [2n + n n, n D],
    base float32 [2n + n n], scale float32 [3], norm_weight float32 [D]; mix float32 [T, n + n n]. D is a multiple of
    128. On a GPU n is 4.
    """

    rounded_out: Coded[T] | None
    mix: T
    norm_weight: T


def _pre_check(a: _PreArgs[Tensor]) -> None:
    _mixing_check(a)
    tokens, n, width = a.streams.shape
    if a.rounded_out is not None:
        op.expect_values("rounded_out", a.rounded_out, (tokens, width), a.streams.dtype)
    op.expect("mix", a.mix, (tokens, n + n * n), float32)
    op.expect("norm_weight", a.norm_weight, (width,), float32)
    op.require(
        width % op.SCALE_BLOCK == 0, f"streams are {width} wide; it must be a multiple of {op.SCALE_BLOCK}"
    )


def _mixing(streams: Array, fn: Array, eps: float) -> Array:
    flat = op.f32(streams).reshape(len(streams), -1)
    rms = np.sqrt(np.mean(flat * flat, axis=1, keepdims=True) + np.float32(eps))
    return np.asarray(op.matmul_nt(flat, fn) / rms)


def _collapsed(streams: Array, pre: Array) -> Array:
    """sum_s pre[t, s] * streams[t, s], one stream after the other, rounded: float32 [T, D]."""
    total = pre[:, :1] * op.f32(streams[:, 0])
    for s in range(1, streams.shape[1]):
        total = total + pre[:, s : s + 1] * op.f32(streams[:, s])
    return op.rounded(total, streams.dtype)


def _pre_reference(a: _PreArgs[Array]) -> None:
    n = a.streams.shape[1]
    m = _mixing(a.streams, a.fn, a.eps) * np.repeat(a.scale, [n, n, n * n]) + a.base
    pre, a.mix[:] = sigmoid(m[:, :n]) + np.float32(a.hc_eps), m[:, n:]
    normed = op.rms_norm(_collapsed(a.streams, pre).astype(a.streams.dtype), a.norm_weight, a.eps)
    a.out[:] = normed
    if a.rounded_out is not None:
        op.write_values(a.rounded_out, normed)


def _pre_cost(workload: Workload, a: _PreArgs[Tensor]) -> Cost:
    _, n, width = a.streams.shape
    numbers = (n + 1) * width * a.streams.itemsize + a.mix.shape[1] * 4
    if a.rounded_out is not None:
        numbers += a.rounded_out.nbytes // a.rounded_out.shape[0]
    moved = a.fn.nbytes + 4 * width + workload.tokens * numbers
    return Cost(moved, workload.tokens * 2 * (a.fn.shape[0] + 2) * n * width)


hc_pre = Op(
    "hc_pre", _PreArgs[Tensor], _pre_check, _pre_reference, _mixing_launches, _pre_cost,
    writes=("out", "rounded_out", "mix"),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class _HeadArgs(_MixingArgs[T], Generic[T]):
    """The streams as one: out = sum_s pre_s * streams[t, s], rounded, with pre as in hc_pre of n numbers m.

    streams [R, n, D], out [R, D] of one float dtype; fn float32 [n, n D], base float32 [n], scale float32 [1]. On a GPU
    n is 4.
    """


def _head_reference(a: _HeadArgs[Array]) -> None:
    pre = sigmoid(_mixing(a.streams, a.fn, a.eps) * a.scale[0] + a.base) + np.float32(a.hc_eps)
    a.out[:] = _collapsed(a.streams, pre)


def _head_cost(workload: Workload, a: _HeadArgs[Tensor]) -> Cost:
    _, n, width = a.streams.shape
    moved = a.fn.nbytes + workload.rows * (n + 1) * width * a.streams.itemsize
    return Cost(moved, workload.rows * 2 * (n + 2) * n * width)


hc_head = Op("hc_head", _HeadArgs[Tensor], _mixing_check, _head_reference, _mixing_launches, _head_cost)


ONE_KERNEL = 1 << 20
"""Bytes that one kernel pushes. Where a rank comes late, several kernels take a millisecond each (docs/lessons)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _PostArgs(Generic[T]):
    """streams[t, k] = post_k * y[t] + sum over j of C[j, k] * streams[t, j], in place: float32, rounded once.

    With the logits p and q of mix float32 [T, n + n n], as hc_pre writes them, p [n] before q [n, n] row by row:

        post = 2 sigmoid(p)
        C = softmax over k of q + hc_eps;  C = C / (sum over j + hc_eps)
        iters - 1 times:  C = C / (sum over k + hc_eps);  C = C / (sum over j + hc_eps)

    streams [T, n, D], y [T, D] of one float dtype. On a GPU n is 4. There the streams and mix are read while the kernel
    ahead may still run: another kernel comes between those that write them and this op.

    With several ranks y is a rank's part, and the streams get the sum of all, rounded before it is mixed. y may be
    overwritten.
    """

    streams: T
    y: T
    mix: T
    hc_eps: float
    iters: int
    ranks: int = 1


def _post_check(a: _PostArgs[Tensor]) -> None:
    op.expect("streams", a.streams, (-1, -1, -1), *op.FLOATS)
    tokens, n, width = a.streams.shape
    op.expect("y", a.y, (tokens, width), a.streams.dtype)
    op.expect("mix", a.mix, (tokens, n + n * n), float32)
    op.require(a.hc_eps > 0, f"hc_eps is {a.hc_eps}; it must be positive")
    op.require(a.iters >= 1, f"iters is {a.iters}; it must be at least 1")


def sigmoid(x: Array) -> Array:
    """float32, as a tanh, which never overflows."""
    return np.asarray(np.float32(0.5) * (np.float32(1) + np.tanh(x * np.float32(0.5))), np.float32)


def sinkhorn(logits: Array, hc_eps: float, iters: int) -> Array:
    """float32 [T, n, n]: rows by softmax, then columns and rows normalised in turn."""
    eps = np.float32(hc_eps)
    c = np.exp(logits - logits.max(axis=2, keepdims=True))
    c = c / np.add.reduce(c, axis=2, keepdims=True) + eps
    for axis in [1, *[2, 1] * (iters - 1)]:
        c /= np.add.reduce(c, axis=axis, keepdims=True) + eps
    return np.asarray(c, np.float32)


def _post_reference(a: _PostArgs[Array], communicator: op.Communicator | None) -> None:
    tokens, n, _ = a.streams.shape
    post, comb = 2 * sigmoid(a.mix[:, :n]), sinkhorn(a.mix[:, n:].reshape(tokens, n, n), a.hc_eps, a.iters)
    old, added = op.f32(a.streams).copy(), op.rounded(op.sum_over(communicator, a.y), a.y.dtype)
    for k in range(n):
        total = post[:, k : k + 1] * added
        for j in range(n):
            total = total + comb[:, j, k : k + 1] * old[:, j]
        a.streams[:, k] = total


def _post_launches(target: Target, a: _PostArgs[Tensor]) -> Iterator[Command]:
    op.expect_bf16(a.streams)
    tokens, n, width = a.streams.shape
    early = target.early(tokens)
    op.require(n == 4, f"there are {n} streams; kernels for hyper-connections take 4")
    args: dict[str, Arg] = {**op.tensors(a, "streams", "y", "mix"), "hc_eps": a.hc_eps, "iters": a.iters}
    if a.ranks > 1:
        part = op.depth(width, 1024)  # the width of all rows that the model's kernels push
        rows, way = a.y.reshape(-1, part), op.way_of(target, a.ranks, a.y, ONE_KERNEL)
        if part < 64:
            way = op.NCCL
        if way.kind == "push":
            warps = max(1, part // 256)
            for pushed in op.pushed_rows(target, a.ranks, rows.shape[0], part, warps):
                own, constants = args | pushed.args, {**pushed.constants, "PARTS": width // part}
                yield op.launch(
                    _DEVICE, "hc_post_ranks", pushed.grid, own, constants, num_warps=warps, early=early
                )
            return
        yield from op.sum_of_ranks(target, rows, rows, a.ranks, add=False, way=way)
    # Each program finds its token's numbers, so a token has one, but for tokens that leave SMs idle.
    few = 4 * tokens <= target.num_sms and not target.batch_invariant
    block = min(1024 if few else 4096, op.power_of_two(width))
    args, grid = args | {"width": op.Aligned(width)}, (tokens, -(-width // block))
    yield op.launch(_DEVICE, "hc_post", grid, args, {"BLOCK": block}, early=early)


def _post_cost(workload: Workload, a: _PostArgs[Tensor]) -> Cost:
    _, n, width = a.streams.shape
    numbers = (2 * n + 1) * width * a.streams.itemsize + a.mix.shape[1] * 4
    link = op.Collective("all_reduce", a.y, a.y, a.ranks).link_bytes
    return Cost(workload.tokens * numbers, workload.tokens * 2 * (n * n + n) * width, link)


hc_post = Op(
    "hc_post", _PostArgs[Tensor],
    check=_post_check, reference=_post_reference, launches=_post_launches, cost=_post_cost, collective=True,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class _SpreadArgs(Generic[T]):
    """streams[t, s] = x[t] for every stream s, or += with `add` (rounded once). streams [T, n, D], x [T, D] of one
    float dtype."""

    streams: T
    x: T
    add: bool


def _spread_check(a: _SpreadArgs[Tensor]) -> None:
    op.expect("streams", a.streams, (-1, -1, -1), *op.FLOATS)
    op.expect("x", a.x, (a.streams.shape[0], a.streams.shape[2]), a.streams.dtype)


def _spread_reference(a: _SpreadArgs[Array]) -> None:
    a.streams[:] = op.f32(a.streams) + op.f32(a.x)[:, None] if a.add else a.x[:, None]


def _spread_launches(target: Target, a: _SpreadArgs[Tensor]) -> Iterator[Command]:
    tokens, n, width = a.streams.shape
    block = min(1024, op.power_of_two(width))
    args, grid = {**op.tensors(a), "width": op.aligned(width)}, (tokens, -(-width // block))
    constants = {"STREAMS": n, "ADD": a.add, "BLOCK": block}
    yield op.launch(_DEVICE, "spread", grid, args, constants, early=target.early(tokens))


def _spread_cost(workload: Workload, a: _SpreadArgs[Tensor]) -> Cost:
    _, n, width = a.streams.shape
    moved = workload.tokens * ((1 + a.add) * n + 1) * width * a.x.itemsize
    return Cost(moved, workload.tokens * a.add * n * width)


spread = Op("spread", _SpreadArgs[Tensor], _spread_check, _spread_reference, _spread_launches, _spread_cost)


@dataclass(frozen=True, kw_only=True, slots=True)
class _MeanArgs(Generic[T]):
    """out[t] = the mean of streams[t] over its streams, rounded. streams [T, n, D]; out [T, D], rows at any stride, of
    its dtype."""

    out: T
    streams: T


def _mean_check(a: _MeanArgs[Tensor]) -> None:
    op.expect("streams", a.streams, (-1, -1, -1), *op.FLOATS)
    tokens, _, width = a.streams.shape
    op.expect_columns("out", a.out, (tokens, width), a.streams.dtype)


def _mean_reference(a: _MeanArgs[Array]) -> None:
    a.out[:] = op.f32(a.streams).mean(axis=1)


def _mean_launches(target: Target, a: _MeanArgs[Tensor]) -> Iterator[Command]:
    op.expect_bf16(a.streams)
    tokens, n, width = a.streams.shape
    args = {**op.tensors(a), "width": op.aligned(width), "stride": op.aligned(a.out.strides[0])}
    constants, early = {"STREAMS": n, "BLOCKS": op.power_of_two(-(-width // 128))}, target.early(tokens)
    yield op.launch(_DEVICE, "mean_streams", (tokens,), args, constants, early=early)


def _mean_cost(workload: Workload, a: _MeanArgs[Tensor]) -> Cost:
    _, n, width = a.streams.shape
    return Cost(workload.tokens * (n + 1) * width * a.out.itemsize, workload.tokens * n * width)


mean_streams = Op("mean_streams", _MeanArgs[Tensor], _mean_check, _mean_reference, _mean_launches, _mean_cost)


def cases(memory: op.Memory) -> Iterator[op.OpCase]:
    """The streams of a DeepSeek-V4-Flash layer."""
    hidden, n, numbers = 4096, 4, 24
    for tokens in (1, 8, 32, 128, 1024, 4096):
        workload = Workload(tokens, tokens, 0, 0)
        mix = memory.of(memory.rng.uniform(0, 0.3, (tokens, n * n + n)).astype(np.float32))
        rounded_out, out = memory.coded(tokens, hidden, empty=True), memory.empty(tokens, hidden)
        both = {
            "streams": memory.normal(tokens, n, hidden),
            "fn": memory.normal(numbers, n * hidden, scale=(n * hidden) ** -0.5, dtype=float32),
        }
        base, scale = memory.normal(numbers, dtype=float32), memory.normal(3, dtype=float32)
        pre = {
            "out": out, "rounded_out": rounded_out, "mix": mix, **both, "base": base, "scale": scale,
            "norm_weight": memory.normal(hidden, dtype=float32), "eps": 1e-6, "hc_eps": 1e-6,
        }  # fmt: skip
        yield op.OpCase(f"V4-Flash, {tokens} tokens", hc_pre, memory.copies(pre, "streams", "fn"), workload)
        y = memory.normal(tokens, hidden)
        post = {"streams": both["streams"], "y": y, "mix": mix, "hc_eps": 1e-6, "iters": 20}
        yield op.OpCase(f"V4-Flash, {tokens} tokens", hc_post, memory.copies(post, "streams"), workload)
        head = {"out": out, "streams": both["streams"], "fn": both["fn"][:n], "base": base[:n], "scale": scale[:1],
                "eps": 1e-6, "hc_eps": 1e-6}  # fmt: skip
        yield op.OpCase(f"V4-Flash, {tokens} tokens", hc_head, memory.copies(head, "streams"), workload)
