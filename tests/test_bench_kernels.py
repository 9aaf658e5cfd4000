"""`openinfer bench kernels`: what it lists, what it refuses, and what it writes of a measurement."""

from __future__ import annotations

import math

import pytest

from openinfer.cli.bench import kernels as bench_kernels
from openinfer.cli.explain.ledger import Machine
from openinfer.kernels import NullPack, Target
from openinfer.kernels.measure import Measurement
from openinfer.kernels.op.cases import Memory
from openinfer.tensor import Device


def test_cases_of_ops_are_listed_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_kernels.main(["attend", "hc_pre", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "attend: Qwen3-4B decode 8 x 4096" in lines
    assert {line.partition(":")[0] for line in lines} == {"attend", "hc_pre"}
    with pytest.raises(SystemExit):
        bench_kernels.main(["no_such_op"])
    assert "no cases for no_such_op; ops with cases: add_lora, attend, compress," in capsys.readouterr().err


def test_every_case_of_every_package_has_a_plan() -> None:
    target = Target(90, 132, cublas=True, gpu="NVIDIA H200")
    for module, case in bench_kernels.installed_cases(Memory(Device("null")), []):
        pack = NullPack(target)
        case.op(pack, **case.args[0])
        assert pack.calls[0].commands, case.name
        for name, commands in module.variants(target, case) if hasattr(module, "variants") else ():
            assert list(commands(case.calls[0])), (case.name, name)


def test_without_a_gpu_there_is_a_line_and_no_figure(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        Device("cuda", 0).activate()
    except Exception:
        assert bench_kernels.main(["route"]) == 1
        assert "openinfer bench kernels: error:" in capsys.readouterr().err


def test_an_entry_has_its_floor_and_a_failed_one_its_reason() -> None:
    _, case = next(iter(bench_kernels.installed_cases(Memory(Device("null")), ["route"])))
    limits = Machine(1e12, 100e12)
    good = bench_kernels.kernel_entry(case, Measurement("chosen", 2e-6), limits)
    assert good["of_floor"] == pytest.approx(good["floor_us"] / 2)
    assert "2.00 us" in bench_kernels.kernel_line(good)
    bad = bench_kernels.kernel_entry(
        case, Measurement("16 places", math.nan, "out differs by 1.0e+00"), limits
    )
    assert (bad["us"], bad["of_floor"]) == (None, None)
    assert bench_kernels.kernel_line(bad).endswith("out differs by 1.0e+00")
