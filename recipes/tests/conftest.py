"""What the tests of kernels have in common: a call in Triton's interpreter or on a GPU, beside its reference."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import pytest

from openinfer.kernels import NullPack, Op, Target
from openinfer.kernels.measure.tuner import DeviceMeter
from openinfer.kernels.op.op import mapped
from openinfer.kernels.testing import INTERPRETED, run_interpreted, run_on_gpu, run_reference
from openinfer.tensor import Tensor, TensorError

Array = np.ndarray[Any, Any]


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Of the test's own name."""
    return np.random.default_rng(list(request.node.name.encode()))


Both = Callable[..., tuple[dict[str, Array], dict[str, Array]]]


Run = Callable[[Op[Any], Mapping[str, Any]], dict[str, Array]]


@pytest.fixture(params=["interp", pytest.param("gpu", marks=pytest.mark.gpu)])
def run_both(request: pytest.FixtureRequest) -> Both:
    """run_both(op, args, target): the arrays of a call as the kernels leave them, and as the reference does."""
    meter = request.getfixturevalue("meter") if request.param == "gpu" else None

    def both(
        op: Op[Any], args: Mapping[str, Any], target: Target | None = None
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        want = run_reference(op, args)
        if meter is None:
            return run_interpreted(op, args, target or INTERPRETED), want
        if target is not None:
            pytest.skip("a target of its own is for the interpreter")
        return run_on_gpu(op, args, meter.target, meter.driver, meter.stream), want

    return both


@pytest.fixture
def interpreted() -> Run:
    """interpreted(op, args): the arrays of a call as the interpreter leaves them."""
    return run_interpreted


@pytest.fixture
def reference() -> Run:
    """reference(op, args): the arrays of a call as the reference leaves them."""
    return run_reference


@pytest.fixture
def on_gpu(meter: DeviceMeter) -> Run:
    """on_gpu(op, args): the arrays of a call as a GPU leaves them."""
    return lambda op, args: run_on_gpu(op, args, meter.target, meter.driver, meter.stream)


@pytest.fixture(scope="session")
def compile_together(meter: DeviceMeter) -> Callable[[Iterable[tuple[Op[Any], Mapping[str, Any]]]], None]:
    """compile_together(calls): what these calls, (op, args), launch on the GPU, compiled side by side."""

    def compile_all(calls: Iterable[tuple[Op[Any], Mapping[str, Any]]]) -> None:
        plan = NullPack(meter.target)
        for op, args in calls:
            op(plan, **mapped(args, np.ndarray, Tensor.from_numpy))
        meter.store.prepare(plan.specs())

    return compile_all


@pytest.fixture(scope="session")
def meter() -> DeviceMeter:
    """The GPU; skips without one."""
    try:
        return DeviceMeter()
    except TensorError as e:
        pytest.skip(f"no usable CUDA device: {e}")
