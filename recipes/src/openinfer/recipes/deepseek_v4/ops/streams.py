"""hc_post, spread: a sublayer's output, or an embedding, into the residual streams."""

from __future__ import annotations

from collections.abc import Iterator

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
    Target,
    Workload,
    aligned,
    depth,
    expect,
    expect_bf16,
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


def _post_contract(*, streams: Tensor, y: Tensor, mix: Tensor, ranks: int = 1) -> None:
    """streams[t, k] = post_k * y[t] + sum over j of C[j, k] * streams[t, j], in place: float32, rounded once.

    streams [T, n, D], y [T, D] of one float dtype; mix float32 [T, n + n n] as hc_pre writes it: post, then C row by
    row (the sum is over its first index). On a GPU n is 4.

    With several ranks y is a rank's part, and the streams get the sum of all, rounded before it is mixed. y may be
    overwritten.
    """
    expect("streams", streams, (-1, -1, -1), *FLOATS)
    tokens, n, width = streams.shape
    expect("y", y, (tokens, width), streams.dtype)
    expect("mix", mix, (tokens, n + n * n), float32)


def _post_reference(
    *, streams: Array, y: Array, mix: Array, ranks: int = 1, communicator: Communicator | None = None
) -> None:
    tokens, n, _ = streams.shape
    post, comb = mix[:, :n], mix[:, n:].reshape(tokens, n, n)
    old, added = f32(streams).copy(), rounded(sum_over(communicator, y), y.dtype)
    for k in range(n):
        total = post[:, k : k + 1] * added
        for j in range(n):
            total = total + comb[:, j, k : k + 1] * old[:, j]
        streams[:, k] = total


def _post_launches(
    target: Target, *, streams: Tensor, y: Tensor, mix: Tensor, ranks: int = 1
) -> Iterator[Command]:
    expect_bf16(streams)
    tokens, n, width = streams.shape
    require(n == 4, f"there are {n} streams; kernels for hyper-connections take 4")
    if ranks > 1:
        part = depth(width, 1024)  # the width of all rows that the model's kernels push
        rows, way = y.reshape(-1, part), way_of(target, ranks, y, ONE_KERNEL)
        if part < 64:
            way = NCCL
        if way.kind == "push":
            warps = max(1, part // 256)
            for pushed in pushed_rows(target, ranks, rows.shape[0], part, warps):
                args = {"streams": streams, "y": y, "mix": mix, **pushed.args}
                constants = {**pushed.constants, "PARTS": width // part}
                yield launch(_DEVICE, "hc_post_ranks", pushed.grid, args, constants, num_warps=warps)
            return
        yield from sum_of_ranks(target, rows, rows, ranks, add=False, way=way)
    block = min(1024, power_of_two(width))
    yield launch(
        _DEVICE,
        "hc_post",
        (tokens, -(-width // block)),
        {"streams": streams, "y": y, "mix": mix, "width": Aligned(width)},
        {"BLOCK": block},
    )


def _post_cost(workload: Workload, *, streams: Tensor, y: Tensor, mix: Tensor, ranks: int = 1) -> Cost:
    _, n, width = streams.shape
    numbers = (2 * n + 1) * width * streams.itemsize + mix.shape[1] * 4
    link = Collective("all_reduce", y, y, ranks).link_bytes
    return Cost(workload.tokens * numbers, workload.tokens * 2 * (n * n + n) * width, link)


hc_post = Op(
    "hc_post",
    _post_contract,
    reference=_post_reference,
    launches=_post_launches,
    cost=_post_cost,
    collective=True,
)


def _spread_contract(*, streams: Tensor, x: Tensor, add: bool) -> None:
    """streams[t, s] = x[t] for every stream s, or += with `add` (rounded once). streams [T, n, D], x [T, D] of one
    float dtype."""
    expect("streams", streams, (-1, -1, -1), *FLOATS)
    expect("x", x, (streams.shape[0], streams.shape[2]), streams.dtype)


def _spread_reference(*, streams: Array, x: Array, add: bool) -> None:
    streams[:] = f32(streams) + f32(x)[:, None] if add else x[:, None]


def _spread_launches(target: Target, *, streams: Tensor, x: Tensor, add: bool) -> Iterator[Command]:
    tokens, n, width = streams.shape
    block = min(1024, power_of_two(width))
    yield launch(
        _DEVICE,
        "spread",
        (tokens, -(-width // block)),
        {"streams": streams, "x": x, "width": aligned(width)},
        {"STREAMS": n, "ADD": add, "BLOCK": block},
    )


def _spread_cost(workload: Workload, *, streams: Tensor, x: Tensor, add: bool) -> Cost:
    _, n, width = streams.shape
    return Cost(workload.tokens * ((1 + add) * n + 1) * width * x.itemsize, workload.tokens * add * n * width)


spread = Op(
    "spread", _spread_contract, reference=_spread_reference, launches=_spread_launches, cost=_spread_cost
)
