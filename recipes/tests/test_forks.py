"""Which calls of a published model's step run side by side: found in its plan, since no recipe says so."""

from __future__ import annotations

from typing import Any

import pytest

from openinfer.kernels import H200, NullPack
from openinfer.kernels.packs.null import Call
from openinfer.recipes import deepseek_v3, deepseek_v4, qwen3, qwen3_5
from openinfer.recipes.deepseek_v4.ops.queries import q_kv_write
from openinfer.recipes.deepseek_v4.published import config_json
from openinfer.recipes.engine import Recipe, Source
from openinfer.recipes.engine.limits import decide
from openinfer.recipes.engine.startup import buckets_for
from openinfer.tensor import Arena, Device, Stream

SHARED = "gate_up_clamped project | project route"
KEYS = "project q_kv_write project | project compress"
CHOSEN = "index_topk | compress project"
V4 = {SHARED: 43, KEYS: 41, CHOSEN: 21}
"""Flash has 43 layers: 2 with a window alone, 20 with heavy entries, 21 with sparse ones."""
V3 = {"norm_linear route | gate_up_silu": 58}
V32 = {"norm_linear write_latents norm_linear | norm_linear": 61, "index_topk | norm_linear": 61, **V3}


def calls_of(recipe: Recipe[Any], config: Any, ranks: int, tokens: int, *, layers: str = "all") -> list[Call]:
    options, null, pack = recipe.options(device="cuda"), Device("null"), NullPack(H200)
    blueprint: Any = recipe.blueprint(Source(config), options, ranks=ranks)
    limits = decide(options, Device("cuda"), blueprint)
    model = blueprint.lay_out(Arena(null, None), Stream(null), limits, [1] * len(blueprint.groups(limits)))
    model = model if layers == "all" else blueprint.traced(model, pack)
    shape = buckets_for(blueprint, limits).choose(tokens, min(tokens, limits.max_rows))
    return pack.traced(lambda: model.forward(pack, *shape))


def forks_of(calls: list[Call]) -> dict[str, int]:
    """How often the calls have branches of these ops."""
    found: dict[str, int] = {}
    text, before, times = "", 0, 1
    for call in [*calls, None]:
        branch = call.branch if call is not None else 0
        if text and branch < before:
            found[text] = found.get(text, 0) + times
            text = ""
        if call is not None and branch:
            text += (" | " if branch > before == 1 else " " if text else "") + call.op.name
            times = call.times
        before = branch
    return found


@pytest.mark.parametrize("layers", ["traced", pytest.param("all", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("recipe", "size", "ranks", "found"),
    [
        (deepseek_v4, "Flash", 1, V4),
        (deepseek_v4, "Flash", 4, V4),
        (deepseek_v3, "DeepSeek-V3", 8, V3),
        (deepseek_v3, "DeepSeek-V3.2", 8, V32),
        (qwen3_5, "35B-A3B", 1, {"gate_up_silu | norm_linear": 40}),
        (qwen3_5, "35B-A3B-FP8", 1, {"gate_up_silu | norm_linear": 40}),
        (qwen3_5, "35B-A3B-FP8", 2, {"gate_up_silu | norm_linear": 40}),
        (qwen3_5, "27B", 1, {}),
        (qwen3_5, "27B-FP8", 1, {}),  # its two products of one input are calls of one op
        (qwen3, "4B", 1, {}),
        (qwen3, "30B-A3B-FP8", 1, {}),
    ],
)
def test_plans_have_these_forks(
    recipe: Any, size: str, ranks: int, found: dict[str, int], layers: str
) -> None:
    config = config_json(size) if recipe is deepseek_v4 else recipe.RECIPE.published()[size]
    for tokens, expected in ((1, found), (8, found), (32, found), (256, found), (1024, {})):
        assert forks_of(calls_of(recipe.RECIPE, config, ranks, tokens, layers=layers)) == expected


def test_forks_follow_from_what_ops_say_that_they_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """A control: were it to write the block tables too, compressors beside it would have to wait."""
    monkeypatch.setattr(q_kv_write, "writes", None)
    found = forks_of(calls_of(deepseek_v4.RECIPE, config_json("Flash"), 1, 8))
    assert found[SHARED] == 43
    assert KEYS not in found
