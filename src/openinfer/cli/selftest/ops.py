"""Every op of the installed libraries against its numpy reference, on the GPU, in the cases of `bench kernels`.

This needs no checkout and no torch: cases come from the modules of ops, the reference is a part of each op.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from openinfer.cli.bench.kernels import installed_cases
from openinfer.kernels import NullPack, Op
from openinfer.kernels.authoring import leaves, mapped
from openinfer.kernels.errors import KernelsError
from openinfer.kernels.measure.tuner import DeviceMeter
from openinfer.kernels.op.cases import Memory, OpCase
from openinfer.kernels.testing import error, run_reference
from openinfer.tensor import Device, Tensor

Array = np.ndarray[Any, Any]
Run = Callable[[Op[Any], Any], None]

TOLERANCE = 1e-2
"""Relative Frobenius error of floats: a few last bits of bf16."""
OTHER_INTEGERS = 1e-3
"""The share of integers that may differ, or one of them: a near tie decides otherwise with another order of sums."""
MOST_FLOPS, MOST_BYTES = 1e10, 2e8
"""Cases that take more are left out; numpy needs seconds for each."""


class Agreement(NamedTuple):
    """A case and its worst output. `off`: relative error, or the share of integers that differ. problem: "" if fine."""

    op: str
    case: str
    output: str
    off: float
    problem: str


def check_all(meter: DeviceMeter) -> Iterator[Agreement]:
    """An Agreement for each case that the host can compute in about a second. All kernels are compiled first."""
    plan = NullPack(meter.target)
    for case in _small(Memory(Device("null"), poisoned=True)):
        case.op(plan, **case.args[0])
    meter.store.prepare(plan.specs())

    def run(op: Op[Any], args: Any) -> None:
        meter.pack.submit(op.name, list(op.plan(meter.target, args)))
        meter.stream.synchronize()

    for case in _small(Memory(meter.device, meter.stream, poisoned=True)):
        yield check_case(case, run)


def _small(memory: Memory) -> Iterator[OpCase]:
    for _, case in installed_cases(memory, []):
        cost = case.op.cost(case.workload, case.calls[0])
        if cost.flops <= MOST_FLOPS and cost.bytes <= MOST_BYTES:
            yield case


def check_case(case: OpCase, run: Run) -> Agreement:
    """Run a case by `run` and by its reference on copies. Of each tensor that the reference changed, the elements that
    either of the two wrote are compared."""
    args = case.args[0]
    tensors = dict(leaves(args, Tensor))
    before = {name: _array(tensor) for name, tensor in tensors.items()}
    want = run_reference(case.op, mapped(args, Tensor, _array))
    try:
        run(case.op, case.op.args(**args))
    except KernelsError as failure:
        return Agreement(case.op.name, case.name, "", float("inf"), str(failure))
    found = []
    for name, array in want.items():
        got, old = _array(tensors[name]), before[name]
        written = _bits(array) != _bits(old)
        if written.any():
            written |= _bits(got) != _bits(old)
            found.append((name, *_compared(got[written], array[written])))
    if not found:
        return Agreement(case.op.name, case.name, "", 0.0, "the reference writes nothing")
    name, off, allowed = max(found, key=lambda one: one[1] / one[2])
    problem = "" if off <= allowed else f"{name} is off by {off:.1e}, allowed {allowed:.1e}"
    return Agreement(case.op.name, case.name, name, off, problem)


def _compared(got: Array, want: Array) -> tuple[float, float]:
    """How far an output is from the reference's, and how far it may be."""
    if np.issubdtype(want.dtype, np.integer):
        return float((got != want).mean()), max(OTHER_INTEGERS, 1 / want.size)
    return error(got, want), TOLERANCE


def _bits(array: Array) -> Array:
    return array.view(f"u{array.itemsize}")


def _array(tensor: Tensor) -> Array:
    """A copy on the host with the tensor's strides."""
    pairs = zip(tensor.shape, tensor.strides, strict=True)
    span = 1 + sum((n - 1) * stride for n, stride in pairs)
    flat = Tensor(tensor.ptr, (span,), tensor.dtype, tensor.device, (1,), tensor.owner).numpy().copy()
    strides = [stride * tensor.itemsize for stride in tensor.strides]
    return np.lib.stride_tricks.as_strided(flat, tensor.shape, strides)
