"""A prompt that is alone in its step takes a larger chunk, and no token changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from openinfer.cli.explain.segments import SERVED, Outline
from openinfer.graph import Shape
from openinfer.kernels import H200
from openinfer.recipes.deepseek_v3.recipe import RECIPE as DEEPSEEK_V3
from openinfer.recipes.deepseek_v4.recipe import RECIPE as DEEPSEEK_V4
from openinfer.recipes.engine import Source, startup
from openinfer.recipes.engine.limits import decide
from openinfer.recipes.qwen3.recipe import RECIPE as QWEN3
from openinfer.recipes.qwen3_5.recipe import RECIPE as QWEN3_5
from openinfer.tensor import Device

GOLDENS = Path(__file__).parent / "goldens"
TINY, V4 = GOLDENS / "qwen3-tiny", GOLDENS / "deepseek_v4-tiny"
RESTLESS = "openinfer.recipes.engine.testing.restless"
BUDGET, LONE = 24, 64
LONG, SHORT = [3 + 7 * n % 200 for n in range(150)], list(range(40, 60))
SHARED = [*LONG[:100], *SHORT, *LONG[:70]]
ASKED = [[(LONG, 12, {"prompt_logprobs": 0})], [(SHARED, 6, {}), (SHORT, 12, {}), (SHARED[::-1], 6, {})]]
LORA = {"enable_lora": True}
NGRAM = {"speculative_config": '{"method": "ngram", "num_speculative_tokens": 3}'}


@pytest.mark.parametrize(
    ("path", "flags"),
    [
        (TINY, {}),
        (TINY, {"scheduling_policy": f"{RESTLESS}:fcfs"}),
        (TINY, {"scheduling_policy": f"{RESTLESS}:priority", **NGRAM, **LORA}),
        (V4, {"activation_quantization": "off"}),
        (GOLDENS / "qwen3_5-tiny", {"snapshot_interval": 64}),
    ],
    ids=["plain", "preemption", "priority, drafts, adapters", "windows and entries", "states"],
)
def test_its_tokens_are_those_of_small_chunks(
    path: Path, flags: dict[str, Any], session: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = session(path, max_num_batched_tokens=BUDGET, **flags)
    expected = [outcome for asked in ASKED for outcome in plain.outcomes_of(asked)]
    monkeypatch.setattr(
        startup, "decide", lambda *given: replace(decide(*given), lone_tokens=(LONE // 2, LONE))
    )
    lone = session(path, max_num_batched_tokens=BUDGET, **flags)
    runner, steps = lone.engine.runner, []
    launch = type(runner).launch

    def noted(runner: Any, step: Any) -> None:
        steps.append((step.num_decode, [row.num_tokens for row in step.rows[step.num_decode :]]))
        launch(runner, step)

    monkeypatch.setattr(type(runner), "launch", noted)
    found = [outcome for asked in ASKED for outcome in lone.outcomes_of(asked)]
    for one, other in zip(found, expected, strict=True):
        assert one.tokens == other.tokens
        for mine, its in zip(one.prompt_logprobs, other.prompt_logprobs, strict=True):
            assert mine.logprob == pytest.approx(its.logprob, abs=1e-4)
    assert Shape(LONE, 1, LONE) in runner.buckets.segments()
    longer = [[LONE // 2], [LONE]]
    assert any(chunks == [LONE] for _, chunks in steps)
    assert all(sum(chunks) + rows <= BUDGET or (rows == 0 and chunks in longer) for rows, chunks in steps)
    if "scheduling_policy" in flags:
        assert lone.engine.stats().preemptions


def test_all_models_have_them_on_a_gpu_and_only_by_default() -> None:
    def of(recipe: Any, size: str = "", device: str = "cuda", **flags: Any) -> tuple[int, ...]:
        options, raw = recipe.options(**flags), recipe.published()[size] if size else recipe.small
        return decide(options, Device(device), recipe.blueprint(Source(raw), options)).lone_tokens

    assert of(QWEN3) == of(QWEN3_5) == (4096,)
    assert (
        of(QWEN3, "30B-A3B") == of(QWEN3_5, "35B-A3B") == of(DEEPSEEK_V3) == of(DEEPSEEK_V4) == (4096, 8192)
    )
    assert of(QWEN3, max_num_batched_tokens=2048) == of(QWEN3, device="cpu") == ()
    assert of(DEEPSEEK_V4, max_num_seqs=5000) == (8192,)


def test_they_are_given_up_where_the_cache_has_no_room_for_eight() -> None:
    def of(nbytes: float, **flags: Any) -> tuple[int, ...]:
        options, source = QWEN3_5.options(**flags), Source(QWEN3_5.published()["35B-A3B"])
        outline = Outline(QWEN3_5, source, options, SERVED, memory_bytes=nbytes)
        sizes, room = outline.buckets.lone_tokens, int(0.9 * nbytes) - outline.fixed_bytes
        assert outline.cache(room).capacity_tokens >= 8 * max(sizes, default=2048)
        return sizes

    assert of(141e9) == (4096, 8192)
    assert of(80e9) == ()
    assert of(141e9, kv_cache_memory_bytes=3 << 29) == (4096,)


def test_ranks_give_them_up_together() -> None:
    """Where another rank has less room, this one does without as well."""
    options, target = QWEN3.options(), replace(H200, nvrtc=True)
    blueprint: Any = QWEN3.blueprint(Source(QWEN3.published()["4B"]), options, ranks=2)
    limits = decide(options, Device("cuda"), blueprint)
    plan = startup.make_start_plan(blueprint, limits, startup.buckets_for(blueprint, limits), target)
    for others, left in (([1], (4096,)), ([0], ())):
        found = startup.with_room(
            plan, blueprint, options, target, 141e9, lambda mine, others=others: [min(*mine, *others)]
        )
        assert found.limits.lone_tokens == left
