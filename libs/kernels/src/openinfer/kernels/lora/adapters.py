"""Adapters (LoRA) on a device: an arena with places for some of them, each filled by one copy.

A place holds the matrices of one adapter for all projections, one after the other. An op finds those of a fused weight
as a tensor over all places, whose stride is the size of a place.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from openinfer.kernels.errors import InvalidAdapter
from openinfer.kernels.lora.low_rank import MOST_PARTS, Lora
from openinfer.kernels.lora.peft import LowRank, read_peft, text_module
from openinfer.tensor import Arena, Stream, Tensor

Array = np.ndarray[Any, Any]
ALIGNED = 128
"""Elements that matrices begin at multiples of."""
DUMMIES = 1 << 20
"""Numbers of a dummy adapter that are drawn. The rest repeats them."""
RANKS = (8, 16, 32, 64, 128, 256, 512)
"""Possible values of AdapterSizes.max_rank."""


class AdapterSizes(NamedTuple):
    """The room for adapters: how many are on the device at once, and their largest rank, one of RANKS."""

    places: int
    max_rank: int


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """An adapter in host memory. values: its matrices for whole layers, in the model's dtype: with one rank the content
    of a place, unless layers lie in pieces. digest: of the values; adapters with the same digest compute the same."""

    name: str
    path: str
    values: Array
    digest: bytes


class Projection(NamedTuple):
    """A linear layer of the checkpoint, and the rows of a fused weight that hold it, or the part `source` of it. The
    rows of `weight` may hold several parts one after the other, each as a projection of its own."""

    module: str
    weight: Tensor
    source: tuple[slice, ...] = ()
    """Rows and columns of the layer; empty: all of them."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows and columns of the part. A packed weight may have fewer columns."""
        given = [part.stop - part.start for part in self.source if part.stop is not None]
        return tuple(given) if len(given) == 2 else self.weight.shape


class _Part(NamedTuple):
    """A layer in a fused weight, and which rows of the whole layer its rows are."""

    module: str
    rows: tuple[slice, ...]

    @property
    def height(self) -> int:
        return sum(part.stop - part.start for part in self.rows)


class _Span(NamedTuple):
    """The matrices of a fused weight in a row of values: A [P R, columns] from start_a on, then B
    [sum(rows), R]."""

    rows: tuple[int, ...]
    columns: int
    rank: int
    start_a: int
    start_b: int

    @property
    def end(self) -> int:
        return self.start_b + _aligned(sum(self.rows) * self.rank)

    @classmethod
    def after(cls, start: int, rows: tuple[int, ...], columns: int, rank: int) -> "_Span":
        return cls(rows, columns, rank, start, start + _aligned(len(rows) * rank * columns))

    def of(self, values: Array) -> tuple[Array, Array]:
        height, width = len(self.rows) * self.rank, sum(self.rows)
        a = values[self.start_a : self.start_a + height * self.columns].reshape(height, self.columns)
        return a, values[self.start_b : self.start_b + width * self.rank].reshape(width, self.rank)


@dataclass(frozen=True, slots=True)
class _Product:
    """The matrices of a fused weight: a [places, P R, K] and b [places, N, R]. `columns`: of the whole layers, those
    that the weight has. `own`: in a place; `whole`: in an adapter's values."""

    parts: tuple[_Part, ...]
    columns: slice
    a: Tensor
    b: Tensor
    own: _Span
    whole: _Span


