"""The calls that an op is measured by (openinfer.kernels.measure).

A module of ops may offer

 - `cases(memory)`: the Cases, with tensors from `memory`;
 - `variants(target, case)`: (name, commands) of other launches for a case, where `commands(args)` gives those of one
   call, from its arguments as `Op.args` makes them.

`openinfer bench kernels` finds both. A case has copies of its weights or cache, so that the L2 cache does not serve
them.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from openinfer.kernels.op.coded import Coded
from openinfer.kernels.op.launch import Command
from openinfer.kernels.op.op import Op, Workload, leaves, mapped
from openinfer.kernels.op.rounding import SCALE_BLOCK
from openinfer.tensor import Arena, Device, Stream, Tensor, bfloat16, float8_e4m3fn, uint8

COLD_BYTES = 300 << 20
"""Bytes that the copies of a call's cold tensors have together, at least: several times an L2 cache."""
MOST_COPIES = 40

Commands = Callable[[Any], Iterable[Command]]
Array = np.ndarray[Any, Any]


class OpCase(NamedTuple):
    """An op, its arguments with each copy of the cold tensors, and the workload of its cost. The first tensor of the
    arguments is the output."""

    name: str
    op: Op[Any]
    args: Sequence[Mapping[str, Any]]
    workload: Workload

    @property
    def calls(self) -> list[Any]:
        """The arguments as `Op.args` makes them."""
        return [self.op.args(**args) for args in self.args]


