"""Weights in the memory of another process: SharedWeights gives them, SharedCheckpoint takes them.

The giver listens at a Unix socket. Each connection gets 8 bytes (the bytes of the GPU's segment, little-endian; 0 for
none) and one or two descriptors. The first is a memfd: a safetensors file. The second is there where the weights are in
a GPU's memory: a segment (cuMemExportToShareableHandle) with the file's data. The data of the memfd are a hole then.
"""

import json
import mmap
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from openinfer.tensor import dtypes
from openinfer.tensor.checkpoint import Checkpoint, check_range
from openinfer.tensor.device import Closing, Device
from openinfer.tensor.dtypes import DType
from openinfer.tensor.errors import CheckpointError
from openinfer.tensor.handover import Giver, receive_file, sealed_file
from openinfer.tensor.memory import num_elements
from openinfer.tensor.peers import PeerMemory, PeerSegment
from openinfer.tensor.stream import Stream
from openinfer.tensor.tensor import Tensor

CONNECT_S = 1.0
"""Seconds that the other process has to give its memory. The engine stands still meanwhile."""
_PAGE = 4096

Shapes = Mapping[str, tuple[Sequence[int], DType | type | str]]


class SharedWeights(Closing):
    """Tensors that engines of this host take from this process's memory: `shared[name]` is a Tensor to write into.

    path: of the Unix socket that is made; this user's processes may connect. shapes: shape and dtype by name in the
    checkpoint. device: where the memory is, a CPU or a GPU. Nothing may be written while an engine reads. `close` takes
    the memory away; an engine copies, so it needs no tensor afterwards. Raises OSError, OutOfMemory, DeviceError.
    """

    def __init__(self, path: str | os.PathLike[str], shapes: Shapes, device: Device | None = None) -> None:
        self.path, self.device = Path(path), device or Device("cpu")
        header, places, nbytes = _header(shapes)
        self._memfd = sealed_file("weights", len(header) + nbytes)
        os.pwrite(self._memfd, header, 0)
        self._memory: PeerMemory | np.ndarray[Any, Any]
        if self.device.kind == "cuda":
            self._memory = PeerMemory(self.device, nbytes)
            base = self._memory.address
        else:
            mapped = mmap.mmap(self._memfd, len(header) + nbytes)
            self._memory = np.frombuffer(mapped, np.uint8)
            base = int(self._memory.ctypes.data) + len(header)
        self._tensors = {
            name: Tensor(base + offset, shape, dtype, self.device, owner=self._memory, name=name)
            for name, (offset, shape, dtype) in places.items()
        }
        try:
            self._giver = Giver(str(self.path), self._send, "shared weights")
        except OSError:
            os.close(self._memfd)
            raise

    def __getitem__(self, name: str) -> Tensor:
        """The tensor of this name. It shares the memory, and other libraries take it by DLPack."""
        return self._tensors[name]

    def _send(self, connection: socket.socket) -> None:
        segment = self._memory.export() if isinstance(self._memory, PeerMemory) else None
        try:
            size = self._memory.nbytes if segment is not None else 0
            fds = [self._memfd] if segment is None else [self._memfd, segment]
            socket.send_fds(connection, [size.to_bytes(8, "little")], fds)
        finally:
            if segment is not None:
                os.close(segment)

    def close(self) -> None:
        """Take no more connections, and remove the socket. Tensors stay valid as long as someone holds them."""
        self._giver.close()
        self.path.unlink(missing_ok=True)
        os.close(self._memfd)
        self._tensors = {}


class SharedCheckpoint(Checkpoint):
    """The weights that another process gives at the socket `path`, for an engine on `device`.

    Its header is checked as a file's. Raises CheckpointError, and OSError where the other process gives nothing, is
    another user's, or gives memory that could become shorter.
    """

    def __init__(self, path: str | os.PathLike[str], device: Device) -> None:
        self._segment: PeerSegment | None = None
        size, self._received = receive_file(str(path), 8, 2, CONNECT_S)
        try:
            if len(size) != 8 or len(self._received) != 1 + any(size):
                raise CheckpointError(Path(path), None, "the process at this socket gave no weights")
            if any(size) and device.kind != "cuda":
                raise CheckpointError(
                    Path(path), None, f"the weights are in a GPU's memory, and the engine is on {device}"
                )
            super().__init__(path)
            self._device, self._start = device, self.info(self.names[0]).offset if self.names else 0
            self._in_files = not any(size)
            if any(size):
                self._segment = PeerSegment(device, self._received[1], int.from_bytes(size, "little"))
                if self._start + self._segment.nbytes < os.fstat(self._received[0]).st_size:
                    raise CheckpointError(Path(path), None, "the GPU's segment is shorter than the file says")
        finally:
            for descriptor in self._received:
                os.close(descriptor)

    def _open(self) -> None:
        found = self._add(Path(f"/proc/self/fd/{self._received[0]}"))
        self._tensors = {one.name: one for one in found}

    def address(self, name: str) -> int | None:
        info = self.info(name)
        return None if self._segment is None else self._segment.address + info.offset - self._start

    def read_into(self, name: str, out: np.ndarray[Any, Any], start: int = 0) -> None:
        address = self.address(name)
        if address is None:
            super().read_into(name, out, start)
            return
        info = self.info(name)
        check_range(info, start, out.nbytes)
        with Stream(self._device) as stream:
            stream.copy_async(out.ctypes.data, address + start, out.nbytes, "d2h")
            stream.synchronize()


_Place = tuple[int, tuple[int, ...], DType]


def _header(shapes: Shapes) -> tuple[bytes, dict[str, _Place], int]:
    """The header of a safetensors file, padded to a page; offset, shape and dtype of each tensor; bytes of the data.
    Wide dtypes come first, so that each tensor is aligned."""
    wanted = {name: (tuple(shape), dtypes.of(dtype)) for name, (shape, dtype) in shapes.items()}
    places: dict[str, _Place] = {}
    entries, end = {}, 0
    for name, (shape, dtype) in sorted(wanted.items(), key=lambda item: -item[1][1].itemsize):
        begin, end = end, end + num_elements(shape) * dtype.itemsize
        places[name] = begin, shape, dtype
        entries[name] = {"dtype": dtypes.tag(dtype), "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-(8 + len(text)) % _PAGE)
    return len(text).to_bytes(8, "little") + text, places, end
