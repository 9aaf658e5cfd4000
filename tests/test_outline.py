"""The memory of an engine that is planned without a GPU: its parts are what the engine itself sets aside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from openinfer.cli import recipes
from openinfer.cli.explain.segments import Outline
from openinfer.kernels import H200
from openinfer.recipes.engine import Source

GOLDENS = Path(__file__).parent / "goldens"
MTP = {"speculative_config": json.dumps({"method": "mtp", "num_speculative_tokens": 1})}


@pytest.mark.parametrize(
    ("name", "flags", "ranks"),
    [
        ("qwen3-tiny", {}, 2),
        ("qwen3_5-moe-tiny", {}, 2),
        ("qwen3_5-tiny", MTP, 1),
        ("deepseek_v4-tiny", MTP, 1),
    ],
)
def test_the_parts_of_the_memory_are_all_of_it(name: str, flags: dict[str, Any], ranks: int) -> None:
    source, family = Source.read(GOLDENS / name), name.partition("-")[0]
    (recipe,) = (one for one in recipes.installed() if one.name == family)
    outline = Outline(recipe, source, recipe.options(max_num_seqs=8, **flags), H200, ranks=ranks)
    assert 0 <= outline.fixed_bytes - sum(outline.memory.values()) < 1 << 14  # tensors begin at multiples


def test_states_of_sequences_share_the_room_of_the_cache() -> None:
    """They are part of the cache, not of what is beside it."""
    (recipe,) = (one for one in recipes.installed() if one.name == "qwen3_5")
    outline = Outline(recipe, Source(recipe.published()["27B"]), recipe.options(), H200)
    assert outline.fixed_bytes < 57e9
    pages, states = outline.cache(60 << 30).groups
    taken = pages.num_blocks * pages.block_bytes + states.num_blocks * states.block_bytes
    assert 0.99 * (60 << 30) < taken <= 60 << 30