@dataclass(slots=True)
class Memory:
    """Tensors for cases, filled with seeded values; on the null device they have no memory.

    poisoned: for a check of what ops write, not of how long they take; calls get no copies.
    """

    device: Device
    stream: Stream | None = None
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    poisoned: bool = False

    def empty(self, *shape: int, dtype: Any = bfloat16) -> Tensor:
        """For an op to write: without values, or in `poisoned` memory of 0xFF bytes, which are NaN or -1."""
        if not self.poisoned:
            return self._new(shape, dtype)
        size = np.dtype(dtype).itemsize
        return self._repeated(shape, dtype, lambda n: np.full(n * size, 0xFF, np.uint8).view(dtype))

    def _new(self, shape: tuple[int, ...], dtype: Any) -> Tensor:
        if self.device.kind == "null":
            return Arena(self.device, None).alloc(shape, dtype)
        return Tensor.empty(shape, dtype, self.device)

    def of(self, array: Array) -> Tensor:
        """With these values."""
        tensor = self._new(array.shape, array.dtype)
        if self.device.kind != "null":
            tensor.copy_from(np.ascontiguousarray(array), self.stream)
            self._wait()
        return tensor

    def ints(self, values: Any) -> Tensor:
        """int32."""
        return self.of(np.asarray(values).astype(np.int32))

    def normal(self, *shape: int, scale: float = 1.0, dtype: Any = bfloat16) -> Tensor:
        """Normally distributed."""
        return self._repeated(shape, dtype, lambda n: (self.rng.standard_normal(n) * scale).astype(dtype))

    def codes(self, *shape: int, low: int = 0, high: int = 256) -> Tensor:
        """uint8 in [low, high): FP4 pairs, or exponents of E8M0 scales."""
        return self._repeated(shape, uint8, lambda n: self.rng.integers(low, high, n, np.uint8))

    def float8(self, *shape: int) -> Tensor:
        """Float8 numbers of both signs, at most 1."""

        def make(n: int) -> Array:
            signs, sizes = self.rng.integers(0, 2, n, np.uint8), self.rng.integers(0, 57, n, np.uint8)
            return np.asarray(signs << 7 | sizes)

        return self._repeated(shape, uint8, make).view_as(float8_e4m3fn)

    def coded(self, tokens: int, width: int, *, empty: bool = False) -> Coded[Tensor]:
        """Values of bf16 that went through q8, or for an op to write."""
        scales = (tokens, -(-width // SCALE_BLOCK))
        if empty:
            codes = self.empty(tokens, width, dtype=float8_e4m3fn)
            return Coded(codes, self.empty(*scales, dtype=uint8), bfloat16)
        return Coded(self.float8(tokens, width), self.codes(*scales, low=126, high=129), bfloat16)

    def copies(self, args: Mapping[str, Any], *cold: str) -> list[Mapping[str, Any]]:
        """The arguments, and as many others with own copies of the tensors named as the L2 cache takes."""
        nbytes = sum(tensor.nbytes for name in cold for _, tensor in leaves(args[name], Tensor))
        count = max(1, min(MOST_COPIES, math.ceil(COLD_BYTES / max(1, nbytes))))
        if self.device.kind == "null" or self.poisoned:
            count = 1
        made = [dict(args) for _ in range(count)]
        for other in made[1:]:
            for name in cold:
                other[name] = mapped(args[name], Tensor, self._copy)
        return list(made)

    def _repeated(self, shape: tuple[int, ...], dtype: Any, make: Callable[[int], Array]) -> Tensor:
        """A block of at most a million values, copied until the tensor is full."""
        tensor = self._new(shape, dtype)
        if self.device.kind != "null":
            flat = tensor.reshape(-1)
            block = make(min(tensor.numel, 1 << 20))
            for start in range(0, tensor.numel, block.size):
                part = flat[start : start + block.size]
                part.copy_from(block[: part.numel], self.stream)
            self._wait()
        return tensor

    def _copy(self, tensor: Tensor) -> Tensor:
        copy = self._new(tensor.shape, tensor.dtype)
        copy.copy_from(tensor, self.stream)
        self._wait()
        return copy

    def _wait(self) -> None:
        if self.stream is not None:
            self.stream.synchronize()


class CaseRows(NamedTuple):
    """The batch of a step: new tokens of each row, and tokens cached before them."""

    lengths: Sequence[int]
    before: Sequence[int]

    @property
    def tokens(self) -> int:
        """The tokens of the step."""
        return sum(self.lengths)

    @property
    def workload(self) -> Workload:
        """The workload of the step, for costs."""
        ends = [new + old for new, old in zip(self.lengths, self.before, strict=True)]
        pairs = sum(e * (e + 1) // 2 - b * (b + 1) // 2 for e, b in zip(ends, self.before, strict=True))
        return Workload(self.tokens, len(self.lengths), sum(ends), pairs)

    def fields(self, memory: Memory) -> dict[str, Tensor]:
        """slots, q_starts, seq_lens and alive, as in expand_rows."""
        rows = len(self.lengths)
        return {
            "slots": memory.ints(np.arange(rows)),
            "q_starts": memory.ints(np.concatenate([[0], np.cumsum(self.lengths)])),
            "seq_lens": memory.ints(self.before),
            "alive": memory.ints(np.ones(rows)),
        }

    def pages(self, memory: Memory, page_size: int, max_len: int) -> tuple[Tensor, int]:
        """Block tables of pages in random order, for rows of up to `max_len` tokens; and how many pages there are."""
        counts = [-(-(new + old) // page_size) for new, old in zip(self.lengths, self.before, strict=True)]
        order = iter(memory.rng.permutation(sum(counts)))
        tables = np.zeros((len(counts), -(-max_len // page_size)), np.int32)
        for row, count in enumerate(counts):
            tables[row, :count] = [next(order) for _ in range(count)]
        return memory.ints(tables), sum(counts)

    def positions(self, memory: Memory) -> dict[str, Tensor]:
        """positions and token_slots, by token."""
        pairs = list(zip(self.lengths, self.before, strict=True))
        places = np.concatenate([np.arange(old, old + new) for new, old in pairs])
        return {
            "positions": memory.ints(places),
            "token_slots": memory.ints(np.repeat(np.arange(len(pairs)), self.lengths)),
        }
