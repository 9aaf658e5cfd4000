"""The engine: frontend.contract over the step loop."""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Literal

from openinfer import scheduler
from openinfer.frontend.contract import (
    Command,
    EngineInfo,
    EngineStats,
    Failed,
    Finished,
    LoadAdapter,
    Rejected,
    Request,
    ResetPrefixCache,
    Scheduled,
    Sleep,
    SlowTraces,
    StepOutputs,
    TokenTable,
    UnloadAdapter,
    Update,
    UpdateWeights,
    WakeUp,
)
from openinfer.frontend.errors import Unsupported
from openinfer.graph import SlowLoads
from openinfer.graph.runner import FirstTokens, Payload, PromptScore, Runner, Sampling, WeightsDesk
from openinfer.kernels import Store
from openinfer.kernels.authoring import Adapter
from openinfer.kvpool import Pool, hash_blocks
from openinfer.recipes.engine.adapters import AdapterDesk
from openinfer.recipes.engine.emitting import (
    NO_ROWS,
    Emitting,
    put_drafted,
    put_logprobs,
    put_prompt_logprobs,
)
from openinfer.recipes.engine.refusal import refusal
from openinfer.recipes.engine.statistics import drafts_of, snapshot
from openinfer.recipes.engine.training import Training
from openinfer.recipes.engine.transfer import Transfers
from openinfer.sampler import fresh_seed
from openinfer.sampler.constraint import Constraint, Masks, PendingGrammars
from openinfer.sampler.grammar import Compiler
from openinfer.scheduler import FinishReason, Policy, RejectReason, Seq, StepLoop, Tokens
from openinfer.tensor import DriverCounts

if TYPE_CHECKING:
    from openinfer.kvpool.publisher import EventPublisher
    from openinfer.kvpool.tiers import Tiers
    from openinfer.recipes.engine.followers import Followers

REJECT_CODES: dict[RejectReason, Literal["too_long", "queue_full"]] = {
    RejectReason.TOO_LONG: "too_long",
    RejectReason.POOL_TOO_SMALL: "too_long",
    RejectReason.QUEUE_FULL: "queue_full",
}

FEATURES = ["logprobs", "prompt_logprobs", "penalties", "logit_bias", "allowed_token_ids", "bad_words"]
"""The features of every engine, in the names of EngineInfo.features."""


