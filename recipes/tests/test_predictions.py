"""Every recorded step of a published model has a prediction, and one that is near what was measured."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import pytest

from openinfer.kernels import H200, NullPack, Target, predictions
from openinfer.kernels.packs.null import Call
from openinfer.tensor import Arena, Device, Stream

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

    def __init__(self, recipe: str, size: str, **cut: Any) -> None:
        def module(name: str) -> Any:
            return importlib.import_module(f"openinfer.recipes.{recipe}.{name}")

        startup, published = module("startup"), module("published")
        sizes_of = startup if recipe == "qwen3" else module("sizes")
        buckets = module("runner" if recipe == "qwen3" else "buckets").Buckets
        config = module("config").Config.parse(published.config_json(size, **cut), None)
        form = {
            "qwen3": lambda: (),
            "qwen3_5": lambda: (module("weights").Format.published(config),),
            "deepseek_v4": lambda: (module("places").Format(fp4_experts=True),),
        }[recipe]()
        sizes = sizes_of.decide_sizes(config, sizes_of.Options(device="cuda"), Device("cuda"))
        self.buckets = buckets.up_to(sizes.max_rows, sizes.max_tokens)
        self.plan = startup.make_plan(config, *form, sizes, self.buckets, H200)
        room = 1 if recipe == "qwen3" else sizes_of.Room(1, 1)
        null = Device("null")
        self.model = startup.lay_out(config, *form, sizes, Arena(null, None), Stream(null), room)

    def shape(self, tokens: int, rows: int) -> tuple[int, int, int]:
        found: tuple[int, int, int] = self.buckets.choose(tokens, rows)
        return found

    def calls(self, shape: tuple[int, int, int]) -> list[Call]:
        """Of all layers, one after the other."""
        pack = NullPack(H200)
        self.model.forward(pack, *shape)
        self.model.sample(pack, shape[1])
        return pack.calls


def kinds(calls: Sequence[Call]) -> dict[tuple[str, Any], int]:
    """How often an op with such shapes and numbers comes."""
    found: dict[tuple[str, Any], int] = {}
    for call in calls:
        shapes = tuple(getattr(arg, "shape", arg) for arg in call.args.values())
        found[call.op.name, shapes] = found.get((call.op.name, shapes), 0) + call.times
    return found


@pytest.mark.parametrize(("recipe", "size", "points"), [("qwen3", "4B", QWEN3), ("qwen3_5", "4B", QWEN3_5)])
def test_predictions_are_near_what_was_measured(recipe: str, size: str, points: list[Point]) -> None:
    planned = Planned(recipe, size)
    found = predictions(planned.plan.steps, H200)
    assert set(found) == set(planned.buckets.segments())
    for rows, context, prompt, measured in points:
        pairs = rows * context + prompt * (prompt + 1) // 2
        shape = planned.shape(rows + prompt, rows + bool(prompt))
        seconds = found[shape].seconds(rows * context + prompt, pairs)
        assert seconds * 1e3 == pytest.approx(measured, rel=0.25), (rows, context, prompt)


@pytest.mark.parametrize(
    ("recipe", "size", "cut"),
    [("qwen3", "0.6B", {}), ("qwen3_5", "0.8B", {}), ("deepseek_v4", "Flash", {"layers": 6})],
)
def test_the_traced_layers_stand_for_all(recipe: str, size: str, cut: dict[str, Any]) -> None:
    """A plan traces one layer of each kind, and counts each of its calls as often as the model has such a layer."""
    planned = Planned(recipe, size, **cut)
    for shape in (planned.shape(64, 2), planned.shape(4, 4)):
        traced, whole = kinds(planned.plan.steps[shape]), kinds(planned.calls(shape))
        assert traced == whole
        assert len(planned.plan.steps[shape]) < len(planned.calls(shape))


def test_nothing_is_predicted_for_kernels_that_nobody_measured() -> None:
    steps = Planned("qwen3", "0.6B").plan.steps
    assert not predictions(steps, Target(90, 132, gpu="another GPU"))
    assert not predictions(steps, Target(90, 132, gpu=H200.gpu, batch_invariant=True))
