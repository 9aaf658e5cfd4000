"""Sharing: what one engine lends to its peers, and what it asks them for."""

import logging
from collections.abc import Sequence
from typing import Any

from ...errors import InvalidConfig
from ...group import Group
from ...ledger import Saver
from ...pool import Pool
from ..host import HostMemory
from ..mover import SharedRecords
from .client import Peers
from .config import PeerRange, TransferConfig
from .lane import Address
from .lending import Lending
from .nixl import Nixl
from .server import PeerServer
from .transport import Shared, Tcp, Transport

log = logging.getLogger("openinfer.kvpool")

TIMEOUT_S = 5.0
"""A peer that is silent for so long is lost."""


class Sharing:
    """The peers of an engine, for its `Tiers`, which open and close this object. One thread calls it.

    about: all that blocks depend on besides tokens and salt, for JSON; engines of another are refused. addresses: peers
    that are asked for every prompt. allowed: others that a request may name. Raises InvalidConfig for an address that
    cannot be had, and where NIXL is missing.
    """

    def __init__(
        self,
        config: TransferConfig,
        groups: Sequence[Group],
        about: dict[str, Any],
        addresses: Sequence[Address] = (),
        allowed: Sequence[PeerRange] = (),
    ) -> None:
        self.config, self._groups, self._secret = config, groups, config.secret()
        self._about = about = dict(about)
        self._shared = Shared() if config.share_memory else None
        own = Nixl(config.backends, TIMEOUT_S) if config.kv_connector == "NixlConnector" else Tcp()
        asks: list[Transport] = [own] if self._shared is None else [self._shared, own]
        self._transports = {one.name: one for one in (Tcp(), *asks)}
        self._addresses, self._allowed = frozenset(addresses), allowed
        self.peers = Peers(groups, asks, self._secret, about, addresses, TIMEOUT_S)
        self.lending: Lending | None = None
        """The records that peers may read; None before the tiers are attached, and in a kv_consumer."""
        self._server: PeerServer | None = None
        # Before the weights, because an address that is taken is refused here.
        self._listener = PeerServer.listen(config.kv_ip, config.kv_port) if config.serves else None

    def add(self, **facts: Any) -> None:
        """Add to what blocks depend on. Before `open`, and before any peer is asked."""
        self._about |= facts

    @property
    def address(self) -> Address | None:
        """Where this engine listens; None: nowhere."""
        if self._listener is None:
            return None
        return self.config.kv_ip, int(self._listener.getsockname()[1])

    def check(self, address: Address) -> None:
        """Raise InvalidConfig for a peer that a request may not name. Its blocks serve all requests, so it must be one
        that the operator allows, and prove that it knows the secret."""
        if not self._secret:
            raise InvalidConfig("requests name peers only where kv_connector_extra_config has a secret_file")
        if address not in self._addresses and not any(one.admits(address) for one in self._allowed):
            raise InvalidConfig(
                f"remote_host {address[0][:80]!r}, remote_port {address[1]} is no peer that --kv-peer allows; give it "
                "HOST:PORT, HOST:* or NETWORK/BITS:*"
            )

    def register(self, ptr: int, nbytes: int) -> None:
        """Host memory in which records will be."""
        for transport in self._transports.values():
            transport.register(ptr, nbytes)

    def open(self, host: HostMemory, records: SharedRecords) -> None:
        """Begin to lend the records of this memory, which lie in `records`."""
        if self._listener is None:
            return
        self.lending = Lending(host, self.config.lease_s)
        if self._shared is not None:
            self._shared.lend(records)
        names = list(self._transports)
        card = {"about": self._about, "engine_id": self.config.engine_id, "transports": names}
        self._server = PeerServer(
            self._listener, self.lending, self._groups, self._transports, self._secret, card
        )

    def export(
        self,
        lease: str,
        pool: Pool,
        saver: Saver,
        tokens: Sequence[int],
        salt: bytes,
        hashes: Sequence[bytes] | None,
    ) -> tuple[int, list[list[str]]]:
        """Copy a cached prefix to the host memory of `saver`, and keep it there for a peer under this lease.

        The prefix leaves one of `tokens` to compute. Returns its length, and by group the name of its last block in
        hexadecimal digits; 0 where host memory has no room for all. `exported`: whether the copies are done.
        """
        if self.lending is None:
            return 0, []
        known = None if hashes is None else hashes[: (len(tokens) - 1) // pool.hash_block_size]
        with pool.pin(tokens[:-1], salt, known) as hold:
            records = list(hold.records())
            for group, names, blocks in records:
                saver.save(group, names, blocks)
            wanted = [(group, name) for group, names, _ in records for name in names]
            kept = self.lending.grant(lease, wanted)
            if kept < len(wanted):
                self.lending.end(lease)  # so that its records do not take the room of the next prompt's
                log.warning(
                    "KV peers: host memory has room for %d of %d blocks of a prompt; the decode engine computes the "
                    "others; give more by kv_buffer_size or --kv-offload-gb", kept, len(wanted),
                )  # fmt: skip
                return 0, []
            return hold.num_tokens, [[name.hex() for name in names[-1:]] for _, names, _ in records]

    def export_ahead(
        self, pool: Pool, saver: Saver, tokens: Sequence[int], salt: bytes, hashes: Sequence[bytes] | None
    ) -> None:
        """Copy what is cached of a prompt to the host memory of `saver`, while the rest is computed: `export` then has
        few copies to wait for. Windows and snapshots are left out, because only a prompt's last ones count."""
        if self.lending is None:
            return
        known = None if hashes is None else hashes[: len(tokens) // pool.hash_block_size]
        with pool.pin(tokens, salt, known) as hold:
            for group, names, blocks in hold.records():
                if self._groups[group].window is None and not self._groups[group].snapshots:
                    saver.save(group, names, blocks)

    def exported(self, lease: str) -> bool:
        """Whether all records of a lease can be read. The tiers must have collected their copies."""
        return self.lending is None or self.lending.landed(lease)

    def clear(self) -> None:
        """Forget what peers have, and end all leases: the weights have changed."""
        self.peers.clear()
        if self.lending is not None:
            self.lending.clear()

    def close(self) -> None:
        self.peers.close()
        if self._server is not None:
            self._server.close()
        elif self._listener is not None:
            self._listener.close()
        if self.lending is not None:
            self.lending.clear()
        for transport in self._transports.values():
            transport.close()
