"""Checkpoint to device: page-locked buffers filled by threads while the one before uploads."""

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np

from openinfer.tensor import dtypes
from openinfer.tensor.checkpoint import Checkpoint
from openinfer.tensor.errors import CheckpointError, DeviceError, ShapeError
from openinfer.tensor.memory import PinnedBuffer
from openinfer.tensor.parts import TensorPart
from openinfer.tensor.stream import Event, Stream
from openinfer.tensor.tensor import Tensor

BUFFER_BYTES = 32 << 20
_NUM_FILLING = 2  # threads start on the next buffer while the last piece of one is read
_NUM_BUFFERS = 4  # two that fill, one that uploads, and one that waits for its upload
_PIECE_BYTES = 4 << 20  # what one thread reads at a time
NUM_THREADS = min(8, os.cpu_count() or 1)

Progress = Callable[[int, int], None]


class TensorLoad(NamedTuple):
    """Tensor `name` of the checkpoint, or its part `source`, goes to `dst`.

    `dst` has the shape of what it gets and is contiguous; it may be part of a larger tensor. `source` has slices with
    step 1 for the leading axes: `(slice(64, 128),)` is rows, `(slice(None), slice(0, 32))` columns. Only the part's
    bytes are read, and short gaps between them.
    """

    name: str
    dst: Tensor
    source: tuple[slice, ...] = ()


class _Task(NamedTuple):
    part: TensorPart
    load: TensorLoad


class LoadReport(NamedTuple):
    """The bytes of the checkpoint that a load moved, and the seconds it took. filled: the tensors that it wrote."""

    bytes: int
    seconds: float
    gbytes_per_s: float
    filled: tuple[Tensor, ...] = ()


class _Piece(NamedTuple):
    """Elements of a part that one thread reads. They lie at byte `at` of their buffer in the dtype of their place.

    start: of the elements among the part's bytes. nbytes: bytes in the buffer, and at dst_ptr."""

    part: TensorPart
    dtype: dtypes.DType
    start: int
    nbytes: int
    dst_ptr: int
    at: int

    @property
    def source_bytes(self) -> int:
        return self.nbytes * self.part.info.dtype.itemsize // self.dtype.itemsize

    def read(self, ckpt: Checkpoint, room: np.ndarray[Any, Any]) -> None:
        """Fill `room` (uint8), converting where dtypes differ."""
        source = self.part.info.dtype
        if source == self.dtype:
            self.part.read_into(ckpt, room, self.start)
            return
        raw = np.empty(self.source_bytes, np.uint8)
        self.part.read_into(ckpt, raw, self.start)
        np.copyto(room.view(self.dtype), raw.view(source), casting="unsafe")


def load_tensors(
    ckpt: Checkpoint, loads: Iterable[TensorLoad], stream: Stream, progress: Progress | None = None
) -> LoadReport:
    """Fill device tensors from a checkpoint. All loads are checked before the first byte moves.

    Where dtypes differ, values are converted: on cuda between those of dtypes.WEIGHTS, elsewhere between all floats.
    cuda: uploads go to `stream`, which is idle again when this returns. null: only the checks.
    `progress(done, total)` is called in this thread, in bytes of the checkpoint. Raises CheckpointError (also for a
    shape or dtype that does not fit `dst`), DeviceError, ShapeError, OutOfMemory.
    """
    todo = [_Task(TensorPart.of(ckpt.info(load.name), load.source), load) for load in loads]
    for part, load in todo:
        _check(part, load.dst, stream)
    todo.sort(key=lambda task: (task.part.info.file, task.part.first_byte))  # disks like to be read in order
    total = sum(part.nbytes for part, _ in todo)
    if stream.device.kind == "null" or not total:
        return LoadReport(0, 0.0, 0.0)
    started = time.perf_counter()
    if stream.device.kind == "cpu":
        _load_cpu(ckpt, todo, total, progress)
    else:
        left = _copy_on_device(ckpt, todo, stream)
        if left:
            _load_cuda(ckpt, left, stream, total, progress)
        elif progress:
            progress(total, total)
        stream.synchronize()
    seconds = time.perf_counter() - started
    return LoadReport(total, seconds, total / seconds / 1e9, tuple(load.dst for _, load in todo))


