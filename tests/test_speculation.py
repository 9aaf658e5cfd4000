"""Drafts on whole engines: turns of a conversation go on from what drafts left in the cache."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from openinfer.recipes.engine.testing import Planted

GOLDENS = Path(__file__).parent / "goldens"
NGRAM = '{"method": "ngram", "num_speculative_tokens": 3}'


@pytest.mark.parametrize("name", ["qwen3-tiny", "qwen3_5-tiny", "deepseek_v4-tiny"])
def test_a_prefix_that_drafts_have_written_is_as_good_as_another(
    session: Callable[..., Any], name: str
) -> None:
    """Outputs cross the edges of pages amid drafts, and end there. The next turn finds them in the cache."""
    flags = {"max_model_len": 1024, "kv_cache_memory_bytes": 64 << 20}
    if name.startswith("deepseek"):
        flags["activation_quantization"] = "off"
    plain = session(GOLDENS / name, enable_prefix_caching=False, **flags)
    drafted = session(GOLDENS / name, speculative_config=NGRAM, **flags)
    rng, answers = random.Random(1), list[list[int]]()
    drafted.engine.runner.drafting.make_drafter = lambda: Planted(answers)
    for start in range(3):
        prompt = [rng.randrange(3, 500) for _ in range(118 + start)]
        for turn in range(4):
            count = 9 + start + 3 * turn
            asked = [(prompt, count, {"ignore_eos": True})]
            (want,) = plain.outcomes_of(asked)
            answers.append(prompt + want.tokens)
            (got,) = drafted.outcomes_of(asked)
            assert got.tokens == want.tokens, (start, turn)
            prompt = [*prompt, *want.tokens, *[rng.randrange(3, 500) for _ in range(117 - count)]]
    stats = drafted.engine.stats()
    assert stats.prefix_hit_tokens > 0
    assert stats.accepted_draft_tokens > 20
