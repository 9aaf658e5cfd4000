"""The engine: frontend.contract over the step loop."""

import os
import time
from collections.abc import Sequence
from concurrent.futures import Future
from copy import copy
from dataclasses import asdict, dataclass

from openinfer import scheduler
from openinfer.frontend import contract
from openinfer.frontend.errors import Unsupported
from openinfer.graph import SlowLoads
from openinfer.graph.runner import Drafting, FirstTokens, Payload, PromptScore, Runner, Sampling, WeightsDesk
from openinfer.kernels import Store
from openinfer.kernels.authoring import Adapter
from openinfer.kvpool import Pool, hash_blocks
from openinfer.recipes.engine import emitting
from openinfer.recipes.engine.followers import Followers, NoFollowers
from openinfer.recipes.engine.gates import Gate, Queue, Refused
from openinfer.recipes.engine.gates.adapter_places import AdapterPlaces
from openinfer.recipes.engine.gates.grammars import Grammars
from openinfer.recipes.engine.gates.transfers import Transfers
from openinfer.recipes.engine.offload import Cache
from openinfer.recipes.engine.refusal import no_token_left, request_refusal
from openinfer.recipes.engine.training import Training
from openinfer.sampler import fresh_seed
from openinfer.scheduler import FinishReason, Policy, Seq, StepLoop, Tokens
from openinfer.tensor import DriverCounts

FEATURES = ["logprobs", "prompt_logprobs", "penalties", "logit_bias", "allowed_token_ids", "bad_words"]
"""The features of every engine, in the names of EngineInfo.features."""


@dataclass(frozen=True, slots=True)
class Served:
    """What an engine serves: its model, and the adapters that are there from the start; and the most rows of a step,
    tokens of a sequence, and requests that wait."""

    name: str
    eos_token_ids: tuple[int, ...]
    max_rows: int
    max_model_len: int
    max_queued: int
    adapters: Sequence[Adapter] = ()


