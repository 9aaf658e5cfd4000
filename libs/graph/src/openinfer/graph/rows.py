"""Rows: the batch, as fixed buffers on the device that the host changes by small packed deltas.

Per-sequence state (length, last token, block table, sampling parameters, ...) lives at a *slot* that the sequence keeps
while it runs; a step names the slots it works on. So captured graphs always read the same addresses. A sequence that
joins or leaves moves no other, and a step in which nothing changed uploads nothing.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from openinfer.graph.errors import FieldError
from openinfer.tensor import Arena, Event, PinnedBuffer, Stream, Tensor, dtypes, int32

Words = np.ndarray[Any, np.dtype[np.int32]]
Places = np.ndarray[Any, np.dtype[np.int64]]


class Delta(NamedTuple):
    """Changes of rows: the places of words in `Rows.words`, and their values. No place is named twice with different
    values. last: of those that bring the batch up to date together."""

    places: Places | Words
    values: Words
    last: bool = True


@dataclass(frozen=True, slots=True)
class Field:
    """A named buffer of 4-byte elements; `dtype` may be a name, as in "float32". `device_written`: kernels change it
    too, so the host's copy is not the truth and every host write is sent."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any] = int32
    device_written: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", dtypes.of(self.dtype))


class Rows:
    """The fields in one block of device memory, and the host's pending changes to them.

    `words` is that block as int32 [W]; `writes` int32 [1 + 2 * capacity] receives a delta: the count, `capacity`
    indices into `words`, `capacity` values. All fields start as zeros. Applying a delta is the caller's: for every
    item of `uploads(stream)`, launch a kernel that scatters `writes` into `words`.

    Host side, one thread. Staging buffers form a ring of `ring` page-locked buffers; one is reused only after its copy
    is done. `rooms` are these buffers as the device sees them: the kernel may scatter from them (`uploads(in_place)`).
    """

    def __init__(
        self, arena: Arena, fields: Sequence[Field], stream: Stream, *, capacity: int = 16384, ring: int = 3
    ) -> None:
        # Field, first word, words an entry of the first axis.
        self._fields: dict[str, tuple[Field, int, int]] = {}
        self._tensors: dict[str, Tensor] = {}
        end = 0
        for field in fields:
            if field.name in self._fields:
                raise FieldError(f"field {field.name!r} is declared twice")
            if field.dtype.itemsize != 4:
                raise FieldError(
                    f"field {field.name!r} is {field.dtype.name}; row fields are 4 bytes an element"
                )
            width = int(np.prod(field.shape[1:]))
            self._fields[field.name] = (field, end, width)
            end += -(-field.shape[0] * width // 64) * 64  # fields start at 256-byte boundaries
        self.words = arena.alloc((end,), int32, "rows")
        self.writes = arena.alloc((1 + 2 * capacity,), int32, "row writes")
        self.words.zero_(stream)
        self.writes.zero_(stream)
        self._mirror: Words = np.zeros(end, np.int32)
        self._dirty: list[int] = []
        self._dirty_ranges: list[Places] = []
        self._capacity = capacity
        device = arena.device
        self._staging = [(PinnedBuffer(device, self.writes.nbytes), Event(device)) for _ in range(ring)]
        self.rooms = [
            Tensor(buffer.ptr, self.writes.shape, int32, device, owner=buffer) for buffer, _ in self._staging
        ]
        """The staging buffers, int32 [1 + 2 * capacity] each."""
        self.place = 0
        """The room that has the last delta."""

    def __getitem__(self, name: str) -> Tensor:
        """The device tensor of a field, in its shape and dtype."""
        if name not in self._tensors:
            field, start, width = self._field(name)
            flat = self.words[start : start + field.shape[0] * width]
            self._tensors[name] = flat.view_as(field.dtype).reshape(*field.shape)
        return self._tensors[name]

    def held(self, name: str, index: int) -> Words:
        """The host's copy of an entry of the first axis, as words; of a field that kernels write it may be old."""
        _, start, width = self._field(name)
        return self._mirror[start + index * width : start + (index + 1) * width]

    def set(self, name: str, index: int, value: float) -> None:
        """Change one element of a field of one axis."""
        field, start, width = self._field(name)
        if width != 1 or not 0 <= index < field.shape[0]:
            raise FieldError(
                f"{name!r} has shape {field.shape}; set() writes one element of one axis, got [{index}]"
            )
        try:
            word = int(np.asarray(value, field.dtype).view(np.int32)) if field.dtype != int32 else int(value)
            np.int32(word)
        except OverflowError:
            raise FieldError(f"{value} does not fit the {field.dtype.name} elements of {name!r}") from None
        if field.device_written or self._mirror[start + index] != word:
            self._mirror[start + index] = word
            self._dirty.append(start + index)

    def write(
        self, name: str, index: int, values: Sequence[float] | np.ndarray[Any, Any], offset: int = 0
    ) -> None:
        """Change a run of elements: values go to field[index].flat[offset:] where the field has more than one axis, and
        to field[index:] where it has one."""
        field, start, width = self._field(name)
        array = np.ascontiguousarray(values, field.dtype)
        if array.ndim != 1 or field.dtype != int32:
            array = array.reshape(-1).view(np.int32)
        first = index * width + offset
        room = width - offset if len(field.shape) > 1 else field.shape[0] - index
        if not 0 <= index < field.shape[0] or offset < 0 or len(array) > room:
            raise FieldError(
                f"{len(array)} values at [{index}, {offset}] do not fit {name!r} of shape {field.shape}"
            )
        at = slice(start + first, start + first + len(array))
        if field.device_written:
            changed = np.arange(at.start, at.stop)
        else:
            changed = (self._mirror[at] != array).nonzero()[0]
            changed += at.start
        if len(changed):
            self._mirror[at] = array
            self._dirty_ranges.append(changed)

    def width(self, name: str) -> int:
        """Words of an entry of the first axis."""
        return self._field(name)[2]

    def scatter(self, name: str, places: Sequence[int], values: Sequence[int]) -> None:
        """Change words of a field: places count from its start, none twice. Raises FieldError for one outside."""
        field, start, width = self._field(name)
        at, array = np.array(places, np.int64), np.array(values, np.int32)
        if len(at) and not 0 <= at.min() <= at.max() < field.shape[0] * width:
            raise FieldError(
                f"places {at.min()} to {at.max()} are not all in {name!r} of shape {field.shape}"
            )
        at += start
        if not field.device_written:
            changed = self._mirror[at] != array
            at, array = at[changed], array[changed]
        if len(at):
            self._mirror[at] = array
            self._dirty_ranges.append(at)

    def uploads(self, stream: Stream, *, in_place: bool = False) -> Iterator[Delta]:
        """Send the pending changes in as many deltas as their number needs (none, if nothing changed). Each is yielded
        when it is on its way to `writes`, and the caller scatters it before asking for the next. in_place: nothing is
        copied, and the caller scatters from `rooms[place]`; a copy would wait for all copies of its direction."""
        if not self._dirty and not self._dirty_ranges:
            return
        index = np.concatenate([np.array(self._dirty, np.int64), *self._dirty_ranges])
        self._dirty.clear()
        self._dirty_ranges.clear()
        for start in range(0, len(index), self._capacity):
            part = index[start : start + self._capacity]
            delta = Delta(part, self._mirror[part], start + self._capacity >= len(index))
            if in_place:
                self._stage(delta)
            else:
                self.send(delta, stream)
            yield delta
            if in_place:
                self._staging[self.place][1].record(stream)

    def send(self, delta: Delta, stream: Stream) -> None:
        """Copy a delta to `writes`: one of `uploads`, or one that came from the rows of another process. Rows that get
        deltas from elsewhere are not written to."""
        self._stage(delta)
        buffer, copied = self._staging[self.place]
        # One copy must do, with a gap of old indices in it, because a second copy costs more than the 64 KB of the gap.
        nbytes = 4 * (1 + self._capacity + len(delta.places))
        stream.copy_async(self.writes.ptr, buffer.ptr, nbytes, "h2d")
        copied.record(stream)

    def _stage(self, delta: Delta) -> None:
        """Write a delta to the next room, once the device has read what is there."""
        index, values, _ = delta
        self.place = (self.place + 1) % len(self._staging)
        buffer, copied = self._staging[self.place]
        if not copied.query():
            copied.synchronize()
        staged = buffer.array.view(np.int32)
        count, split = len(index), 1 + self._capacity
        staged[0] = count
        staged[1 : 1 + count] = index
        staged[split : split + count] = values

    def _field(self, name: str) -> tuple[Field, int, int]:
        found = self._fields.get(name)
        if found is None:
            raise FieldError(f"no row field {name!r}; there are {', '.join(self._fields)}")
        return found

    def close(self) -> None:
        """Give up the staging buffers. The device memory is the arena's."""
        for buffer, copied in self._staging:
            copied.synchronize()
            copied.close()
            buffer.close()
        self._staging, self.rooms = [], []
