"""Random arrivals and random acceptance: whatever is drafted, each request has the tokens that it has alone."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from openinfer.frontend.http import Tokenizer
from openinfer.recipes.engine.testing import Planted
from openinfer.recipes.engine.testing.restless import priority
from openinfer.sampler.form import Grammar

GOLDENS = Path(__file__).parent / "goldens"
GRAMMARS = (None, None, Grammar("regex", "[a-e]{3,12}!"), Grammar("choice", '["yes", "perhaps"]'))
Asked = tuple[list[int], int, dict[str, Any]]


def request(rng: random.Random, shared: list[int]) -> Asked:
    """A request of any kind; half of the prompts begin alike."""
    prompt = [
        *(shared if rng.random() < 0.5 else ()),
        *(rng.randrange(3, 500) for _ in range(rng.randint(3, 40))),
    ]
    options: dict[str, Any] = {"temperature": rng.choice([0.0, 0.7, 1.1]), "seed": rng.randrange(99)}
    if rng.random() < 0.3:
        options |= {"frequency_penalty": 0.5, "presence_penalty": 0.3, "top_p": 0.9}
    if rng.random() < 0.3:
        options |= {"min_tokens": 8, "stop_token_ids": tuple(rng.sample(range(3, 500), 16))}
    if rng.random() < 0.2:
        options["allowed_token_ids"] = tuple(range(600))
    options["grammar"] = rng.choice(GRAMMARS)
    options["disable_spec_decode"] = rng.random() < 0.15
    options["logprobs"] = rng.choice([None, None, 2])
    return prompt, rng.randint(1, 40), options


def play(session: Callable[..., Any], seed: int, name: str, count: int) -> Any:
    """One history. Returns the engine's statistics."""
    rng = random.Random(seed)
    tokenizer = Tokenizer.load(GOLDENS / name)
    table = tokenizer.token_table("")
    shared = [rng.randrange(3, 500) for _ in range(70)]
    asked = [request(rng, shared) for _ in range(count)]
    flags = {"max_model_len": 256, "kv_cache_memory_bytes": 64 << 20}
    plain = session(GOLDENS / name, max_num_seqs=8, **flags)
    plain.engine.control(table)
    wanted = plain.outcomes_of(asked)
    drafts, tight = rng.randint(1, 4), {"max_num_batched_tokens": rng.choice([24, 64])}
    config = f'{{"method": "ngram", "num_speculative_tokens": {drafts}}}'
    drafted = session(
        GOLDENS / name,
        speculative_config=config,
        max_num_seqs=5,
        scheduling_policy=priority(tight["max_num_batched_tokens"]),
        **{**flags, **tight},
    )
    drafted.engine.control(table)
    drafting, answers = (
        drafted.engine.runner.drafting,
        [p + w.tokens for (p, _, _), w in zip(asked, wanted, strict=True)],
    )
    # In turn, because how many steps a history has depends on when its grammars are ready.
    chances = itertools.cycle(rng.sample([0.0, 0.0, 0.3, 0.8, 0.8, 0.95, 1.0, 1.0], 8))
    drafting.make_drafter = lambda: Planted(answers, next(chances))
    drafting.worth.choose = lambda available, rows, cost: rng.randint(0, drafts) if available else 0
    drafting.worth.idle = lambda cost: 0
    waiting, ids = list(enumerate(asked)), {}
    aborted: set[int] = set()
    while waiting or drafted.open:
        while waiting and rng.random() < 0.3:
            number, (prompt, most, options) = waiting.pop(0)
            ids[number] = drafted.submit(prompt, most, **options)
        if drafted.open and rng.random() < 0.01:
            aborted.add(rng.choice(drafted.open))
            drafted.engine.abort(max(aborted))
        drafted.step()
    for number, want in enumerate(wanted):
        got = drafted.outcomes[ids[number]]
        if ids[number] in aborted:
            assert got.tokens == want.tokens[: len(got.tokens)], number
            continue
        assert got.tokens == want.tokens, (number, asked[number])
        for mine, theirs in zip(want.logprobs, got.logprobs, strict=True):
            assert (mine is None) == (theirs is None)
            assert mine is None or abs(mine.logprob - theirs.logprob) < 1e-4
    return drafted.engine.stats()


@pytest.mark.parametrize("name", ["qwen3-tiny", "qwen3_5-tiny"])
def test_a_history_changes_no_token(session: Callable[..., Any], late: None, name: str) -> None:
    stats = play(session, 1, name, 16)
    assert 0 < stats.accepted_draft_tokens < stats.draft_tokens
    assert stats.preemptions > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 14))
@pytest.mark.parametrize("name", ["qwen3-tiny", "qwen3_5-tiny"])
def test_more_histories(session: Callable[..., Any], late: None, name: str, seed: int) -> None:
    play(session, seed, name, 30)
