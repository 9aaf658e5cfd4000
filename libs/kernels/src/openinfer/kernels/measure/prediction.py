"""How long a step should take: from what its ops cost and how fast the GPU is known to be.

    seconds = sum over ops of max(bytes / bytes_per_s, FLOPs / flops_per_s) + kernels * kernel_s

The three speeds are fitted to measured steps, or to the measured calls of one op (`Figures.speed`). So they are the
speeds of our kernels, not the limits of the GPU.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from openinfer.kernels.measure.speeds import GPUS, Figures, Speed
from openinfer.kernels.op.op import Cost, Workload
from openinfer.kernels.op.target import Target
from openinfer.kernels.packs.null import Call

log = logging.getLogger("openinfer.kernels")

Shape = TypeVar("Shape", bound=tuple[int, ...])

_FAR = 1 << 20  # tokens and pairs, for the slope of a cost
_TRIES = ((1000, 0), (0, 1000), (1 << 15, 1 << 22), (1 << 22, 1 << 30))  # a cost is a line if these are on it


class _Varying(NamedTuple):
    """The cost of an op that depends on the rows, the cached tokens or the pairs of query and key.

    It has the cost of one row without tokens and pairs, and the cost that another row, a token and a pair add.
    `times`: calls of the op. `speed`: of the op."""

    times: int
    speed: Speed
    none: Cost
    row: tuple[float, float]
    token: tuple[float, float]
    pair: tuple[float, float]

    def cost(self, rows: int, kv_tokens: int, qk_pairs: int) -> tuple[float, float]:
        more = rows - 1
        size = self.none.bytes + more * self.row[0] + kv_tokens * self.token[0] + qk_pairs * self.pair[0]
        flops = self.none.flops + more * self.row[1] + kv_tokens * self.token[1] + qk_pairs * self.pair[1]
        return size, flops


class Prediction(NamedTuple):
    """Seconds of a recorded step or segment of `tokens` tokens and `rows` rows, for any workload in it. Costs that are
    lines are evaluated as such, others (`bent`) by the op at every question."""

    tokens: int
    rows: int
    fixed_s: float
    varying: tuple[_Varying, ...]
    bent: tuple[tuple[Call, Speed], ...]

    @classmethod
    def of(
        cls, calls: Iterable[Call], tokens: int, rows: int, figures: Figures, ranks: int = 1
    ) -> "Prediction":
        """The prediction for the calls of a step that `ranks` GPUs share."""
        fixed, varying, bent = 0.0, [], []
        for call in calls:
            speed = _speed(call, figures)
            line = _line(call, tokens, rows, speed)
            fixed += call.times * (speed.kernel_s + _link_s(call, line.none, figures, ranks))
            if not _is_line(call, line, tokens, rows):
                bent.append((call, speed))
            elif not any((*line.row, *line.token, *line.pair)):
                fixed += call.times * line.none.floor_s(speed.bytes_per_s, speed.flops_per_s)
            else:
                varying.append(line)
        return cls(tokens, rows, fixed, tuple(varying), tuple(bent))

    def seconds(self, kv_tokens: int, qk_pairs: int, rows: int | None = None) -> float:
        """Seconds with this many cached tokens to read and pairs to score, as in Workload. rows: the sequences of the
        step, where they are fewer than it was recorded for: programs of padding rows end at once."""
        rows = self.rows if rows is None else rows
        total = self.fixed_s
        for line in self.varying:
            size, flops = line.cost(rows, kv_tokens, qk_pairs)
            memory, compute = size / line.speed.bytes_per_s, flops / line.speed.flops_per_s
            total += line.times * (memory if memory > compute else compute)
        if not self.bent:
            return total
        workload = Workload(self.tokens, rows, kv_tokens, qk_pairs)
        for call, speed in self.bent:
            total += call.times * call.cost(workload).floor_s(speed.bytes_per_s, speed.flops_per_s)
        return total


class Parts(NamedTuple):
    """Predicted seconds of a step by what its ops wait for.

    `memory_s`: ops whose bytes take longer than their FLOPs. `compute_s`: ops whose FLOPs take longer. `kernels_s`:
    the time of a kernel besides, summed. `link_s`: what collectives of several GPUs take besides."""

    memory_s: float
    compute_s: float
    kernels_s: float
    link_s: float

    @property
    def names(self) -> dict[str, float]:
        """The seconds by the name of what binds."""
        return dict(zip(("bandwidth", "tensor cores", "launches", "links"), self, strict=True))

    @classmethod
    def of(cls, calls: Iterable[Call], workload: Workload, figures: Figures, ranks: int = 1) -> "Parts":
        """The parts of a step of these calls. Their sum is Prediction.seconds of the workload. ranks: the GPUs that
        share the step."""
        memory_s, compute_s, kernels_s, link_s = 0.0, 0.0, 0.0, 0.0
        for call in calls:
            cost = call.cost(workload)
            speed = _speed(call, figures)
            memory, compute = cost.bytes / speed.bytes_per_s, cost.flops / speed.flops_per_s
            launches = min(speed.kernel_s, len(call.commands) * figures.fitted.kernel_s)
            # Of an op with a line: work that grows with neither bytes nor FLOPs.
            rest = speed.kernel_s - launches
            if memory >= compute:
                memory_s += call.times * (memory + rest)
            else:
                compute_s += call.times * (compute + rest)
            kernels_s += call.times * launches
            link_s += call.times * _link_s(call, cost, figures, ranks)
        return cls(memory_s, compute_s, kernels_s, link_s)


def predictions(
    steps: Mapping[Shape, Sequence[Call]], target: Target | None, ranks: int = 1
) -> dict[Shape, Prediction]:
    """Predictions of steps by their shapes (tokens, rows, ...); `steps` has the calls of all their segments, which
    `ranks` GPUs share.

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
    return {shape: Prediction.of(calls, shape[0], shape[1], figures, ranks) for shape, calls in steps.items()}


