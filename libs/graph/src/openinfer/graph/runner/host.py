"""HostPack: ops on the host, in steps whose calls are noted once and repeated."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from openinfer.graph.watch.trace import NoTrace, StepTrace
from openinfer.kernels import Op


class Binding(Protocol):
    """A pack on the host, such as kernels.CpuPack."""

    def bind(self, op: Op[Any], args: Any) -> Callable[[], None]:
        """Check a call; the call itself, which may be made any number of times."""


@dataclass(slots=True)
class HostPack:
    """Runs ops on `pack`, and reports their times to `trace`. repeats: `recorded` notes calls."""

    pack: Binding
    trace: StepTrace = field(default_factory=NoTrace)
    repeats: bool = True
    _noted: list[tuple[str, Callable[[], None]]] | None = field(default=None, init=False)

    def run(self, op: Op[Any], args: Any) -> None:
        call = self.pack.bind(op, args)
        if self._noted is not None:
            self._noted.append((op.name, call))
        self._timed(op.name, call)

    def recorded(self, enqueue: Callable[[], None]) -> Callable[[], None]:
        """A function that calls `enqueue` the first time. After that it repeats the calls of this pack that `enqueue`
        made, so it needs none of the Python that led to them. `enqueue` keeps the rules of StepGraphs."""
        calls: list[tuple[str, Callable[[], None]]] = []

        def step() -> None:
            for name, call in calls:
                self._timed(name, call)
            if not calls:
                self._noted = []
                try:
                    enqueue()
                    calls.extend(self._noted)
                finally:
                    self._noted = None

        return step if self.repeats else enqueue

    def _timed(self, name: str, call: Callable[[], None]) -> None:
        start = time.perf_counter_ns()
        call()
        self.trace.op(name, start, time.perf_counter_ns())
