"""Steps whose rows ask for the most likely token and nothing else choose it in a segment of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

TINY = Path(__file__).parents[1] / "tests" / "goldens" / "qwen3-tiny"
NGRAM = '{"method": "ngram", "num_speculative_tokens": 3}'
PLAIN = {"ignore_eos": True}
PROMPT = list(range(40, 70))

CASES: tuple[tuple[dict[str, Any], set[str]], ...] = (
    ({}, {"greedy"}),
    ({"temperature": 0.7, "top_k": 1}, {"greedy"}),
    ({"min_tokens": 3}, {"greedy"}),
    ({"temperature": 0.7, "seed": 1}, {"sample"}),
    ({"logprobs": 0}, {"sample"}),
    ({"frequency_penalty": 0.5}, {"sample"}),
    ({"logit_bias": ((5, 2.0),)}, {"sample"}),
)


def counted(runner: Any) -> list[str]:
    """The kinds of the segments that the runner launches from now on."""
    launched, launch = list[str](), runner.graphs.launch

    def noted(key: tuple[object, ...]) -> None:
        launched.append(str(key[0]))
        launch(key)

    runner.graphs.launch = noted
    return launched


def test_one_row_that_asks_for_more_gives_its_steps_the_whole_segment(session: Callable[..., Any]) -> None:
    opened = session(TINY, enable_prefix_caching=False)
    launched = counted(opened.engine.runner)
    (alone,) = opened.outcomes_of([(PROMPT, 6, PLAIN)])
    for other, expected in CASES:
        launched.clear()
        first, second = opened.outcomes_of([(PROMPT, 6, PLAIN), (PROMPT[::-1], 6, {**PLAIN, **other})])
        assert {"greedy", "sample"} & set(launched) == expected, other
        assert first.tokens == alone.tokens
        assert first.logprobs == [None] * 6
        assert all((entry is None) == ("logprobs" not in other) for entry in second.logprobs)
    launched.clear()
    opened.outcomes_of([(PROMPT, 9, PLAIN), (PROMPT[::-1], 3, {**PLAIN, "logprobs": 1})])
    assert {"greedy", "sample"} < set(launched)  # the other row has ended


def test_steps_with_drafts_choose_there_too(session: Callable[..., Any]) -> None:
    plain, opened = session(TINY), session(TINY, speculative_config=NGRAM)
    opened.engine.runner.drafting.costs = None
    launched = counted(opened.engine.runner)
    for other, expected in CASES:
        # After one token again and again, the model goes on with one.
        asked = [([39 + 6 * n] * 30, 20, {**PLAIN, **(other if n else {})}) for n in (0, 1)]
        launched.clear()
        wanted, found = plain.outcomes_of(asked), opened.outcomes_of(asked)
        used = {"greedy", "sample"} & set(launched)
        assert used == expected or used == {"greedy"} | expected, other  # one of the two ends first
        assert [outcome.tokens for outcome in found] == [outcome.tokens for outcome in wanted]
    assert opened.engine.stats().accepted_draft_tokens > 50
