"""Readback: results of steps on their way to the host, without the host waiting for them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from openinfer.graph.errors import RingFull
from openinfer.tensor import Device, Event, PinnedBuffer, Stream, Tensor, int32


class _Pending(NamedTuple):
    """Results in flight: their buffer, the place of each in it, and the marks before and after their step."""

    buffer: PinnedBuffer
    places: list[tuple[slice, tuple[int, ...], np.dtype[Any]]]
    begun: Event | None
    done: Event


class Readback:
    """A ring of `depth` page-locked buffers of `nbytes`, in the order of the steps.

    words: of the first tensor of every step, int32, which the caller's own kernel writes to `rooms[place]`; 0: copy
    engines copy it, after all copies of that direction that were begun before.

    `begin` marks where a step starts on the stream, `enqueue` puts the copy of its results there and returns at once;
    `take` gives the oldest step's results when they have arrived. `seconds` is then the device's time between the two;
    `waits` counts how often the host asked to be woken, which is once a step.
    """

    def __init__(self, device: Device, nbytes: int, depth: int, words: int = 0) -> None:
        self._ring = [PinnedBuffer(device, nbytes) for _ in range(depth)]
        self.rooms = [Tensor(one.ptr, (words,), int32, device, owner=one) for one in self._ring if words]
        """The memory of the host for the first tensor, as the device sees it."""
        # A step under way has at most two marks, and the one that is being launched two more.
        self._marks = [Event(device, timing=True) for _ in range(2 * depth + 2)]
        self._next_mark = 0
        self.seconds: float | None = None
        self.waits = 0
        self._begun: Event | None = None
        self._nbytes = nbytes
        self._pending: list[_Pending] = []
        self._next = 0

    def __len__(self) -> int:
        """Steps whose results were not taken yet."""
        return len(self._pending)

    @property
    def place(self) -> int:
        """The place in the ring of the next `enqueue`. Raises RingFull."""
        if len(self._pending) == len(self._ring):
            raise RingFull(f"{len(self._ring)} results are under way, and the ring is full; take one first")
        return self._next

    def begin(self, stream: Stream) -> None:
        """The work put on the stream from now on is the next step's, until its `enqueue`."""
        # A busy device begins where the step before ends, so its end mark serves. Another mark would make it pause.
        last = self._pending[-1].done if self._pending else None
        self._begun = self._mark(stream) if last is None or last.query() else last

    def enqueue(self, stream: Stream, tensors: Sequence[Tensor]) -> None:
        """Copy contiguous tensors to the host once the work now on `stream` is done. With `rooms` the first is in its
        room then, or a part of it. Raises RingFull."""
        buffer = self._ring[self.place]
        places, end = [], 0
        for number, tensor in enumerate(tensors):
            if end + tensor.nbytes > self._nbytes:
                raise RingFull(f"results of more than {self._nbytes} bytes do not fit a buffer of the ring")
            if number or not self.rooms:
                stream.copy_async(buffer.ptr + end, tensor.ptr, tensor.nbytes, "d2h")
            places.append((slice(end, end + tensor.nbytes), tensor.shape, tensor.dtype))
            end += -(-tensor.nbytes // 64) * 64
        self._pending.append(_Pending(buffer, places, self._begun, self._mark(stream)))
        self._begun = None
        self._next = (self._next + 1) % len(self._ring)

    def take(self, *, wait: bool) -> list[np.ndarray[Any, Any]] | None:
        """The oldest step's results as new arrays. None if no step is pending or, without `wait`, if it is not done."""
        if not self._pending:
            return None
        buffer, places, begun, done = self._pending[0]
        if not wait and not done.query():
            return None
        done.synchronize()
        self.waits += 1
        self.seconds = done.elapsed_s(begun) if begun is not None else None
        self._pending.pop(0)
        return [buffer.array[part].view(dtype).reshape(shape).copy() for part, shape, dtype in places]

    def _mark(self, stream: Stream) -> Event:
        event = self._marks[self._next_mark]
        self._next_mark = (self._next_mark + 1) % len(self._marks)
        event.record(stream)
        return event

    def close(self) -> None:
        """Wait for the copies under way and let go of the buffers."""
        for mark in self._marks:
            mark.synchronize()
            mark.close()
        for buffer in self._ring:
            buffer.close()
        self._ring, self._marks, self.rooms = [], [], []
        self._pending = []
