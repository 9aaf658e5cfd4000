"""--batch-invariant as on a GPU: every step launches the same kernels, and whole engines whose kernels run in Triton's
interpreter have the same bits on every path."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import invariance
import numpy as np
import pytest
from deepseek_v3_form import write_checkpoint

from openinfer.cli.selftest import packed
from openinfer.graph.runner.segments import segments
from openinfer.kernels import H200, InterpDriver, KernelSpec, Launch, LaunchPack, Op, Target, predictions
from openinfer.kernels.testing import of_the_day
from openinfer.recipes import deepseek_v3, deepseek_v4, qwen3, qwen3_5
from openinfer.recipes.engine import Source, startup
from openinfer.recipes.engine.limits import decide
from openinfer.recipes.engine.startup import (
    StartPlan,
    buckets_for,
    build,
    kernel_specs,
    make_start_plan,
    options_target,
)
from openinfer.tensor import Device, Tensor, uint8

GOLDENS = Path(__file__).parent / "goldens"
FAMILIES: dict[str, Any] = {
    "qwen3": qwen3,
    "qwen3_5": qwen3_5,
    "deepseek_v3": deepseek_v3,
    "deepseek_v32": deepseek_v3,
    "deepseek_v4": deepseek_v4,
}
LENGTHS = {
    "qwen3-tiny": 40,
    "qwen3_5-tiny": 70,
    "qwen3_5-moe-tiny": 70,
    "deepseek_v3-tiny": 40,
    "deepseek_v32-tiny": 40,
    "deepseek_v4-tiny": 140,
}
"""Tokens of a prompt that leaves a cached prefix, by the name of a checkpoint. The last takes minutes."""
OF_THE_DAY = [*of_the_day([*LENGTHS][:-1]), pytest.param("deepseek_v4-tiny", marks=pytest.mark.slow)]
FLAGS: dict[str, Any] = {
    "device": "cpu", "dtype": "bfloat16", "max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 256,
    "kv_cache_memory_bytes": 32 << 20, "batch_invariant": True, "snapshot_interval": 64,
    "speculative_config": '{"method": "ngram", "num_speculative_tokens": 2}',
}  # fmt: skip


class Interpreted:
    """The pack of an engine: what a GPU of `target` would launch, in the interpreter."""

    def __init__(self, target: Target) -> None:
        regions = (Tensor.from_numpy(np.zeros(64 << 20, uint8)) for _ in range(2))
        self._inner = LaunchPack(target, InterpDriver(), *regions)

    def bind(self, op: Op[Any], args: Any) -> Callable[[], None]:
        return lambda: self.run(op, args)

    def run(self, op: Op[Any], args: Any) -> None:
        self._inner.run(op, args)


def interpreted(
    monkeypatch: pytest.MonkeyPatch, folder: Path, name: str, invariant: bool, **more: Any
) -> Any:
    target = Target(arch=90, num_sms=4, interpreted=True, batch_invariant=invariant)
    monkeypatch.setattr(startup, "CpuPack", lambda *_, **__: Interpreted(target))
    flags = {k: v for k, v in FLAGS.items() if k != "snapshot_interval" or "3_5" in name} | more
    path = GOLDENS / name if (GOLDENS / name / "config.json").exists() else write_checkpoint(folder, name)
    return build(FAMILIES[name.partition("-")[0]].RECIPE, path, **flags).engine


@pytest.mark.slow
@pytest.mark.parametrize("name", LENGTHS)
def test_logits_are_the_same_bits_on_every_path(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    engine = interpreted(monkeypatch, tmp_path, name, True)
    found = invariance.differences(engine, LENGTHS[name])
    engine.close()
    assert found.keys() >= {"chunks of 7", "beside 3 others", "cached prefix", "preempted"}
    assert not any(map(max, found.values())), found


@pytest.mark.parametrize("name", OF_THE_DAY)
def test_drafts_and_company_change_no_log_probability(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    engine = interpreted(monkeypatch, tmp_path, name, True, max_num_seqs=3)  # a row of each kind of request
    found = invariance.drafts(engine, 4, 5)
    engine.close()
    assert {*found.values()} == {"equal"}, found


@pytest.mark.slow
@pytest.mark.parametrize("name", LENGTHS)
def test_other_kernels_are_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    """A control: kernels that are chosen by the number of tokens."""
    engine = interpreted(monkeypatch, tmp_path, name, False)
    found = invariance.differences(engine, LENGTHS[name])
    engine.close()
    assert any(map(max, found.values()))


INVARIANT: dict[str, Any] = {"device": "cuda", "batch_invariant": True, "max_num_seqs": 64}
SCALARS = ("accept", "advance", "sample")
"""Ops of the sampler whose kernels differ only in how they count rows and where they write a row's own numbers."""

