"""Benchmarks of ops: cases are calls that the ops take, and a variant is timed if its output is right."""

import importlib
import math
import pkgutil
from dataclasses import replace

import numpy as np
import pytest

from openinfer.kernels import (
    CompileError,
    InterpDriver,
    LaunchPack,
    NullPack,
    Target,
    Workload,
    linear_add,
    ops,
)
from openinfer.kernels.measure import measure
from openinfer.kernels.op.cases import CaseRows, Memory, OpCase
from openinfer.kernels.op.op import leaves
from openinfer.kernels.testing import INTERPRETED
from openinfer.tensor import Device, Stream, Tensor

MODULES = [
    module
    for found in pkgutil.iter_modules(ops.__path__, ops.__name__ + ".")
    if hasattr(module := importlib.import_module(found.name), "cases")
]


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__.rpartition(".")[2])
def test_cases_are_calls_that_have_a_plan(module):
    found = list(module.cases(Memory(Device("null"))))
    assert len({(case.op.name, case.name) for case in found}) == len(found)
    for case in found:
        assert next(leaves(case.args[0], Tensor))
        target = Target(90, 132, cublas=True, gpu="NVIDIA H200")
        pack = NullPack(target)
        case.op(pack, **case.args[0])
        assert pack.calls[0].cost(case.workload).bytes > 0
        for name, commands in module.variants(target, case) if hasattr(module, "variants") else ():
            assert list(commands(case.calls[0])), name


def test_a_batch_has_the_fields_of_a_step():
    rows, memory = CaseRows([3, 1], [10, 40]), Memory(Device("cpu"), Stream(Device("cpu")))
    fields = {name: tensor.numpy().tolist() for name, tensor in rows.fields(memory).items()}
    assert fields == {"slots": [0, 1], "q_starts": [0, 3, 4], "seq_lens": [10, 40], "alive": [1, 1]}
    assert rows.workload == Workload(4, 2, 13 + 41, 11 + 12 + 13 + 41)
    tables, pages = rows.pages(memory, 16, 64)
    assert pages == 1 + 3
    assert sorted([*tables.numpy()[0, :1], *tables.numpy()[1, :3]]) == [0, 1, 2, 3]
    positions = {name: tensor.numpy().tolist() for name, tensor in rows.positions(memory).items()}
    assert positions == {"positions": [10, 11, 12, 40], "token_slots": [0, 0, 0, 1]}


class Meter:
    """The interpreter in place of a GPU; a call takes a millisecond."""

    def __init__(self):
        self.target, self.store, self.stream = INTERPRETED, self, Stream(Device("cpu"))
        scratch, zeroed = (Tensor.from_numpy(np.zeros(1 << 16, np.uint8)) for _ in range(2))
        self.pack, self.calls = LaunchPack(INTERPRETED, InterpDriver(), scratch, zeroed), 0

    def prepare(self, specs):
        """Nothing is compiled."""

    def seconds(self, calls):
        for call in calls:
            call()
        self.calls += len(calls)
        return 1e-3


@pytest.mark.parametrize("unwritten", [0, 1])
def test_a_variant_is_timed_if_its_output_is_the_same(unwritten):
    """Also where a row of the output is NaN in all of them, as a part of a cache may be."""
    memory = Memory(Device("cpu"), Stream(Device("cpu")))
    args = {
        "x": memory.normal(3, 32),
        "h": memory.normal(3, 64),
        "weight": memory.normal(32, 64),
    }
    args["x"].numpy()[:unwritten] = np.nan
    case = OpCase("small", linear_add, [args, dict(args)], Workload(3, 3, 0, 0))

    def same(args):
        return linear_add.plan(INTERPRETED, args)

    def broken(args):
        raise CompileError("no such tile")

    wrong = memory.normal(32, 64)
    meter = Meter()
    variants = [
        ("same", same),
        ("wrong", lambda args: linear_add.plan(INTERPRETED, replace(args, weight=wrong))),
        ("broken", broken),
    ]
    found = list(measure(meter, case, variants))
    assert [m.variant for m in found] == ["chosen", "same", "wrong", "broken"]
    assert [m.seconds for m in found[:2]] == [1e-3, 1e-3]
    assert meter.calls == 4  # two copies, twice
    assert math.isnan(found[2].seconds)
    assert "x differs by" in found[2].problem
    assert found[3].problem == "no such tile"


def test_copies_are_as_many_as_a_cache_takes(monkeypatch):
    monkeypatch.setattr("openinfer.kernels.op.cases.COLD_BYTES", 10 * 64 * 2)
    memory = Memory(Device("cpu"), Stream(Device("cpu")))
    args = {"x": memory.normal(4), "weight": memory.normal(64)}
    copies = memory.copies(args, "weight")
    assert len(copies) == 10
    assert len({copy["weight"].ptr for copy in copies}) == 10
    assert len({copy["x"].ptr for copy in copies}) == 1
    for copy in copies:
        np.testing.assert_array_equal(copy["weight"].numpy(), args["weight"].numpy())
    assert replace(memory, device=Device("null")).copies(args, "weight")[1:] == []