class Engine:
    """A model behind the engine contract. Single-threaded: one thread submits, aborts and steps."""

    def __init__(
        self,
        runner: Runner,
        pool: Pool,
        policy: Policy,
        store: Store | None,
        *,
        name: str,
        eos_token_ids: Sequence[int],
        max_rows: int,
        max_model_len: int,
        max_queued: int,
        publisher: EventPublisher | None = None,
        followers: Followers | None = None,
        tiers: Tiers | None = None,
        loaded: Sequence[Adapter] = (),
        desk: WeightsDesk | None = None,
    ) -> None:
        self._followers = followers
        adapters = self._adapters = AdapterDesk(runner.model.batch.adapters, runner.stream, loaded, followers)
        self._pool, self._store, self._publisher, self._tiers = pool, store, publisher, tiers
        self._vocab_size, self._eos_token_ids = runner.model.vocab_size, tuple(eos_token_ids)
        self.runner = runner
        self._loop = StepLoop(
            runner, pool, policy, max_rows=max_rows, max_model_len=max_model_len, max_queued=max_queued,
            speculation=runner.drafting, lone_tokens=runner.buckets.lone_tokens,
        )  # fmt: skip
        self._seqs: dict[int, Seq[Sampling]] = {}
        self._max_rows, self._max_queued = max_rows, max_queued
        self._table: TokenTable | None = None
        self._grammars: PendingGrammars[Seq[Sampling]] | None = None
        self._updates: list[Update] = []
        self._stats = EngineStats()
        self._first_tokens = FirstTokens(runner.watch) if runner.watch is not None else None
        self._slow_loads = SlowLoads(runner.watch, tiers.load_times) if runner.watch and tiers else None
        self._batch, self.training, self._transfers = NO_ROWS, Training(desk, tiers), Transfers(tiers, pool)
        self._counts_at_ready = DriverCounts.now()
        self.info = EngineInfo(
            model=name,
            max_model_len=max_model_len,
            vocab_size=self._vocab_size,
            eos_token_ids=list(eos_token_ids),
            kv_capacity_tokens=pool.capacity_tokens,
            block_size=pool.groups[0].block_size,
            features=[
                *FEATURES,
                *["prefix_cache"] * pool.prefix_cache,
                *["priority"] * policy.uses_priority,
                *["grammar"] * (importlib.util.find_spec("llguidance") is not None),
                *["adapters"] * bool(adapters.places),
                *["kv_transfer"] * (self._transfers.sharing is not None),
            ],
            max_adapters=adapters.places,
            hang_timeout_s=10.0 if runner.stream.device.kind == "cuda" else 60.0,
        )

    @property
    def pool(self) -> Pool:
        """The pool of the sequences' blocks."""
        return self._pool

    def check(self) -> None:
        """Check scheduler and pool, for tests. Raises IntegrityError where their books disagree."""
        self._loop.check()
        self._pool.check_integrity()

    def submit(self, request: Request) -> None:
        """Queue a request, or reject it in the next step's outputs."""
        problem = self._problem(request)
        if problem is not None:
            self._updates.append(problem)
            return
        params = request.sampling
        stop_ids = (*params.stop_token_ids, *(() if params.ignore_eos else self._eos_token_ids))
        seed = fresh_seed() if params.seed is None else params.seed
        salt, tokens = request.cache_salt.encode(), list(request.prompt_token_ids)
        sampling = Sampling(params, seed, stop_ids, draftless=request.disable_spec_decode)
        if request.prompt_logprobs is not None:
            sampling.score = PromptScore(request.prompt_logprobs)
            salt += os.urandom(16)  # cached blocks have no scores: it shares only its own, after a preemption
        salt = self._adapters.assign(request, sampling, self.training.salt(salt))
        # Made once, however often the queue is looked through.
        hashes = hash_blocks(tokens, self._pool.hash_block_size, salt) if self._pool.prefix_cache else None
        seq = Seq(
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
        if request.grammar is not None and self._grammars is not None:
            self._grammars.start(request.id, seq, request.grammar)
        else:
            self._enqueue(seq)

    def _enqueue(self, seq: Seq[Sampling]) -> None:
        """Queue a sequence; it waits first for peers that may have its blocks, and until its adapter has a place."""
        if self._transfers.waits(seq) or self._adapters.waits(seq):
            return
        try:
            self._loop.submit(seq)
        except scheduler.Rejected as e:
            self._updates.append(Rejected(seq.id, str(e), REJECT_CODES.get(e.reason, "invalid")))
            self._transfers.forget(seq.id)
            self._adapters.end(seq)
            return
        self._seqs[seq.id] = seq

    def _enqueue_compiled(self, wait_s: float) -> None:
        """Queue requests whose grammar is compiled, and reject those whose grammar is malformed. Waits up to
        `wait_s` for the first."""
        if self._grammars is None or not self._grammars:
            return
        vocab = self._vocab_size
        for _, seq, matcher, problem in self._grammars.ready(wait_s):
            if matcher is None:
                self._updates.append(Rejected(seq.id, problem, "grammar"))
                self._transfers.forget(seq.id)
                continue
            sampling = seq.owner
            sampling.constraint = Constraint(matcher, sampling.params.allowed_token_ids, vocab)
            self._enqueue(seq)

    def _problem(self, request: Request) -> Rejected | None:
        found = (
            self.training.refusal(request.id)
            or refusal(request, self.info)
            or self._adapters.refusal(request, self._waiting, self._max_queued)
            or self._transfers.refusal(request)
        )
        return found if found or request.grammar is None else self._grammar_problem(request.id)

    @property
    def _waiting(self) -> int:
        """Requests that wait: for a grammar, for a place of their adapter, for a row."""
        return (
            len(self._grammars or ()) + len(self._adapters) + len(self._transfers) + self._loop.stats.waiting
        )

    def _grammar_problem(self, request_id: int) -> Rejected | None:
        if self._grammars is None:
            return Rejected(
                request_id, "grammars need a TokenTable, which this engine was not given", "unsupported"
            )
        if self._waiting >= self._max_queued:
            waiting = f"{self._waiting} requests wait, {len(self._grammars)} of them for their grammar"
            return Rejected(request_id, f"{waiting} (max_queued {self._max_queued}); try later", "queue_full")
        return None

    def abort(self, request_id: int) -> None:
        """End a request; its terminal comes with a later step."""
        held = self._grammars is not None and self._grammars.drop(request_id)
        if held or self._adapters.drop(request_id) or self._transfers.drop(request_id):
            self._updates.append(Finished(request_id, "abort"))
            self._transfers.forget(request_id)
        else:
            self._loop.abort(request_id)

    def control(self, command: Command) -> Future[None] | str | None:
        """Carry out a command. Returns the answer of one that asks; an adapter is loaded when the future is done."""
        match command:
            case LoadAdapter() | UnloadAdapter():
                return self._adapters.carry_out(command)
            case SlowTraces():
                return "" if self.runner.watch is None else self.runner.watch.as_json()
            case ResetPrefixCache():
                if not self._pool.reset_prefix_cache():
                    raise Unsupported("the prefix cache can be reset only while no request runs")
                self._publish()
            case UpdateWeights() | Sleep() | WakeUp():
                self.training.carry_out(command, self._pool, len(self._seqs) or self._waiting)
                self._publish()
                self._counts_at_ready = DriverCounts.now()  # a new start
            case TokenTable():
                self._take_tokens(command)
        return None

    def _take_tokens(self, table: TokenTable) -> None:
        """Get ready for grammars."""
        if table == self._table:
            return  # from another frontend of the same model
        if "grammar" not in self.info.features or self._table is not None:
            raise Unsupported(
                "this engine takes no TokenTable: it has another, or openinfer-sampler[grammar] is missing"
            )
        self._table = table
        vocab = self._vocab_size
        special_ids = [token for token in table.special_ids if token < vocab]
        eos = self._eos_token_ids
        compiler = Compiler(
            table.tokens[:vocab], special_ids, eos, vocabulary=vocab, tokenizer=table.definition
        )
        self._grammars = PendingGrammars(compiler)
        self.runner.masking.masks = Masks(self._max_rows, vocab, self.runner.buckets.max_drafts)

    def step(self, wait: float) -> StepOutputs:
        """One turn of the loop. Raises RankLost where the engine has lost one of its ranks."""
        if self._followers is None:
            return self._step(wait)
        try:
            return self._step(wait)
        finally:
            # It knows how the rank ended; and what a device gives after that is no result.
            self._followers.check()

    def _step(self, wait: float) -> StepOutputs:
        trace = self.runner.trace
        if trace is not None:
            trace.mark("plan")
        self._enqueue_compiled(0.0 if self._updates or self._loop.has_work else wait)
        idle = not (self._updates or self._loop.has_work)
        for seq in (*self._adapters.ready(), *self._transfers.ready(wait if idle else 0.0)):
            self._enqueue(seq)
        outputs = StepOutputs(updates=self._updates)
        self._updates = []
        events = self._loop.step(0.0 if outputs.updates else wait)
        if self._loop.has_work and not self._loop.live:
            events += self._loop.drain()  # the next step may be far off: blocks go back now
        if trace is not None:
            trace.mark("outputs")
        if self._first_tokens is not None:
            self._first_tokens.events(events, self._loop.stats)
        if self._slow_loads is not None:
            self._slow_loads.look()
        put_prompt_logprobs(outputs, self.runner.take_scores(), self._seqs)
        for event in events:
            match event:
                case Tokens():
                    self._tokens(event, outputs)
                case scheduler.Scheduled(seq, num_cached):
                    self._stats.prompt_tokens += seq.prompt_len
                    outputs.updates.append(Scheduled(seq.id, num_cached, time.monotonic()))
                    if not self._transfers.scheduled(seq, num_cached):
                        self._loop.abort(seq.id)
                case scheduler.Finished(seq, reason):
                    outputs.updates += self._transfers.end(seq, self._finished(seq, reason))
        outputs.updates += self._transfers.left()
        self._publish()
        if trace is not None:
            trace.mark("")
        return outputs

    def _publish(self) -> None:
        """Put out the KV events for routers: blocks that became findable, and blocks that were evicted."""
        if self._publisher is not None:
            self._publisher.publish(self._pool.take_events())

    def _tokens(self, event: Tokens[Sampling, Payload], outputs: StepOutputs) -> None:
        payload = event.payload
        if not isinstance(payload, Payload):
            raise TypeError(f"a step's payload is {type(payload).__name__}")
        if len(payload.token_ids) > 1:
            self._stats.generation_tokens += put_drafted(outputs, event, payload)
            return
        batch = self._batch
        if event.rows is not batch.rows or event.dead:
            batch = Emitting.of(event)
            self._batch = batch if len(batch.ids) == len(event.rows) else NO_ROWS
        token_ids = payload.token_ids[0].tolist()
        if len(batch.ids) != len(event.rows):
            token_ids = [token_ids[position] for position in batch.positions]
        for append, token in zip(batch.appends, token_ids, strict=True):
            append(token)
        outputs.request_ids += batch.ids
        outputs.token_ids += token_ids
        self._stats.generation_tokens += len(token_ids)
        if batch.wants_logprobs:
            put_logprobs(outputs, payload, [(0, position, seq) for position, seq in event.emitting()])
        elif outputs.logprobs is not None:
            outputs.logprobs += [None] * len(token_ids)

    def _finished(self, seq: Seq[Sampling], reason: FinishReason) -> Finished | Failed:
        del self._seqs[seq.id]
        self._adapters.end(seq)
        drafts = drafts_of(seq.owner)
        match reason:
            case FinishReason.STOP:
                return Finished(seq.id, "stop", seq.tokens[-1], drafts)
            case FinishReason.LENGTH:
                return Finished(seq.id, "length", drafts=drafts)
            case FinishReason.ABORT:
                return Finished(seq.id, "abort", drafts=drafts)
            case FinishReason.ERROR:
                constraint = seq.owner.constraint
                problem = constraint.problem if constraint is not None else ""
                if problem:
                    return Failed(seq.id, problem, "grammar")
                return Failed(seq.id, "the model's output was not finite")

    def stats(self) -> EngineStats:
        """A snapshot of the counters. Raises RankLost where the engine has lost one of its ranks."""
        if self._followers is not None:
            self._followers.check()
        stats = snapshot(
            self._stats,
            self._loop.stats,
            self._pool,
            self.runner,
            self._store,
            self._tiers,
            self._counts_at_ready,
        )
        stats.waiting, stats.adapters = self._waiting, self._adapters.states()
        self.training.tell(stats)
        return stats

    def close(self) -> None:
        """Wait for the device and give everything back."""
        if self._grammars is not None:
            self._grammars.close()
        self._adapters.close()
        if self._publisher is not None:
            self._publisher.close()
        if self._tiers is not None:
            if self._followers is None or not self._followers.reason:
                self._tiers.keep(self._pool)
            self._tiers.close()
        if self._followers is not None:
            self._followers.end()
        self.runner.close()
        if self._followers is not None:
            self._followers.close()
