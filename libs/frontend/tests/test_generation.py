"""A choice does not depend on how the engine's steps cut its tokens."""

import random
from typing import Any

import pytest

from openinfer.frontend.client import Delta
from openinfer.frontend.contract import EngineInfo, EngineStats, Finished, Request, TokenLogprobs
from openinfer.frontend.http.generation import Choice
from openinfer.frontend.http.metrics import Metrics
from openinfer.frontend.http.params import Plan
from openinfer.frontend.http.tokenizer import Tokenizer
from openinfer.sampler import SamplingParams


class NoClient:
    info = EngineInfo(
        model="m", max_model_len=1, vocab_size=1, eos_token_ids=[], kv_capacity_tokens=1, block_size=1
    )

    def stats(self) -> EngineStats:
        return EngineStats()


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(NoClient(), None)  # type: ignore[arg-type]


def make(tokenizer: Tokenizer, metrics: Metrics, aborted: list[int], **options: Any) -> Choice:
    sampling = SamplingParams(
        min_tokens=options.pop("min_tokens", 0), stop_token_ids=options.pop("stop_ids", ()), logprobs=0
    )
    plan = Plan(
        sampling=sampling,
        n=1,
        stop=options.pop("stop", []),
        include_stop=options.pop("include", False),
        skip_special_tokens=options.pop("skip", True),
        return_token_ids=False,
        stream=True,
        include_usage=False,
        priority=0,
        tenant="",
        cache_salt="",
    )
    assert not options
    request = Request(id=7, prompt_token_ids=[1], sampling=sampling, max_tokens=100, arrival=0.0)
    return Choice(0, request, plan, tokenizer, metrics, lambda: None, aborted.append)


def outcome(choice: Choice, ids: list[int], cuts: list[int], terminal: Finished) -> tuple[Any, ...]:
    """What comes out when the tokens arrive in pieces of these sizes, the last with the terminal."""
    text, seen, logprobs = "", [], 0
    rest = list(ids)
    while rest or not choice.done:
        size = cuts.pop() if cuts else len(rest)
        piece, rest = rest[:size], rest[size:]
        entries = [TokenLogprobs(-1.0, [], []) for _ in piece]
        choice.push(Delta(piece, entries, terminal=None if rest else terminal))
        new_text, new_ids, new_logprobs = choice.take()
        text, seen, logprobs = text + new_text, [*seen, *new_ids], logprobs + len(new_logprobs)
    return text, seen, logprobs, choice.num_tokens, choice.finish_reason, choice.stop_reason


def test_any_cut_gives_the_same(tokenizer: Tokenizer, metrics: Metrics) -> None:
    rng = random.Random(11)
    words = tokenizer._core.encode("the end of the line is the end of it all 漢字 ").ids
    stopped = worded = 0
    for _ in range(400):
        ids = [rng.choice(words) for _ in range(rng.randrange(1, 40))]
        terminal = Finished(7, "length")
        options: dict[str, Any] = {
            "stop": rng.sample(["e", "he", "the end", " of", "l i", "漢", "of it"], rng.randrange(0, 4)),
            "include": rng.random() < 0.3,
            "min_tokens": rng.choice([0, 0, 5, 20]),
            "skip": rng.random() < 0.5,
        }
        if rng.random() < 0.5:
            ids.append(2)
            terminal = Finished(7, "stop", 2)
        results = []
        for _ in range(4):
            cuts = [rng.choice([1, 1, 2, 3, 9]) for _ in range(40)]
            results.append(outcome(make(tokenizer, metrics, [], **options), ids, cuts, terminal))
        assert all(result == results[0] for result in results)
        text, seen, logprobs, count, *_ = results[0]
        assert count == len(seen) == logprobs
        stopped += results[0][5] is not None
        worded += bool(text)
    assert stopped > 50
    assert worded > 300


def test_a_stop_string_aborts_once_and_drops_what_overshot(tokenizer: Tokenizer, metrics: Metrics) -> None:
    aborted: list[int] = []
    choice = make(tokenizer, metrics, aborted, stop=["end"])
    ids = tokenizer._core.encode("the end of it").ids
    choice.push(Delta(ids[:-1]))
    choice.push(Delta(ids[-1:]))
    choice.push(Delta([], terminal=Finished(7, "abort")))
    text, seen, _ = choice.take()
    assert text == "the "
    assert tokenizer.decode(seen, True) == "the end"
    assert aborted == [7]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", "end")


def test_stop_reason_is_the_id_only_if_it_was_asked_for(tokenizer: Tokenizer, metrics: Metrics) -> None:
    for stop_ids, expected in (((), None), ((2,), 2)):
        choice = make(tokenizer, metrics, [], stop_ids=stop_ids)
        choice.push(Delta([47, 2], terminal=Finished(7, "stop", 2)))
        assert (choice.take()[0], choice.stop_reason) == ("H", expected)


def test_a_broken_end_is_shown(tokenizer: Tokenizer, metrics: Metrics) -> None:
    first = tokenizer._core.encode("漢").ids[0]
    choice = make(tokenizer, metrics, [])
    choice.push(Delta([47, first]))
    assert choice.take()[0] == "H"
    choice.push(Delta([], terminal=Finished(7, "length")))
    assert choice.take()[0] == "\ufffd"
