"""hc_post, spread, mean_streams: a sublayer's output, or an embedding, into the residual streams, and their mean."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic

import numpy as np

from openinfer.kernels.authoring import (
    FLOATS,
    NCCL,
    Aligned,
    Arg,
    Array,
    Collective,
    Command,
    Communicator,
    Cost,
    Op,
    T,
    Target,
    Workload,
    aligned,
    depth,
    expect,
    expect_bf16,
    expect_columns,
    f32,
    launch,
    power_of_two,
    pushed_rows,
    require,
    rounded,
    sum_of_ranks,
    sum_over,
    tensors,
    way_of,
)
from openinfer.tensor import Tensor, float32

_DEVICE = "openinfer.recipes.deepseek_v4.device.hyper_connections"
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
    expect("streams", a.streams, (-1, -1, -1), *FLOATS)
    tokens, n, width = a.streams.shape
    expect("y", a.y, (tokens, width), a.streams.dtype)
    expect("mix", a.mix, (tokens, n + n * n), float32)
    require(a.hc_eps > 0, f"hc_eps is {a.hc_eps}; it must be positive")
    require(a.iters >= 1, f"iters is {a.iters}; it must be at least 1")


def sigmoid(x: Array) -> Array:
    """float32, as a tanh, which never overflows."""
    return np.asarray(np.float32(0.5) * (np.float32(1) + np.tanh(x * np.float32(0.5))), np.float32)


def sinkhorn(logits: Array, hc_eps: float, iters: int) -> Array:
    """float32 [T, n, n]: rows by softmax, then columns and rows normalised in turn."""
    eps = np.float32(hc_eps)
    c = np.exp(logits - logits.max(axis=2, keepdims=True))
    c = c / c.sum(axis=2, keepdims=True) + eps
    c = c / (c.sum(axis=1, keepdims=True) + eps)
    for _ in range(iters - 1):
        c = c / (c.sum(axis=2, keepdims=True) + eps)
        c = c / (c.sum(axis=1, keepdims=True) + eps)
    return np.asarray(c, np.float32)


def _post_reference(a: _PostArgs[Array], communicator: Communicator | None) -> None:
    tokens, n, _ = a.streams.shape
    post, comb = 2 * sigmoid(a.mix[:, :n]), sinkhorn(a.mix[:, n:].reshape(tokens, n, n), a.hc_eps, a.iters)
    old, added = f32(a.streams).copy(), rounded(sum_over(communicator, a.y), a.y.dtype)
    for k in range(n):
        total = post[:, k : k + 1] * added
        for j in range(n):
            total = total + comb[:, j, k : k + 1] * old[:, j]
        a.streams[:, k] = total


def _post_launches(target: Target, a: _PostArgs[Tensor]) -> Iterator[Command]:
    expect_bf16(a.streams)
    tokens, n, width = a.streams.shape
    early = target.early(tokens)
    require(n == 4, f"there are {n} streams; kernels for hyper-connections take 4")
    args: dict[str, Arg] = {**tensors(a, "streams", "y", "mix"), "hc_eps": a.hc_eps, "iters": a.iters}
    if a.ranks > 1:
        part = depth(width, 1024)  # the width of all rows that the model's kernels push
        rows, way = a.y.reshape(-1, part), way_of(target, a.ranks, a.y, ONE_KERNEL)
        if part < 64:
            way = NCCL
        if way.kind == "push":
            warps = max(1, part // 256)
            for pushed in pushed_rows(target, a.ranks, rows.shape[0], part, warps):
                own, constants = args | pushed.args, {**pushed.constants, "PARTS": width // part}
                yield launch(
                    _DEVICE, "hc_post_ranks", pushed.grid, own, constants, num_warps=warps, early=early
                )
            return
        yield from sum_of_ranks(target, rows, rows, a.ranks, add=False, way=way)
    # Each program finds its token's numbers, so a token has one, but for tokens that leave SMs idle.
    few = 4 * tokens <= target.num_sms and not target.batch_invariant
    block = min(1024 if few else 4096, power_of_two(width))
    args, grid = args | {"width": Aligned(width)}, (tokens, -(-width // block))
    yield launch(_DEVICE, "hc_post", grid, args, {"BLOCK": block}, early=early)


def _post_cost(workload: Workload, a: _PostArgs[Tensor]) -> Cost:
    _, n, width = a.streams.shape
    numbers = (2 * n + 1) * width * a.streams.itemsize + a.mix.shape[1] * 4
    link = Collective("all_reduce", a.y, a.y, a.ranks).link_bytes
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
    expect("streams", a.streams, (-1, -1, -1), *FLOATS)
    expect("x", a.x, (a.streams.shape[0], a.streams.shape[2]), a.streams.dtype)


def _spread_reference(a: _SpreadArgs[Array]) -> None:
    a.streams[:] = f32(a.streams) + f32(a.x)[:, None] if a.add else a.x[:, None]


def _spread_launches(target: Target, a: _SpreadArgs[Tensor]) -> Iterator[Command]:
    tokens, n, width = a.streams.shape
    block = min(1024, power_of_two(width))
    yield launch(
        _DEVICE,
        "spread",
        (tokens, -(-width // block)),
        {"streams": a.streams, "x": a.x, "width": aligned(width)},
        {"STREAMS": n, "ADD": a.add, "BLOCK": block},
        early=target.early(tokens),
    )


def _spread_cost(workload: Workload, a: _SpreadArgs[Tensor]) -> Cost:
    _, n, width = a.streams.shape
    return Cost(
        workload.tokens * ((1 + a.add) * n + 1) * width * a.x.itemsize, workload.tokens * a.add * n * width
    )


spread = Op(
    "spread", _SpreadArgs[Tensor],
    check=_spread_check, reference=_spread_reference, launches=_spread_launches, cost=_spread_cost,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class _MeanArgs(Generic[T]):
    """out[t] = the mean of streams[t] over its streams, rounded. streams [T, n, D]; out [T, D], rows at any stride, of
    its dtype."""

    out: T
    streams: T


def _mean_check(a: _MeanArgs[Tensor]) -> None:
    expect("streams", a.streams, (-1, -1, -1), *FLOATS)
    tokens, _, width = a.streams.shape
    expect_columns("out", a.out, (tokens, width), a.streams.dtype)


def _mean_reference(a: _MeanArgs[Array]) -> None:
    a.out[:] = f32(a.streams).mean(axis=1)


def _mean_launches(target: Target, a: _MeanArgs[Tensor]) -> Iterator[Command]:
    expect_bf16(a.streams)
    tokens, n, width = a.streams.shape
    sizes = {"width": aligned(width), "stride": aligned(a.out.strides[0])}
    args = {"out": a.out, "streams": a.streams, **sizes}
    constants, early = {"STREAMS": n, "BLOCKS": power_of_two(-(-width // 128))}, target.early(tokens)
    yield launch(_DEVICE, "mean_streams", (tokens,), args, constants, early=early)


def _mean_cost(workload: Workload, a: _MeanArgs[Tensor]) -> Cost:
    _, n, width = a.streams.shape
    return Cost(workload.tokens * (n + 1) * width * a.out.itemsize, workload.tokens * n * width)


mean_streams = Op(
    "mean_streams", _MeanArgs[Tensor],
    check=_mean_check, reference=_mean_reference, launches=_mean_launches, cost=_mean_cost,
)  # fmt: skip
