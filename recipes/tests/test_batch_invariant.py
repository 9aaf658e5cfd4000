"""--batch-invariant: the same kernel, tile and order of sums for every number of tokens and rows."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from typing import Any

import pytest

from openinfer.kernels import H200, KernelSpec, Launch, Target, predictions
from openinfer.recipes import qwen3, qwen3_5
from openinfer.recipes.engine import Source
from openinfer.recipes.engine.limits import decide
from openinfer.recipes.engine.startup import (
    StartPlan,
    buckets_for,
    kernel_specs,
    make_start_plan,
    options_target,
)
from openinfer.tensor import Device

FLAGS = {"device": "cuda", "batch_invariant": True}
SCALARS = ("accept", "advance", "sample")
"""Ops of the sampler whose kernels differ only in how they count rows and where they write a row's own numbers."""

Kernels = tuple[KernelSpec | str, ...]


def plan(target: Target, size: str = "4B", family: Any = qwen3, **flags: Any) -> StartPlan:
    recipe = family.RECIPE
    options = recipe.options(**flags)
    blueprint = recipe.blueprint(
        Source(recipe.published()[size]), options, ranks=options.tensor_parallel_size
    )
    limits = decide(options, Device("cuda"), blueprint)
    return make_start_plan(blueprint, limits, buckets_for(blueprint, limits), options_target(options, target))


def kernels_by_step(found: StartPlan) -> dict[str, dict[Any, set[Kernels]]]:
    """What every op launches in each step. Launches of one kernel for some rows after the other are one."""
    kernels: dict[str, dict[Any, set[Kernels]]] = defaultdict(lambda: defaultdict(set))
    for step, calls in found.steps.items():
        for call in calls:
            specs = [c.spec if isinstance(c, Launch) else "cublas" for c in call.commands]
            if call.op.name in SCALARS:
                specs = [dataclasses.replace(s, divisible=(), constants=()) for s in specs]
            kernels[call.op.name][step].add(tuple(dict.fromkeys(specs)))
    return kernels


def several(found: StartPlan) -> set[str]:
    """Ops whose kernels are not those of every step that has the op."""
    kernels = kernels_by_step(found)
    return {op for op, steps in kernels.items() if len({*map(frozenset, steps.values())}) > 1}


HOPPER, MTP = (H200,), '{"method": "mtp", "num_speculative_tokens": 3}'
ALL = (H200, Target(80, 108), Target(100, 148), Target(120, 170))
FP8 = tuple(target for target in ALL if target.arch >= 89)
CASES: dict[str, tuple[Any, str, tuple[Target, ...], dict[str, Any]]] = {
    "4B": (qwen3, "4B", ALL, {}),
    "4B-FP8": (qwen3, "4B-FP8", FP8, {}),
    "4B-AWQ": (qwen3, "4B-AWQ", ALL, {"enable_lora": True}),
    "30B-A3B": (qwen3, "30B-A3B", ALL, {"kv_cache_memory_bytes": 1 << 30}),
    "30B-A3B-FP8": (qwen3, "30B-A3B-FP8", FP8, {"tensor_parallel_size": 2}),
    "3.5-4B": (qwen3_5, "4B", ALL, {"enable_lora": True}),
    "3.5-4B, drafts": (qwen3_5, "4B", HOPPER, {"speculative_config": MTP, "max_num_seqs": 64}),
    "3.5-4B-FP8, bf16 states": (qwen3_5, "4B-FP8", HOPPER, {"mamba_ssm_cache_dtype": "bfloat16"}),
    "3.5-27B, FP8 cache": (qwen3_5, "27B", FP8, {"kv_cache_dtype": "fp8", "tensor_parallel_size": 2}),
    "3.5-35B-A3B": (qwen3_5, "35B-A3B", ALL, {}),
    "Next-80B-A3B-FP8": (qwen3_5, "Qwen3-Next-80B-A3B-FP8", HOPPER, {"tensor_parallel_size": 2}),
}


@pytest.mark.parametrize("case", CASES)
def test_every_step_runs_the_same_kernels(case: str) -> None:
    family, size, targets, flags = CASES[case]
    for target in targets:
        found = plan(target, size, family, **FLAGS, **flags)
        assert several(found) == set(), target
        kernels = kernels_by_step(found)
        assert len(kernels) >= 8
        assert not any(("cublas",) in one for steps in kernels.values() for one in steps.values())


def test_without_the_flag_steps_have_kernels_of_their_own() -> None:
    """A control of the test above."""
    usual = several(plan(H200, device="cuda"))
    assert usual >= {"norm_linear", "linear_add", "gate_up_silu", "norm_rope_attend"}
    usual = several(plan(H200, "35B-A3B", qwen3_5, device="cuda"))
    assert usual >= {"norm_linear", "experts_add", "gated_attention", "gated_delta_net"}


def test_nothing_is_split_over_programs() -> None:
    invariant, usual = plan(H200, **FLAGS), plan(H200, device="cuda")
    assert invariant.zeroed_bytes < usual.zeroed_bytes  # the counters of parts that wait for each other
    functions = {spec.function for spec in invariant.specs}
    assert not functions & {"gemv", "gemm_small", "attend_short", "attend_new", "attend_prompt"}
    assert {"attend_long", "gemm_tma"} <= functions


def test_a_wheel_can_carry_its_kernels_and_its_steps_are_not_held_to_the_usual_times() -> None:
    source = Source(qwen3.RECIPE.published()["4B"])
    specs = kernel_specs(qwen3.RECIPE, source, qwen3.RECIPE.options(**FLAGS), H200)
    assert {spec.function for spec in specs} >= {"attend_long", "gemm_tma"}
    target = options_target(qwen3.RECIPE.options(**FLAGS), H200)
    assert not predictions(plan(H200, **FLAGS).steps, target)