def _check(part: TensorPart, dst: Tensor, stream: Stream) -> None:
    info = part.info
    if dst.device != stream.device:
        raise DeviceError(
            f"{info.name} goes to {dst.device} and the stream is of {stream.device}; use one device"
        )
    if not dst.is_contiguous:
        raise ShapeError(f"{info.name} goes to {dst!r} with strides {dst.strides}; it must be contiguous")
    if part.shape != dst.shape:
        what = "" if part.shape == info.shape else f", its part {list(part.shape)}"
        raise CheckpointError(
            info.file, info.name, f"has shape {list(info.shape)}{what}, its place {list(dst.shape)}"
        )
    convertible = {*dtypes.WEIGHTS} if stream.device.kind == "cuda" else dtypes.FLOATS
    converts = {info.dtype, dst.dtype} <= convertible
    if info.dtype != dst.dtype and not converts:
        raise CheckpointError(info.file, info.name, f"has dtype {info.dtype}, its place {dst.dtype}")


def _load_cpu(ckpt: Checkpoint, todo: list[_Task], total: int, progress: Progress | None) -> None:
    def copy(task: _Task) -> int:
        part, (name, dst, source) = task
        out = dst.reshape(-1)
        if part.info.dtype == dst.dtype:
            part.read_into(ckpt, out.view_as("uint8").numpy(), 0)
        else:
            np.copyto(out.numpy(), ckpt.part(name, source).reshape(-1), casting="unsafe")
        return part.nbytes

    done = 0
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        for nbytes in pool.map(copy, todo):
            done += nbytes
            if progress:
                progress(done, total)


def _copy_on_device(ckpt: Checkpoint, todo: list[_Task], stream: Stream) -> list[_Task]:
    """Start the copies of parts that are in device memory already. Returns the tasks that are left."""
    left = []
    for task in todo:
        part, dst = task.part, task.load.dst
        address = ckpt.address(part.info.name)
        if address is None or part.info.dtype != dst.dtype:
            left.append(task)
            continue
        for number, offset in enumerate(part.offsets.tolist()):
            stream.copy_async(dst.ptr + number * part.run, address + offset, part.run, "d2d")
    return left


def _load_cuda(
    ckpt: Checkpoint, todo: list[_Task], stream: Stream, total: int, progress: Progress | None
) -> None:
    device, done = stream.device, 0
    size = min(BUFFER_BYTES, sum(load.dst.nbytes for _, load in todo))
    filling: deque[tuple[int, list[_Piece], list[Future[None]]]] = deque()
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(NUM_THREADS))
        buffers = [stack.enter_context(PinnedBuffer(device, size)) for _ in range(_NUM_BUFFERS)]
        uploaded = [stack.enter_context(Event(device)) for _ in range(_NUM_BUFFERS)]
        stack.callback(stream.synchronize)  # runs first: no buffer may go while an upload reads it

        def upload_oldest() -> None:
            nonlocal done
            turn, batch, fills = filling.popleft()
            for piece, fill in zip(batch, fills, strict=True):
                fill.result()
                stream.copy_async(piece.dst_ptr, buffers[turn].ptr + piece.at, piece.nbytes, "h2d")
            uploaded[turn].record(stream)
            done += sum(piece.source_bytes for piece in batch)
            if progress:
                progress(done, total)

        for i, batch in enumerate(_batches(todo, size)):
            turn = i % _NUM_BUFFERS
            uploaded[turn].synchronize()
            rooms = [buffers[turn].array[p.at : p.at + p.nbytes] for p in batch]
            fills = [pool.submit(p.read, ckpt, room) for p, room in zip(batch, rooms, strict=True)]
            filling.append((turn, batch, fills))
            if len(filling) == _NUM_FILLING:
                upload_oldest()
        while filling:
            upload_oldest()


def _batches(todo: Iterable[_Task], size: int) -> Iterator[list[_Piece]]:
    """Cut the loads into pieces and pack these, in order, into buffers of `size` bytes."""
    batch: list[_Piece] = []
    used = 0
    for part, (_, dst, _) in todo:
        source, done = part.info.dtype, 0
        unit = 1 if source == dst.dtype else dst.itemsize  # a value that is converted must lie in one piece
        while done < dst.nbytes:
            used += -used % unit
            nbytes = min(dst.nbytes - done, size - used, _PIECE_BYTES) // unit * unit
            if nbytes <= 0:
                yield batch
                batch, used = [], 0
                continue
            start = done * source.itemsize // dst.itemsize
            batch.append(_Piece(part, dst.dtype, start, nbytes, dst.ptr + done, used))
            done += nbytes
            used += nbytes
    if batch:
        yield batch
