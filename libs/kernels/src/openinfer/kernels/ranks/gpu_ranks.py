"""GpuRanks: the ranks of a model that run on GPUs of one host, a process each."""

import ctypes
import os
import socket
from collections.abc import Sequence

import numpy as np

from openinfer.kernels.errors import LaunchError, RankLost
from openinfer.kernels.op.launch import Collective, PeerTable
from openinfer.kernels.ranks.exchange import segment_bytes, table_of
from openinfer.tensor import Arena, Device, NcclRanks, PeerMemory, PinnedBuffer, Stream, int64


class GpuRanks:
    """This process among `nccl.size`. NCCL runs collectives of any size; our own kernels use the segments in which
    ranks write to each other.

    width: bytes of a row that ranks add up. `connect` comes before the first launch. `abort` may come from any thread;
    kernels that wait for a rank then end, and results are of no use.
    """

    def __init__(self, device: Device, nccl: NcclRanks, width: int) -> None:
        self.rank, self.size, self._width = nccl.rank, nccl.size, width
        self._nccl, self._device = nccl, device
        self._memory = PeerMemory(device, segment_bytes(self.size, width))
        self._lost = PinnedBuffer(device, 64)
        self._lost.array[:] = 0
        self._table = Arena(device, table_of([0] * self.size, 0).nbytes + 1024)

    def connect(self, links: Sequence[socket.socket], stream: Stream) -> None:
        """Map the segments of the other ranks. links: of rank 0, a Unix socket to each other rank; of another one, the
        socket to rank 0. Let all ranks meet before the first launch. Raises RankLost."""
        own = self._memory.export()
        self._memory.connect(self.rank, self._everyones(own, links))
        os.close(own)
        words = table_of(self._memory.addresses, self._lost.ptr)
        self._peers = self._table.alloc(words.shape, int64, "peers and calls by program")
        self._peers.copy_from(words, stream)
        stream.synchronize()

    def _everyones(self, own: int, links: Sequence[socket.socket]) -> list[int | None]:
        """The descriptors of all ranks, by rank; None at our own. They go through rank 0."""
        if self.rank:
            (link,) = links
            socket.send_fds(link, [b"-"], [own])
            others = _received(link, self.size - 1)
        else:
            others = [_received(link, 1)[0] for link in links]
            everyone = [own, *others]
            for rank, link in enumerate(links, start=1):
                socket.send_fds(link, [b"-"], everyone[:rank] + everyone[rank + 1 :])
        return [*others[: self.rank], None, *others[self.rank :]]

    def table(self, table: PeerTable) -> int:
        """The address of the table that device.push_sum reads. Raises LaunchError for rows of another width."""
        if table.width not in (None, self._width):
            raise LaunchError(
                f"rows of {table.width} bytes; the ranks' segments are for rows of {self._width}"
            )
        return self._peers.ptr

    def run(self, command: Collective, out: int, x: int, stream: Stream) -> None:
        """A collective through NCCL."""
        shape = (command.out if command.kind == "reduce_scatter" else command.x).shape
        call = getattr(self._nccl, command.kind)
        call(out, x, int(np.prod(shape)), command.x.dtype, stream)

    def abort(self) -> None:
        """A rank is lost: end what waits for it."""
        ctypes.c_int32.from_address(self._lost.ptr).value = 1
        self._nccl.abort()

    def close(self) -> None:
        """Give NCCL's communicator up, without waiting for other ranks. The device must be idle."""
        self._nccl.abort()


def _received(link: socket.socket, count: int) -> list[int]:
    _, found, _, _ = socket.recv_fds(link, 1, count)
    if len(found) != count:
        raise RankLost(f"a rank sent {len(found)} descriptors of its memory; {count} were due")
    return found
