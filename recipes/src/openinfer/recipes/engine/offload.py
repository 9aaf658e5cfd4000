"""The tiers and peers behind the pool that the flags ask for, and the fingerprint of what their blocks depend on."""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openinfer.kvpool import Eviction, Group, Pool
from openinfer.kvpool.tiers import Disk, Sharing, Tiers, TransferConfig, parse_peers
from openinfer.recipes.engine.errors import SetupError
from openinfer.recipes.engine.limits import Limits
from openinfer.recipes.engine.options import Options
from openinfer.tensor import Device

if TYPE_CHECKING:
    from openinfer.kvpool.publisher import EventPublisher


def transfer_config(options: Options) -> TransferConfig | None:
    """The configuration that the flags ask for; None for none. Raises SetupError, InvalidConfig."""
    if options.kv_transfer_config is None and not options.kv_peer:
        return None
    flag = "--kv-transfer-config" if options.kv_transfer_config is not None else "--kv-peer"
    if not options.enable_prefix_caching:
        raise SetupError(f"{flag} shares cached prefixes; leave out --no-enable-prefix-caching")
    if options.kv_transfer_config is None:
        return TransferConfig("TcpConnector", kv_role="kv_consumer")
    return TransferConfig.parse(options.kv_transfer_config)


STAGING_BYTES = 256 << 20
"""Host memory through which blocks go to the disk where --kv-offload-gb asks for none."""
PEER_TIMEOUT_S = 30.0
"""Seconds that a load may take where a peer may bring it."""
GB = 1e9


@dataclass(frozen=True, slots=True)
class Cache:
    """Where blocks are: the pool, the tiers behind it, and the publisher that tells routers of them."""

    pool: Pool
    tiers: Tiers | None = None
    publisher: "EventPublisher | None" = None

    def publish(self) -> None:
        """Put out the KV events for routers: blocks that became findable, and blocks that were evicted."""
        if self.publisher is not None:
            self.publisher.publish(self.pool.take_events())

    def close(self, *, keep: bool) -> None:
        """Give everything back. keep: the blocks of the pool go to the tiers first."""
        if self.publisher is not None:
            self.publisher.close()
        if self.tiers is not None:
            if keep:
                self.tiers.keep(self.pool)
            self.tiers.close()


def check_offload(options: Options) -> None:
    """Raise SetupError or InvalidConfig for flags that do not fit each other."""
    transfer_config(options)
    parse_peers(options.kv_peer)
    host, folder, disk_gb = options.kv_offload_gb, options.kv_offload_dir, options.kv_offload_disk_gb
    if host is None and folder is None and disk_gb is None:
        return
    if not options.enable_prefix_caching:
        raise SetupError("--kv-offload keeps cached prefixes; leave out --no-enable-prefix-caching")
    if (folder is None) != (disk_gb is None):
        raise SetupError(
            "--kv-offload-dir and --kv-offload-disk-gb need each other: a folder, and how much of it"
        )
    if not all(0 < size < 1e6 for size in (host, disk_gb) if size is not None):
        raise SetupError(
            "--kv-offload-gb and --kv-offload-disk-gb must be more than 0 and less than a million"
        )
    if folder == "":
        raise SetupError("--kv-offload-dir is empty; give a folder")


def open_tiers(
    options: Options,
    groups: Sequence[Group],
    eviction: Callable[[Group], Eviction],
    model_dir: Path,
    limits: Limits,
    device: Device,
    parts: int,
    *,
    events: bool,
) -> Tiers | None:
    """The tiers of an engine; None where no flag asks for one. groups: of a rank. parts: of a record, one for each rank
    that holds a part of the cache. Raises InvalidTiers."""
    host, folder, disk_gb = options.kv_offload_gb, options.kv_offload_dir, options.kv_offload_disk_gb
    config, sharing, staging = transfer_config(options), None, float(STAGING_BYTES)
    if host is None and folder is None and config is None:
        return None
    groups = [dataclasses.replace(group, block_bytes=parts * group.block_bytes) for group in groups]
    about, disk = description(options, groups, model_dir, limits, device), None
    if folder is not None and disk_gb is not None:
        name = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).digest()
        disk = Disk(Path(folder), int(disk_gb * GB), groups, name, about)
    if config is not None:
        # Names and times of files differ from host to host. The weights' digest is added once they are loaded.
        common = {name: value for name, value in about.items() if name != "weights"}
        sharing = Sharing(config, groups, common, *parse_peers(options.kv_peer))
        staging = config.kv_buffer_size
    return Tiers(
        groups, int(staging if host is None else host * GB), disk, eviction=eviction, events=events, sharing=sharing,
        parts=parts, load_timeout_s=5.0 if sharing is None else PEER_TIMEOUT_S,
    )  # fmt: skip


def description(
    options: Options, groups: Sequence[Group], model_dir: Path, limits: Limits, device: Device
) -> dict[str, Any]:
    """Everything that the content of a block depends on besides its tokens and salt: the software, config and weights
    of the model, number formats, the layout. A file of weights is known by its name, its size and when it was changed,
    which nobody can set back."""
    import importlib.metadata  # it takes long, and only engines with tiers or peers need it

    common = {field.name for field in dataclasses.fields(Options)}
    own = {f.name: getattr(options, f.name) for f in dataclasses.fields(options) if f.name not in common}
    folders = [folder for folder in (model_dir, options.head_folder) if folder is not None]
    files = [
        (path.name, path.stat())
        for folder in folders
        for kind in ("safetensors", "gguf")
        for path in sorted(folder.glob(f"*.{kind}"))
    ]
    return {
        "version": importlib.metadata.version("openinfer-recipes"),
        "device": device.kind,
        "dtype": limits.dtype.name,
        "kv_cache_dtype": limits.cache.dtype.name,
        "load_format": options.load_format,
        "quantization": options.quantization,
        "activation_quantization": options.activation_quantization,
        "options": own,
        "ranks": options.tensor_parallel_size,
        "groups": [[g.name, g.block_size, g.block_bytes, g.window, g.snapshots] for g in groups],
        "config": json.loads((model_dir / "config.json").read_text()),
        "weights": [[name, status.st_size, status.st_ctime_ns] for name, status in files],
    }
