"""TransferConfig: the keys of vLLM's `--kv-transfer-config`."""

import ipaddress
import json
import math
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from ...errors import InvalidConfig
from .lane import Address

CONNECTORS = ("NixlConnector", "TcpConnector")
ROLES = ("kv_producer", "kv_consumer", "kv_both")
POLICIES = ("recompute", "fail")
_EXTRA = {
    "kv_lease_duration": (int, float),
    "backends": (list,),
    "secret_file": (str,),
    "share_memory": (bool,),
}
_IGNORED = ("kv_rank", "kv_parallel_size", "enable_permute_local_kv")
"""Keys of vLLM's that say nothing here; null or vLLM's default only."""


@dataclass(frozen=True, slots=True)
class TransferConfig:
    """The keys of vLLM's `--kv-transfer-config` (https://docs.vllm.ai/en/stable/features/nixl_connector_usage/). Raises
    InvalidConfig.

    kv_connector: NixlConnector, or TcpConnector, which needs no other package. kv_role: a kv_producer listens for
    peers, a kv_consumer asks them, kv_both does both. kv_ip, kv_port: where this engine listens, and what answers name
    as remote_host and remote_port. kv_buffer_device: cpu, because blocks travel through page-locked host memory.
    kv_buffer_size: its bytes, where --kv-offload-gb gives none. kv_load_failure_policy: "recompute", or "fail": one
    error for a request whose blocks did not come. kv_connector_extra_config: kv_lease_duration in seconds, backends of
    NIXL, secret_file, which all engines must have that share (it is needed to listen beyond this host), and
    share_memory: false sends blocks through the connector within a host too.
    """

    kv_connector: str
    kv_role: str = "kv_both"
    engine_id: str = field(default_factory=lambda: os.urandom(16).hex())
    kv_ip: str = "127.0.0.1"
    kv_port: int = 14579
    kv_buffer_device: str = "cpu"
    kv_buffer_size: float = 4e9
    kv_load_failure_policy: str = "recompute"
    kv_connector_extra_config: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _among("kv_connector", self.kv_connector, CONNECTORS)
        _among("kv_role", self.kv_role, ROLES)
        _among("kv_load_failure_policy", self.kv_load_failure_policy, POLICIES)
        if self.kv_buffer_device != "cpu":
            raise InvalidConfig(
                f"kv_buffer_device is {self.kv_buffer_device!r}; blocks travel through host memory here: give 'cpu'"
            )
        if not isinstance(self.engine_id, str) or not self.engine_id:
            raise InvalidConfig(f"engine_id is {self.engine_id!r}; it must be a text")
        if not _number(self.kv_port, int) or not 0 <= self.kv_port < 65536:
            raise InvalidConfig(f"kv_port is {self.kv_port!r}; 0 to 65535 are possible")
        if not _number(self.kv_buffer_size, (int, float)) or not 0 < self.kv_buffer_size < 1e15:
            raise InvalidConfig(
                f"kv_buffer_size is {self.kv_buffer_size!r}; give bytes, more than 0 and fewer than 1e15"
            )
        extra = self.kv_connector_extra_config
        if not isinstance(extra, dict):
            raise InvalidConfig(f"kv_connector_extra_config is {extra!r}; it must be an object")
        wrong = [k for k in extra if type(extra[k]) not in _EXTRA.get(k, ())]
        if wrong:
            raise InvalidConfig(
                f"kv_connector_extra_config: {wrong[0]} is {extra[wrong[0]]!r}; possible are kv_lease_duration "
                "(seconds), backends (a list), secret_file (a path) and share_memory (true or false)"
            )
        if not 0 < self.lease_s < math.inf:
            raise InvalidConfig(f"kv_lease_duration is {self.lease_s!r}; give seconds, more than 0")
        if not self.backends or not all(isinstance(one, str) for one in self.backends):
            raise InvalidConfig(f'backends is {self.backends!r}; give a list of names, as in ["UCX"]')
        if not isinstance(self.kv_ip, str):
            raise InvalidConfig(f"kv_ip is {self.kv_ip!r}; it must be a text")
        if self.kv_ip in ("", "*", "0.0.0.0", "::"):
            raise InvalidConfig(
                f"kv_ip is {self.kv_ip!r}; answers name it as remote_host, so give an address of this host"
            )
        if self.serves and not is_loopback(self.kv_ip) and "secret_file" not in extra:
            raise InvalidConfig(
                f"kv_ip {self.kv_ip} can be reached from other hosts, and blocks tell what prompts were: give "
                'kv_connector_extra_config {"secret_file": FILE} to all engines that share, or kv_ip 127.0.0.1'
            )

    @classmethod
    def parse(cls, text: str) -> "TransferConfig":
        """From JSON: an object with some of the keys."""
        try:
            given = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InvalidConfig(f"this is no JSON ({error}): {text[:100]!r}") from None
        known = [field.name for field in fields(cls)]
        if not isinstance(given, dict) or set(given) - {*known, *_IGNORED} or "kv_connector" not in given:
            raise InvalidConfig(
                f"{text[:200]!r} must be an object with kv_connector, and keys among {', '.join(known)}"
            )
        for name in _IGNORED:
            if given.pop(name, None) not in (None, False, 1):
                raise InvalidConfig(f"{name} has no meaning here; leave it out")
        return cls(**given)

    @property
    def serves(self) -> bool:
        """Whether peers may ask this engine."""
        return self.kv_role != "kv_consumer"

    @property
    def lease_s(self) -> float:
        """Seconds that a peer has to fetch what a request left for it."""
        return float(self.kv_connector_extra_config.get("kv_lease_duration", 30.0))

    @property
    def backends(self) -> list[str]:
        """Backends of NIXL."""
        return list(self.kv_connector_extra_config.get("backends", ["UCX"]))

    @property
    def share_memory(self) -> bool:
        """Whether engines of one host map each other's memory."""
        return bool(self.kv_connector_extra_config.get("share_memory", True))

    def secret(self) -> bytes:
        """The content of secret_file; b"" without one. Raises InvalidConfig."""
        path = self.kv_connector_extra_config.get("secret_file")
        if path is None:
            return b""
        try:
            secret = Path(path).read_bytes().strip()
        except OSError as error:
            raise InvalidConfig(f"secret_file cannot be read: {error}") from None
        if len(secret) < 16:
            raise InvalidConfig(f"secret_file {path} has {len(secret)} bytes; give at least 16 random ones")
        return secret


