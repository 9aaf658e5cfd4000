"""Activations that went through q8, as their codes: what makes them writes these once, and products read them."""

from dataclasses import dataclass
from typing import Any, Generic

import numpy as np

from openinfer.kernels.errors import ContractError
from openinfer.kernels.op.contract import expect, require
from openinfer.kernels.op.launch import Arg
from openinfer.kernels.op.op import T
from openinfer.kernels.op.rounding import SCALE_BLOCK, Array, q8_codes, q8_values
from openinfer.tensor import Arena, Tensor, float8_e4m3fn, uint8


@dataclass(frozen=True, slots=True)
class Coded(Generic[T]):
    """Values [T, K] of a dtype that went through q8 (op.rounding) in blocks of 128 columns, or of all K if they are
    fewer: float8_e4m3fn codes [T, K], and the bytes of E8M0 scales, uint8 [T, ceil(K / 128)]. Both are dense, and row
    by row, so that tokens are a slice of each."""

    codes: T
    scales: T
    dtype: np.dtype[Any]

    @classmethod
    def allocate(cls, arena: Arena, shape: tuple[int, int], dtype: np.dtype[Any]) -> "Coded[Tensor]":
        """Uninitialised memory for values of this shape."""
        tokens, width = shape
        scales = arena.alloc((tokens, -(-width // SCALE_BLOCK)), uint8)
        return Coded(arena.alloc(shape, float8_e4m3fn), scales, dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """[T, K]."""
        stored: Any = self.codes
        return tuple(stored.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        stored: tuple[Any, Any] = self.codes, self.scales
        return sum(one.nbytes for one in stored)

    def __getitem__(self: "Coded[Any]", tokens: slice) -> "Coded[Any]":
        """The values of some tokens."""
        return Coded(self.codes[tokens], self.scales[tokens], self.dtype)

    def values(self: "Coded[Array]") -> Array:
        """The values in float32, exactly."""
        blocks = self.codes.reshape(len(self.codes), self.scales.shape[1], -1)
        return q8_values(blocks, self.scales).reshape(self.codes.shape)


def in_blocks(width: int) -> bool:
    """Whether these are whole blocks, or the even part of one block that one of several ranks has."""
    return width % SCALE_BLOCK == 0 or SCALE_BLOCK % width == 0


def decoded(x: Coded[Array] | Array) -> Array:
    """The values of an argument, of which codes become float32."""
    return x.values() if isinstance(x, Coded) else x


def write_values(out: Coded[Array] | Array, values: Array) -> None:
    """Write float32 values, through q8 where they are to be codes."""
    if isinstance(out, Coded):
        codes, out.scales[:] = q8_codes(values.reshape(len(values), out.scales.shape[1], -1))
        out.codes[:] = codes.reshape(values.shape)
    else:
        out[:] = values


def code_args(out: Coded[Tensor] | Tensor) -> dict[str, Arg]:
    """The arguments `out` and `scales` of a kernel that writes values, or their codes."""
    return {"out": out.codes, "scales": out.scales} if isinstance(out, Coded) else {"out": out, "scales": out}


def expect_values(
    name: str, x: Coded[Tensor] | Tensor, shape: tuple[int, ...], *dtypes: np.dtype[Any]
) -> None:
    """`expect` for an argument that may be Coded, of one of these dtypes."""
    if not isinstance(x, Coded):
        expect(name, x, shape, *dtypes)
        return
    if x.dtype not in dtypes:
        names = " or ".join(one.name for one in dtypes)
        raise ContractError(f"{name} has codes of {x.dtype.name}; it must be {names}")
    expect(name, x.codes, shape, float8_e4m3fn)
    tokens, width = x.codes.shape
    require(in_blocks(width), f"{name} has {width} columns; q8 takes multiples of {SCALE_BLOCK}")
    expect(f"{name}.scales", x.scales, (tokens, -(-width // SCALE_BLOCK)), uint8)