Kernels = tuple[KernelSpec | str, ...]


def plan(target: Target, size: str = "4B", family: Any = qwen3, form: Any = None, **flags: Any) -> StartPlan:
    recipe = family.RECIPE
    options, config = recipe.options(**flags), recipe.published()[size]
    source = Source(config if form is None else {**config, "quantization_config": form})
    blueprint = recipe.blueprint(source, options, ranks=options.tensor_parallel_size)
    limits = decide(options, Device("cuda"), blueprint)
    return make_start_plan(blueprint, limits, buckets_for(blueprint, limits), options_target(options, target))


def kernels_by_step(found: StartPlan) -> dict[str, dict[Any, set[Kernels]]]:
    """What every op launches in each step. Launches of one kernel for some rows after the other are one."""
    kernels: dict[str, dict[Any, set[Kernels]]] = defaultdict(lambda: defaultdict(set))
    known: dict[int, Kernels] = {}
    for step, calls in found.steps.items():
        for call in calls:
            if (like := id(call.commands)) not in known:  # calls that were planned once
                specs = [c.spec if isinstance(c, Launch) else "cublas" for c in call.commands]
                if call.op.name in SCALARS:
                    specs = [dataclasses.replace(s, divisible=(), constants=()) for s in specs]
                known[like] = tuple(dict.fromkeys(specs))
            kernels[call.op.name][step].add(known[like])
    return kernels


def several(found: StartPlan) -> set[str]:
    """Ops whose kernels are not those of every step that has the op."""
    kernels = kernels_by_step(found)
    return {op for op, steps in kernels.items() if len({*map(frozenset, steps.values())}) > 1}


HOPPER, MTP = (H200,), '{"method": "mtp", "num_speculative_tokens": 3}'
NGRAM = FLAGS["speculative_config"]
DSPARK = '{"method": "dspark"}'
ALL = (H200, Target(80, 108), Target(100, 148), Target(120, 170))
FP8 = tuple(target for target in ALL if target.arch >= 89)
CASES: dict[str, tuple[Any, str, tuple[Target, ...], dict[str, Any]]] = {
    "4B": (qwen3, "4B", ALL, {}),
    "4B-FP8": (qwen3, "4B-FP8", FP8, {}),
    "4B-AWQ": (qwen3, "4B-AWQ", ALL, {"enable_lora": True}),
    "30B-A3B": (qwen3, "30B-A3B", ALL, {"kv_cache_memory_bytes": 1 << 30}),
    "30B-A3B-FP8": (qwen3, "30B-A3B-FP8", FP8, {"tensor_parallel_size": 2}),
    "3.5-4B": (qwen3_5, "4B", ALL, {"enable_lora": True}),
    "3.5-4B, drafts": (qwen3_5, "4B", HOPPER, {"speculative_config": MTP}),
    "3.5-4B-FP8, bf16 states": (qwen3_5, "4B-FP8", HOPPER, {"mamba_ssm_cache_dtype": "bfloat16"}),
    "3.5-27B, FP8 cache": (qwen3_5, "27B", FP8, {"kv_cache_dtype": "fp8", "tensor_parallel_size": 2}),
    "3.5-35B-A3B": (qwen3_5, "35B-A3B", ALL, {}),
    "V3": (
        deepseek_v3,
        "DeepSeek-V3",
        FP8,
        {"tensor_parallel_size": 8, "speculative_config": MTP},
    ),
    "Kimi-K2": (deepseek_v3, "Kimi-K2", HOPPER, {"tensor_parallel_size": 8, "speculative_config": NGRAM}),
    "V3.2": (deepseek_v3, "DeepSeek-V3.2", HOPPER, {"tensor_parallel_size": 8, "speculative_config": MTP}),
    "V4-Flash": (deepseek_v4, "Flash", HOPPER, {"speculative_config": MTP}),
    "V4-Flash-0731": (deepseek_v4, "Flash-0731", HOPPER, {"speculative_config": DSPARK}),
    "V4-Pro": (deepseek_v4, "Pro", HOPPER, {"tensor_parallel_size": 8, "activation_quantization": "off"}),
    "Next-80B-A3B-FP8": (qwen3_5, "Qwen3-Next-80B-A3B-FP8", HOPPER, {"tensor_parallel_size": 2}),
}


