"""The child of a ProcessDriver: `python -m openinfer.frontend.engine_process`, told what to do on stdin.

Ends with exit code 0 when asked to, 1 when the engine did not start or was lost, 2 when the parent is gone.
"""

import logging
import os
import shutil
import signal
import sys
import threading

import msgspec
import zmq

from openinfer.frontend import heap
from openinfer.frontend.engine_loop import IDLE_WAIT_S, run_engine
from openinfer.frontend.errors import is_users_error, one_line
from openinfer.frontend.logs import LogLines, set_up_logging
from openinfer.frontend.wire import Boot, FromEngine, StartFailed, ToEngine

LINGER_MS = 2000
_log = logging.getLogger("openinfer.frontend.engine_process")  # __name__ is __main__


def main() -> int:
    """Build the engine, say Ready, run it until told to close."""
    with open(0, "rb", buffering=0, closefd=False) as stdin:
        line = stdin.readline()
    if not line:  # the parent was gone before it could say what to build
        return 2
    boot = msgspec.json.decode(line, type=Boot)
    threading.Thread(target=_end_with_parent, args=(boot.directory,), daemon=True).start()
    # A supervisor may send its signals to all processes; the parent drains first and then says Close.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    set_up_logging(boot.log_level, boot.log_format)
    if boot.log_format == "json":
        sys.stderr = LogLines(_log)  # the log itself has the stream that was there before
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.set_hwm(0)
    socket.bind(boot.address_in(boot.directory))
    try:
        return _serve(boot, socket)
    finally:
        socket.close(linger=LINGER_MS)
        context.term()


def _serve(boot: Boot, socket: "zmq.Socket[bytes]") -> int:
    encode = msgspec.msgpack.Encoder().encode
    decode = msgspec.msgpack.Decoder(ToEngine).decode

    def send(client: int, message: FromEngine) -> None:
        socket.send_multipart((b"%d" % client, encode(message)))  # dropped, if the client is gone

    def receive(block: bool) -> list[tuple[int, ToEngine]]:
        messages: list[tuple[int, ToEngine]] = []
        if block:
            socket.poll(int(1000 * IDLE_WAIT_S))
        try:
            while True:
                client, frame = socket.recv_multipart(zmq.NOBLOCK)
                messages.append((int(client), decode(frame)))
        except zmq.Again:
            return messages

    try:
        with heap.starting():
            engine = boot.spec.build()
    except Exception as error:
        if not is_users_error(error):
            _log.exception("the engine did not start")
        while not any(client == 0 for client, _ in receive(True)):  # the parent must have joined to hear it
            pass
        send(0, StartFailed(one_line(error)))
        return 1
    try:
        run_engine(engine, receive, send)
    except Exception:
        _log.exception("the engine raised")
        return 1
    finally:
        engine.close()
    return 0


def _end_with_parent(directory: str) -> None:
    while os.read(0, 1):  # returns nothing once the other end of the pipe is gone
        pass
    shutil.rmtree(directory, ignore_errors=True)  # a parent that was killed could not
    os._exit(2)


if __name__ == "__main__":
    sys.exit(main())
