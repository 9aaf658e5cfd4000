"""Every recorded step of a published model has a prediction, and one that is near what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from openinfer.graph import Shape
from openinfer.kernels import H200, NullPack, Target, predictions
from openinfer.kernels.authoring import mapped
from openinfer.kernels.packs.null import Call
from openinfer.recipes import deepseek_v4, qwen3, qwen3_5
from openinfer.recipes.deepseek_v4.published import config_json
from openinfer.recipes.engine import Recipe, Source
from openinfer.recipes.engine.limits import decide
from openinfer.recipes.engine.startup import buckets_for, make_start_plan
from openinfer.sampler.gpu import sample_rows
from openinfer.tensor import Arena, Device, Stream, Tensor

Json = Mapping[str, Any]
Point = tuple[int, int, int, float]
"""Decode rows, their context, tokens of a prompt beside them, milliseconds on an H200."""

QWEN3: list[Point] = [
    (1, 1024, 0, 2.77), (8, 1024, 0, 3.36), (64, 1024, 0, 5.50), (256, 512, 0, 9.72),
    (0, 0, 128, 3.5), (0, 0, 1024, 14.3), (0, 0, 2048, 28.5), (224, 512, 1024, 22.4),
]  # fmt: skip
QWEN3_5: list[Point] = [
    (1, 1024, 0, 2.77), (8, 1024, 0, 3.24), (64, 1024, 0, 5.66), (256, 512, 0, 12.84),
    (0, 0, 128, 3.94), (0, 0, 1024, 14.6), (0, 0, 2048, 28.5),
]  # fmt: skip


class Planned:
    """The plan of a published model, and the model itself on the null device."""

    def __init__(self, recipe: Recipe[Any], config: Json, ranks: int = 1, target: Target = H200) -> None:
        options, self.target = recipe.options(device="cuda"), target
        blueprint: Any = recipe.blueprint(Source(config), options, ranks=ranks)
        limits = decide(options, Device("cuda"), blueprint)
        self.buckets = buckets_for(blueprint, limits)
        self.plan, null = make_start_plan(blueprint, limits, self.buckets, target), Device("null")
        one_each = [1] * len(blueprint.groups(limits))
        self.model = blueprint.lay_out(Arena(null, None), Stream(null), limits, one_each)

    def shape(self, tokens: int, rows: int) -> Shape:
        return self.buckets.choose(tokens, rows)

    def calls(self, shape: Shape) -> list[Call]:
        """Of all layers, one after the other."""
        pack = NullPack(self.target)
        self.model.forward(pack, *shape)
        batch = self.model.batch
        sample_rows(pack, batch.rows, batch.sampled, shape.rows)
        return pack.calls


def kinds(calls: Sequence[Call]) -> dict[tuple[Any, ...], int]:
    """How often an op with such shapes, numbers and kernels comes."""
    found: dict[tuple[Any, ...], int] = {}
    for call in calls:
        shapes = repr(mapped(call.args, Tensor, lambda tensor: tensor.shape))
        kernels = tuple(getattr(command, "spec", type(command)) for command in call.commands)
        key = call.op.name, shapes, kernels
        found[key] = found.get(key, 0) + call.times
    return found


@pytest.mark.parametrize(
    ("recipe", "size", "points"), [(qwen3.RECIPE, "4B", QWEN3), (qwen3_5.RECIPE, "4B", QWEN3_5)]
)
def test_predictions_are_near_what_was_measured(recipe: Recipe[Any], size: str, points: list[Point]) -> None:
    planned = Planned(recipe, recipe.published()[size])
    found = predictions(planned.plan.steps, H200)
    assert set(found) == set(planned.buckets.segments())
    for rows, context, prompt, measured in points:
        pairs = rows * context + prompt * (prompt + 1) // 2
        shape = planned.shape(rows + prompt, rows + bool(prompt))
        seconds = found[shape].seconds(rows * context + prompt, pairs)
        assert seconds * 1e3 == pytest.approx(measured, rel=0.25), (rows, context, prompt)


@pytest.mark.parametrize(
    ("recipe", "config", "ranks"),
    [
        pytest.param(one, config, ranks, marks=() if ranks == usual else pytest.mark.slow, id=f"{one.name}-{ranks}")
        for one, config, usual in (
            (qwen3.RECIPE, qwen3.RECIPE.published()["0.6B"], 2),
            (qwen3_5.RECIPE, qwen3_5.RECIPE.published()["0.8B"], 1),
            (deepseek_v4.RECIPE, config_json("Flash", layers=6), 2),
        ) for ranks in (1, 2)
    ],
)  # fmt: skip
def test_the_traced_layers_stand_for_all(recipe: Recipe[Any], config: Json, ranks: int) -> None:
    """A plan traces one layer of each kind, and counts each of its calls as often as the model has such a layer. Among
    several ranks the first layer differs: the others' norms are made with the sums ahead of them."""
    planned = Planned(recipe, config, ranks, replace(H200, nvrtc=True))
    for shape in (planned.shape(64, 2), planned.shape(4, 4), planned.shape(1, 1)):
        traced, whole = kinds(planned.plan.steps[shape]), kinds(planned.calls(shape))
        assert traced == whole
        assert len(planned.plan.steps[shape]) < len(planned.calls(shape))


def test_nothing_is_predicted_for_kernels_that_nobody_measured() -> None:
    steps = Planned(qwen3.RECIPE, qwen3.RECIPE.published()["0.6B"]).plan.steps
    assert not predictions(steps, Target(90, 132, gpu="another GPU"))
    assert not predictions(steps, Target(90, 132, gpu=H200.gpu, batch_invariant=True))
