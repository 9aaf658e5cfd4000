"""--batch-invariant: the same kernel, tile and order of sums for every number of tokens and rows."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

from openinfer.kernels import H200, KernelSpec, Launch, Target, predictions
from openinfer.recipes.qwen3.config import Config
from openinfer.recipes.qwen3.published import config_json
from openinfer.recipes.qwen3.runner import Buckets
from openinfer.recipes.qwen3.startup import Options, Plan, decide_sizes, kernel_specs, make_plan
from openinfer.tensor import Device, Tensor

CONFIG = Config.parse(config_json("4B"), None)
FLAGS = {"device": "cuda", "batch_invariant": True}


def plan(target: Target, **flags: Any) -> Plan:
    options = Options(**flags)
    sizes = decide_sizes(CONFIG, options, Device("cuda"))
    return make_plan(CONFIG, sizes, Buckets.up_to(sizes.max_rows, sizes.max_tokens), options.on(target))


def kernels_by_use(found: Plan) -> dict[tuple[str, int], set[tuple[KernelSpec | str, ...]]]:
    """What every op launches, by the op and its weight; all steps together."""
    weights: dict[tuple[int, ...], int] = {}
    kernels = defaultdict(set)
    for calls in found.steps.values():
        for call in calls:
            weight = call.args.get("weight")
            shape = weight.shape if isinstance(weight, Tensor) else ()
            use = call.op.name, weights.setdefault(shape, len(weights))
            kernels[use].add(tuple(c.spec if isinstance(c, Launch) else "cublas" for c in call.commands))
    return kernels


def test_every_bucket_runs_the_same_kernels() -> None:
    for target in (H200, Target(80, 108), Target(120, 170)):
        found = kernels_by_use(plan(target, **FLAGS))
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


def test_a_wheel_can_carry_its_kernels_and_its_steps_are_not_held_to_the_usual_times(tmp_path: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_json("4B")))
    specs = kernel_specs(str(tmp_path), H200, **FLAGS)
    assert {spec.function for spec in specs} >= {"attend_long", "gemm_tma"}
    target = Options(**FLAGS).on(H200)
    assert not predictions(plan(H200, **FLAGS).steps, target)
