"""Tiers: evicted blocks go to host memory and to a disk, and come back from there.

    tiers = Tiers(groups, host_bytes=64 << 30)
    pool = Pool(groups, loader=tiers, saver=tiers)
    tiers.attach(cache, stream)             # the memory of the blocks, and the stream of the steps
    ...
    lease.load(); pool.poll()               # as with any loader

Needs `openinfer-kvpool[tiers]`.
"""

try:
    import openinfer.tensor  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"{error.name} is missing; tiers need it: pip install 'openinfer-kvpool[tiers]'", name=error.name
    ) from None

from .disk import Disk
from .host import HostMemory, Slot
from .layout import Layout
from .mover import Copier, Kind, Others, SharedRecords
from .peers import Peers, Sharing, TransferConfig, parse_peers
from .tiers import Tiers
from .told import LoadTime, TierStats

__all__ = [
    "Copier", "Disk", "HostMemory", "Kind", "Layout", "LoadTime", "Others", "Peers", "SharedRecords",
    "Sharing", "Slot", "TierStats", "Tiers", "TransferConfig", "parse_peers",
]  # fmt: skip
