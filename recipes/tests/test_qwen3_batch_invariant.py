"""--batch-invariant: the same kernel, tile and order of sums for every number of tokens and rows."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from openinfer.kernels import H200, KernelSpec, Launch, Target, predictions
from openinfer.recipes.engine import Options, Source
from openinfer.recipes.engine.limits import decide
from openinfer.recipes.engine.startup import (
    StartPlan,
    buckets_for,
    kernel_specs,
    make_start_plan,
    options_target,
)
from openinfer.recipes.qwen3 import RECIPE
from openinfer.tensor import Device

SOURCES = {name: Source(RECIPE.published()[name]) for name in ("4B", "4B-FP8")}
FLAGS = {"device": "cuda", "batch_invariant": True}


def plan(target: Target, size: str = "4B", **flags: Any) -> StartPlan:
    options = Options(**flags)
    blueprint = RECIPE.blueprint(SOURCES[size], options)
    limits = decide(options, Device("cuda"), blueprint)
    return make_start_plan(blueprint, limits, buckets_for(blueprint, limits), options_target(options, target))


def kernels_by_use(found: StartPlan) -> dict[tuple[str, int], set[tuple[KernelSpec | str, ...]]]:
    """What every op launches, by the op and its weight; all steps together."""
    weights: dict[tuple[int, ...], int] = {}
    kernels = defaultdict(set)
    for calls in found.steps.values():
        for call in calls:
            weight = getattr(call.args, "weight", None)
            shape = () if weight is None else weight.shape
            use = call.op.name, weights.setdefault(shape, len(weights))
            kernels[use].add(tuple(c.spec if isinstance(c, Launch) else "cublas" for c in call.commands))
    return kernels


def test_every_bucket_runs_the_same_kernels() -> None:
    for target, size in ((H200, "4B"), (H200, "4B-FP8"), (Target(80, 108), "4B"), (Target(120, 170), "4B")):
        found = kernels_by_use(plan(target, size, **FLAGS))
        assert len(found) >= 8
        for use, kernels in found.items():
            assert len(kernels) == 1, use
            assert ("cublas",) not in kernels
    usual = kernels_by_use(plan(H200, device="cuda"))
    several = {op for (op, _), kernels in usual.items() if len(kernels) > 1}
    assert several >= {
        "norm_linear",
        "linear_add",
        "gate_up_silu",
        "norm_rope_attend",
    }  # the flag does something


def test_nothing_is_split_over_programs() -> None:
    invariant, usual = plan(H200, **FLAGS), plan(H200, device="cuda")
    assert invariant.zeroed_bytes < usual.zeroed_bytes  # the counters of parts that wait for each other
    functions = {spec.function for spec in invariant.specs}
    assert not functions & {"gemv", "gemm_small", "attend_short", "attend_new", "attend_prompt"}
    assert {"attend_long", "gemm_tma"} <= functions


def test_a_wheel_can_carry_its_kernels_and_its_steps_are_not_held_to_the_usual_times() -> None:
    specs = kernel_specs(RECIPE, SOURCES["4B"], Options(**FLAGS), H200)
    assert {spec.function for spec in specs} >= {"attend_long", "gemm_tma"}
    target = options_target(Options(**FLAGS), H200)
    assert not predictions(plan(H200, **FLAGS).steps, target)
