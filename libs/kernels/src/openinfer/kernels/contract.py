"""Checks that contracts are written with."""

from __future__ import annotations

from typing import Any

import numpy as np

from openinfer.kernels.errors import ContractError
from openinfer.tensor import Tensor, bfloat16, float32

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


def require(condition: bool, message: str) -> None:
    """Raise ContractError with `message` unless `condition` holds."""
    if not condition:
        raise ContractError(message)
