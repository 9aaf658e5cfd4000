"""HostPack: a step's calls are noted once and repeated, each with its time."""

import numpy as np
import pytest

from openinfer.graph import StepTrace
from openinfer.graph.runner import HostPack
from openinfer.kernels import ContractError, CpuPack, linear_add
from openinfer.tensor import Tensor


class Step:
    """x [2, 16] += h @ weight^T, twice. calls: how often the Python of the step has run."""

    def __init__(self, pack):
        self.pack, self.calls = pack, 0
        self.x, self.h = (Tensor.from_numpy(np.ones((2, 16), np.float32)) for _ in range(2))
        self.weight = Tensor.from_numpy(np.eye(16, dtype=np.float32))

    def __call__(self):
        self.calls += 1
        for _ in range(2):
            linear_add(self.pack, x=self.x, h=self.h[:2], weight=self.weight)


@pytest.mark.parametrize("repeats", [True, False])
def test_a_step_gives_the_same_whether_its_calls_are_repeated_or_not(repeats):
    pack = HostPack(CpuPack(), repeats=repeats)
    step = Step(pack)
    recorded = pack.recorded(step)
    assert step.calls == 0
    for n in range(1, 4):
        step.h.numpy()[...] = n  # the calls read what is there when they are made
        recorded()
    assert step.calls == (1 if repeats else 3)
    np.testing.assert_array_equal(step.x.numpy(), 1 + 2 * (1 + 2 + 3))
    step()  # without the record
    np.testing.assert_array_equal(step.x.numpy(), 13 + 2 * 3)


def test_each_call_is_timed(monkeypatch):
    trace, seen = StepTrace(), []
    monkeypatch.setattr(StepTrace, "op", lambda self, name, start, end: seen.append((name, end >= start)))
    pack = HostPack(CpuPack(), trace)
    recorded = pack.recorded(Step(pack))
    for _ in range(3):
        recorded()
    assert seen == [("linear_add", True)] * 6


def test_a_step_that_fails_is_not_repeated():
    pack = HostPack(CpuPack())
    step = Step(pack)
    recorded, whole = pack.recorded(step), step.weight
    step.weight = step.weight[:, :1]
    with pytest.raises(ContractError):
        recorded()
    step.weight = whole
    recorded()
    recorded()
    assert step.calls == 2
    np.testing.assert_array_equal(step.x.numpy(), 1 + 2 * 2)
