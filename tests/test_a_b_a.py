"""Prompt A, a prompt B that begins like it, and A again: whatever drafts, the prefix cache, preemption and aborts do in
between, both answers to A are those of an engine that has none of these."""

from __future__ import annotations

import datetime
import functools
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dspark_form import write_dspark
from test_eagle3 import speculation, write_head
from test_speculation import write_mixture

from openinfer.kernels import CpuPack, Op
from openinfer.recipes.engine import startup
from openinfer.recipes.engine.testing import Outcome, Session
from openinfer.recipes.engine.testing.restless import fcfs

GOLDENS = Path(__file__).parent / "goldens"
DRAFTS = 3
AT_ONCE = 6
TODAY = datetime.date.today().toordinal()
Options = dict[str, Any]


@dataclass(frozen=True)
class Family:
    """Who drafts for it, the longest prompt, and the bytes of a cache that is too small for AT_ONCE rounds."""

    methods: tuple[str, ...]
    longest: int
    cache_bytes: int


FAMILIES = {
    "qwen3-tiny": Family(("ngram", "suffix", "eagle3"), 64, 3 << 20),
    "qwen3_5-tiny": Family(("ngram", "suffix", "mtp"), 100, 12 << 20),
    "qwen3_5-moe-tiny": Family(("ngram", "suffix", "mtp"), 100, 12 << 20),
    "deepseek_v4-tiny": Family(("ngram", "suffix", "mtp", "dspark"), 168, 16 << 20),
}


@dataclass(frozen=True)
class Found:
    """What a run of the probe met: without cached tokens, drafts of both kinds and preemptions it shows nothing."""

    rounds: int
    different: int
    cached: int
    accepted: int
    rejected: int
    preemptions: int


