"""EngineConformance: the rules that users may rely on, for every model."""

import itertools
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, cast
from unittest.mock import patch

import numpy as np

from openinfer.frontend.contract import Finished, Rejected, TokenLogprobs, TokenTable
from openinfer.graph.runner import Drafting
from openinfer.kernels import Op
from openinfer.kernels.authoring import mapped
from openinfer.recipes.engine.engine import FEATURES, Engine
from openinfer.recipes.engine.limits import Room, decide
from openinfer.recipes.engine.recipe import Recipe, Source
from openinfer.recipes.engine.startup import build, capacity
from openinfer.recipes.engine.testing.restless import Planted, fcfs
from openinfer.recipes.engine.testing.session import Golden, Outcome, Session, ensure
from openinfer.sampler import SamplingParams, sample
from openinfer.sampler.form import Grammar
from openinfer.tensor import Device, Tensor

Options = Mapping[str, Any]
ASKED: Mapping[str, Options] = {
    "logprobs": {"logprobs": 3},
    "prompt_logprobs": {"prompt_logprobs": 2},
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2},
    "logit_bias": {"logit_bias": [(7, 4.0), (11, -50.0)]},
    "allowed_token_ids": {"allowed_token_ids": tuple(range(3, 200))},
    "temperature": {"temperature": 0.9, "top_p": 0.9, "top_k": 40, "seed": 5},
    "min_tokens": {"min_tokens": 6, "ignore_eos": False},
}
SAMPLED: Sequence[Options] = [
    {"temperature": 0.0, "frequency_penalty": 1.5, "presence_penalty": 0.5, "logit_bias": ((7, 8.0),)},
    {"temperature": 0.8, "repetition_penalty": 1.4, "top_p": 0.9},
    {"temperature": 1.0, "allowed_token_ids": tuple(range(50, 60)), "min_tokens": 5},
    {"temperature": 1.0, "allowed_token_ids": (4, 5, 6), "bad_words_token_ids": ((4, 4), (5, 6), (6, 6, 6))},
    {"temperature": 1.2, "repetition_penalty": 2.0, "top_k": 30, "min_p": 0.01},
]
MAX_LEN = 352
SIZES: Options = {"max_model_len": MAX_LEN, "max_num_seqs": 8}
SHARED, NEW = 130, 10
"""Tokens that prompts have in common, enough for a cached prefix of every model; and tokens that are generated."""