class PeerRange(NamedTuple):
    """Peers that a request may name: a host or a network (10.1.0.0/16), and a port, 0 for any."""

    host: str
    port: int

    def admits(self, address: Address) -> bool:
        host, port = address
        if self.port not in (0, port):
            return False
        if "/" not in self.host:
            return host == self.host
        try:
            return ipaddress.ip_address(host) in ipaddress.ip_network(self.host)
        except ValueError:
            return False


def parse_peers(texts: Sequence[str]) -> tuple[list[Address], list[PeerRange]]:
    """The peers of each HOST:PORT, which are asked for every prompt; and those of each HOST:*, NETWORK/BITS:PORT and
    NETWORK/BITS:*, which requests may name. Raises InvalidConfig."""
    asked: list[Address] = []
    allowed: list[PeerRange] = []
    for text in texts:
        host, _, port = text.rpartition(":")
        host = host.replace("[", "").replace("]", "")
        try:
            number = int(port) if port.isascii() and port.isdecimal() else 0
            network = ipaddress.ip_network(host) if "/" in host else None
            if not host or not (port == "*" or 0 < number < 65536):
                raise ValueError
        except ValueError:
            raise InvalidConfig(
                f"{text!r} is no peer; give HOST:PORT to ask it for every prompt, or HOST:* or NETWORK/BITS:* for "
                "peers that requests may name"
            ) from None
        if network is not None or port == "*":
            allowed.append(PeerRange(host, number))
        else:
            asked.append((host, number))
    return asked, allowed


def is_loopback(host: str) -> bool:
    """Whether an address is of this host alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" and socket.gethostbyname(host).startswith("127.")


def _among(name: str, value: object, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise InvalidConfig(f"{name} is {value!r}; {', '.join(allowed)} are possible")


def _number(value: object, kinds: Any) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool)
