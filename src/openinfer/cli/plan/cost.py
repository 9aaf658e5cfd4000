"""The predicted time of a server's steps, for the scheduler's simulator: a recorded step's ops on a known GPU."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from openinfer.graph import Buckets, Shape
from openinfer.kernels import Call, Figures, Parts, Prediction, Workload
from openinfer.scheduler.sim import StepWork

PROMPT_STEP_S = 0.4e-3
"""Host seconds that a step with a prompt takes besides its time on the device, where nothing hides it. It is the median
of wall less device time of `bench step`'s prompts."""
ARRIVAL_S = 1.5e-3
"""Seconds from a client to the engine's queue and from the first token back: HTTP, JSON and the engine's process."""


@dataclass(slots=True)
class _Total:
    """The steps of one shape: how many, their rows, cached tokens and pairs of query and key."""

    steps: int = 0
    rows: int = 0
    kv_tokens: int = 0
    qk_pairs: int = 0


@dataclass(slots=True)
class StepCost:
    """Seconds of a step (a sim.CostModel), padded as the engine pads it. It also keeps what the steps were made of.

    steps: the calls of every recorded step by its shape. ranks: the GPUs that share each step. most_rows: the largest
    number of rows in a step so far.
    """

    steps: Mapping[Shape, Sequence[Call]]
    buckets: Buckets
    figures: Figures
    ranks: int = 1
    most_rows: int = 0
    prompt_steps: int = 0
    context: int = 0
    """Tokens that the decode rows of the last step attended to, on average."""
    _totals: dict[Shape, _Total] = field(default_factory=dict)
    _predictions: dict[Shape, Prediction] = field(default_factory=dict)

    def decode_s(self, rows: int, drafts: int) -> float:
        """Seconds of a step in which each of `rows` decode rows has `drafts` drafts."""
        rows = min(rows, self.buckets.max_tokens // (1 + drafts))
        shape = self.buckets.choose(rows * (1 + drafts), rows, drafts=drafts, chunks=False)
        read = rows * self.context
        return self._prediction(shape).seconds(read, read * (1 + drafts), rows)

    def __call__(self, work: StepWork) -> float:
        new = work.prefill_tokens
        self.context = work.decode_context // max(1, work.decode_rows)
        rows = work.decode_rows + (new > 0)
        tokens, drafts = (
            work.decode_rows + work.drafts + new,
            math.ceil(work.drafts / max(1, work.decode_rows)),
        )
        shape = self.buckets.choose(tokens, rows, drafts=drafts, chunks=not drafts or new > 0)
        # A chunk of n tokens after m has n * m + n * (n + 1) / 2 pairs and reads m + n tokens.
        read = round(work.prefill_context / new + (new - 1) / 2) if new else 0
        queries = 1 + work.drafts / max(1, work.decode_rows)  # of a decode row
        kv_tokens = work.decode_context + read
        qk_pairs = round(queries * work.decode_context) + work.prefill_context
        total = self._totals.setdefault(shape, _Total())
        total.steps += 1
        total.rows += rows
        total.kv_tokens += kv_tokens
        total.qk_pairs += qk_pairs
        self.most_rows = max(self.most_rows, rows)
        self.prompt_steps += new > 0
        host_s = self.figures.host_s + (PROMPT_STEP_S if new else 0.0)
        return self._prediction(shape).seconds(kv_tokens, qk_pairs, rows) + host_s

    def _prediction(self, shape: Shape) -> Prediction:
        if shape not in self._predictions:
            calls, (tokens, rows, *_) = self.steps[shape], shape
            self._predictions[shape] = Prediction.of(calls, tokens, rows, self.figures, self.ranks)
        return self._predictions[shape]

    def shares(self) -> dict[str, float]:
        """The parts of all steps' time by what binds, the largest first; they add up to 1."""
        steps = sum(total.steps for total in self._totals.values())
        seconds = {"host": self.prompt_steps * PROMPT_STEP_S + steps * self.figures.host_s}
        for shape, total in self._totals.items():
            sums = (total.rows, total.kv_tokens, total.qk_pairs)
            mean = Workload(shape.tokens, *(one // total.steps for one in sums))
            for name, one in Parts.of(self.steps[shape], mean, self.figures, self.ranks).names.items():
                seconds[name] = seconds.get(name, 0.0) + total.steps * one
        whole = sum(seconds.values())
        largest = sorted(seconds.items(), key=lambda item: -item[1])
        return {name: one / whole for name, one in largest if one}
