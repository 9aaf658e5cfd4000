"""Weights whose codes have a scale for each group of columns, as publishers store them: which tensors, which of their
parts, and how these become the tensors of a Linear."""

import dataclasses
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from openinfer.kernels.errors import ContractError
from openinfer.kernels.op.contract import expect
from openinfer.kernels.op.rounding import SCALE_BLOCK, Array, Coding
from openinfer.tensor import Conversion, Tensor, TensorLoad

ONE = 0
"""The size of an axis that has one element for all rows or all columns."""


Empty = tuple[tuple[tuple[int, ...], np.dtype[Any]], tuple[tuple[int, ...], np.dtype[Any]]]


class WeightPart(NamedTuple):
    """`rows` rows of a module's weight from row `row` on, in the columns from `column` on: all, or a rank's part."""

    module: str
    rows: int
    row: int = 0
    column: int = 0


class CodedForm(ABC):
    """A format whose numbers are codes with scales."""

    __slots__ = ()

    @abstractmethod
    def code(self) -> tuple[np.dtype[Any], int]:
        """The dtype of an element of the weight, and how many columns it holds."""

    @abstractmethod
    def scales(self, shape: tuple[int, ...], parts: int) -> tuple[tuple[int, ...], np.dtype[Any]]:
        """Shape and dtype of the scales of a weight [..., N, K]. `parts`: projections stacked in N."""

    @abstractmethod
    def values(self, weight: Array, scales: Array, parts: int) -> Array:
        """The float32 values, exactly."""

    @property
    def block(self) -> int:
        """Columns of a rank's part are a multiple of this."""
        return SCALE_BLOCK

    def columns(self, weight: Any) -> int:
        """Columns of a weight that is stored so."""
        return self.code()[1] * int(weight.shape[-1])

    def empty(self, rows: int, columns: int) -> Empty:
        """Shape and dtype of the codes and of the scales of a weight [rows, columns]."""
        dtype, packed = self.code()
        return ((rows, columns // packed), dtype), self.scales((rows, columns), 1)

    def expect(
        self, name: str, weight: Tensor, scales: Any, shape: tuple[int, ...], dtype: np.dtype[Any], parts: int
    ) -> None:
        """Raise ContractError unless the tensors hold a weight [..., N, K] of this shape (-1 = any)."""
        coded, packed = self.code()
        expect(name, weight, (*shape[:-1], shape[-1] // packed), coded)
        k = self.columns(weight)
        self.check(name, k, scales)
        expect(f"scales of {name}", scales, *self.scales((*weight.shape[:-1], k), parts))

    def check(self, name: str, k: int, scales: Tensor) -> None:  # noqa: B027
        """Raise ContractError where no weight with `k` columns has such scales."""

    def allows(self, coding: Coding | None) -> bool:
        """Whether activations may be quantised so before they are multiplied with the weight."""
        return coding is None


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of a module: an element is of `rows` rows and `columns` columns of the weight (ONE: of all; None: it
    lacks that axis). dtype: the one that it has; None: any of a plain weight. transposed: columns come first. optional:
    a checkpoint may lack it."""

    ending: str
    rows: int | None = 1
    columns: int | None = 1
    dtype: np.dtype[Any] | None = None
    transposed: bool = False
    optional: bool = False

    def source(self, module: str, rows: slice, columns: slice) -> tuple[slice, ...]:
        """The part of the tensor that has these rows and columns. Raises ContractError where they are no whole
        elements."""
        axes = (rows, self.rows), (columns, self.columns)
        found = tuple(_elements(module, span, size) for span, size in axes if size is not None)
        return found[::-1] if self.transposed else found


@dataclass(frozen=True, slots=True)
class Grouped:
    """How a checkpoint stores such weights.

    kind: the name that messages use. form: what they become. codes, scales: the tensors that codes and scales are made
    of. to_codes: of the first; None: its bytes are the codes. to_scales: of the part, and the arrays of the others.
    to_values: instead of both, the values, of the arrays of all: no form holds them, so the weight is plain. ignored:
    endings of tensors that say nothing that is needed. coding: how activations are quantised. modules: the packed ones.
    """

    kind: str
    form: CodedForm
    codes: Stored
    scales: tuple[Stored, ...]
    to_codes: Callable[[Array], Array] | None = None
    to_scales: Callable[..., Array] | None = None
    to_values: Callable[..., Array] | None = None
    ignored: tuple[str, ...] = ()
    coding: Coding | None = None
    modules: frozenset[str] | None = None

    made: ClassVar[bool] = False
    block_rows: ClassVar[bool] = False

    @property
    def marker(self) -> str:
        """The ending of a name that only packed modules have."""
        return self.scales[0].ending if self.codes.ending == ".weight" else self.codes.ending

    @property
    def block(self) -> int:
        """Columns of a rank's part are a multiple of this."""
        return self.form.block

    @property
    def kept(self) -> bool:
        """Whether weights stay packed; else they become plain while they are loaded."""
        return self.to_values is None

    def found_in(self, names: Collection[str], modules: frozenset[str]) -> "Grouped":
        """Of these modules, without the optional tensors that the checkpoint lacks."""
        some = next(iter(modules), "")
        kept = (one for one in self.scales if not one.optional or some + one.ending in names)
        return dataclasses.replace(self, scales=tuple(kept), modules=modules)

    def fill(
        self, part: WeightPart, columns: int, weight: Tensor, scales: Tensor | None
    ) -> Iterator[TensorLoad | Conversion]:
        """What fills the rows of a part: codes and scales, or the plain weight where there are no scales."""
        rows, span = slice(part.row, part.row + part.rows), slice(part.column, part.column + columns)
        stored = self.codes, *self.scales
        names = tuple(part.module + one.ending for one in stored)
        sources = tuple(one.source(part.module, rows, span) for one in stored)
        if scales is None:
            values = self.to_values or functools.partial(self._values, part)
            yield Conversion(names, weight, values, sources)
            return
        assert self.to_scales is not None
        if self.to_codes is None:
            yield TensorLoad(names[0], weight, sources[0])
        else:
            yield Conversion(names[:1], weight, self.to_codes, sources[:1])
        yield Conversion(names[1:], scales, functools.partial(self.to_scales, part), sources[1:])

    def _values(self, part: WeightPart, codes: Array, *scales: Array) -> Array:
        assert self.to_scales is not None
        ours = codes if self.to_codes is None else self.to_codes(codes)
        return self.form.values(ours, self.to_scales(part, *scales), 1)


def _elements(module: str, span: slice, size: int) -> slice:
    if size == ONE:
        return slice(0, 1)
    if span.start % size or span.stop % size:
        raise ContractError(
            f"{module}: rows or columns {span.start} to {span.stop} are no whole groups of {size}"
        )
    return slice(span.start // size, span.stop // size)


def finite(scales: Array) -> Array:
    """Scales in float32. Raises ValueError for those that are not finite."""
    wide = scales.astype(np.float32)
    if not np.isfinite(wide).all():
        raise ValueError("a scale is not finite")
    return wide
