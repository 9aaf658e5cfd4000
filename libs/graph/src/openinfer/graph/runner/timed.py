"""TimedPack: a pack whose ops run on the host, each timed for the trace."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from openinfer.graph.trace import StepTrace
from openinfer.kernels import Op, Pack


@dataclass(frozen=True, slots=True)
class TimedPack:
    """Runs ops on `pack` and reports each one's time to `trace`."""

    pack: Pack
    trace: StepTrace

    def run(self, op: Op[Any], args: Mapping[str, Any]) -> None:
        start = time.perf_counter_ns()
        self.pack.run(op, args)
        self.trace.op(op.name, start, time.perf_counter_ns())
