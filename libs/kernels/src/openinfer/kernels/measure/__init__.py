"""How long kernels, calls and steps take, measured and predicted. Here: the cases of an op on a GPU."""

import functools
import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from openinfer.kernels.errors import KernelsError
from openinfer.kernels.measure.tuner import DeviceMeter
from openinfer.kernels.op.cases import Array, Commands, OpCase
from openinfer.kernels.op.launch import Command, Launch
from openinfer.kernels.op.op import leaves
from openinfer.tensor import Tensor

TOLERANCE = 1e-2
"""The relative error of a variant's output against that of the launches as chosen."""


class Measurement(NamedTuple):
    """The measurement of one variant of a case: seconds a call, or the problem that prevented it."""

    variant: str
    seconds: float
    problem: str = ""


def measure(
    meter: DeviceMeter, case: OpCase, variants: Iterable[tuple[str, Commands]] = ()
) -> Iterator[Measurement]:
    """Time the launches that the op chooses, then those of each variant with the same output."""
    target, pack = meter.target, meter.pack
    name, output = next(leaves(case.args[0], Tensor))
    before = output.numpy().copy()

    def chosen(args: Any) -> Iterable[Command]:
        return case.op.plan(target, args)

    want: Array | None = None
    for variant, commands in (("chosen", chosen), *variants):
        try:
            made = [list(commands(args)) for args in case.calls]
            meter.store.prepare([c.spec for c in made[0] if isinstance(c, Launch)])
            output.copy_from(before, meter.stream)
            pack.submit(case.op.name, made[0])
            meter.stream.synchronize()
        except KernelsError as error:
            yield Measurement(variant, math.nan, str(error))
            continue
        got = output.numpy().copy()
        want = got if want is None else want
        error_of = _error(got, want)
        if not error_of <= TOLERANCE:
            yield Measurement(variant, math.nan, f"{name} differs by {error_of:.1e}")
            continue
        calls = [functools.partial(pack.submit, case.op.name, one) for one in made]
        yield Measurement(variant, meter.seconds(calls))


def _error(got: Array, want: Array) -> float:
    """The relative error, NaN if only one has a NaN somewhere. A part of a cache that no call writes may be NaN."""
    a, b = got.astype(np.float32), want.astype(np.float32)
    same = np.isnan(a) & np.isnan(b)
    size = np.linalg.norm(np.where(same, 0, b))
    return float(np.linalg.norm(np.where(same, 0, a - b)) / max(float(size), 1e-30))
