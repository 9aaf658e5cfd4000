"""A client's end of the line to an engine process: msgpack over a ZeroMQ socket, read from the event loop."""

import asyncio
import time
from collections.abc import Callable, Sequence

import msgspec

from openinfer.frontend.client import MESSAGES_A_TURN
from openinfer.frontend.errors import EngineStartError, MissingExtraError
from openinfer.frontend.wire import FromEngine, Hello, ToEngine

try:
    import zmq
except ImportError as error:
    raise MissingExtraError("the engine process", "process") from error

RECONNECT_MS = 10
"""The pause between two attempts of a client to connect, because the engine's process listens only after its start."""
LAST_WORDS_S = 0.5
"""For ZeroMQ's thread to see the end of an engine whose process has ended; one that never listened has no other end."""


class EngineLink:
    """Connects, says Hello, and hands on what comes. Belongs to the running event loop's thread.

    address: of the engine's socket. client: our number. receive: takes the messages read in one turn. lose: told when a
    frame cannot be read. Raises EngineStartError where the address cannot be used, such as a path that is too long."""

    def __init__(
        self,
        address: str,
        client: int,
        receive: Callable[[Sequence[FromEngine]], None],
        lose: Callable[[str], None],
    ) -> None:
        self._receive, self._lose = receive, lose
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(FromEngine).decode
        self._scheduled = False  # a _drain is on its way
        self._loop = asyncio.get_running_loop()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._ends = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._socket.set_hwm(0)  # never drop, never block: what is in flight is bounded by the requests
        self._socket.setsockopt(zmq.IDENTITY, str(client).encode())
        self._socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        try:
            self._socket.connect(address)
        except zmq.ZMQError as error:
            self._close()
            path = address.removeprefix("ipc://")
            raise EngineStartError(
                f"the engine's socket {path} ({len(path)} characters) cannot be used: {error}; "
                "TMPDIR says where it lies"
            ) from error
        self._loop.add_reader(self._socket.fileno(), self._schedule)
        self.send(Hello())

    def send(self, message: ToEngine) -> None:
        """Send without waiting. A message to an engine that is gone is kept, and dropped by close()."""
        self._socket.send(self._encode(message), zmq.NOBLOCK)
        # ZeroMQ signals its descriptor on edges, and sending may swallow one.
        self._schedule()

    async def read_rest(self) -> None:
        """Take the last messages of an engine whose process has ended. ZeroMQ's thread may be behind; it has read them
        all once it sees that the connection has ended."""
        deadline = time.monotonic() + LAST_WORDS_S
        while not self._socket.closed and not self._ends.poll(0) and time.monotonic() < deadline:
            await asyncio.sleep(0.002)
        while not self._socket.closed and self._socket.poll(0):
            self._drain()

    def close(self) -> None:
        """Leave; a second time is no error."""
        if not self._socket.closed:
            self._loop.remove_reader(self._socket.fileno())
            self._close()

    def _close(self) -> None:
        self._socket.disable_monitor()
        self._ends.close(linger=0)
        self._socket.close(linger=0)
        self._context.term()

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        self._scheduled = False
        if self._socket.closed:
            return
        messages: list[FromEngine] = []
        fault = None
        try:
            while len(messages) < MESSAGES_A_TURN:
                messages.append(self._decode(self._socket.recv(zmq.NOBLOCK)))
        except zmq.Again:
            pass
        except msgspec.MsgspecError as error:
            fault = error
        else:
            self._schedule()
        if messages:
            self._receive(messages)
        if fault is not None:
            self._lose(f"the engine breaks its contract: {fault}")
