"""Adapters (LoRA) on a device: an arena with places for some of them, each filled by one copy.

A place holds the matrices of one adapter for all projections, one after the other. An op finds those of a fused weight
as a tensor over all places, whose stride is the size of a place.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from openinfer.kernels.op import Pack
from openinfer.kernels.ops.add_lora import MOST_PARTS, add_lora
from openinfer.kernels.peft import read_peft, text_module
from openinfer.tensor import Arena, Stream, Tensor

__all__ = ["Adapter", "AdapterSizes", "Adapters", "Projection"]

Array = np.ndarray[Any, Any]
ALIGNED = 128
"""Elements that matrices begin at multiples of."""
RANKS = (8, 16, 32, 64, 128, 256, 512)
"""Possible values of AdapterSizes.max_rank."""


class AdapterSizes(NamedTuple):
    """The room for adapters: how many are on the device at once, and their largest rank, one of RANKS."""

    places: int
    max_rank: int


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """An adapter in host memory. values: the content of a place, in the model's dtype. digest: of the values; two
    adapters with the same digest compute the same."""

    name: str
    path: str
    values: Array
    digest: bytes


class Projection(NamedTuple):
    """A linear layer of the checkpoint, and the rows of a fused weight that hold it."""

    module: str
    weight: Tensor


@dataclass(frozen=True, slots=True)
class _Product:
    """The matrices of a fused weight: a [places, P R, K] and b [places, N, R]; `modules` and `rows`: of its parts.
    start_a, start_b: elements from the beginning of a place."""

    modules: tuple[str, ...]
    rows: tuple[int, ...]
    a: Tensor
    b: Tensor
    start_a: int
    start_b: int


class Adapters:
    """The places of adapters, and the products of each. The arena of `allocate` owns the memory.

    Places are numbered from 1. A place's content is undefined until `put`.
    """

    def __init__(
        self,
        sizes: AdapterSizes,
        memory: Tensor,
        products: Mapping[int, _Product],
        added: Tensor,
        unused: tuple[str, ...],
    ) -> None:
        self.sizes = sizes
        self._unused = unused
        self._memory, self._products, self._added = memory, products, added

    @classmethod
    def allocate(
        cls,
        arena: Arena,
        sizes: AdapterSizes,
        weights: Iterable[Tensor],
        projections: Iterable[Projection],
        *,
        dtype: np.dtype[Any],
        max_tokens: int,
        unused: tuple[str, ...] = (),
    ) -> Adapters:
        """Places in `arena` for adapters of these fused weights [N, K]. A weight's parts are the projections that lie
        in it; other projections cannot be adapted. dtype: of activations. max_tokens: of a step. unused: see read_peft.
        """
        rank, end = max(16, sizes.max_rank), 0
        known = list(projections)
        found: list[tuple[Tensor, list[Projection], int, int]] = []
        for weight in weights:
            inside = range(weight.ptr, weight.ptr + weight.nbytes)
            parts = sorted((p for p in known if p.weight.ptr in inside), key=lambda p: p.weight.ptr)
            if not 1 <= len(parts) <= MOST_PARTS:
                raise ValueError(
                    f"{len(parts)} projections lie in {weight!r}; 1 to {MOST_PARTS} are possible"
                )
            start_a, columns = end, parts[0].weight.shape[1]
            start_b = start_a + _aligned(len(parts) * rank * columns)
            end = start_b + _aligned(sum(p.weight.shape[0] for p in parts) * rank)
            found.append((weight, parts, start_a, start_b))
        memory = arena.alloc((sizes.places, end), dtype, "adapters")
        products = {
            weight.ptr: _product(memory, parts, rank, start_a, start_b)
            for weight, parts, start_a, start_b in found
        }
        widest = max(sum(product.rows) for product in products.values())
        added = arena.alloc((max_tokens * widest,), dtype, "added by adapters")
        return cls(sizes, memory, products, added, unused)

    @property
    def nbytes(self) -> int:
        """Device memory."""
        return self._memory.nbytes + self._added.nbytes

    @property
    def place_bytes(self) -> int:
        """Bytes of an adapter, on the device and on the host."""
        return self._memory[0].nbytes

    def read(self, name: str, folder: Path) -> Adapter:
        """The adapter in a PEFT folder. Any thread may call it. Raises InvalidAdapter."""
        shapes = {
            text_module(module): (rows, product.a.shape[2])
            for product in self._products.values()
            for module, rows in zip(product.modules, product.rows, strict=True)
        }
        peft = read_peft(folder, shapes, self.sizes.max_rank, self._unused)
        values = np.zeros(self._memory.shape[1], self._memory.dtype)
        for product in self._products.values():
            _fill(values, product, peft.matrices, peft.rank, peft.scale)
        digest = hashlib.sha256(values.view(np.uint8).data).digest()
        return Adapter(name, str(folder), values, digest)

    def put(self, place: int, adapter: Adapter, stream: Stream) -> None:
        """Copy an adapter into a place, after the work that is on the stream."""
        self._memory[place - 1].copy_from(adapter.values, stream)

    def add(
        self, pack: Pack, weight: Tensor, *, out: Tensor, x: Tensor, ids: Tensor, token_slots: Tensor,
        norm_weight: Tensor | None = None, eps: float | None = None,
    ) -> None:  # fmt: skip
        """out += what the adapters add to x @ weight^T (of normalised x, see add_lora). Columns of out after the last
        projection are left alone. Nothing for a weight without places."""
        product = self._products.get(weight.ptr)
        if product is not None:
            _add(pack, product, out[:, : sum(product.rows)], x, ids, token_slots, norm_weight, eps, add=True)

    def added(
        self, pack: Pack, weight: Tensor, *, x: Tensor, ids: Tensor, token_slots: Tensor,
        norm_weight: Tensor | None = None, eps: float | None = None,
    ) -> Tensor | None:  # fmt: skip
        """The sum that `add` adds, [T, N], in memory that the next call overwrites."""
        product = self._products.get(weight.ptr)
        if product is None:
            return None
        tokens, width = x.shape[0], sum(product.rows)
        out = self._added[: tokens * width].reshape(tokens, width)
        _add(pack, product, out, x, ids, token_slots, norm_weight, eps, add=False)
        return out


def _aligned(count: int) -> int:
    return -(-count // ALIGNED) * ALIGNED


def _product(memory: Tensor, parts: Sequence[Projection], rank: int, start_a: int, start_b: int) -> _Product:
    rows, columns = tuple(p.weight.shape[0] for p in parts), parts[0].weight.shape[1]

    def over_places(start: int, height: int, width: int) -> Tensor:
        first = memory[:, start:]
        shape, strides = (memory.shape[0], height, width), (memory.strides[0], width, 1)
        return Tensor(first.ptr, shape, memory.dtype, memory.device, strides, memory.owner, memory.name)

    a, b = over_places(start_a, len(parts) * rank, columns), over_places(start_b, sum(rows), rank)
    return _Product(tuple(p.module for p in parts), rows, a, b, start_a, start_b)


def _fill(
    values: Array, product: _Product, matrices: Mapping[str, tuple[Array, Array]], rank: int, scale: float
) -> None:
    """Write an adapter's matrices for one product into a place; B times the scale."""
    (_, height, columns), (_, width, room) = product.a.shape, product.b.shape
    a = values[product.start_a : product.start_a + height * columns].reshape(height, columns)
    b = values[product.start_b : product.start_b + width * room].reshape(width, room)
    start = 0
    for part, (name, rows) in enumerate(zip(product.modules, product.rows, strict=True)):
        pair = matrices.get(text_module(name))
        if pair is not None:
            a[part * room : part * room + rank] = pair[0].astype(np.float32)
            b[start : start + rows, :rank] = pair[1].astype(np.float32) * np.float32(scale)
        start += rows


def _add(
    pack: Pack, product: _Product, out: Tensor, x: Tensor, ids: Tensor, token_slots: Tensor,
    norm_weight: Tensor | None, eps: float | None, *, add: bool,
) -> None:  # fmt: skip
    add_lora(
        pack, out=out, x=x, a=product.a, b=product.b, parts=product.rows, adapters=ids, token_slots=token_slots,
        add=add, norm_weight=norm_weight, eps=eps,
    )  # fmt: skip
