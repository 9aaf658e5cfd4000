"""An engine that shares blocks, without a model: for tests of peers, and of what goes between them."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from openinfer.kvpool import Group, Lease, Pool
from openinfer.kvpool.tiers import Sharing, Tiers, TransferConfig
from openinfer.kvpool.tiers.peers.lane import Address
from openinfer.tensor import Device, Stream, Tensor

PAGES = Group("pages", 4, 8, 64)
STATES = Group("state", 4, 6, 4096 + 64, snapshots=True)
ABOUT = {"model": "m", "version": "1"}
TOKENS = list(range(100, 117))
"""A prompt of four pages and a token."""
PATIENCE_S = 10.0


def transfer(connector: str = "TcpConnector", **fields: Any) -> TransferConfig:
    """A TransferConfig with these fields, at a port that is free."""
    return TransferConfig(connector, kv_port=0, **fields)


class SharingEngine:
    """A pool with tiers and peers, whose blocks are memory of a CPU. To compute a page is to write its first token into
    it; to compute a state, its last one.

    groups: one of pages, then groups with snapshots. host: bytes of host memory. Close it.
    """

    def __init__(
        self,
        config: TransferConfig,
        addresses: Sequence[Address] = (),
        about: dict[str, Any] = ABOUT,
        groups: Sequence[Group] = (PAGES,),
        host: int = 64 * 4096,
    ) -> None:
        self.sharing = Sharing(config, groups, about, addresses)
        self.tiers = Tiers(groups, host, sharing=self.sharing, load_timeout_s=PATIENCE_S)
        self.pool = Pool(groups, loader=self.tiers, saver=self.tiers)
        device = Device("cpu")
        self.cache = [Tensor.empty((g.num_blocks, g.block_bytes), "uint8", device) for g in groups]
        self.tiers.attach([[tensor] for tensor in self.cache], Stream(device))
        _until(lambda: self.tiers.ready, lambda: time.sleep(0.001))

    def serve(self, tokens: Sequence[int], salt: bytes = b"", load: bool = True) -> int:
        """Compute a prompt; the number of its tokens that were cached or loaded. Raises AssertionError where a block
        holds something else than what was computed."""
        with self.pool.acquire(tokens, salt) as lease:
            if load and lease.load():
                self.wait_for(lease)
            # Loads that were given up have blocks until they end.
            assert _until(lambda: lease.reserve(len(tokens)) is not None, lambda: self.pool.poll(0.1))
            for copy in lease.copies or ():
                memory = self.cache[copy.group].numpy()
                memory[copy.target] = memory[copy.source]
            for index, block in enumerate(lease.block_table()):
                page = self.cache[0].numpy()[block]
                if index < lease.num_cached // 4:
                    assert set(page.tolist()) == {tokens[index * 4]}
                else:
                    page[:] = tokens[index * 4]
            for group in range(1, len(self.cache)):
                self._serve_states(lease, tokens, group)
            lease.commit(tokens, len(tokens))
            return lease.num_cached

    def _serve_states(self, lease: Lease, tokens: Sequence[int], group: int) -> None:
        states = self.cache[group].numpy()
        state = states[lease.block_table(group)[0]]
        assert not lease.num_cached or set(state.tolist()) == {tokens[lease.num_cached - 1]}
        for boundary in range(lease.num_cached + 4, len(tokens), 4):
            state[:] = tokens[boundary - 1]
            for copy in lease.snapshot(boundary) or ():
                states[copy.target] = state

    def wait_for(self, lease: Lease) -> None:
        """Wait until a load has ended."""
        until = time.monotonic() + PATIENCE_S
        while lease not in self.pool.poll(1.0):
            assert time.monotonic() < until

    def export(self, lease: str, tokens: Sequence[int], salt: bytes = b"") -> tuple[int, list[list[str]]]:
        """Bring a prompt's blocks to host memory and keep them there under the name `lease`. See Sharing.export."""
        found = self.sharing.export(lease, self.pool, self.tiers, tokens, salt, None)
        assert _until(lambda: self.sharing.exported(lease), self.tiers.collect)
        return found

    def ask(
        self,
        tokens: Sequence[int],
        address: Address | None = None,
        salt: bytes = b"",
        wait_s: float = PATIENCE_S,
    ) -> str | None:
        """The problem of a question about a prompt, "" where there was none; None if no peer is asked."""
        if not self.sharing.peers.ask(1, self.pool.missing(tokens, salt), address):
            return None
        until = time.monotonic() + wait_s
        while time.monotonic() < until:
            for answer in self.sharing.peers.answers(0.1):
                return answer.problem
        raise AssertionError("no answer came")

    def close(self) -> None:
        """End it, and check the pool's books."""
        self.pool.check_integrity()
        self.tiers.close()


def two_engines(**fields: Any) -> tuple[SharingEngine, SharingEngine]:
    """One with TOKENS to fetch, and another one of the same host. fields: of the TransferConfig of both."""
    first, second = SharingEngine(transfer(**fields)), SharingEngine(transfer(**fields))
    first.serve(TOKENS)
    first.export("lease", TOKENS)
    return first, second


def _until(done: Callable[[], bool], turn: Callable[[], object]) -> bool:
    """Take turns until it is done or the patience ends; whether it is done."""
    until = time.monotonic() + PATIENCE_S
    while not done():
        if time.monotonic() > until:
            return False
        turn()
    return True
