"""The ranks of an engine: this process and those that run the same steps. A rank has a part of the weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from openinfer.kernels import SharedMemory

START_TIMEOUT_S = 3600.0
"""How long a rank waits for the others at start-up, where one may load or compile much longer than another."""
STEP_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among those of an engine. shared: the memory over which they agree on sizes and, on a CPU, exchange
    arrays; None: there is one rank."""

    rank: int = 0
    size: int = 1
    shared: SharedMemory | None = None

    @classmethod
    def joined(cls, file: int, rank: int, size: int) -> Ranks:
        """A rank of several, over the memory behind a descriptor."""
        return cls(rank, size, SharedMemory(file, rank, size, timeout_s=START_TIMEOUT_S))

    def least(self, numbers: Sequence[int]) -> list[int]:
        """The smallest of each number over all ranks. Raises RankLost."""
        if self.shared is None:
            return list(numbers)
        return [int(n) for n in np.min(self.shared.exchange(np.array(numbers, np.int64)), axis=0)]

    def meet(self) -> None:
        """Wait until all ranks are ready to serve; from then on a rank that is late is lost. Raises RankLost."""
        if self.shared is not None:
            self.shared.exchange(np.zeros(1))
            self.shared.timeout_s = STEP_TIMEOUT_S
