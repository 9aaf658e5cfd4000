"""Room: how much memory the host has left, so that a tier ends no process for want of it."""

from __future__ import annotations

import sys
from pathlib import Path

KEPT_BYTES = 1 << 30
"""Bytes that stay free for all else."""
_MEMINFO = Path("/proc/meminfo")
_GROUP = Path("/sys/fs/cgroup")


def room_bytes() -> int:
    """Bytes that a tier may still take: of the host, and of the control group (version 2) of this process. More than
    any host has where the system tells neither."""
    return max(0, min(_of_host(), _of_group()) - KEPT_BYTES)


def _of_host() -> int:
    try:
        lines = _MEMINFO.read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return sys.maxsize


def _of_group() -> int:
    """Pages of files that are not in use count as free, because the kernel takes them back."""
    try:
        limit, used = ((_GROUP / name).read_text() for name in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in (_GROUP / "memory.stat").read_text().splitlines())
        return int(limit) - int(used) + int(stat["inactive_file"])
    except (OSError, ValueError, KeyError):  # "max": no limit
        return sys.maxsize
