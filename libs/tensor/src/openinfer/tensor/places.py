"""Places: the weights of a model in an arena, and which tensors of a checkpoint fill them."""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from openinfer.tensor.arena import Arena
from openinfer.tensor.checkpoint import Checkpoint
from openinfer.tensor.dtypes import float32
from openinfer.tensor.errors import CheckpointError
from openinfer.tensor.loading import NUM_THREADS, LoadReport, Progress, TensorLoad, load_tensors
from openinfer.tensor.parts import TensorPart
from openinfer.tensor.stream import Stream
from openinfer.tensor.tensor import Tensor


class Conversion(NamedTuple):
    """The tensors `names` of a checkpoint become `dst` on the host: `convert` gets their arrays, in that order.

    sources: the part of each, as TensorLoad.source; () is the whole tensors. Only touched parts are read.
    """

    names: tuple[str, ...]
    dst: Tensor
    convert: Callable[..., np.ndarray[Any, Any]]
    sources: tuple[tuple[slice, ...], ...] = ()

    def parts(self) -> Iterator[tuple[str, tuple[slice, ...]]]:
        """The name of each tensor, and the part of it that is read."""
        return zip(self.names, self.sources or ((),) * len(self.names), strict=True)

    def nbytes(self, checkpoint: Checkpoint) -> int:
        """Bytes of the checkpoint that are read."""
        return sum(TensorPart.of(checkpoint.info(name), part).nbytes for name, part in self.parts())

    def converted(self, checkpoint: Checkpoint) -> np.ndarray[Any, Any]:
        """The values of `dst`. Any thread may call it. Raises CheckpointError where `convert` raises ValueError."""
        try:
            arrays = [checkpoint.part(name, part) for name, part in self.parts()]
            return np.ascontiguousarray(self.convert(*arrays), self.dst.dtype)
        except ValueError as e:
            raise CheckpointError(checkpoint.directory, self.names[0], str(e)) from e


@dataclass(slots=True)
class Places:
    """Makes tensors in `arena` and notes how to fill them: `loads` straight from the checkpoint, `conversions` through
    the host, `pads` with zeros. `dtype`: the default dtype of a tensor. The arena owns the memory. The lists are whole
    after `complete`, `names` or `load`."""

    arena: Arena
    dtype: np.dtype[Any]
    loads: list[TensorLoad] = field(default_factory=list)
    conversions: list[Conversion] = field(default_factory=list)
    pads: list[Tensor] = field(default_factory=list)
    _later: list[Callable[[], None]] = field(default_factory=list)

    def later(self, note: Callable[[], None]) -> None:
        """Call `note`, which adds to the lists, once these are needed. A plan only makes tensors, and the experts of a
        mixture have tens of thousands of entries."""
        self._later.append(note)

    def complete(self) -> None:
        """Add what was put off until later."""
        while self._later:
            self._later.pop(0)()

    def plain(
        self, name: str, *shape: int, dtype: np.dtype[Any] | None = None, source: tuple[slice, ...] = ()
    ) -> Tensor:
        """A tensor that takes the values of the checkpoint's tensor of this name, or of its part `source`."""
        tensor = self.arena.alloc(shape, self.dtype if dtype is None else dtype, name)
        self.loads.append(TensorLoad(name, tensor, source))
        return tensor

    def converted(
        self,
        name: str,
        *shape: int,
        convert: Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]],
        dtype: np.dtype[Any] = float32,
        source: tuple[slice, ...] = (),
    ) -> Tensor:
        """A tensor made of one of the checkpoint's, or of its part. `convert` may raise ValueError for wrong values."""
        tensor = self.arena.alloc(shape, dtype, name)
        self.conversions.append(Conversion((name,), tensor, convert, (source,)))
        return tensor

    def names(self) -> Iterator[str]:
        """The checkpoint's tensors that are read."""
        self.complete()
        yield from (load.name for load in self.loads)
        for conversion in self.conversions:
            yield from conversion.names

    def _converted(self, checkpoint: Checkpoint) -> Iterator[tuple[Conversion, np.ndarray[Any, Any]]]:
        """All conversions with their values. Threads are ahead of the caller by a bounded number of conversions."""
        with ThreadPoolExecutor(NUM_THREADS) as pool:
            begun = ((one, pool.submit(one.converted, checkpoint)) for one in self.conversions)
            waiting = deque(islice(begun, 2 * NUM_THREADS))
            while waiting:
                conversion, future = waiting.popleft()
                yield conversion, future.result()
                waiting.extend(islice(begun, 1))

    def load(self, checkpoint: Checkpoint, stream: Stream, progress: Progress | None = None) -> LoadReport:
        """Fill all of them; `stream` is idle again afterwards. `progress` counts the bytes of `loads` and then those of
        `conversions`; the report's bytes are those of `loads`.

        Raises what load_tensors does, and CheckpointError where a conversion raises ValueError.
        """
        self.complete()
        left = sum(conversion.nbytes(checkpoint) for conversion in self.conversions)
        seen = None if progress is None else lambda done, total: progress(done, total + left)
        report = load_tensors(checkpoint, self.loads, stream, seen)
        whole = report.bytes + left
        for conversion, array in self._converted(checkpoint):
            conversion.dst.copy_from(array, stream)
            stream.synchronize()  # the upload reads the array until then
            left -= conversion.nbytes(checkpoint)
            if progress is not None:
                progress(whole - left, whole)
        for pad in self.pads:
            pad.zero_(stream)
        stream.synchronize()
        converted = [conversion.dst for conversion in self.conversions]
        return report._replace(filled=(*report.filled, *converted, *self.pads))
