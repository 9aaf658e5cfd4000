"""Checks for writing contracts."""

from __future__ import annotations

from typing import Any

import numpy as np

from openinfer.kernels.errors import ContractError
from openinfer.kernels.formats.codes import FP4_BLOCK, SCALE_BLOCK, Coding, of_rows
from openinfer.kernels.formats.int4 import GROUPS, is_int4
from openinfer.tensor import Tensor, bfloat16, float8_e4m3fn, float32, int32, uint8

FLOATS = (bfloat16, float32)
"""Dtypes of activations and weights: bf16 on a GPU, either on a CPU."""


def expect(
    name: str, tensor: Tensor, shape: tuple[int, ...], *dtypes: np.dtype[Any], dense: bool = True
) -> None:
    """Raise ContractError unless `tensor` has this shape (-1 = any), one of these dtypes, and is dense if asked."""
    given = tensor.shape
    if given != shape and (
        len(given) != len(shape) or any(w not in (-1, g) for g, w in zip(given, shape, strict=True))
    ):
        want = ", ".join("any" if n == -1 else str(n) for n in shape)
        raise ContractError(f"{name} has shape {given}; it must be [{want}]")
    if dtypes and tensor.dtype not in dtypes:
        raise ContractError(
            f"{name} is {tensor.dtype.name}; it must be {' or '.join(d.name for d in dtypes)}"
        )
    if dense and not tensor.is_contiguous:
        raise ContractError(f"{name} has strides {tensor.strides}; it must be contiguous")


def expect_norm(norm_weight: Tensor | None, eps: float | None, width: int, dtype: np.dtype[Any]) -> None:
    """Raise ContractError unless both are given, a weight [width] of `dtype` or float32 and an eps, or neither."""
    if norm_weight is None or eps is None:
        require(norm_weight is None and eps is None, "norm_weight and eps come together")
        return
    expect("norm_weight", norm_weight, (width,), dtype, float32)
    require(eps > 0, f"eps is {eps}; it must be positive")


def expect_normed(normed: Tensor | None, norm_weight: Tensor | None, eps: float | None, x: Tensor) -> None:
    """Raise ContractError unless `normed` is like x [T, H] and its norm is given, or none of them is."""
    expect_norm(norm_weight, eps, x.shape[1], x.dtype)
    require((normed is None) == (norm_weight is None), "normed and norm_weight come together")
    if normed is not None:
        expect("normed", normed, x.shape, x.dtype)


def require(condition: bool, message: str) -> None:
    """Raise ContractError with `message` unless `condition` holds."""
    if not condition:
        raise ContractError(message)


def expect_rows(slots: Tensor, q_starts: Tensor, **by_slot: Tensor) -> tuple[int, int]:
    """Raise ContractError unless these are the rows of a step, as in expand_rows: slots int32 [R], q_starts int32
    [R + 1], seq_lens and others by slot int32 [S]. Returns R and S."""
    rows, size = slots.shape[0], by_slot["seq_lens"].shape[0]
    expect("slots", slots, (rows,), int32)
    expect("q_starts", q_starts, (rows + 1,), int32)
    for name, tensor in by_slot.items():
        expect(name, tensor, (size,), int32)
    return rows, size


def expect_max_q_len(max_q_len: int, tokens: int, rows: int) -> None:
    """Raise ContractError unless no row of a step can have more tokens; rows of one token each are all its tokens."""
    require(1 <= max_q_len <= tokens, f"max_q_len is {max_q_len}; it must be in [1, {tokens}]")
    require(max_q_len > 1 or tokens == rows, f"a step of one token a row has {tokens} tokens and {rows} rows")


def expect_cos_sin(cos_sin: Tensor, dim: int) -> None:
    """Raise ContractError unless cos_sin is float32 [P, 2, r / 2] for heads of `dim`: cosines and sines by position."""
    expect("cos_sin", cos_sin, (-1, 2, -1), float32)
    require(2 * cos_sin.shape[2] <= dim, f"cos_sin rotates {2 * cos_sin.shape[2]} elements of heads of {dim}")


