"""hc_post, spread, mean_streams: a sublayer's output, or an embedding, into the residual streams, and their mean."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic

from openinfer.kernels.authoring import (
    FLOATS,
    NCCL,
    Aligned,
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
    way_of,
)
from openinfer.tensor import Tensor, float32

_DEVICE = "openinfer.recipes.deepseek_v4.device.hyper_connections"
ONE_KERNEL = 1 << 20
"""Bytes that one kernel pushes. Where a rank comes late, several kernels take a millisecond each (docs/lessons)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _PostArgs(Generic[T]):
    """streams[t, k] = post_k * y[t] + sum over j of C[j, k] * streams[t, j], in place: float32, rounded once.

    streams [T, n, D], y [T, D] of one float dtype; mix float32 [T, n + n n] as hc_pre writes it: post, then C row by
    row (the sum is over its first index). On a GPU n is 4.

    With several ranks y is a rank's part, and the streams get the sum of all, rounded before it is mixed. y may be
    overwritten.
    """

    streams: T
    y: T
    mix: T
    ranks: int = 1


def _post_check(a: _PostArgs[Tensor]) -> None:
    expect("streams", a.streams, (-1, -1, -1), *FLOATS)
    tokens, n, width = a.streams.shape
    expect("y", a.y, (tokens, width), a.streams.dtype)
    expect("mix", a.mix, (tokens, n + n * n), float32)


def _post_reference(a: _PostArgs[Array], communicator: Communicator | None) -> None:
    tokens, n, _ = a.streams.shape
    post, comb = a.mix[:, :n], a.mix[:, n:].reshape(tokens, n, n)
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
    if a.ranks > 1:
        part = depth(width, 1024)  # the width of all rows that the model's kernels push
        rows, way = a.y.reshape(-1, part), way_of(target, a.ranks, a.y, ONE_KERNEL)
        if part < 64:
            way = NCCL
        if way.kind == "push":
            warps = max(1, part // 256)
            for pushed in pushed_rows(target, a.ranks, rows.shape[0], part, warps):
                args = {"streams": a.streams, "y": a.y, "mix": a.mix} | dict(pushed.args)
                constants = {**pushed.constants, "PARTS": width // part}
                yield launch(
                    _DEVICE, "hc_post_ranks", pushed.grid, args, constants, num_warps=warps, early=early
                )
            return
        yield from sum_of_ranks(target, rows, rows, a.ranks, add=False, way=way)
    block = min(1024, power_of_two(width))
    yield launch(
        _DEVICE,
        "hc_post",
        (tokens, -(-width // block)),
        {"streams": a.streams, "y": a.y, "mix": a.mix, "width": Aligned(width)},
        {"BLOCK": block},
        early=early,
    )


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