class Adapters:
    """The places of adapters, and the products of each. The arena of `allocate` owns the memory.

    Places are numbered from 1. A place's content is undefined until `put`.
    """

    def __init__(
        self, sizes: AdapterSizes, memory: Tensor, products: Mapping[int, _Product], unused: tuple[str, ...]
    ) -> None:
        self.sizes = sizes
        self._unused = unused
        self._memory, self._products = memory, products
        self.num_values = max(product.whole.end for product in products.values())
        """Elements of an adapter's values."""
        self._dummies: Array | None = None

    @classmethod
    def allocate(
        cls,
        arena: Arena,
        sizes: AdapterSizes,
        weights: Iterable[Tensor],
        projections: Iterable[Projection],
        *,
        dtype: np.dtype[Any],
        unused: tuple[str, ...] = (),
        shapes: Mapping[str, tuple[int, ...]] | None = None,
    ) -> "Adapters":
        """Places in `arena` for adapters of these fused weights [N, K]. A weight's parts are the projections that lie
        in it; other projections cannot be adapted. dtype: of activations. unused: see read_peft.
        shapes: of whole layers, by module, where the weights are a rank's parts of them.
        """
        rank, end, whole_end = max(16, sizes.max_rank), 0, 0
        known = list(projections)
        found: list[tuple[Tensor, list[_Part], slice, _Span, _Span]] = []
        for weight in weights:
            inside = range(weight.ptr, weight.ptr + weight.nbytes)
            lying = sorted((p for p in known if p.weight.ptr in inside), key=lambda p: p.weight.ptr)
            parts = _parts(lying)
            if not 1 <= len(parts) <= MOST_PARTS:
                raise ValueError(
                    f"{len(parts)} projections lie in {weight!r}; 1 to {MOST_PARTS} are possible"
                )
            counts, columns = tuple(part.height for part in parts), lying[0].shape[1]
            own = _Span.after(end, counts, columns, rank)
            if shapes is not None:
                counts = tuple(shapes[part.module][0] for part in parts)
                columns = shapes[parts[0].module][1]
            whole = _Span.after(whole_end, counts, columns, rank)
            taken = lying[0].source[1:] or (slice(None),)
            found.append((weight, parts, taken[0], own, whole))
            end, whole_end = own.end, whole.end
        memory = arena.alloc((sizes.places, end), dtype, "adapters")
        products = {
            weight.ptr: _Product(tuple(parts), taken, *_matrices(memory, own), own, whole)
            for weight, parts, taken, own, whole in found
        }
        return cls(sizes, memory, products, unused)

    @property
    def nbytes(self) -> int:
        """Device memory."""
        return self._memory.nbytes

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of an adapter's values."""
        return self._memory.dtype

    def read(self, name: str, folder: Path) -> Adapter:
        """The adapter in a PEFT folder. Any thread may call it. Raises InvalidAdapter."""
        shapes = {
            text_module(part.module): (rows, product.whole.columns)
            for product in self._products.values()
            for part, rows in zip(product.parts, product.whole.rows, strict=True)
        }
        matrices = read_peft(folder, shapes, self.sizes.max_rank, self._unused)
        values = np.zeros(self.num_values, self._memory.dtype)
        with np.errstate(over="ignore"):
            for product in self._products.values():
                _fill(values, product, matrices)
        if not np.isfinite(values).all():  # they would reach other requests of a step
            raise InvalidAdapter(f"adapter {folder}: B times the scale is too large for {values.dtype}")
        digest = hashlib.sha256(values.view(np.uint8).data).digest()
        return Adapter(name, str(folder), values, digest)

    def dummy(self, name: str) -> Adapter:
        """An adapter of random values, as one of weights that are random too. Its values are those of all dummies."""
        if self._dummies is None:
            some = np.random.default_rng(0).standard_normal(min(self.num_values, DUMMIES), np.float32)
            self._dummies = np.resize((some / 64).astype(self._memory.dtype), self.num_values)
        return Adapter(name, "dummy", self._dummies, hashlib.sha256(name.encode()).digest())

    def put(self, place: int, values: Array, stream: Stream) -> None:
        """Copy an adapter's values, or a rank's part of them, into a place, after the work that is on the stream."""
        own = values
        products = self._products.values()
        if any(one.own != one.whole or any(len(part.rows) > 1 for part in one.parts) for one in products):
            own = np.zeros(self._memory.shape[1], self._memory.dtype)
            for product in products:
                _take(own, product, values)
        self._memory[place - 1].copy_from(own, stream)

    def of(self, weight: Tensor, ids: Tensor, token_slots: Tensor) -> Lora[Tensor] | None:
        """What adapters add to a product with `weight`; None for a weight without places. ids
        int32 [S]: the place of each slot's adapter."""
        product = self._products.get(weight.ptr)
        if product is None:
            return None
        return Lora(a=product.a, b=product.b, parts=product.own.rows, adapters=ids, token_slots=token_slots)


def _aligned(count: int) -> int:
    return -(-count // ALIGNED) * ALIGNED


def _parts(lying: Iterable[Projection]) -> list[_Part]:
    """The layers in a fused weight. A layer may lie there in several pieces, one after the other."""
    parts: list[_Part] = []
    for module, weight, source in lying:
        rows = source[0] if source and source[0].start is not None else slice(0, weight.shape[0])
        if parts and parts[-1].module == module:
            parts[-1] = _Part(module, (*parts[-1].rows, rows))
        else:
            parts.append(_Part(module, (rows,)))
    return parts


def _matrices(memory: Tensor, span: _Span) -> tuple[Tensor, Tensor]:
    def over_places(start: int, height: int, width: int) -> Tensor:
        first = memory[:, start:]
        shape, strides = (memory.shape[0], height, width), (memory.strides[0], width, 1)
        return Tensor(first.ptr, shape, memory.dtype, memory.device, strides, memory.owner, memory.name)

    a = over_places(span.start_a, len(span.rows) * span.rank, span.columns)
    return a, over_places(span.start_b, sum(span.rows), span.rank)


def _fill(values: Array, product: _Product, matrices: Mapping[str, LowRank]) -> None:
    """Write an adapter's matrices for one product into its values; B times the scale."""
    (a, b), room, start = product.whole.of(values), product.whole.rank, 0
    for index, (part, rows) in enumerate(zip(product.parts, product.whole.rows, strict=True)):
        own = matrices.get(text_module(part.module))
        if own is not None:
            rank = len(own.a)
            a[index * room : index * room + rank] = own.a.astype(np.float32)
            b[start : start + rows, :rank] = own.b.astype(np.float32) * np.float32(own.scale)
        start += rows


def _take(own: Array, product: _Product, values: Array) -> None:
    """Write a rank's part of one product's matrices into the content of a place."""
    (a, b), (whole_a, whole_b) = product.own.of(own), product.whole.of(values)
    a[:] = whole_a[:, product.columns]
    start = first = 0
    for part, rows in zip(product.parts, product.whole.rows, strict=True):
        for piece in part.rows:
            count = piece.stop - piece.start
            b[start : start + count] = whole_b[first + piece.start : first + piece.stop]
            start += count
        first += rows