def expect_weight(
    name: str,
    weight: Tensor,
    scales: Tensor | None,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    *,
    parts: int = 1,
    rows: bool = False,
) -> None:
    """Raise ContractError unless `weight` [..., N, K] has this shape (-1 = any) and either `dtype` and no scales, or
    float8_e4m3fn and scales.

    Scales are float32 [..., parts * ceil(N / parts / 128), ceil(K / 128)]: the value of a weight is its e4m3 number
    times the scale of the block of 128 x 128 that it is in. `parts`: projections that are stacked in N; blocks begin
    anew at each. `rows`: scales may also be float32 [..., N, 1], one for each row. Where scales are int32
    [..., N, K / G], the weight is INT4 in bytes [..., N, K / 2] (openinfer.kernels.formats.int4).
    """
    if scales is None:
        expect(name, weight, shape, dtype)
        return
    if is_int4(scales):
        k = shape[-1]
        expect(name, weight, (*shape[:-1], k // 2), uint8)
        group = k // max(1, scales.shape[-1])
        require(
            group in GROUPS and k % group == 0,
            f"{name} has {scales.shape[-1]} INT4 groups in {k} columns; a group has one of {GROUPS} columns",
        )
        expect(f"scales of {name}", scales, (*weight.shape[:-1], k // group), int32)
        return
    expect(name, weight, shape, float8_e4m3fn)
    n, k = weight.shape[-2:]
    if rows and of_rows(weight, scales):
        expect(f"scales of {name}", scales, scales.shape, float32)
        return
    blocks = (parts * -(-n // parts // SCALE_BLOCK), -(-k // SCALE_BLOCK))
    expect(f"scales of {name}", scales, (*weight.shape[:-2], *blocks), float32)


def expect_coding(
    coding: Coding | None, x_scale: Tensor | None, weight: Tensor, scales: Tensor | None
) -> None:
    """Raise ContractError unless activations can be quantised so before they are multiplied with this weight: by block
    where a float8 weight has scales of blocks, by token or with one scale where it has scales of rows."""
    require(
        (x_scale is not None) == (coding == "tensor"),
        f"coding is {coding!r} and x_scale is {x_scale!r}; only 'tensor' has an x_scale",
    )
    if x_scale is not None:
        expect("x_scale", x_scale, (1,), float32)
    if coding is not None and scales is not None:
        require(
            not is_int4(scales) and (coding != "block") == of_rows(weight, scales),
            f"coding is {coding!r}, and scales of weight have shape {scales.shape}; 'block' is for scales of blocks, "
            "the others are for scales of rows",
        )


def expect_columns(name: str, tensor: Tensor, shape: tuple[int, ...], *dtypes: np.dtype[Any]) -> None:
    """Like `expect`, for columns of a wider tensor: rows may be at any stride, the elements of a row lie together."""
    expect(name, tensor, shape, *dtypes, dense=False)
    if tensor.shape[0] > 1:
        expect(f"{name}[0]", tensor[0], tensor.shape[1:])


def expect_packed(
    name: str, weight: Tensor, scales: Tensor | None, shape: tuple[int, ...], dtype: np.dtype[Any],
    *, parts: int = 1,
) -> None:  # fmt: skip
    """Raise ContractError unless `weight` [..., N, K] has this shape (-1 = any) and is of one of these kinds:

    - `dtype`, and no scales;
    - float8_e4m3fn, scales uint8 [..., parts * ceil(N / parts / 128), ceil(K / 128)]: of blocks of 128 x 128;
    - uint8 [..., N, K / 2], scales uint8 [..., N, K / 32]: FP4 pairs, column 2i in the low nibble of byte i.

    Scales are the exponents of E8M0: byte b is 2^(b - 127), at most 134 for float8 and 128 for FP4; codes are numbers,
    no NaN. Products of float8 codes take an FP4 block whose byte is below 102 for zero: it holds less than 2^-22.
    `parts`: projections stacked in N; float8 blocks begin anew at each.
    """
    if scales is None:
        expect(name, weight, shape, dtype)
        return
    if weight.dtype == uint8:
        expect(name, weight, (*shape[:-1], shape[-1] // 2))
        expect(f"scales of {name}", scales, (*weight.shape[:-1], shape[-1] // FP4_BLOCK), uint8)
        return
    expect(name, weight, shape, float8_e4m3fn)
    n, k = weight.shape[-2:]
    blocks = (parts * -(-n // parts // SCALE_BLOCK), -(-k // SCALE_BLOCK))
    expect(f"scales of {name}", scales, (*weight.shape[:-2], *blocks), uint8)
