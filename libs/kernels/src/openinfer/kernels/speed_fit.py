"""The three speeds of a GPU that predict measured steps best. It needs no GPU."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from openinfer.kernels.op import Workload
from openinfer.kernels.packs.null import Call
from openinfer.kernels.target import Speed

ROUNDS = 50
SHARE = 0.01
"""A speed is fitted where at least one step spends this part of its time on it."""

Array = np.ndarray[Any, Any]


class MeasuredStep(NamedTuple):
    """Seconds that one or several steps took together, and each step's calls with its workload."""

    parts: Sequence[tuple[Sequence[Call], Workload]]
    seconds: float


class _Ops(NamedTuple):
    """The ops of a measured step: bytes, FLOPs and times of each; kernels of all."""

    bytes: Array
    flops: Array
    times: Array
    kernels: int
    seconds: float

    @classmethod
    def of(cls, step: MeasuredStep) -> _Ops:
        calls = [(call, call.cost(workload)) for calls, workload in step.parts for call in calls]
        columns = ((cost.bytes, cost.flops, call.times) for call, cost in calls)
        size, flops, times = np.array(list(columns), float).reshape(-1, 3).T
        return cls(size, flops, times, sum(c.times * len(c.commands) for c, _ in calls), step.seconds)

    def columns(self, speed: Speed) -> tuple[float, float, float]:
        """Bytes of the ops that wait for memory, FLOPs of the others, and kernels."""
        memory = self.bytes / speed.bytes_per_s >= self.flops / speed.flops_per_s
        weights = self.times
        return (
            float((weights * self.bytes)[memory].sum()),
            float((weights * self.flops)[~memory].sum()),
            self.kernels,
        )


def fit_speed(steps: Iterable[MeasuredStep], first: Speed) -> Speed:
    """The speeds with the least squares of relative errors. first: where to begin; a speed that no step depends on
    keeps this value. Raises ValueError without steps, or with one that took no time."""
    ops = [_Ops.of(step) for step in steps]
    if not ops or any(one.seconds <= 0 for one in ops):
        raise ValueError(f"speeds are fitted to steps of positive seconds; {len(ops)} steps were given")
    best, least = first, _error(ops, first)
    speed = first
    for _ in range(ROUNDS):
        speed = _solved(ops, speed)
        error = _error(ops, speed)
        if error >= least * (1 - 1e-9):
            break
        best, least = speed, error
    return best


def errors(steps: Iterable[MeasuredStep], speed: Speed) -> list[float]:
    """The relative error of the predicted time of each step."""
    return [_relative(_Ops.of(step), speed) for step in steps]


def _solved(ops: Sequence[_Ops], speed: Speed) -> Speed:
    """The least squares where each op waits for what it waits for at `speed`: the time is then linear in seconds a
    byte, a FLOP and a kernel."""
    old = np.array([1 / speed.bytes_per_s, 1 / speed.flops_per_s, speed.kernel_s])
    matrix = np.array([one.columns(speed) for one in ops]) / np.array([[one.seconds] for one in ops])
    fitted = (matrix * old).max(0) > SHARE
    target = 1 - matrix[:, ~fitted] @ old[~fitted]
    scale = old[fitted]
    found, *_ = np.linalg.lstsq(matrix[:, fitted] * scale, target, rcond=None)
    new = old.copy()
    new[fitted] = np.clip(found, 0.1, 10.0) * scale  # one round changes no speed by more than a factor of ten
    return Speed(1 / float(new[0]), 1 / float(new[1]), float(new[2]))


def _relative(one: _Ops, speed: Speed) -> float:
    size, flops, kernels = one.columns(speed)
    return (size / speed.bytes_per_s + flops / speed.flops_per_s + kernels * speed.kernel_s) / one.seconds - 1


def _error(ops: Sequence[_Ops], speed: Speed) -> float:
    return sum(_relative(one, speed) ** 2 for one in ops)
