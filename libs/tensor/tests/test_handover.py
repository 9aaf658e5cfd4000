"""Memory from one process to another: who may have it, and what the receiver demands."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from openinfer.tensor import handover
from openinfer.tensor.handover import Giver, accepted, receive_file, sealed_file

pytestmark = pytest.mark.attack


@pytest.fixture
def file() -> Iterator[int]:
    file = sealed_file("test", 4096)
    yield file
    os.close(file)


def give(file: int) -> Any:
    return lambda asking: socket.send_fds(asking, [b"hello"], [file])


@pytest.mark.parametrize("place", ["a name", "a path"])
def test_a_sealed_file_comes_as_it_is(file: int, place: str, tmp_path: Path) -> None:
    address = f"\0handover-{os.getpid()}" if place == "a name" else str(tmp_path / "socket")
    os.pwrite(file, b"content", 0)
    giver = Giver(address, give(file), "test")
    data, (received,) = receive_file(address, 5, 1, 5.0)
    assert (data, os.pread(received, 7, 0), os.fstat(received).st_size) == (b"hello", b"content", 4096)
    for size in (0, 8192):
        with pytest.raises(PermissionError):
            os.ftruncate(received, size)
    os.close(received)
    giver.close()
    with pytest.raises(OSError, match="refused"):
        receive_file(address, 5, 1, 5.0)


@pytest.mark.parametrize("seals", [0, fcntl.F_SEAL_GROW, fcntl.F_SEAL_SEAL, None])
def test_a_file_that_could_become_shorter_is_refused(seals: int | None, tmp_path: Path) -> None:
    """None: a file on a disk, which has no seals."""
    if seals is None:
        file = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    else:
        file = os.memfd_create("lie", os.MFD_ALLOW_SEALING)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    giver = Giver(str(tmp_path / "socket"), give(file), "test")
    with pytest.raises(PermissionError, match="F_SEAL_SHRINK"):
        receive_file(str(tmp_path / "socket"), 5, 1, 5.0)
    giver.close()
    assert len(os.listdir("/proc/self/fd")) == before
    os.close(file)


@pytest.mark.parametrize("side", ["giver", "receiver"])
def test_another_users_process_gets_and_gives_nothing(
    side: str, file: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    giver = Giver(str(tmp_path / "socket"), give(file), "test")
    real = handover._user
    other = threading.current_thread() if side == "giver" else giver._thread

    def user(connection: socket.socket) -> int:
        return real(connection) + (threading.current_thread() is other)

    monkeypatch.setattr(handover, "_user", user)
    with pytest.raises(OSError, match="belongs to user" if side == "giver" else "no memory"):
        receive_file(str(tmp_path / "socket"), 5, 1, 5.0)
    giver.close()
    assert ("asks for memory of user" in caplog.text) == (side == "receiver")


def test_a_process_that_gives_nothing_is_not_waited_for(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(path)
        silent.listen(0)
        with pytest.raises(TimeoutError):
            receive_file(path, 8, 2, 0.05)
        waiting = socket.socket(socket.AF_UNIX)
        waiting.setblocking(False)
        with suppress(BlockingIOError):
            waiting.connect(path)  # nobody takes connections any more, and the queue is full
        with pytest.raises((TimeoutError, BlockingIOError)):
            receive_file(path, 8, 2, 0.05)
        waiting.close()


def test_connections_are_taken_after_a_lack_of_descriptors(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is said once; a listener that was shut down ends."""
    monkeypatch.setattr(handover, "_PAUSE_S", 0.0)
    left = [errno.EMFILE, errno.ENFILE, errno.ECONNABORTED, errno.ENOMEM]

    class Listener(socket.socket):
        def accept(self) -> Any:
            if left:
                number = left.pop(0)
                raise OSError(number, os.strerror(number))
            return super().accept()

    with Listener() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        found = accepted(listener, "test")
        client = socket.create_connection(listener.getsockname())
        assert [next(found) for _ in range(4)] == [None] * 4
        taken = next(found)
        assert taken is not None
        assert taken[1] == client.getsockname()
        taken[0].close()
        client.close()
        listener.settimeout(0.01)
        assert next(found) is None
        listener.shutdown(socket.SHUT_RDWR)
        assert list(found) == []
    assert caplog.text.count("a connection cannot be taken") == 1
