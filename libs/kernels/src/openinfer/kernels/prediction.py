"""How long a step should take: from what its ops cost and how fast the GPU is known to be.

    seconds = sum over ops of max(bytes / bytes_per_s, FLOPs / flops_per_s) + kernels * kernel_s

The three speeds are fitted to measured steps. So they are the speeds of our kernels, not the limits of the GPU.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from openinfer.kernels.op import Cost, Workload
from openinfer.kernels.packs.null import Call
from openinfer.kernels.target import GPUS, Speed, Target

log = logging.getLogger("openinfer.kernels")

Shape = TypeVar("Shape", bound=tuple[int, int, int])

_FAR = 1 << 20  # tokens and pairs, for the slope of a cost
_TRIES = ((1000, 0), (0, 1000), (1 << 15, 1 << 22))  # where a cost must be on the line to be taken for one


class _Varying(NamedTuple):
    """The cost of an op that depends on the cached tokens and the pairs of query and key.

    It has the cost without any of these, the cost that a token adds, and the cost that a pair adds. `times`: calls of
    the op."""

    times: int
    none: Cost
    token: tuple[float, float]
    pair: tuple[float, float]

    def floor_s(self, kv_tokens: int, qk_pairs: int, speed: Speed) -> float:
        size = self.none.bytes + kv_tokens * self.token[0] + qk_pairs * self.pair[0]
        flops = self.none.flops + kv_tokens * self.token[1] + qk_pairs * self.pair[1]
        return max(size / speed.bytes_per_s, flops / speed.flops_per_s)


class Prediction(NamedTuple):
    """Seconds of a recorded step or segment of `tokens` tokens and `rows` rows, for any workload in it. Costs that are
    lines are evaluated as such, others (`bent`) by the op at every question."""

    tokens: int
    rows: int
    speed: Speed
    fixed_s: float
    varying: tuple[_Varying, ...]
    bent: tuple[Call, ...]

    @classmethod
    def of(cls, calls: Iterable[Call], tokens: int, rows: int, speed: Speed) -> Prediction:
        """The prediction for the calls of a step."""
        fixed, varying, bent = 0.0, [], []
        for call in calls:
            fixed += call.times * len(call.commands) * speed.kernel_s
            none, token, pair = (
                call.cost(Workload(tokens, rows, *sizes)) for sizes in ((0, 0), (_FAR, 0), (0, _FAR))
            )
            line = _Varying(call.times, none, _slope(none, token), _slope(none, pair))
            if not _is_line(call, line, tokens, rows):
                bent.append(call)
            elif none == token == pair:
                fixed += call.times * none.floor_s(speed.bytes_per_s, speed.flops_per_s)
            else:
                varying.append(line)
        return cls(tokens, rows, speed, fixed, tuple(varying), tuple(bent))

    def seconds(self, kv_tokens: int, qk_pairs: int) -> float:
        """Seconds with this many cached tokens to read and pairs to score, as in Workload."""
        speed, workload = self.speed, Workload(self.tokens, self.rows, kv_tokens, qk_pairs)
        total = self.fixed_s
        for line in self.varying:
            total += line.times * line.floor_s(kv_tokens, qk_pairs, speed)
        for call in self.bent:
            total += call.times * call.cost(workload).floor_s(speed.bytes_per_s, speed.flops_per_s)
        return total


def predictions(steps: Mapping[Shape, Sequence[Call]], target: Target | None) -> dict[Shape, Prediction]:
    """Predictions of steps by their shapes (tokens, rows, longest row); `steps` has the calls of all their segments.

    The result is empty without a target (a CPU). It is empty too where no speeds have been fitted to the GPU or to
    batch-invariant kernels; the log then says so."""
    if target is None:
        return {}
    figures = GPUS.get(target.gpu)
    if figures is None or target.batch_invariant:
        log.info(
            "steps are not compared with predictions: no speed is known of these kernels on %s", target.gpu
        )
        return {}
    return {shape: Prediction.of(calls, shape[0], shape[1], figures.fitted) for shape, calls in steps.items()}


def _slope(none: Cost, far: Cost) -> tuple[float, float]:
    return (far.bytes - none.bytes) / _FAR, (far.flops - none.flops) / _FAR


def _is_line(call: Call, line: _Varying, tokens: int, rows: int) -> bool:
    """Whether the cost is that line at three other places, but for rounding."""
    for kv_tokens, qk_pairs in _TRIES:
        cost = call.cost(Workload(tokens, rows, kv_tokens, qk_pairs))
        size = line.none.bytes + kv_tokens * line.token[0] + qk_pairs * line.pair[0]
        flops = line.none.flops + kv_tokens * line.token[1] + qk_pairs * line.pair[1]
        if abs(cost.bytes - size) > 1 + 1e-6 * size or abs(cost.flops - flops) > 1 + 1e-6 * flops:
            return False
    return True