class EngineConformance:
    """The rules of an engine, as tests to subclass: set `recipe`, `checkpoint`, and what else differs.

    Engines are made once a class and flags, and are checked and closed at the end, when all blocks must be back.
    """

    recipe: ClassVar[Recipe[Any]]
    checkpoint: ClassVar[Path]
    """A folder with weights; write_random_checkpoint makes one."""
    flags: ClassVar[Options] = {}
    """Fields of the recipe's options, for every engine."""
    goldens: ClassVar[Sequence[Golden]] = ()
    tolerance: ClassVar[float] = 1e-3
    """The largest error of a log-probability against the goldens."""
    chunks: ClassVar[Sequence[int]] = (17, 64, 352)
    """Tokens of a step that the goldens are tried with, those that take at most 64 steps."""
    seeds: ClassVar[Sequence[int]] = (0,)
    """The seeds of random schedules."""
    share: ClassVar[tuple[int, int]] = (0, 1)
    """(n, count): of the options of requests, the n-th of `count` shares is tried, all by default."""

    _made: ClassVar[dict[tuple[Any, ...], Session]]

    @classmethod
    def setup_class(cls) -> None:
        cls._made = {}

    @classmethod
    def teardown_class(cls) -> None:
        sessions = list(cls._made.values())
        for session in sessions:
            session.finish()
            check_empty(session.engine)
        for session in sessions:
            session.engine.close()

    @classmethod
    def session(cls, *, restless: bool = False, **flags: Any) -> Session:
        """A session on an engine with these flags; each kind is made once. restless: it preempts rows now and then."""
        key = (restless, *sorted(flags.items()))
        if key not in cls._made:
            usual = {**SIZES, "kv_cache_memory_bytes": 64 << 20}
            usual |= {"scheduling_policy": fcfs(flags["max_num_batched_tokens"])} if restless else {}
            made = build(cls.recipe, cls.checkpoint, device="cpu", **{**usual, **cls.flags, **flags})
            cls._made[key] = Session(made.engine)
        return cls._made[key]

    @classmethod
    def alone(cls) -> Session:
        """One request at a time, and no cached prefix: the engine that all others must agree with."""
        return cls.session(max_num_seqs=1, enable_prefix_caching=False)

    @classmethod
    def small(cls, **flags: Any) -> Session:
        """An engine that preempts rows now and then, and whose cache is twice the least."""
        options = cls.recipe.options(**{"device": "cpu", **SIZES, **cls.flags})
        blueprint, cpu = cls.recipe.blueprint(Source.read(cls.checkpoint), options), Device("cpu")
        limits = decide(options, cpu, blueprint)
        nbytes = 1 << 12
        while capacity(blueprint, limits, Room(nbytes, cpu, 0)) < MAX_LEN:
            nbytes += nbytes // 8
        own = {"kv_cache_memory_bytes": 2 * nbytes, "max_num_batched_tokens": 64}
        return cls.session(**own, restless=True, **flags)

    @classmethod
    def prompts(cls, count: int, seed: int = 0) -> list[list[int]]:
        """Prompts that begin alike."""
        rng, top = random.Random(seed), min(cls.alone().engine.info.vocab_size, 600)
        shared = [rng.randrange(3, top) for _ in range(SHARED)]
        return [shared + [rng.randrange(3, top) for _ in range(rng.randrange(1, 40))] for _ in range(count)]

    def test_it_says_what_it_is(self) -> None:
        info = self.session().engine.info
        ensure(set(FEATURES) <= set(info.features), f"features are missing: {info.features}")
        length = info.max_model_len
        ensure(length == MAX_LEN, f"max_model_len is {length}, {MAX_LEN} was asked for")
        ensure(info.kv_capacity_tokens >= MAX_LEN, "the cache has no room for one sequence")
        ids = info.eos_token_ids
        ensure(all(0 <= one < info.vocab_size for one in ids), f"EOS ids {ids} are not in the vocabulary")

    def test_the_goldens_in_chunks_of_any_size(self) -> None:
        for tokens in self.chunks:
            flags: dict[str, Any] = {"max_num_batched_tokens": tokens, "enable_prefix_caching": False}
            session = self.session(max_num_seqs=min(4, tokens), **flags)
            asked = {
                session.submit(g.prompt, len(g.greedy), ignore_eos=True, logprobs=2, prompt_logprobs=2): g
                for g in self.goldens
                if len(g.prompt) + len(g.greedy) <= MAX_LEN and len(g.prompt) <= 64 * tokens
            }
            session.finish()
            for request, golden in asked.items():
                outcome = session.outcomes[request]
                step = f"{tokens} tokens a step"
                ensure(outcome.tokens == list(golden.greedy), f"{step}: not the golden tokens")
                worst = golden_error(golden, outcome)
                ensure(worst <= self.tolerance, f"{step}: {worst:.2g} off the golden logits")

    def test_a_wrong_token_would_be_noticed(self) -> None:
        """Negative control: the comparison with the goldens fails with targets that are one place off."""
        session = self.alone()
        for golden in [g for g in self.goldens if 5 < len(g.prompt) < 100][:1]:
            outcome = session.outcomes[session.submit(golden.prompt, 1, logprobs=0, prompt_logprobs=0)]
            session.finish()
            outcome.prompt_logprobs = outcome.prompt_logprobs[1:] + outcome.prompt_logprobs[:1]
            ensure(golden_error(golden, outcome) > 100 * self.tolerance, "wrong log-probabilities pass")

    def test_greedy_tokens_whatever_the_schedule(self) -> None:
        """Random arrivals, cached prefixes, aborts in between, and a cache small enough to preempt."""
        alone, prompts = self.alone(), self.prompts(4)
        truth = alone.outcomes_of([(prompt, 4 * NEW, {"ignore_eos": True}) for prompt in prompts])
        for seed in self.seeds:
            rng, session = random.Random(seed), self.small()
            waiting, owners, aborted = [rng.randrange(4) for _ in range(16)], {}, set()
            while waiting or session.open:
                while waiting and rng.random() < 0.7:
                    index = waiting.pop()
                    owners[session.submit(prompts[index], 4 * NEW, ignore_eos=True)] = index
                if session.open and rng.random() < 0.02:
                    aborted.add(victim := rng.choice(session.open))
                    session.engine.abort(victim)
                session.step()
            for request, index in owners.items():
                outcome, want = session.outcomes[request], truth[index].tokens
                ensure(outcome.tokens == want[: len(outcome.tokens)], f"seed {seed}: other tokens than alone")
                whole = request in aborted or len(outcome.tokens) == len(want)
                ensure(whole and len(outcome.terminals) == 1, f"seed {seed}: not every request ended once")
        stats = self.small().engine.stats()
        ensure(stats.preemptions > 0, "no row was preempted, so the test shows nothing")
        ensure(stats.prefix_hit_tokens > 0, "no prefix was found, so the test shows nothing")

    def test_any_two_options_in_any_company(self) -> None:
        """Any two options give the same tokens alone as among requests with other options."""
        first, count = self.share
        pairs = list(itertools.combinations(ASKED, 2))[first::count]
        prompts = self.prompts(len(pairs))
        asked = [{"ignore_eos": True, **ASKED[a], **ASKED[b]} for a, b in pairs]
        alone, company, small = self.alone(), self.session(max_num_batched_tokens=33), self.small()
        requests = [(prompt, NEW, chosen) for prompt, chosen in zip(prompts, asked, strict=True)]
        found = [session.outcomes_of(requests) for session in (alone, company, small)]
        for pair, one, *others in zip(pairs, *found, strict=True):
            for other in others:
                ensure(other.tokens == one.tokens, f"{pair}: other tokens than alone")
                ensure(same_logprobs(one, other), f"{pair}: other log-probabilities than alone")
        ensure(len({tuple(one.tokens) for one in found[0]}) > len(pairs) // 2, "the options do nothing")
        ensure(any(other.cached for other in found[1]), "no prefix was found, so the test shows nothing")

    def test_drafts_change_no_token(self) -> None:
        """Drafts, of which some are wrong, give the tokens and log-probabilities that the engine gives without."""
        if "speculative_config" in self.recipe.options.refused:
            return
        first, count = self.share
        every = [*ASKED.values(), *SAMPLED]
        options = [{"ignore_eos": True, "seed": n, **one} for n, one in enumerate(every)][first::count]
        prompts, alone = self.prompts(len(options), seed=3), self.alone()
        asked = [(prompt, 2 * NEW, one) for prompt, one in zip(prompts, options, strict=True)]
        truth = alone.outcomes_of(asked)
        answers = [prompt + one.tokens for prompt, one in zip(prompts, truth, strict=True)]
        for prompt, one, outcome in zip(prompts[:4], options, truth[:4], strict=False):
            asked.append((prompt, 2 * NEW, {**one, "stop_token_ids": (outcome.tokens[NEW],)}))
        truth += alone.outcomes_of(asked[len(truth) :])
        session = self.small(speculative_config='{"method": "ngram", "num_speculative_tokens": 3}')
        drafting = cast(Drafting, cast(Engine, session.engine).runner.drafting)
        drafting.make_drafter, drafting.costs = lambda: Planted(answers), None
        for want, other, (_, _, chosen) in zip(truth, session.outcomes_of(asked), asked, strict=True):
            ensure(other.tokens == want.tokens, f"{chosen}: other tokens than without drafts")
            ensure(same_logprobs(want, other), f"{chosen}: other log-probabilities than without drafts")
            ensure(type(other.terminals[0]) is type(want.terminals[0]), f"{chosen}: it ended otherwise")
        counts = drafting.counts
        ensure(counts.accepted_tokens > 0.5 * counts.drafts, f"few drafts are accepted: {counts}")
        ensure(counts.accepted_tokens < 0.9 * counts.draft_tokens, f"too few drafts are wrong: {counts}")

    def test_logprobs_are_sorted_and_only_where_asked(self) -> None:
        session, (first, second) = self.session(), self.prompts(2)
        silent = session.submit(first, NEW, ignore_eos=True)
        asked = session.submit(second, NEW, ignore_eos=True, logprobs=3, prompt_logprobs=1)
        bare = session.submit(second[:1], NEW, ignore_eos=True, logprobs=0, prompt_logprobs=1)
        session.finish()
        unasked, outcome = session.outcomes[silent].logprobs, session.outcomes[asked]
        ensure(unasked == [None] * NEW, "log-probabilities that no request asked for")
        count = len(outcome.prompt_logprobs)
        ensure(count == len(second) - 1, "not one entry a token after the prompt's first")
        ensure(session.outcomes[bare].prompt_logprobs == [], "a prompt of one token has no log-probabilities")
        for token, entry in zip(outcome.tokens, outcome.logprobs, strict=True):
            if entry is None:
                raise AssertionError("a token without log-probabilities")
            ensure(entry.top_token_ids[0] == token, "a greedy token is not the most likely one")
            ensure(entry.logprob == entry.top_logprobs[0] <= 0, "two log-probabilities of one token")
            ensure(entry.top_logprobs == sorted(entry.top_logprobs, reverse=True), "not sorted")

    def test_sampled_tokens_are_those_of_the_definition(self) -> None:
        """openinfer.sampler.sample, the reference in numpy, on the logits that the engine sampled from."""
        session = self.session(max_num_seqs=5)
        engine = cast(Engine, session.engine)
        params = [SamplingParams(**asked, seed=seed, ignore_eos=True) for seed, asked in enumerate(SAMPLED)]
        prompts = self.prompts(len(params))
        with patch.object(engine.runner, "pack", tap := _Tap(engine.runner.pack)):
            engine.runner.record()
            outcomes = session.outcomes_of([
                (prompt, NEW, {**asked, "seed": seed, "ignore_eos": True})
                for seed, (prompt, asked) in enumerate(zip(prompts, SAMPLED, strict=True))
            ])  # fmt: skip
        engine.runner.record()
        for p, prompt, outcome in zip(params, prompts, outcomes, strict=True):
            output, lengths = outcome.tokens, range(len(prompt), len(prompt) + NEW)
            want = sample(
                np.stack([tap.logits[length, p.seed or 0] for length in lengths]), [p] * NEW, lengths,
                prompts=[prompt] * NEW, outputs=[output[:n] for n in range(NEW)],
            )  # fmt: skip
            ensure(output == want.token_ids.tolist(), f"{p}: other tokens than the definition's")

    def test_a_stop_id_ends_a_request(self) -> None:
        session, (prompt,) = self.session(), self.prompts(1)
        tokens = session.outcomes_of([(prompt, NEW, {"ignore_eos": True})])[0].tokens
        stop = tokens[NEW // 2]
        asked = session.submit(prompt, NEW, ignore_eos=True, stop_token_ids=(stop,))
        session.finish()
        outcome = session.outcomes[asked]
        ensure(outcome.tokens == tokens[: tokens.index(stop) + 1], "it did not end at its stop id")
        ensure(outcome.terminals == [Finished(asked, "stop", stop)], f"it ended with {outcome.terminals}")

    def test_a_grammar_is_kept(self) -> None:
        """Where llguidance is installed, an output that is not cut off is one of two sentences."""
        session = self.session(max_num_seqs=3)
        engine, (prompt,) = session.engine, self.prompts(1)
        if "grammar" not in engine.info.features:
            return
        eos = engine.info.eos_token_ids or [0]
        table = [bytes([n - 3]) if 3 <= n < 259 else b"" for n in range(engine.info.vocab_size)]
        engine.control(TokenTable(table, eos))
        grammar = Grammar("regex", "(yes|no) it is[.]{2}")
        asked = [(prompt, 20, {"grammar": grammar, "temperature": 1.0, "seed": seed}) for seed in range(3)]
        for outcome in session.outcomes_of(asked):
            said = b"".join(table[token] for token in outcome.tokens)
            ensure(said in (b"yes it is..", b"no it is.."), f"the grammar was not kept: {said!r}")

    def test_what_is_refused_and_what_is_aborted(self) -> None:
        session, (prompt,) = self.session(), self.prompts(1)
        vocab = session.engine.info.vocab_size
        refused = [
            session.submit([1, vocab], 1),
            session.submit([1] * MAX_LEN, 8),
            session.submit(prompt, 1, prompt_logprobs=21),
            session.submit(prompt, 1, logit_bias=((vocab, 1.0),)),
        ]
        early, late = (session.submit(prompt, 100, ignore_eos=True) for _ in range(2))
        session.engine.abort(early)
        while not session.outcomes[late].tokens:
            session.step()
        session.engine.abort(late)
        session.engine.abort(late)
        session.finish()
        for request in refused:
            (terminal,) = session.outcomes[request].terminals
            ensure(isinstance(terminal, Rejected) and bool(terminal.reason), f"not refused: {terminal}")
        for request in (early, late):
            ensure(session.outcomes[request].terminals == [Finished(request, "abort")], "no end of an abort")

    def test_all_blocks_come_back(self) -> None:
        session = self.small()
        session.outcomes_of([(prompt, NEW, {}) for prompt in self.prompts(6)])
        check_empty(session.engine)


class _Tap:
    """A pack that keeps the logits of every row that is sampled, by its length and its seed."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.logits: dict[tuple[int, int], np.ndarray[Any, Any]] = {}

    def run(self, op: Op[Any], args: Any) -> None:
        if op.name == "sample":
            a = mapped(args, Tensor, Tensor.numpy)
            for r, slot in enumerate(a.slots):
                if a.alive[slot] and a.emits[r]:
                    length = int(a.seq_lens[slot] + a.q_starts[r + 1] - a.q_starts[r])
                    self.logits[length, int(a.seeds[slot][0])] = a.logits[r].copy()
        self.inner.run(op, args)


def check_empty(engine: Any) -> None:
    """Raise where scheduler and pool disagree, or where an idle engine holds blocks."""
    engine.check()
    ensure(engine.pool.num_free == engine.pool.num_total, "blocks were not given back")


def golden_error(golden: Golden, outcome: Outcome) -> float:
    """The largest error of a log-probability of the prompt or of the first token, alternatives included."""
    worst = [0.0]
    entries = [*outcome.prompt_logprobs, *outcome.logprobs[:1]]
    for position in golden.logits:
        entry, want = entries[position], golden.logprobs(position)
        if entry is None:
            raise AssertionError("a token without log-probabilities")
        token = golden.prompt[position + 1] if position + 1 < len(golden.prompt) else outcome.tokens[0]
        worst.append(abs(entry.logprob - want[token]))
        worst += np.abs(entry.top_logprobs - want[entry.top_token_ids]).tolist()
    return max(worst)


def same_logprobs(one: Outcome, other: Outcome, bound: float = 1e-4) -> bool:
    """Whether two outcomes have log-probabilities of the same tokens, of the prompt and of the output."""

    def same(a: TokenLogprobs | None, b: TokenLogprobs | None) -> bool:
        return a is b if a is None or b is None else not abs(a.logprob - b.logprob) > bound

    pairs = ((one.prompt_logprobs, other.prompt_logprobs), (one.logprobs, other.logprobs))
    return all(len(mine) == len(theirs) and all(map(same, mine, theirs)) for mine, theirs in pairs)
