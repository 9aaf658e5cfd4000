"""A record in a file: a header of 4,096 bytes with a checksum, then the block."""

import errno
import mmap
import os
import struct
import zlib
from contextlib import suppress
from pathlib import Path

from .layout import ALIGNMENT, align_up

_HEADER = struct.Struct("<8s32s32sIQI")  # magic, fingerprint, name, group, bytes, checksum of the block
_MAGIC = b"openkv01"


class Wrong(ValueError):
    """A file does not hold the record that its name promises."""


class Files:
    """Reads and writes records in one thread. direct: without the page cache (O_DIRECT)."""

    def __init__(self, fingerprint: bytes, *, direct: bool) -> None:
        # No link is followed, and no pipe waited for.
        flags = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        self._fingerprint, self._flags = fingerprint, flags | (os.O_DIRECT if direct else 0)
        self._header = mmap.mmap(-1, ALIGNMENT)  # page-aligned, as O_DIRECT wants it

    def write(self, path: Path, group: int, name: bytes, record: memoryview, nbytes: int) -> None:
        """Write a record of which `nbytes` bytes count. The file is there as a whole or not at all. Raises OSError."""
        checksum = zlib.crc32(record[:nbytes])
        packed = _HEADER.pack(_MAGIC, self._fingerprint, name, group, nbytes, checksum)
        self._header[: _HEADER.size] = packed
        part = path.with_suffix(".part")
        try:
            fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | self._flags, 0o600)
            try:
                written = os.pwritev(fd, [self._header, record], 0)
            finally:
                os.close(fd)
            if written != ALIGNMENT + len(record):
                raise OSError(f"{written} of {ALIGNMENT + len(record)} bytes were written to {part}")
            part.rename(path)
        except OSError:
            with suppress(OSError):
                part.unlink()
            raise

    def read(self, path: Path, group: int, name: bytes, record: memoryview, nbytes: int) -> None:
        """Fill `record` from a file. Raises OSError, and Wrong for bytes that are not the record."""
        fd = os.open(path, os.O_RDONLY | self._flags)
        try:
            count = os.preadv(fd, [self._header, record], 0)
        finally:
            os.close(fd)
        packed = self._header[: _HEADER.size]
        expected = _HEADER.pack(_MAGIC, self._fingerprint, name, group, nbytes, zlib.crc32(record[:nbytes]))
        if count != ALIGNMENT + align_up(nbytes) or packed != expected:
            raise Wrong(f"{path}: the checksum or the header is wrong")

    def close(self) -> None:
        self._header.close()


def file_bytes(nbytes: int) -> int:
    return ALIGNMENT + align_up(nbytes)


def takes_direct(folder: Path) -> str | None:
    """Why the file system takes no O_DIRECT; None if it does."""
    path, page = folder / "probe.part", mmap.mmap(-1, ALIGNMENT)
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT | os.O_NOFOLLOW, 0o600)
        try:
            os.pwritev(fd, [page], 0)
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):  # it was opened, which is all that can be known
            return None
        return error.strerror or str(error)
    finally:
        page.close()
        path.unlink(missing_ok=True)
    return None
