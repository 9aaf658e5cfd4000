"""The speeds of a GPU that predict measured steps, or measured calls of an op, best. It needs no GPU."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from openinfer.kernels.measure.speeds import Figures, Lines, Speed
from openinfer.kernels.op.op import Cost, Workload
from openinfer.kernels.packs.null import Call

ROUNDS = 50
SHARE = 0.01
"""A speed is fitted where at least one step spends this part of its time on it."""

PARTS = np.geomspace(0.01, 4.0, 120)
"""A line of an op has one of these parts of the speed of all ops."""
SHARES = np.linspace(0.02, 1.0, 100)
"""The time of a call besides is one of these shares of the shortest call."""
PULL = 1e-3
"""How much a line is pulled to the speed of all ops. It decides where one call of an op was measured."""

Array = np.ndarray[Any, Any]


class MeasuredStep(NamedTuple):
    """Seconds that one or several steps took together, and each step's calls with its workload."""

    parts: Sequence[tuple[Sequence[Call], Workload]]
    seconds: float


class MeasuredCalls(NamedTuple):
    """Seconds that `calls` calls of an op took together, each for so many `Call.tokens`, and their cost in sum."""

    tokens: float
    calls: int
    cost: Cost
    seconds: float


class _Ops(NamedTuple):
    """The ops of a measured step: bytes, FLOPs and times of each; kernels of all. An op with a line of its own counts
    as the bytes, FLOPs and kernels that take as long at the speed of all ops."""

    bytes: Array
    flops: Array
    times: Array
    kernels: float
    seconds: float

    @classmethod
    def of(cls, step: MeasuredStep, figures: Figures) -> "_Ops":
        columns, kernels, usual = [], 0.0, figures.fitted
        for calls, workload in step.parts:
            for call in calls:
                cost = call.cost(workload)
                speed = figures.speed(call.kind, call.tokens, len(call.commands))
                size = cost.bytes * usual.bytes_per_s / speed.bytes_per_s
                columns.append((size, cost.flops * usual.flops_per_s / speed.flops_per_s, call.times))
                kernels += call.times * speed.kernel_s / usual.kernel_s
        size_, flops, times = np.array(columns, float).reshape(-1, 3).T
        return cls(size_, flops, times, kernels, step.seconds)

    def columns(self, speed: Speed) -> tuple[float, float, float]:
        """Bytes of the ops that wait for memory, FLOPs of the others, and kernels."""
        memory = self.bytes / speed.bytes_per_s >= self.flops / speed.flops_per_s
        moved, computed = (self.times * self.bytes)[memory].sum(), (self.times * self.flops)[~memory].sum()
        return float(moved), float(computed), self.kernels


def fit_speed(steps: Iterable[MeasuredStep], figures: Figures, first: Speed | None = None) -> Speed:
    """The speed of all ops with the least squares of relative errors; lines of single ops move with it
    (`Figures.at`). first: where to begin, by default as the figures are; a speed that no step depends on keeps this
    value. Raises ValueError without steps, or with one that took no time."""
    ops = [_Ops.of(step, figures) for step in steps]
    if not ops or any(one.seconds <= 0 for one in ops):
        raise ValueError(f"speeds are fitted to steps of positive seconds; {len(ops)} steps were given")
    first = figures.fitted if first is None else first
    best, least = first, _error(ops, first)
    speed = first
    for _ in range(ROUNDS):
        speed = _solved(ops, speed)
        error = _error(ops, speed)
        if error >= least * (1 - 1e-9):
            break
        best, least = speed, error
    return best


def fit_lines(calls: Sequence[MeasuredCalls], usual: Speed) -> Lines:
    """The lines of one op, one for each number of tokens: the time of a call, and a part of the speed of all ops. They
    have the least squares of the logarithms, weighted by the seconds. Raises ValueError for calls that took no time."""
    if not calls or any(one.seconds <= 0 for one in calls):
        raise ValueError(f"lines are fitted to calls of positive seconds; {len(calls)} were given")
    sizes = sorted({one.tokens for one in calls})
    alike = ([one for one in calls if one.tokens == tokens] for tokens in sizes)
    return tuple((tokens, _fit_line(own, usual)) for tokens, own in zip(sizes, alike, strict=True))


def _fit_line(calls: Sequence[MeasuredCalls], usual: Speed) -> Speed:
    kernel_s = SHARES * min(one.seconds / one.calls for one in calls)
    total = np.zeros((len(SHARES), 1)) + PULL * np.log(PARTS) ** 2
    for one in calls:
        floor = one.cost.floor_s(usual.bytes_per_s, usual.flops_per_s) / PARTS
        weight = one.seconds / sum(each.seconds for each in calls)
        total = total + weight * np.log((one.calls * kernel_s[:, None] + floor) / one.seconds) ** 2
    at, part = np.unravel_index(total.argmin(), total.shape)
    speed = float(PARTS[part])
    return Speed(speed * usual.bytes_per_s, speed * usual.flops_per_s, float(kernel_s[at]))


def errors(steps: Iterable[MeasuredStep], figures: Figures) -> list[float]:
    """The relative error of the predicted time of each step."""
    return [_relative(_Ops.of(step, figures), figures.fitted) for step in steps]


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
