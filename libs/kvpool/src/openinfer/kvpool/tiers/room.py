"""Room: how much memory the host has left, so that a tier ends no process for want of it."""

from __future__ import annotations

import sys
from pathlib import Path

KEPT_BYTES = 1 << 30
"""Bytes that stay free for all else."""
_MEMINFO, _OWN, _GROUPS = Path("/proc/meminfo"), Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def room_bytes() -> int:
    """Bytes that a tier may still take: of the host, and of the control groups (version 2) of this process. More than
    any host has where the system tells neither."""
    return max(0, min(_of_host(), _of_groups()) - KEPT_BYTES)


def _of_host() -> int:
    try:
        lines = _MEMINFO.read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return sys.maxsize


def _of_groups() -> int:
    """The least of this process' group and those above it."""
    try:
        own = next(line[4:] for line in _OWN.read_text().splitlines() if line.startswith("0::/"))
    except (OSError, StopIteration):
        return sys.maxsize
    names = Path(own).parts
    return min(_of_group(_GROUPS.joinpath(*names[:count])) for count in range(len(names) + 1))


def _of_group(group: Path) -> int:
    """Pages of files that are not in use count as free, because the kernel takes them back."""
    try:
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return limit - used + int(stat["inactive_file"])
    except (OSError, ValueError, KeyError):  # "max": no limit; or the group of all processes
        return sys.maxsize
