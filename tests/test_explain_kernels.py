"""`openinfer explain` and `plan` count the kernels of an engine on an H200, and predict with them."""

from __future__ import annotations

import functools
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from openinfer.cli import explain, plan, recipe_flags
from openinfer.cli.explain.ledger import Machine
from openinfer.cli.explain.segments import SERVED, Outline
from openinfer.cli.plan.load import PlannedServer
from openinfer.kernels import GPUS, H200, CudaSpec, Parts, Workload, attention_sublayer
from openinfer.recipes.engine import Source
from openinfer.recipes.engine.startup import kernel_specs
from openinfer.recipes.qwen3 import RECIPE

SOURCE = Source(RECIPE.published()["8B"])
ENGINE = replace(H200, nvrtc=True)
"""The first target that an engine's start-up plans for."""
STEP = ["--decode", "2,1024"]
ASSUMED = "(assumed: sm_90, and a wheel with them or NVRTC; else Triton's run)"


@functools.cache
def outline(target: Any) -> Outline:
    return Outline(RECIPE, SOURCE, RECIPE.options(), target)


def test_explain_counts_the_kernels_and_the_workspace_of_an_engine(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert explain.main(["qwen3-8B", *STEP]) == 0
    shown = capsys.readouterr().out
    engine, triton = outline(ENGINE), outline(H200)
    counts = [
        sum(line.kernels for line in explain.trace(one.decode(2, 1024), one.target, Machine(), {}))
        for one in (engine, triton)
    ]
    assert counts[0] < counts[1]
    found = re.search(r"^sum +\d+ +(\d+) ", shown, re.MULTILINE)
    assert found is not None
    assert int(found[1]) == counts[0]
    assert engine.memory["workspace"] < triton.memory["workspace"]
    assert re.search(rf"workspace +{engine.memory['workspace'] / 1e6:.0f} MB\n", shown)
    specs = kernel_specs(RECIPE, SOURCE, RECIPE.options(), ENGINE)
    own = sum(isinstance(spec, CudaSpec) for spec in specs)
    assert own
    assert f"kernels: {len(specs)}, of which {own} are CUDA C++ {ASSUMED}\n" in shown


def test_explain_assumes_nothing_of_an_engine_without_kernels_of_cuda(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert explain.main(["qwen3-8B", *STEP, "--batch-invariant"]) == 0
    assert re.search(r"^  kernels: \d+$", capsys.readouterr().out, re.MULTILINE)


def test_explain_predicts_with_the_kernels_of_an_engine(capsys: pytest.CaptureFixture[str]) -> None:
    steps = outline(ENGINE).decode(2, 1024)
    triton, engine = (explain.predicted(steps, target, 1) for target in (H200, ENGINE))
    assert float(engine.split()[0]) < float(triton.split()[0])  # attention's sublayer is one launch
    assert explain.main(["qwen3-8B", *STEP]) == 0
    assert f"predicted on an NVIDIA H200: {engine}\n" in capsys.readouterr().out


def test_plan_has_the_memory_of_an_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    words = ["qwen3-8B", "--rate", "1", "--compare", "--max-num-seqs 64", "--json", str(path)]
    assert plan.main(words) == 0
    found = json.loads(path.read_text())
    assert found["nvrtc"] is True
    assert found["results"][0]["memory"]["workspace"] == outline(ENGINE).memory["workspace"]
    assert ASSUMED in capsys.readouterr().out


def test_kernels_that_join_calls_alone_change_the_time_of_a_server() -> None:
    _, asked = recipe_flags.parse(["qwen3-8B"], "plan", None, lambda parser: None, named=True)
    figures = GPUS[H200.gpu]
    served, triton = (PlannedServer(asked, target, figures, 1).outline.steps for target in (SERVED, H200))
    assert list(served) == list(triton)
    for shape, calls in served.items():
        workload = Workload(shape.tokens, shape.rows, 1000, 1000)
        own, other = (sum(Parts.of(each, workload, figures)) for each in (calls, triton[shape]))
        joined = any(call.op is attention_sublayer for call in calls)
        assert own < other if joined else own == pytest.approx(other), shape
