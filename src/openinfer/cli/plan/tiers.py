"""Tiers of a server that need not be here: how much they hold, and how long a prefix takes from there."""

import argparse
import dataclasses
from collections.abc import Sequence

from openinfer.cli.recipe_flags import BadFlags
from openinfer.kvpool import Group
from openinfer.recipes.engine.offload import GB, STAGING_BYTES, check_offload
from openinfer.recipes.engine.options import Options
from openinfer.scheduler.sim import SimTiers, TierSpeeds
from openinfer.tensor import format_bytes

HOST_GB_PER_S = 55.0
"""One copy from page-locked memory to an H200, as measured there."""
DISK_GB_PER_S = "6,3"
"""A drive of PCIe 4, as vendors state it."""
PROMPT = 16_384


def flags(parser: argparse.ArgumentParser) -> None:
    """The speeds of tiers. Their sizes are flags of the engine."""
    add = parser.add_argument
    add("--host-rate", type=float, default=HOST_GB_PER_S, metavar="GB/S",
        help="copies from host memory (--kv-offload-gb); default: %(default)s")  # fmt: skip
    add("--disk-rate", default=DISK_GB_PER_S, metavar="READ,WRITE",
        help="GB/s of the disk (--kv-offload-disk-gb); default: %(default)s")  # fmt: skip


def speeds(args: argparse.Namespace) -> TierSpeeds:
    """Raises BadFlags."""
    try:
        read, write = (float(part) for part in args.disk_rate.split(","))
    except ValueError:
        read = write = 0.0
    if min(args.host_rate, read, write) <= 0:
        raise BadFlags(
            f"--host-rate {args.host_rate:g} --disk-rate {args.disk_rate}: GB/s above 0, and READ,WRITE such as 6,3"
        )
    return TierSpeeds(args.host_rate * GB, read * GB, write * GB)


def tiers_of(options: Options, groups: Sequence[Group], parts: int, found: TierSpeeds) -> SimTiers | None:
    """The tiers that the flags ask for, new. None: no tier. groups: of a GPU. parts: GPUs that hold a part of a block
    each, and copy it over links of their own. Raises SetupError."""
    check_offload(options)
    host, disk = options.kv_offload_gb, options.kv_offload_disk_gb
    if host is None and disk is None:
        return None
    groups, found = _whole(groups, parts), dataclasses.replace(found, host=parts * found.host)
    return SimTiers(groups, STAGING_BYTES if host is None else host * GB, (disk or 0.0) * GB, found)


def _whole(groups: Sequence[Group], parts: int) -> list[Group]:
    """The groups with the bytes of a block on all GPUs."""
    return [dataclasses.replace(group, block_bytes=parts * group.block_bytes) for group in groups]


def describe(options: Options, groups: Sequence[Group], parts: int, found: TierSpeeds) -> list[str]:
    """A line a tier: its size, how many tokens it holds, its speed, and the seconds of a long prompt. groups, parts: as
    tiers_of has them. Raises SetupError."""
    check_offload(options)
    groups, found = _whole(groups, parts), dataclasses.replace(found, host=parts * found.host)
    whole = [(group, PROMPT // group.block_size * group.block_size) for group in groups]
    needed = sum(group.num_needed(tokens) * group.block_bytes for group, tokens in whole)
    token, host, disk = needed / PROMPT, options.kv_offload_gb, options.kv_offload_disk_gb
    sizes = (("host memory", host, found.host), ("disk", disk, found.disk_read))
    return [
        f"{name} {format_bytes(int(size * GB))}: {size * GB / token:,.0f} tokens, {rate / GB:g} GB/s, "
        f"{needed / rate:.3f} s for a prompt of {PROMPT:,} tokens"
        for name, size, rate in sizes
        if size is not None
    ]
