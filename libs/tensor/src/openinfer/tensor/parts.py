"""Parts of a checkpoint's tensors: which bytes a slice takes, and how they are read."""

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from openinfer.tensor.errors import CheckpointError
from openinfer.tensor.headers import TensorInfo

if TYPE_CHECKING:
    from openinfer.tensor.checkpoint import Checkpoint

_GAP_BYTES = 64 << 10  # a shorter gap is read along: a system call for each run of bytes would take longer
_SPAN_BYTES = 4 << 20  # the most that one read takes with its gaps


class TensorPart(NamedTuple):
    """A slice of a tensor: runs of `run` bytes that begin at `offsets` (int64, ascending) in the tensor's data."""

    info: TensorInfo
    shape: tuple[int, ...]
    offsets: np.ndarray[Any, Any]
    run: int

    @classmethod
    def of(cls, info: TensorInfo, source: tuple[slice, ...]) -> "TensorPart":
        """The part `tensor[source]`; slices are for the leading axes, and () is the whole tensor.

        Raises CheckpointError for more slices than axes, a step other than 1, and bounds outside the tensor.
        """
        bounds = _bounds(info, source)
        shape = tuple(stop - start for start, stop in bounds)
        whole = len(shape)
        while whole and shape[whole - 1] == info.shape[whole - 1]:
            whole -= 1  # the axes from here on are taken whole, so they are of one run
        inner = max(whole - 1, 0)
        run = math.prod(shape[inner:]) * info.dtype.itemsize
        offsets = np.zeros(1, np.int64)
        stride = math.prod(info.shape[inner:]) * info.dtype.itemsize
        for axis in range(inner - 1, -1, -1):
            start, stop = bounds[axis]
            offsets = (np.arange(start, stop, dtype=np.int64)[:, None] * stride + offsets).reshape(-1)
            stride *= info.shape[axis]
        if whole:
            offsets = offsets + bounds[inner][0] * math.prod(info.shape[whole:]) * info.dtype.itemsize
        return cls(info, shape, offsets, run)

    @property
    def nbytes(self) -> int:
        """Bytes of the part."""
        return math.prod(self.shape) * self.info.dtype.itemsize

    @property
    def first_byte(self) -> int:
        """Where the part begins in its file."""
        return self.info.offset + (int(self.offsets[0]) if len(self.offsets) else 0)

    def read_into(self, checkpoint: "Checkpoint", out: np.ndarray[Any, Any], start: int) -> None:
        """Fill `out` (contiguous uint8) with the part's bytes from `start` on, as if the runs lay together.

        Threads may read different ranges at once. Raises what Checkpoint.read_into does.
        """
        filled = 0
        while filled < out.nbytes:
            index, skip = divmod(start + filled, self.run)
            count = self._together(index, -(-(skip + out.nbytes - filled) // self.run))
            nbytes = min(count * self.run - skip, out.nbytes - filled)
            target, first = out[filled : filled + nbytes], int(self.offsets[index])
            if count == 1:
                checkpoint.read_into(self.info.name, target, first + skip)
            else:
                last = index + count - 1
                span = np.empty(int(self.offsets[last]) + self.run - first, np.uint8)
                checkpoint.read_into(self.info.name, span, first)
                runs = np.lib.stride_tricks.sliding_window_view(span, self.run)
                target[:] = runs[self.offsets[index : last + 1] - first].reshape(-1)[skip : skip + nbytes]
            filled += nbytes

    def _together(self, index: int, wanted: int) -> int:
        """How many of the next `wanted` runs are read by one call."""
        if self.run >= _GAP_BYTES:
            return 1
        next_runs = self.offsets[index : index + wanted]
        far = np.diff(next_runs) - self.run > _GAP_BYTES
        far |= next_runs[1:] + self.run - next_runs[0] > _SPAN_BYTES
        return int(far.argmax()) + 1 if far.any() else len(next_runs)


def _bounds(info: TensorInfo, source: tuple[slice, ...]) -> list[tuple[int, int]]:
    has = f"has shape {list(info.shape)}"
    if len(source) > len(info.shape):
        raise CheckpointError(info.file, info.name, f"{has}; {len(source)} slices were given")
    bounds = []
    for axis, size in enumerate(info.shape):
        part = source[axis] if axis < len(source) else slice(None)
        start = 0 if part.start is None else part.start
        stop = size if part.stop is None else part.stop
        if part.step not in (None, 1) or not 0 <= start <= stop <= size:
            asked = f"axis {axis} cannot give {part.start}:{part.stop}:{part.step}"
            why = f"{has}; {asked}. Take 0 <= start <= stop <= {size} and a step of 1"
            raise CheckpointError(info.file, info.name, why)
        bounds.append((start, stop))
    return bounds
