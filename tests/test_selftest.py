"""What `openinfer selftest` checks without torch and without a checkout: ops by their references, a model by numpy."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from openinfer.cli import recipes, selftest
from openinfer.cli.selftest import gate
from openinfer.cli.selftest import gate as selftest_model
from openinfer.cli.selftest import packed as selftest_packed
from openinfer.cli.selftest.ops import check_case
from openinfer.kernels import H200
from openinfer.kernels.linear.choices import choose, cluster_choice
from openinfer.kernels.op.cases import Memory
from openinfer.kernels.ops import route
from openinfer.kernels.packs import CpuPack
from openinfer.recipes.deepseek_v4.ops.cases import cases as attention_cases
from openinfer.recipes.engine.startup import build
from openinfer.tensor import Device

MODEL = Path(__file__).parent / "goldens" / "qwen3-tiny"


@pytest.fixture
def case() -> Any:
    """A case that writes integers and floats."""
    return next(route.cases(Memory(Device("cpu"), poisoned=True)))


def test_an_op_that_does_what_its_reference_does_agrees(case):
    found = check_case(case, CpuPack().run)
    assert (found.op, found.problem, found.off) == ("route", "", 0.0)


@pytest.mark.parametrize(("output", "part"), [("expert_weights", 1.1), ("expert_ids", 2)])
def test_a_wrong_output_is_named(case, output, part):
    def run(op: Any, args: Any) -> None:
        CpuPack().run(op, args)
        array = getattr(args, output).numpy()
        array[:] = (array * part + 1).astype(array.dtype)

    found = check_case(case, run)
    assert found.output == output
    assert found.problem.startswith(f"{output} is off by")


def test_a_cache_is_compared_where_it_is_written():
    """The rest stays NaN; an element that the reference leaves alone must be left alone."""
    case = next(c for c in attention_cases(Memory(Device("cpu"), poisoned=True)) if c.op.name == "q_kv_write")
    assert np.isnan(case.args[0]["kv"].numpy().astype(np.float32)).all()
    assert check_case(case, CpuPack().run).problem == ""

    case.args[0]["kv"].numpy()[:] = np.nan

    def run(op: Any, args: Any) -> None:
        CpuPack().run(op, args)
        args.kv.numpy()[0, 3] = 1

    found = check_case(case, run)
    assert found.problem.startswith("kv is off by")


def test_an_op_that_writes_nothing_is_no_success(case):
    assert check_case(case, lambda op, args: None).problem.startswith("expert_")


def test_a_model_is_held_against_numpy():
    """The CPU engine stands for the GPU's; a control must be noticed."""
    recipe = recipes.find(MODEL)
    sequences = selftest_model.references(recipe, MODEL)
    assert [len(s.tokens) - s.first for s in sequences] == [selftest_model.FORCED] * 5
    apart = np.concatenate([s.bf16 - s.fp32 for s in sequences])
    assert 0 < np.abs(apart).mean() < 0.1
    built = build(recipe, MODEL, device="cpu", dtype="bfloat16", kv_cache_memory_bytes=64 << 20)
    found = gate.decode_all(built.engine, sequences, chunk=512)
    assert gate.judge("numpy", gate.limits(sequences), sequences, found).passed
    assert not any(control.passed for control in gate.negative_controls(built, sequences))
    built.engine.close()


def test_outside_a_checkout_it_says_what_it_leaves_out(tmp_path):
    command = [sys.executable, "-m", "openinfer.cli", "selftest", "--budget", "0"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "not run without --model: model_gates, model_serve" in done.stdout
    assert "not run outside a checkout of the project: kernels, reference" in done.stdout
    assert done.stdout.splitlines()[-1] == "not run within --budget 0: device, ops, packed"
    assert done.returncode == 1


def test_stages_of_a_model_need_one(tmp_path):
    command = [sys.executable, "-m", "openinfer.cli", "selftest", "--only", "model_gates"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "need --model DIR" in done.stderr


def test_products_of_the_wide_model_go_to_clusters() -> None:
    wide, target = selftest_packed.WIDE, dataclasses.replace(H200, nvrtc=True)
    hidden, heads = wide["hidden_size"], wide["num_attention_heads"] * wide["head_dim"]
    rows = heads + 2 * wide["num_key_value_heads"] * wide["head_dim"]
    inter = wide["intermediate_size"]
    shapes = {"norm_linear": [(rows, hidden)], "linear_add": [(hidden, heads), (hidden, inter)]}
    shapes["gate_up_silu"] = [(2 * inter, hidden)]
    for op, weights in shapes.items():
        for n, k in weights:
            for tokens in (2, 8, 64, 128):
                assert cluster_choice(target, op, tokens, n, k, codes=True) is not None
            assert choose(target, op, 8, n, k).kind == "cluster"


@pytest.mark.slow
@pytest.mark.parametrize("name", selftest_packed.FORMATS)
def test_each_packed_format_passes_and_its_controls_fail(name: str, tmp_path: Path) -> None:
    verdicts, controls = selftest_packed.checks(tmp_path, name, "cpu")
    assert [str(one) for one in verdicts if not one.passed] == []
    assert [str(one) for one in controls if one.passed] == []
    assert any("scales" in one.path for one in controls) == (
        selftest_packed.FORMATS[name].quantization is not None
    )


@pytest.mark.slow
def test_adapters_pass_and_swapped_ones_fail(tmp_path: Path) -> None:
    (right,), (wrong,) = selftest_packed.adapters(tmp_path, "cpu")
    assert right.passed
    assert not wrong.passed


def test_the_reason_of_a_failure_comes_last(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(selftest, "_stage", lambda *_: {"ok": False, "why": "no driver", "seconds": 0.1})
    assert selftest.main(["--budget", "6", "--out", str(tmp_path)]) == 1
    *_, late, failed = capsys.readouterr().out.splitlines()
    assert late == "not run within --budget 6: ops, packed"
    assert failed == "FAILED device: no driver"