class Probe:
    """Rounds on two engines of a family: one with drafts and all that may disturb them, one plain. bits: whether
    log-probabilities are compared, which needs --batch-invariant."""

    def __init__(
        self, session: Callable[..., Session], path: Path, config: str, seed: int, bits: bool
    ) -> None:
        self.rng, self.family, self.bits = random.Random(seed), FAMILIES[path.name], bits
        flags: Options = {"max_model_len": self.family.longest + 28, "batch_invariant": bits}
        if path.name.startswith("deepseek") and not bits:  # else a last bit may become another code
            flags["activation_quantization"] = "off"
        make = functools.partial(session, path, **flags)
        self.plain = make(enable_prefix_caching=False, max_num_seqs=AT_ONCE)
        self.drafted = make(
            speculative_config=config,
            max_num_seqs=4,
            max_num_batched_tokens=(most := self.rng.choice([20, 32, 48])),
            kv_cache_memory_bytes=self.family.cache_bytes,
            scheduling_policy=fcfs(most),
        )
        worth = self.drafted.engine.runner.drafting.worth
        worth.choose = lambda available, rows, cost: self.rng.randint(0, DRAFTS) if available else 0
        worth.idle = lambda cost: 0

    def asked(self) -> tuple[list[int], list[int], Options]:
        """A and B, and what is asked of both. Of few possible tokens drafts are often right."""
        rng, longest, few = self.rng, self.family.longest, self.rng.random() < 0.6
        words = rng.sample(range(3, 500), 3 if few else 60)
        first = [rng.choice(words) for _ in range(rng.randint(rng.choice([1, longest // 4 * 3]), longest))]
        own = [rng.choice(words) for _ in range(rng.randint(1, longest // 4))]
        second = [*first[: rng.randint(rng.choice([1, len(first)]), len(first))], *own][:longest]
        options: Options = {"temperature": rng.choice([0.0, 0.8, 1.2]), "seed": rng.randrange(1 << 20)}
        if few:
            options["allowed_token_ids"] = tuple(words)
        if rng.random() < 0.25:
            options |= {"repetition_penalty": 1.3, "top_p": 0.9}
        return first, second, {**options, "ignore_eos": True, "logprobs": 2}

    def round(self, first: list[int], second: list[int], options: Options, most: int) -> Iterator[list[int]]:
        """Yields between steps: the requests for A so far."""
        rng, session = self.rng, self.drafted
        mine = [session.submit(first, most, **options)]
        yield from (mine for _ in range(rng.randint(0, 30)))
        other = session.submit(second, rng.randint(1, 16), **options)
        yield from (mine for _ in range(rng.randint(0, 20)))
        if rng.random() < 0.3:
            session.engine.abort(other)
        while rng.random() < 0.9 and not all(session.outcomes[one].terminals for one in (*mine, other)):
            yield mine
        mine.append(session.submit(first, most, **options))
        yield mine

    def rounds(self, count: int) -> int:
        """The number of those whose answers to A are not both the plain engine's."""
        asked = [(*self.asked(), self.rng.randint(1, 12)) for _ in range(count)]
        live = [self.round(*one) for one in asked]
        ids: list[list[int]] = [[] for _ in live]
        while len(min(ids, key=len)) < 2 or self.drafted.open:
            for at, one in enumerate(live):
                ids[at] = next(one, ids[at])
            self.drafted.step()
        wanted = self.plain.outcomes_of([(first, most, options) for first, _, options, most in asked])
        answers = [[self.drafted.outcomes[one] for one in both] for both in ids]
        return sum(
            any(self.said(one) != self.said(want) for one in both)
            for want, both in zip(wanted, answers, strict=True)
        )

    def said(self, outcome: Outcome) -> Any:
        """The tokens of an answer; where bits are compared, with their log-probabilities."""
        return (outcome.tokens, outcome.logprobs) if self.bits else outcome.tokens

    def run(self, rounds: int) -> Found:
        different = sum(self.rounds(min(AT_ONCE, rounds - at)) for at in range(0, rounds, AT_ONCE))
        stats = self.drafted.engine.stats()
        rejected = stats.draft_tokens - stats.accepted_draft_tokens
        return Found(
            rounds,
            different,
            stats.prefix_hit_tokens,
            stats.accepted_draft_tokens,
            rejected,
            stats.preemptions,
        )


def given(name: str, method: str, folder: Path) -> tuple[Path, str]:
    """The checkpoint of a family, and --speculative-config. What only tests have is written into the folder."""
    path, keys = GOLDENS / name, {"method": method, "num_speculative_tokens": DRAFTS}
    if method == "eagle3":
        write_head(folder)
        return path, speculation(folder, DRAFTS)
    if method == "dspark":
        path = write_dspark(folder / name)
    if (name, method) == ("qwen3_5-moe-tiny", "mtp"):
        path = folder / name
        write_mixture(path)
    return path, json.dumps(keys | ({"prompt_lookup_min": 1} if method == "ngram" else {}))


def cases(of_the_day: bool) -> Iterator[Any]:
    """A family, who drafts, and whether bits are compared. Of the day: a method of each family, with bits."""
    for number, (name, family) in enumerate(FAMILIES.items()):
        for at, method in enumerate(family.methods):
            for bits in (True, False):
                if not of_the_day or (bits and (number + TODAY) % len(family.methods) == at):
                    yield pytest.param(
                        name, method, bits, id=f"{name}-{method}-{'bits' if bits else 'tokens'}"
                    )


@pytest.mark.parametrize(("name", "method", "bits"), [*cases(True)])
def test_both_answers_to_a_are_those_of_a_plain_engine(
    session: Callable[..., Session], late: None, tmp_path: Path, name: str, method: str, bits: bool
) -> None:
    probe = Probe(session, *given(name, method, tmp_path), TODAY, bits)
    found = probe.run(AT_ONCE // 2)
    assert found.different == 0
    assert found.accepted + found.rejected > 0


@pytest.mark.slow
@pytest.mark.parametrize(("name", "method", "bits"), [*cases(False)])
def test_two_thousand_rounds_of_a_family(
    session: Callable[..., Session], late: None, tmp_path: Path, name: str, method: str, bits: bool
) -> None:
    """Half of them compare bits; methods have equal shares. Each pair of engines has 50, so caches start empty too."""
    path, config = given(name, method, tmp_path)
    share = -(-1000 // len(FAMILIES[name].methods))
    found = [
        Probe(session, path, config, seed, bits).run(min(50, share - 50 * seed))
        for seed in range(-(-share // 50))
    ]
    assert sum(one.rounds for one in found) == share
    assert not any(one.different for one in found), found
    for one in found:
        assert min(one.cached, one.accepted, one.rejected, one.preemptions) > 0, one


def test_swapped_blocks_are_seen(session: Callable[..., Session], tmp_path: Path) -> None:
    """A control: whenever no request has blocks, what the cache holds moves to the next block."""
    probe = Probe(session, *given("qwen3-tiny", "ngram", tmp_path), 0, bits=True)
    engine = probe.drafted.engine
    step, cached = engine.step, engine.runner.model.kv.kv.numpy()

    def swapping(wait: float) -> Any:
        if engine.pool.num_free == engine.pool.num_total:
            cached[:] = np.roll(cached, 1, axis=1)
        return step(wait)

    engine.step = swapping
    assert sum(probe.rounds(1) for _ in range(AT_ONCE)) > 0


class Kept:
    """A pack that takes every draft for an accepted one where it moves recurrent states on."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def bind(self, op: Op[Any], args: Any) -> Callable[[], None]:
        return functools.partial(self.run, op, args)

    def run(self, op: Op[Any], args: Any) -> None:
        self.inner.run(op, args)
        if op.name == "accept":
            args.accepted.numpy()[args.slots.numpy()] = args.num_drafts.numpy()


def test_a_state_that_kept_a_rejected_draft_is_seen(
    session: Callable[..., Session], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(startup, "CpuPack", lambda communicator, **way: Kept(CpuPack(**way)))
    probe = Probe(session, *given("qwen3_5-tiny", "ngram", tmp_path), 0, bits=False)
    assert probe.run(AT_ONCE).different > 0