def _speed(call: Call, figures: Figures) -> Speed:
    """The speed of a call. Kernels of a fork's second branch start while others run."""
    speed = figures.speed(call.kind, call.tokens, len(call.commands))
    return speed._replace(kernel_s=0.0) if call.branch == 2 else speed


def _link_s(call: Call, cost: Cost, figures: Figures, ranks: int) -> float:
    """Seconds that a call's bytes take to the other GPUs; 0 for a call that sends none.

    Without a line of its own, one of the call's kernels is the collective. Lines of ops were measured without it."""
    if not cost.link:
        return 0.0
    link = figures.link(ranks)
    counted = 0.0 if call.op.name in figures.ops else figures.fitted.kernel_s
    return max(0.0, link.call_s - counted) + cost.link / link.bytes_per_s


def _line(call: Call, tokens: int, rows: int, speed: Speed) -> _Varying:
    """The cost as a line through four places."""
    far = ((1, 0, 0), (rows, 0, 0), (1, _FAR, 0), (1, 0, _FAR))
    none, *others = (call.cost(Workload(tokens, *sizes)) for sizes in far)
    slopes = (_slope(none, *one) for one in zip(others, (max(1, rows - 1), _FAR, _FAR), strict=True))
    return _Varying(call.times, speed, none, *slopes)


def _slope(none: Cost, far: Cost, steps: int) -> tuple[float, float]:
    return (far.bytes - none.bytes) / steps, (far.flops - none.flops) / steps


def _is_line(call: Call, line: _Varying, tokens: int, rows: int) -> bool:
    """Whether the cost is that line at other places, but for rounding."""
    for some in {rows, (rows + 1) // 2}:
        for kv_tokens, qk_pairs in _TRIES:
            cost = call.cost(Workload(tokens, some, kv_tokens, qk_pairs))
            size, flops = line.cost(some, kv_tokens, qk_pairs)
            if abs(cost.bytes - size) > 1 + 1e-6 * size or abs(cost.flops - flops) > 1 + 1e-6 * flops:
                return False
    return True
