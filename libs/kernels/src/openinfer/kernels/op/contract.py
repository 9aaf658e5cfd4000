"""Checks for writing contracts."""

from typing import Any

import numpy as np

from openinfer.kernels.errors import ContractError
from openinfer.tensor import Tensor, bfloat16, float32, int32

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


def expect_each(args: Any, shape: tuple[int, ...], dtype: np.dtype[Any], *names: str) -> None:
    """`expect` for fields of a call's arguments that have one shape and dtype."""
    for name in names:
        expect(name, getattr(args, name), shape, dtype)


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


def expect_columns(name: str, tensor: Tensor, shape: tuple[int, ...], *dtypes: np.dtype[Any]) -> None:
    """Like `expect`, for columns of a wider tensor: rows, or pages, may be at any stride, and each is dense."""
    expect(name, tensor, shape, *dtypes, dense=False)
    if tensor.shape[0] > 0:
        expect(f"{name}[0]", tensor[0], tensor.shape[1:])