OF_EACH = [case for n in range(3) for case in [*CASES][n::3]]
"""CASES in an order in which any six are of all families."""


def undrafted(*given: Any) -> dict[Any, Callable[[], None]]:
    """The segments of a model but for those that draft, which take longest to plan."""
    return {key: run for key, run in segments(*given).items() if key[0] != "draft"}


@pytest.mark.parametrize("case", of_the_day(OF_EACH, 6))
def test_every_step_runs_the_same_kernels(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for layers that draft, whose tokens are verified."""
    family, size, targets, flags = CASES[case]
    monkeypatch.setattr(startup, "segments", undrafted)
    for target in targets:
        found = plan(target, size, family, **INVARIANT, **flags)
        assert several(found) == set(), target
        kernels = kernels_by_step(found)
        assert len(kernels) >= 8
        assert not any(("cublas",) in one for steps in kernels.values() for one in steps.values())


@pytest.mark.parametrize("family", [(qwen3, "4B"), (qwen3_5, "35B-A3B")], ids=lambda family: family[1])
@pytest.mark.parametrize("name", packed.FORMATS)
def test_every_step_runs_the_same_kernels_of_packed_weights(name: str, family: tuple[Any, str]) -> None:
    form, (recipe, size) = packed.FORMATS[name], family
    if size == "35B-A3B" and form.quantization == packed.ROWS:
        return  # experts have no such form
    assert several(plan(H200, size, recipe, form.quantization, **INVARIANT, **form.flags)) == set()


def test_without_the_flag_steps_have_kernels_of_their_own() -> None:
    """A control of the test above."""
    usual = several(plan(H200, device="cuda"))
    assert usual >= {"norm_linear", "linear_add", "gate_up_silu", "norm_rope_attend"}
    usual = several(plan(H200, "35B-A3B", qwen3_5, device="cuda"))
    assert usual >= {"norm_linear", "experts_add", "gated_attention", "gated_delta_net"}


def test_nothing_is_split_over_programs() -> None:
    invariant, usual = plan(H200, **INVARIANT), plan(H200, device="cuda")
    assert invariant.zeroed_bytes < usual.zeroed_bytes  # the counters of parts that wait for each other
    functions = {spec.function for spec in invariant.specs}
    assert not functions & {"gemv", "gemm_small", "attend_short", "attend_new", "attend_prompt"}
    assert {"attend_long", "gemm_tma"} <= functions


def test_a_wheel_can_carry_its_kernels_and_its_steps_are_not_held_to_the_usual_times() -> None:
    source = Source(qwen3.RECIPE.published()["4B"])
    specs = kernel_specs(qwen3.RECIPE, source, qwen3.RECIPE.options(**INVARIANT), H200)
    assert {spec.function for spec in specs} >= {"attend_long", "gemm_tma"}
    target = options_target(qwen3.RECIPE.options(**INVARIANT), H200)
    assert not predictions(plan(H200, **INVARIANT).steps, target)
