"""Handover: what one process of a host takes from others: memory, as descriptors over a Unix socket, and folders.

The receiver maps what it gets, and a file that became shorter afterwards would end it by SIGBUS. So it takes only files
that are sealed against that, and only from processes of its own user.
"""

import errno
import fcntl
import logging
import os
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

log = logging.getLogger("openinfer.tensor")

_CREDENTIALS = struct.Struct("iII")  # process, user, group
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_PAUSE_S, _QUIET_S = 0.1, 60.0


def sealed_file(name: str, nbytes: int) -> int:
    """A descriptor of `nbytes` bytes of memory (os.memfd_create) whose size nobody can change."""
    file = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(file, nbytes)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(file)
        raise
    return file


class Giver:
    """Lets processes of this user connect to a Unix socket, from now on; `send` gives each what it came for.

    address: a path, or a name behind a NUL, which is no file. name: in log lines. Raises OSError.
    """

    def __init__(self, address: str, send: Callable[[socket.socket], None], name: str) -> None:
        self.address, self._send, self._name = address, send, name
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self._socket.bind(address)
            if not address.startswith("\0"):
                os.chmod(address, 0o600)
            self._socket.listen()
        except OSError:
            self._socket.close()
            raise
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        for found in accepted(self._socket, self._name):
            if found is None:
                continue
            with found[0] as connection, suppress(OSError):
                user = _user(connection)
                if user == os.getuid():
                    self._send(connection)
                else:
                    log.warning("%s: user %d asks for memory of user %d", self._name, user, os.getuid())

    def close(self) -> None:
        """Take no more connections, and wait for the thread."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join()
        self._socket.close()


def receive_file(address: str, nbytes: int, most: int, timeout_s: float) -> tuple[bytes, list[int]]:
    """What the process at a Unix socket gives: up to `nbytes` bytes, and from one to `most` descriptors, which the
    caller closes. The first is a file that can be mapped: it is sealed (`sealed_file`).

    Raises OSError where nothing comes in timeout_s, in all, or from another user, or a file that could become shorter.
    """
    until = time.monotonic() + timeout_s
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(timeout_s)
        connection.connect(address)
        user = _user(connection)
        if user != os.getuid():
            raise PermissionError(f"it belongs to user {user}, and this process to user {os.getuid()}")
        connection.settimeout(max(1e-3, until - time.monotonic()))
        data, files, _, _ = socket.recv_fds(connection, nbytes, most)
    try:
        if not files:
            raise ConnectionError("it gave no memory")
        try:
            seals = fcntl.fcntl(files[0], fcntl.F_GET_SEALS)
        except OSError:
            seals = 0  # a file of another kind
        if not seals & fcntl.F_SEAL_SHRINK:
            raise PermissionError("its memory could get shorter (no F_SEAL_SHRINK), and end this process")
    except OSError:
        for file in files:
            os.close(file)
        raise
    return data, files


def accepted(listener: socket.socket, name: str) -> Iterator[tuple[socket.socket, Any] | None]:
    """The connections that come to `listener` until it is shut down, with their addresses; None where a timeout of the
    listener has passed, or for a pause after a connection could not be taken, as for want of descriptors."""
    quiet_until = 0.0
    while True:
        found = None
        try:
            found = listener.accept()
        except TimeoutError:
            pass
        except OSError as error:
            if error.errno in (errno.EBADF, errno.EINVAL):
                return
            now = time.monotonic()
            if now >= quiet_until:
                log.warning("%s: a connection cannot be taken: %s; others are tried", name, error)
            quiet_until = now + _QUIET_S
            time.sleep(_PAUSE_S)
        yield found


def distrust(folder: Path, *, sticky: bool = False) -> str:
    """Why the files of a folder could be another user's; "" where they are this user's or root's, or it is not there.
    sticky: what others cannot replace in it counts as theirs alone, as in /tmp."""
    try:
        found = folder.stat()
    except FileNotFoundError:
        return ""
    if found.st_uid not in (os.geteuid(), 0):
        return f"belongs to user {found.st_uid}, and this process runs as user {os.geteuid()}"
    others_write = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if others_write and not (sticky and found.st_mode & stat.S_ISVTX):
        return f"has mode {stat.S_IMODE(found.st_mode):04o}, so other users can write to it"
    return ""


def _user(connection: socket.socket) -> int:
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(packed)[1])
