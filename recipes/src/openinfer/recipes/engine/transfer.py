"""The engine's part in sharing KV with other engines, as its flags ask for it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from openinfer.kvpool import Group
from openinfer.kvpool.tiers import Sharing, TransferConfig, parse_peers
from openinfer.recipes.engine.errors import SetupError
from openinfer.recipes.engine.options import Options

SAMPLES, SAMPLE_BYTES = 256, 4096
"""Parts of a file of weights that stand for it. Two fine-tunes of one model differ nearly everywhere."""


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


def open_sharing(
    options: Options, groups: Sequence[Group], model_dir: Path, about: dict[str, Any]
) -> Sharing | None:
    """The engine's part in sharing; None where no flag asks for it. Raises InvalidConfig.

    about: of the engine's blocks. Its times of files are left out, because they differ from host to host.
    """
    config = transfer_config(options)
    if config is None:
        return None
    files = sorted(model_dir.glob("*.safetensors"))
    about = about | {"weights": [[path.name, _sampled(path)] for path in files]}
    return Sharing(config, groups, about, *parse_peers(options.kv_peer))


def _sampled(path: Path) -> str:
    """A digest of parts of a file, evenly spread over it, and of its size."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        for index in range(SAMPLES):
            file.seek(max(0, size - SAMPLE_BYTES) * index // (SAMPLES - 1))
            digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()
