"""How long a step should take: from what its ops cost and how fast the GPU is known to be.

    seconds = sum over ops of max(bytes / bytes_per_s, FLOPs / flops_per_s) + kernels * kernel_s

The three speeds are fitted to measured steps, so they are what our kernels reach, not what the GPU could.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from openinfer.kernels.op import Cost, Workload
from openinfer.kernels.packs.null import Call

_FAR = 1 << 20  # tokens, for the slope of a cost


class Speed(NamedTuple):
    """Of a GPU with these kernels: memory and matrix products while they run, and what a kernel takes besides."""

    bytes_per_s: float
    flops_per_s: float
    kernel_s: float


SPEEDS = {"NVIDIA H200": Speed(4.10e12, 547e12, 5.0e-6)}
"""By the GPU's name. H200: least squares over 29 decode, prompt and mixed steps of Qwen3-4B, which it meets within 21 %
(10 % for most)."""


class _Varying(NamedTuple):
    """The cost of an op that depends on the cached tokens and the pairs of query and key: without any, what a token
    adds, what a pair adds. `times`: calls of it."""

    times: int
    none: Cost
    token: tuple[float, float]
    pair: tuple[float, float]


class Prediction(NamedTuple):
    """Seconds of a recorded step or segment, for any workload in it."""

    fixed_s: float
    speed: Speed
    varying: tuple[_Varying, ...]

    @classmethod
    def of(cls, calls: Iterable[tuple[Call, int]], tokens: int, rows: int, speed: Speed) -> Prediction:
        """Of calls, each with how often it comes, in a step of so many tokens and rows."""
        fixed, varying = 0.0, []
        for call, times in calls:
            fixed += times * len(call.commands) * speed.kernel_s
            none, token, pair = (
                call.cost(Workload(tokens, rows, *sizes)) for sizes in ((0, 0), (_FAR, 0), (0, _FAR))
            )
            if none == token == pair:
                fixed += times * none.floor_s(speed.bytes_per_s, speed.flops_per_s)
            else:
                varying.append(_Varying(times, none, _slope(none, token), _slope(none, pair)))
        return cls(fixed, speed, tuple(varying))

    def seconds(self, kv_tokens: int, qk_pairs: int) -> float:
        """With so many cached tokens to read and pairs to score, as in Workload."""
        total = self.fixed_s
        for v in self.varying:
            size = v.none.bytes + kv_tokens * v.token[0] + qk_pairs * v.pair[0]
            flops = v.none.flops + kv_tokens * v.token[1] + qk_pairs * v.pair[1]
            total += v.times * max(size / self.speed.bytes_per_s, flops / self.speed.flops_per_s)
        return total


def _slope(none: Cost, far: Cost) -> tuple[float, float]:
    return (far.bytes - none.bytes) / _FAR, (far.flops - none.flops) / _FAR
