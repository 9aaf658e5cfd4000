"""What the tests of kernels have in common: a call in Triton's interpreter or on a GPU, beside its reference."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import pytest

from openinfer.kernels import CpuPack, InterpDriver, LaunchPack, NullPack, Op, Target
from openinfer.kernels.tuner import DeviceMeter
from openinfer.tensor import Tensor, TensorError

Array = np.ndarray[Any, Any]
SMALL = Target(arch=90, num_sms=4, interpreted=True)


def _like(array: Array) -> Array:
    """A copy with the strides kept; what is between the elements is 7."""
    span = 1 + sum((n - 1) * s // array.itemsize for n, s in zip(array.shape, array.strides, strict=True))
    copy = np.lib.stride_tricks.as_strided(np.full(span, 7, array.dtype), array.shape, array.strides)
    copy[...] = array
    return copy


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Of the test's own name."""
    return np.random.default_rng(list(request.node.name.encode()))


Both = Callable[..., tuple[dict[str, Array], dict[str, Array]]]


Run = Callable[[Op[Any], Mapping[str, Any]], dict[str, Array]]


@pytest.fixture(params=["interp", pytest.param("gpu", marks=pytest.mark.gpu)])
def run_both(request: pytest.FixtureRequest) -> Both:
    """run_both(op, args, target): the arrays of a call as the kernels leave them, and as the reference does."""
    run = _interpreted if request.param == "interp" else _on_device(request.getfixturevalue("meter"))

    def both(
        op: Op[Any], args: Mapping[str, Any], target: Target | None = None
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        return run(op, args, target), _reference(op, args)

    return both


@pytest.fixture
def interpreted() -> Run:
    """interpreted(op, args): the arrays of a call as the interpreter leaves them."""
    return lambda op, args: _interpreted(op, args, None)


@pytest.fixture
def reference() -> Run:
    """reference(op, args): the arrays of a call as the reference leaves them."""
    return _reference


@pytest.fixture
def on_gpu(meter: DeviceMeter) -> Run:
    """on_gpu(op, args): the arrays of a call as a GPU leaves them."""
    return lambda op, args: _on_device(meter)(op, args, None)


@pytest.fixture(scope="session")
def compile_together(meter: DeviceMeter) -> Callable[[Iterable[tuple[Op[Any], Mapping[str, Any]]]], None]:
    """compile_together(calls): what these calls, (op, args), launch on the GPU, compiled side by side."""

    def compile_all(calls: Iterable[tuple[Op[Any], Mapping[str, Any]]]) -> None:
        plan = NullPack(meter.target)
        for op, args in calls:
            plan.run(op, _copied(args)[1])
        meter.store.prepare(plan.specs())

    return compile_all


@pytest.fixture(scope="session")
def meter() -> DeviceMeter:
    """The GPU; skips without one."""
    try:
        return DeviceMeter()
    except TensorError as e:
        pytest.skip(f"no usable CUDA device: {e}")


def _interpreted(op: Op[Any], args: Mapping[str, Any], target: Target | None) -> dict[str, Array]:
    arrays, tensors = _copied(args)
    plan = NullPack(target or SMALL)
    plan.run(op, tensors)
    scratch = np.full(plan.workspace_bytes(zeroed=False) + 256, 0xFF, np.uint8)
    zeros = np.zeros(plan.workspace_bytes(zeroed=True) + 256, np.uint8)
    pack = LaunchPack(target or SMALL, InterpDriver(), Tensor.from_numpy(scratch), Tensor.from_numpy(zeros))
    pack.run(op, tensors)
    assert not zeros.any(), f"{op.name} left its zeroed scratch dirty"
    assert (scratch[-256:] == 0xFF).all(), f"{op.name} wrote past its scratch"
    return arrays


def _on_device(meter: DeviceMeter) -> Callable[..., dict[str, Array]]:
    """As `_interpreted`, on a GPU, for its own target."""

    def sent(array: Array) -> tuple[Tensor, Tensor]:
        strides = tuple(s // array.itemsize for s in array.strides)
        span = 1 + sum((n - 1) * s for n, s in zip(array.shape, strides, strict=True))
        memory = Tensor.empty((span,), array.dtype, meter.device)
        memory.copy_from(
            np.lib.stride_tricks.as_strided(array, (span,), (array.itemsize,)).copy(), meter.stream
        )
        meter.stream.synchronize()
        return memory, Tensor(memory.ptr, array.shape, memory.dtype, meter.device, strides, memory)

    def run(op: Op[Any], args: Mapping[str, Any], target: Target | None) -> dict[str, Array]:
        if target is not None:
            pytest.skip("a target of its own is for the interpreter")
        arrays, _ = _copied(args)
        memory = {k: sent(v) for k, v in arrays.items()}
        tensors = {k: memory[k][1] if k in memory else v for k, v in args.items()}
        plan = NullPack(meter.target)
        plan.run(op, tensors)
        meter.store.prepare(plan.specs())
        plain, zeroed = (plan.workspace_bytes(zeroed=z) for z in (False, True))
        scratch, zeros = (Tensor.empty((n + 256,), np.uint8, meter.device) for n in (plain, zeroed))
        scratch.copy_from(np.full(plain + 256, 0xFF, np.uint8), meter.stream)
        zeros.zero_(meter.stream)
        LaunchPack(meter.target, meter.pack.driver, scratch, zeros).run(op, tensors)
        meter.stream.synchronize()
        assert not zeros.numpy().any(), f"{op.name} left its zeroed scratch dirty"
        assert (scratch.numpy()[plain:] == 0xFF).all(), f"{op.name} wrote past its scratch"
        return {
            k: np.lib.stride_tricks.as_strided(flat.numpy(), args[k].shape, args[k].strides)
            for k, (flat, _) in memory.items()
        }

    return run


def _reference(op: Op[Any], args: Mapping[str, Any]) -> dict[str, Array]:
    """The arrays of a call as the reference leaves them."""
    arrays, tensors = _copied(args)
    CpuPack().run(op, tensors)
    return arrays


def _copied(args: Mapping[str, Any]) -> tuple[dict[str, Array], dict[str, Any]]:
    """The arrays of a call, and its arguments on these."""
    arrays = {k: _like(v) for k, v in args.items() if isinstance(v, np.ndarray)}
    return arrays, {k: Tensor.from_numpy(arrays[k]) if k in arrays else v for k, v in args.items()}
