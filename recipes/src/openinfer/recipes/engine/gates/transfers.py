"""Transfers: requests whose prompt another engine computed, and requests that leave their prompt's KV for another."""

import os
from collections.abc import Sequence

import msgspec

from openinfer.frontend.contract import Failed, Finished, KVTransfer, Rejected, Request
from openinfer.graph.runner import Sampling
from openinfer.kvpool import InvalidConfig, Pool
from openinfer.kvpool.tiers import Tiers
from openinfer.kvpool.tiers.peers import Address
from openinfer.recipes.engine.gates import full
from openinfer.scheduler import Seq


class Transfers:
    """A Gate: a request that may find blocks at a peer waits for its answer. One that leaves blocks copies each to host
    memory, and ends when all are there. tiers: without `sharing`, or None: no request has transfers.
    """

    def __init__(self, tiers: Tiers | None, pool: Pool, max_queued: int) -> None:
        self.sharing = tiers.sharing if tiers is not None else None
        self._tiers, self._pool, self._max_queued = tiers, pool, max_queued
        self._params: dict[int, KVTransfer] = {}
        self._asking: dict[int, Seq[Sampling]] = {}
        self._asked: set[int] = set()
        self._problems: dict[int, str] = {}
        self._lost: dict[int, str] = {}
        self._computing: dict[int, tuple[Seq[Sampling], int]] = {}  # leave blocks; tokens copied so far
        self._leaving: dict[str, Finished | Failed] = {}

    def __len__(self) -> int:
        return len(self._asking)

    def refusal(self, request: Request, waiting: int) -> Rejected | None:
        given, sharing, problem = request.kv_transfer, self.sharing, ""
        if given is None:
            return full(request, waiting, self._max_queued) if sharing is not None else None
        if sharing is None:
            problem = "this engine shares no KV; start it with --kv-transfer-config"
        elif request.prompt_logprobs is not None:
            problem = "kv_transfer_params is not possible with prompt_logprobs or echo with logprobs"
        elif given.do_remote_decode and not sharing.config.serves:
            problem = "do_remote_decode needs an engine that peers may ask; this one is a kv_consumer"
        elif given.do_remote_prefill:
            try:
                sharing.check(_address(given))
            except InvalidConfig as error:
                problem = str(error)
        if problem:
            return Rejected(request.id, problem, "unsupported")
        return full(request, waiting, self._max_queued)

    def admit(self, request: Request) -> None:
        if request.kv_transfer is not None:
            self._params[request.id] = request.kv_transfer

    def take(self, seq: Seq[Sampling]) -> bool:
        sharing, given = self.sharing, self._params.get(seq.id)
        if sharing is None or seq.owner.score is not None:
            return False
        self._asked.add(seq.id)
        if given is not None and given.do_remote_decode:
            self._computing[seq.id] = seq, 0
        address = None
        if given is not None and given.do_remote_prefill:
            address = _address(given)
            sharing.peers.keep(address, given.remote_request_id or "")
        names = self._pool.missing(seq.tokens, seq.salt, seq.hashes)
        if not any(names) or not sharing.peers.ask(seq.id, names, address):
            return False
        self._asking[seq.id] = seq
        return True

    def ready(self, wait_s: float) -> Sequence[Seq[Sampling] | Rejected]:
        if self.sharing is None or not self._asking:
            return []
        answers = self.sharing.peers.answers(wait_s)
        self._problems |= {key: problem for key, problem in answers if problem}
        return [self._asking.pop(key) for key, _ in answers]

    def drop(self, request_id: int) -> bool:
        seq = self._asking.pop(request_id, None)
        if seq is not None and self.sharing is not None:
            self.sharing.peers.forget(request_id)
        return seq is not None

    def end(self, seq: Seq[Sampling]) -> None:
        """A request has ended, or blocks from elsewhere are of no use to it any more: its lease at a peer ends."""
        given = self._params.pop(seq.id, None)
        self._computing.pop(seq.id, None)
        asked = seq.id in self._asked
        self._asked.discard(seq.id)
        self._problems.pop(seq.id, None)
        if asked and given is not None and given.do_remote_prefill and self.sharing is not None:
            self.sharing.peers.end(_address(given), given.remote_request_id or "")

    def scheduled(self, seq: Seq[Sampling], num_cached: int) -> bool:
        """A sequence has the blocks that came. False: it must be aborted, because some are missing and needed."""
        given, why = self._params.get(seq.id), self._problems.get(seq.id, "")
        if self.sharing is None or given is None or not given.do_remote_prefill:
            return True
        self.end(seq)
        wanted = given.remote_num_tokens or 0
        if num_cached >= wanted or self.sharing.config.kv_load_failure_policy == "recompute":
            return True
        why = why or "the peer has the others no more, or was lost"
        self._lost[seq.id] = f"{num_cached} of {wanted} tokens came from the prefill engine: {why}"
        return False

    def conclude(self, seq: Seq[Sampling], terminal: Finished | Failed) -> list[Finished | Failed]:
        """The terminal of a sequence that has ended; [] if it comes from `left`, when its blocks can be read."""
        given, lost, sharing = self._params.get(seq.id), self._lost.pop(seq.id, ""), self.sharing
        if lost and isinstance(terminal, Finished) and terminal.reason == "abort":
            return [Failed(seq.id, lost)]
        # vLLM leaves nothing for others either, except at the length.
        complete = isinstance(terminal, Finished) and terminal.reason == "length"
        leaves = complete and given is not None and given.do_remote_decode
        if not leaves or sharing is None or self._tiers is None:
            return [terminal]
        # Whoever knows the name of a lease can end it.
        lease = f"{sharing.config.engine_id}-{seq.id}-{os.urandom(8).hex()}"
        prompt = seq.tokens[: seq.prompt_len]
        num_tokens, names = sharing.export(lease, self._pool, self._tiers, prompt, seq.salt, seq.hashes)
        host, port = sharing.address or ("", 0)
        left = KVTransfer(
            do_remote_decode=False, do_remote_prefill=True, remote_engine_id=sharing.config.engine_id,
            remote_request_id=lease, remote_host=host, remote_port=port, remote_num_tokens=num_tokens, tp_size=1,
            remote_block_ids=[list(group) for group in names],
        )  # fmt: skip
        self._leaving[lease] = msgspec.structs.replace(terminal, kv_transfer=left)
        return []

    def left(self) -> list[Finished | Failed]:
        """The terminals of sequences whose blocks can be read by now."""
        for key, (seq, copied) in self._computing.items():
            if seq.lease is not None and seq.confirmed > copied and self._tiers is not None and self.sharing:
                self._computing[key] = seq, seq.confirmed
                tokens = seq.tokens[: seq.confirmed]
                self.sharing.export_ahead(self._pool, self._tiers, tokens, seq.salt, seq.hashes)
        if not self._leaving or self._tiers is None or self.sharing is None:
            return []
        self._tiers.collect()
        done = [lease for lease in self._leaving if self.sharing.exported(lease)]
        return [self._leaving.pop(lease) for lease in done]


def _address(given: KVTransfer) -> Address:
    return given.remote_host or "", given.remote_port or 0