class Engine:
    """A model behind the engine contract. Single-threaded: one thread submits, aborts and steps. store: of a GPU."""

    def __init__(
        self,
        runner: Runner,
        cache: Cache,
        policy: Policy,
        desk: WeightsDesk,
        served: Served,
        followers: Followers | NoFollowers,
        store: Store | None = None,
    ) -> None:
        self.runner, self._cache, self._followers, self._store = runner, cache, followers, store
        self._vocab_size, self._eos_token_ids = runner.model.batch.logits.shape[1], served.eos_token_ids
        drafting, pool, tiers, max_queued = runner.drafting, cache.pool, cache.tiers, served.max_queued
        self._loop = StepLoop(
            runner, pool, policy, max_rows=served.max_rows, max_model_len=served.max_model_len,
            max_queued=max_queued, speculation=drafting if isinstance(drafting, Drafting) else None,
            lone_tokens=runner.buckets.lone_tokens,
        )  # fmt: skip
        self._grammars = Grammars(self._vocab_size, self._eos_token_ids, max_queued)
        self._transfers = Transfers(tiers, pool, max_queued)
        self._adapters = AdapterPlaces(
            runner.model.batch.adapters, runner.stream, served.adapters, followers.put_adapter, max_queued
        )
        self.gates: tuple[Gate, ...] = (self._grammars, self._transfers, self._adapters, Queue(self._loop))
        self._seqs: dict[int, Seq[Sampling]] = {}
        self._updates: list[contract.Update] = []
        self._stats = contract.EngineStats()
        self._first_tokens = FirstTokens(runner.watch)
        self._slow_loads = SlowLoads(runner.watch, tiers.load_times) if tiers is not None else None
        self._batch, self.training = emitting.NO_ROWS, Training(desk, cache)
        self._counts_at_ready = DriverCounts.now()
        self.info = contract.EngineInfo(
            model=served.name,
            max_model_len=served.max_model_len,
            vocab_size=self._vocab_size,
            eos_token_ids=list(served.eos_token_ids),
            kv_capacity_tokens=pool.capacity_tokens,
            block_size=pool.groups[0].block_size,
            features=[
                *FEATURES,
                *["prefix_cache"] * pool.prefix_cache,
                *["priority"] * policy.uses_priority,
                *["grammar"] * Grammars.possible,
                *["adapters"] * bool(self._adapters.places),
                *["kv_transfer"] * (self._transfers.sharing is not None),
            ],
            max_adapters=self._adapters.places,
            hang_timeout_s=10.0 if runner.stream.device.kind == "cuda" else 300.0,
        )

    @property
    def pool(self) -> Pool:
        """The pool of the sequences' blocks."""
        return self._cache.pool

    def check(self) -> None:
        """Check scheduler and pool, for tests. Raises IntegrityError where their books disagree."""
        self._loop.check()
        self.pool.check_integrity()

    def submit(self, request: contract.Request) -> None:
        problem = self._problem(request)
        if problem is not None:
            self._updates.append(problem)
            return
        params, pool = request.sampling, self.pool
        stop_ids = (*params.stop_token_ids, *(() if params.ignore_eos else self._eos_token_ids))
        seed = fresh_seed() if params.seed is None else params.seed
        salt, tokens = request.cache_salt.encode(), list(request.prompt_token_ids)
        sampling = Sampling(params, seed, stop_ids, draftless=request.disable_spec_decode)
        if request.prompt_logprobs is not None:
            sampling.score = PromptScore(request.prompt_logprobs)
            salt += os.urandom(16)  # cached blocks have no scores: it shares only its own, after a preemption
        salt = self._adapters.assign(request, sampling, self.training.salt(salt))
        # Made once, however often the queue is looked through.
        hashes = hash_blocks(tokens, pool.hash_block_size, salt) if pool.prefix_cache else None
        seq = self._seqs[request.id] = Seq(
            request.id,
            tokens,
            request.max_tokens,
            priority=request.priority,
            tenant=request.tenant,
            arrival=request.arrival,
            salt=salt,
            hashes=hashes,
            owner=sampling,
        )
        for gate in self.gates:
            gate.admit(request)
        self._walk(seq, self.gates)

    def _walk(self, seq: Seq[Sampling], gates: Sequence[Gate]) -> None:
        """Lead a sequence to the first of these gates where it waits."""
        try:
            any(gate.take(seq) for gate in gates)
        except Refused as refused:
            self._refuse(refused.why)

    def _refuse(self, why: contract.Rejected) -> None:
        self._updates.append(why)
        self._over(self._seqs[why.id])

    def _over(self, seq: Seq[Sampling]) -> None:
        del self._seqs[seq.id]
        for gate in self.gates:
            gate.end(seq)

    def _problem(self, request: contract.Request) -> contract.Rejected | None:
        if request.id in self._seqs:
            return contract.Rejected(request.id, f"request {request.id} was submitted before")
        found = self.training.refusal(request.id) or request_refusal(request, self.info)
        waiting = self._waiting
        return found or next(filter(None, (gate.refusal(request, waiting) for gate in self.gates)), None)

    @property
    def _waiting(self) -> int:
        return sum(map(len, self.gates))

    def abort(self, request_id: int) -> None:
        if any(gate.drop(request_id) for gate in self.gates):
            self._updates.append(contract.Finished(request_id, "abort"))
            self._over(self._seqs[request_id])

    def control(self, command: contract.Command) -> Future[None] | str | None:
        """Carry out a command. Returns the answer of one that asks; an adapter is loaded when the future is done."""
        match command:
            case contract.LoadAdapter() | contract.UnloadAdapter():
                return self._adapters.carry_out(command)
            case contract.SlowTraces():
                return self.runner.watch.as_json()
            case contract.ResetPrefixCache():
                if not self.pool.reset_prefix_cache():
                    raise Unsupported("the prefix cache can be reset only while no request runs")
                self._cache.publish()
            case contract.UpdateWeights() | contract.Sleep() | contract.WakeUp():
                self.training.carry_out(command, len(self._seqs))
                self._cache.publish()
                self._counts_at_ready = DriverCounts.now()  # a new start
            case contract.TokenTable():
                self._grammars.take_tokens(command)
        return None

    def step(self, wait: float) -> contract.StepOutputs:
        """One turn of the loop. Raises RankLost where the engine has lost one of its ranks."""
        try:
            return self._step(wait)
        finally:
            # It knows how the rank ended; and what a device gives after that is no result.
            self._followers.check()

    def _step(self, wait: float) -> contract.StepOutputs:
        trace = self.runner.trace
        trace.mark("plan")
        for place, gate in enumerate(self.gates, 1):
            idle = not (self._updates or self._loop.has_work)
            for one in gate.ready(wait if idle else 0.0):
                if isinstance(one, contract.Rejected):
                    self._refuse(one)
                else:
                    self._walk(one, self.gates[place:])
        outputs = contract.StepOutputs(updates=self._updates)
        self._updates = []
        events = self._loop.step(0.0 if outputs.updates else wait)
        if self._loop.has_work and not self._loop.live:
            events += self._loop.drain()  # the next step may be far off: blocks go back now
        trace.mark("outputs")
        self._first_tokens.events(events, self._loop.stats)
        if self._slow_loads is not None:
            self._slow_loads.look()
        emitting.put_prompt_logprobs(outputs, self.runner.take_scores(), self._seqs)
        for event in events:
            match event:
                case Tokens():
                    self._tokens(event, outputs)
                case scheduler.Scheduled(seq, num_cached):
                    self._stats.prompt_tokens += seq.prompt_len
                    outputs.updates.append(contract.Scheduled(seq.id, num_cached, time.monotonic()))
                    if not self._transfers.scheduled(seq, num_cached):
                        self._loop.abort(seq.id)
                case scheduler.Finished(seq, reason):
                    terminal = _terminal(seq, reason, self._vocab_size, self._eos_token_ids)
                    outputs.updates += self._transfers.conclude(seq, terminal)
                    self._over(seq)
        outputs.updates += self._transfers.left()
        self._cache.publish()
        trace.mark("")
        return outputs

    def _tokens(self, event: Tokens[Sampling, Payload], outputs: contract.StepOutputs) -> None:
        payload = event.payload
        if not isinstance(payload, Payload):
            raise TypeError(f"a step's payload is {type(payload).__name__}")
        if len(payload.token_ids) > 1:
            self._stats.generation_tokens += emitting.put_drafted(outputs, event, payload)
            return
        batch = self._batch
        if event.rows is not batch.rows or event.dead:
            batch = emitting.Emitting.of(event)
            self._batch = batch if len(batch.ids) == len(event.rows) else emitting.NO_ROWS
        token_ids = payload.token_ids[0].tolist()
        if len(batch.ids) != len(event.rows):
            token_ids = [token_ids[position] for position in batch.positions]
        for append, token in zip(batch.appends, token_ids, strict=True):
            append(token)
        outputs.request_ids += batch.ids
        outputs.token_ids += token_ids
        self._stats.generation_tokens += len(token_ids)
        if batch.wants_logprobs:
            emitting.put_logprobs(
                outputs, payload, [(0, position, seq) for position, seq in event.emitting()]
            )
        elif outputs.logprobs is not None:
            outputs.logprobs += [None] * len(token_ids)

    def stats(self) -> contract.EngineStats:
        """A snapshot of the counters. Raises RankLost where the engine has lost one of its ranks."""
        self._followers.check()
        runner, loop, pool, tiers = self.runner, self._loop.stats, self.pool, self._cache.tiers
        stats, pace = copy(self._stats), runner.pace
        stats.running, stats.waiting = loop.running, self._waiting
        stats.steps, stats.preemptions = loop.steps, loop.preemptions
        stats.kv_used_tokens = pool.used_tokens
        stats.prefix_query_tokens, stats.prefix_hit_tokens = pool.stats.query_tokens, pool.stats.hit_tokens
        stats.prefix_loaded_tokens = pool.stats.loaded_tokens
        if tiers is not None:
            stats.offload_bytes = {"host": tiers.host_bytes, "disk": tiers.disk_bytes}
            stats.offload_blocks = asdict(tiers.stats)
            if tiers.sharing is not None and tiers.sharing.lending is not None:
                stats.offload_blocks["lent"] = tiers.sharing.lending.lent
        counts = runner.drafting.counts
        stats.drafts, stats.draft_tokens = counts.drafts, counts.draft_tokens
        stats.accepted_draft_tokens = counts.accepted_tokens
        stats.accepted_by_position = list(counts.by_position)
        stats.compiles_after_ready = self._store.misses_after_seal if self._store else 0
        if runner.stream.device.kind == "cuda":
            now = DriverCounts.now()
            stats.allocations_after_ready = now.allocations - self._counts_at_ready.allocations
            stats.host_waits_after_ready = now.waits - self._counts_at_ready.waits - runner.readback.waits
        stats.outlier_steps = pace.num_outliers
        stats.slow_findings = runner.watch.num_findings
        stats.step_times = [
            contract.StepTimes(name, t.steps, t.predicted_s, t.measured_s)
            for name, t in pace.account(whole=not loop.running)
        ]
        stats.adapters = self._adapters.states()
        self.training.tell(stats)
        return stats

    def close(self) -> None:
        """Wait for the device and give everything back."""
        self._grammars.close()
        self._adapters.close()
        self._cache.close(keep=not self._followers.reason)
        self._followers.end()
        self.runner.close()
        self._loop.close()
        self._followers.close()


def _terminal(
    seq: Seq[Sampling], reason: FinishReason, vocab_size: int, eos_token_ids: Sequence[int]
) -> contract.Finished | contract.Failed:
    counts = seq.owner.drafted
    tokens, places = counts.draft_tokens, list(counts.by_position)
    drafts = contract.Drafts(counts.drafts, tokens, places) if counts.drafts else None
    if reason is not FinishReason.ERROR:
        return contract.Finished(
            seq.id, reason.value, seq.tokens[-1] if reason is FinishReason.STOP else None, drafts
        )
    constraint = seq.owner.constraint
    if constraint is not None and constraint.problem:
        return contract.Failed(seq.id, constraint.problem, "grammar")
    if problem := no_token_left(seq, vocab_size, eos_token_ids):
        return contract.Failed(seq.id, problem, "invalid")
    return contract.Failed(seq.id, "the model's output was not finite")
