"""A weight of a linear layer as one value, and the formats of its numbers: one class and one entry of FORMS each."""

from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import numpy as np

from openinfer.kernels.formats.fp4 import Fp4
from openinfer.kernels.formats.fp8 import Fp8, Mx
from openinfer.kernels.formats.groups import CodedForm
from openinfer.kernels.formats.int4 import Int4Groups
from openinfer.kernels.formats.int8 import Int8
from openinfer.kernels.op.contract import expect, require
from openinfer.kernels.op.op import T
from openinfer.kernels.op.rounding import BEFOREHAND, SCALE_BLOCK, Array, Coding
from openinfer.tensor import Tensor, float32

T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Plain:
    """Numbers of the model's dtype, without scales."""

    def __str__(self) -> str:
        return "plain"

    def columns(self, weight: Any) -> int:
        return int(weight.shape[-1])

    def values(self, weight: Array, scales: Any, parts: int) -> Array:
        return weight.astype(np.float32, copy=False)

    def expect(
        self, name: str, weight: Tensor, scales: Any, shape: tuple[int, ...], dtype: np.dtype[Any], parts: int
    ) -> None:
        expect(name, weight, shape, dtype)

    def allows(self, coding: Coding | None) -> bool:
        return True

    @classmethod
    def of(cls, weight: Any, scales: Any) -> "Plain | None":
        """The form of these tensors or arrays, None for another format's."""
        return cls() if scales is None else None


Form = Plain | CodedForm
"""A format of a weight's numbers, with the sizes that kernels depend on. Forms of the same format and sizes are
equal."""
FORMS = (Plain, Fp4, Int4Groups, Int8, Mx, Fp8)
"""All formats; the first that knows the dtypes of weight and scales is a weight's."""
DENSE = (Plain, Fp8, Int4Groups, Fp4, Int8)
"""The formats that products of dense layers take."""
EXPERTS = (Plain, Fp8(by_row=False), Int4Groups, Fp4, Int8)
"""The formats that mixtures of experts take."""


@dataclass(frozen=True, slots=True)
class Linear(Generic[T_co]):
    """A weight [N, K] (of experts [E, N, K]) of the model's dtype, or packed with scales as its `form` says.

    coding, x_scale: how activations are quantised before they are multiplied with it; x_scale is float32 [1], of
    rounding.BEFOREHAND."""

    weight: T_co
    scales: T_co | None = None
    coding: Coding | None = None
    x_scale: T_co | None = None

    @property
    def form(self) -> Form:
        """The format of its numbers."""
        return next(form for kind in FORMS if (form := kind.of(self.weight, self.scales)) is not None)

    @property
    def packed(self) -> str:
        """The short name of a packed format; "" for plain numbers."""
        return "" if isinstance(self.form, Plain) else str(self.form).split()[0]

    @property
    def nbytes(self) -> int:
        """Bytes of the weight and its scales."""
        tensors: tuple[Any, ...] = (self.weight, self.scales)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    @property
    def shape(self) -> tuple[int, ...]:
        """[..., N, K], whatever the weight is stored in."""
        stored: Any = self.weight
        return (*stored.shape[:-1], self.columns)

    @property
    def columns(self) -> int:
        """K."""
        return self.form.columns(self.weight)

    def values(self: "Linear[Array]", parts: int = 1) -> Array:
        """The float32 values, exactly. `parts`: projections stacked in the rows."""
        scales: Any = self.scales
        return self.form.values(self.weight, scales, parts)

    def halves(self: "Linear[Array]") -> tuple[Array, Array]:
        """The gate's and the up projection's half of a weight [..., 2 I, K], each as float32 [..., I, K]."""
        wide, inter = self.values(2), self.weight.shape[-2] // 2
        return wide[..., :inter, :], wide[..., inter:, :]

    def __getitem__(self: "Linear[Any]", expert: int) -> "Linear[Any]":
        """One expert's."""
        return Linear(self.weight[expert], None if self.scales is None else self.scales[expert])

    def rows(self: "Linear[Tensor]", first: int, last: int | None = None) -> "Linear[Tensor]":
        """The rows from `first` to before `last`. A block of scales begins with `first`, or holds all of them."""
        last = self.weight.shape[-2] if last is None else last
        weight, scales = self.weight[first:last], self.scales
        if scales is not None:
            block = 1 if scales.shape[-2] == self.weight.shape[-2] else SCALE_BLOCK
            scales = scales[first // block : -(-last // block)]
        return replace(self, weight=weight, scales=scales)


def linear_of(weight: Linear[T] | T) -> Linear[T]:
    """The weight of an op's arguments, where a tensor stands for plain numbers."""
    return weight if isinstance(weight, Linear) else Linear(weight)


def expect_linear(
    name: str,
    linear: Linear[Tensor],
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    *forms: type[Form] | Form,
    parts: int = 1,
) -> None:
    """Raise ContractError unless a weight [..., N, K] has this shape (-1 = any), is in one of these forms, where plain
    numbers are of `dtype`, and activations may be quantised as it says. `parts`: projections stacked in N."""
    form, coding = linear.form, linear.coding
    kinds = {one if isinstance(one, type) else type(one): one for one in forms}
    require(type(form) in kinds, f"{name} is {form}; no product of this op takes that")
    one = kinds[type(form)]
    (form if isinstance(one, type) else one).expect(name, linear.weight, linear.scales, shape, dtype, parts)
    alike = (linear.x_scale is not None) == (coding in BEFOREHAND)
    require(alike, f"coding is {coding!r} and x_scale is {linear.x_scale!r}; those of {BEFOREHAND} have one")
    if linear.x_scale is not None:
        expect("x_scale", linear.x_scale, (1,), float32)
    require(
        form.allows(coding),
        f"coding is {coding!r}, and {name} is {form}; 'block' is for FP8 with scales of blocks, 'token' and 'tensor' "
        "are for FP8 with scales of rows, and those of int8 for INT8 with scales of rows",
    )
