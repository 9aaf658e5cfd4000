"""The engine's part in sharing KV with other engines, as its flags ask for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from openinfer.kvpool import Group
from openinfer.kvpool.tiers import Sharing, TransferConfig, parse_peers
from openinfer.recipes.engine.errors import SetupError
from openinfer.recipes.engine.options import Options


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


def open_sharing(options: Options, groups: Sequence[Group], about: dict[str, Any]) -> Sharing | None:
    """The engine's part in sharing; None where no flag asks for it. Raises InvalidConfig.

    about: of the engine's blocks. Its weights are left out, because names and times of files differ from host to host;
    their digest is added once they are loaded.
    """
    config = transfer_config(options)
    if config is None:
        return None
    about = {name: value for name, value in about.items() if name != "weights"}
    return Sharing(config, groups, about, *parse_peers(options.kv_peer))
