"""An engine without a model, for testing frontends, drivers and load generators."""

import itertools
import os
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from openinfer.frontend import contract
from openinfer.frontend.errors import FlagError, Unsupported

BLOCK = 16


@dataclass(slots=True)
class _Live:
    request: contract.Request
    generated: int = 0
    token_ids: list[int] = field(default_factory=list)
    stops: frozenset[int] = field(default_factory=frozenset)


@dataclass(eq=False, kw_only=True)
class FakeEngine:
    """Generates known tokens, one a step for each of up to `max_running` requests, in order of arrival.

    The i-th token of a request is `script[i % len(script)]`, or without a script `(last prompt id + 1 + i) %
    vocab_size`; ids that would end it below min_tokens are replaced by `filler`. All arguments are JSON, so that
    an EngineSpec("openinfer.frontend.testing:FakeEngine", {...}) runs it in a process. Faults on request:

    start_delay_s, step_delay_s: how long the constructor and each step take.
    max_waiting: further requests are Rejected with code "queue_full".
    start_error: message of the FlagError that the constructor raises.
    fail_at_step, die_at_step, hang_at_step: at this step raise, kill the process, or sleep for an hour.
    fail_prompt, raise_prompt: a request whose prompt is this single id Fails alone, or makes submit() raise.
    hang_timeout_s: what it says of itself in EngineInfo.
    max_adapters: adapters that requests may name at once; a path with "bad" in it is refused in a future. adapters:
    the names of those that it starts with.
    features: what it claims to honour besides logprobs and prefix_cache (its tokens stay the known ones).

    Its prefix cache has every block of 16 tokens that it has seen: of prompts once scheduled, of outputs once ended.
    """

    model: str = "fake"
    max_model_len: int = 4096
    vocab_size: int = 1024
    eos_token_ids: Sequence[int] = (2, 0)
    script: Sequence[int] = ()
    filler: int = 100
    max_running: int = 256
    max_waiting: int = 1024
    start_delay_s: float = 0.0
    step_delay_s: float = 0.0
    start_error: str | None = None
    fail_at_step: int | None = None
    die_at_step: int | None = None
    hang_at_step: int | None = None
    fail_prompt: int | None = None
    raise_prompt: int | None = None
    features: Sequence[str] = ()
    max_adapters: int = 0
    adapters: Sequence[str] = ()
    hang_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        time.sleep(self.start_delay_s)
        if self.start_error is not None:
            raise FlagError(self.start_error)
        self.info = contract.EngineInfo(
            model=self.model,
            max_model_len=self.max_model_len,
            vocab_size=self.vocab_size,
            eos_token_ids=list(self.eos_token_ids),
            kv_capacity_tokens=self.max_running * self.max_model_len,
            block_size=BLOCK,
            features=["logprobs", "prefix_cache", *self.features],
            max_adapters=self.max_adapters,
            hang_timeout_s=self.hang_timeout_s,
        )
        self._waiting: deque[contract.Request] = deque()
        self._running: dict[int, _Live] = {}
        self._ready = contract.StepOutputs()
        self._stats = contract.EngineStats(
            adapters=[contract.AdapterState(name, "/flag", 0, 0) for name in self.adapters]
        )
        self._seen_blocks: set[int] = set()
        self._has_tokens = False

    def submit(self, request: contract.Request) -> None:
        if request.prompt_token_ids == [self.raise_prompt]:
            raise RuntimeError("submit failed, as asked")
        length = len(request.prompt_token_ids) + request.max_tokens
        if length > self.info.max_model_len:
            reason = f"prompt and max_tokens are {length} tokens, the model takes {self.info.max_model_len}"
            self._ready.updates.append(contract.Rejected(request.id, reason, "too_long"))
        elif request.adapter and request.adapter not in {one.name for one in self._stats.adapters}:
            self._ready.updates.append(
                contract.Rejected(request.id, f"the adapter {request.adapter!r} is not loaded")
            )
        elif request.priority:
            reason = f"priority {request.priority} is not supported, only 0"
            self._ready.updates.append(contract.Rejected(request.id, reason, "unsupported"))
        elif request.grammar is not None and not self._has_tokens:
            self._ready.updates.append(
                contract.Rejected(request.id, "grammars need a TokenTable", "unsupported")
            )
        elif request.prompt_token_ids == [self.fail_prompt]:
            self._ready.updates.append(contract.Failed(request.id, "this prompt fails, as asked"))
        elif len(self._waiting) >= self.max_waiting:
            reason = f"the queue is full ({self.max_waiting} requests)"
            self._ready.updates.append(contract.Rejected(request.id, reason, "queue_full"))
        else:
            self._waiting.append(request)

    def abort(self, request_id: int) -> None:
        if self._running.pop(request_id, None) is None:
            kept = deque(request for request in self._waiting if request.id != request_id)
            if len(kept) == len(self._waiting):
                return
            self._waiting = kept
        self._ready.updates.append(contract.Finished(request_id, "abort"))

    def control(self, command: contract.Command) -> "Future[None] | None":
        if isinstance(command, contract.LoadAdapter | contract.UnloadAdapter):
            return self._adapt(command)
        if isinstance(command, contract.ResetPrefixCache):
            self._seen_blocks.clear()
        if isinstance(command, contract.Sleep | contract.WakeUp):
            self._stats.asleep = isinstance(command, contract.Sleep)
            self._stats.weights_dropped |= isinstance(command, contract.Sleep) and command.level == 2
        self._has_tokens = self._has_tokens or isinstance(command, contract.TokenTable)
        return None

    def _adapt(self, command: contract.LoadAdapter | contract.UnloadAdapter) -> "Future[None] | None":
        if not self.info.max_adapters:
            raise Unsupported("this engine has no adapters")
        answer: Future[None] = Future()
        kept = [one for one in self._stats.adapters if one.name != command.name]
        if isinstance(command, contract.UnloadAdapter):
            if len(kept) == len(self._stats.adapters):
                raise Unsupported(f"the adapter {command.name!r} is not loaded")
            self._stats.adapters = kept
            return None
        if "bad" in command.path:
            answer.set_exception(Unsupported(f"adapter {command.path}: is bad, as asked"))
            return answer
        self._stats.adapters = [*kept, contract.AdapterState(command.name, command.path, 0, 0)]
        answer.set_result(None)
        return answer

    def step(self, wait: float) -> contract.StepOutputs:
        self._stats.steps += 1
        self._apply_faults()
        if self.step_delay_s:
            time.sleep(self.step_delay_s)
        elif not self._waiting and not self._running and not self._ready.updates:
            time.sleep(wait)
        outputs, self._ready = self._ready, contract.StepOutputs()
        while self._waiting and len(self._running) < self.max_running:
            self._admit(self._waiting.popleft(), outputs)
        for live in list(self._running.values()):
            self._generate(live, outputs)
        return outputs

    def stats(self) -> contract.EngineStats:
        self._stats.running, self._stats.waiting = len(self._running), len(self._waiting)
        self._stats.kv_used_tokens = sum(
            len(live.request.prompt_token_ids) + live.generated for live in self._running.values()
        )
        return self._stats

    def close(self) -> None:
        self._running.clear()

    def _apply_faults(self) -> None:
        if self._stats.steps == self.fail_at_step:
            raise RuntimeError("step failed, as asked")
        if self._stats.steps == self.die_at_step:
            os.abort()
        if self._stats.steps == self.hang_at_step:
            time.sleep(3600)

    def _admit(self, request: contract.Request, outputs: contract.StepOutputs) -> None:
        prompt = request.prompt_token_ids
        blocks = _blocks(request, prompt)
        known = itertools.takewhile(self._seen_blocks.__contains__, blocks)
        cached = min(len(list(known)), (len(prompt) - 1) // BLOCK) * BLOCK
        self._seen_blocks.update(blocks)
        self._stats.prompt_tokens += len(prompt)
        self._stats.prefix_query_tokens += len(prompt)
        self._stats.prefix_hit_tokens += cached
        stops = set(request.sampling.stop_token_ids)
        if not request.sampling.ignore_eos:
            stops.update(self.info.eos_token_ids)
        self._running[request.id] = _Live(request, stops=frozenset(stops))
        outputs.updates.append(contract.Scheduled(request.id, cached, time.monotonic()))
        if (wanted := request.prompt_logprobs) is not None:
            scores = [self._logprobs(token, wanted, wanted + 1) for token in prompt[1:]]
            half = len(scores) // 2  # in two pieces, as of a prompt in chunks
            pieces = (scores[:half], scores[half:])
            outputs.prompt_logprobs += [contract.PromptLogprobs(request.id, piece) for piece in pieces]

    def _generate(self, live: _Live, outputs: contract.StepOutputs) -> None:
        request = live.request
        if self.script:
            token = self.script[live.generated % len(self.script)]
        else:
            token = (request.prompt_token_ids[-1] + 1 + live.generated) % self.info.vocab_size
        if token in live.stops and live.generated < request.sampling.min_tokens:
            token = self.filler
        live.generated += 1
        live.token_ids.append(token)
        self._stats.generation_tokens += 1
        outputs.request_ids.append(request.id)
        outputs.token_ids.append(token)
        wanted = request.sampling.logprobs
        if wanted is not None and outputs.logprobs is None:
            outputs.logprobs = [None] * (len(outputs.token_ids) - 1)
        if outputs.logprobs is not None:
            outputs.logprobs.append(None if wanted is None else self._logprobs(token, wanted))
        if token in live.stops:
            self._finish(outputs, contract.Finished(request.id, "stop", token))
        elif live.generated == request.max_tokens:
            given = request.kv_transfer
            left = contract.KVTransfer(
                do_remote_prefill=True, remote_num_tokens=len(request.prompt_token_ids)
            )
            leaves = given is not None and given.do_remote_decode
            self._finish(
                outputs, contract.Finished(request.id, "length", kv_transfer=left if leaves else None)
            )

    def _logprobs(self, token: int, wanted: int, rank: int | None = None) -> contract.TokenLogprobs:
        top = [(token + place) % self.info.vocab_size for place in range(wanted)]
        return contract.TokenLogprobs(-0.5, top, [-0.5 - place for place in range(wanted)], rank)

    def _finish(self, outputs: contract.StepOutputs, finished: contract.Finished) -> None:
        live = self._running.pop(finished.id)
        self._seen_blocks.update(_blocks(live.request, live.request.prompt_token_ids + live.token_ids[:-1]))
        outputs.updates.append(finished)


def _blocks(request: contract.Request, token_ids: Sequence[int]) -> list[int]:
    """A hash for each whole block, which covers all before it, and what keeps requests' blocks apart."""
    starts = range(0, len(token_ids) - BLOCK + 1, BLOCK)
    hashes = itertools.accumulate(
        (tuple(token_ids[start : start + BLOCK]) for start in starts),
        lambda before, block: hash((before, block)),
        initial=hash((request.cache_salt, request.adapter)),
    )
    return list(hashes)[1:]
