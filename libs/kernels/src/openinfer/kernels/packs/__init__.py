"""Four ways to run the same op calls: CpuPack here (references), cuda and interp (kernels), null (write them down)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from openinfer.kernels.op.op import Op, mapped
from openinfer.kernels.ranks import Communicator, member
from openinfer.tensor import Tensor


class CpuPack:
    """Runs each op's numpy reference on tensors in host memory.

    The compute dtype is that of the tensors: float32 tensors give the float32 model, bf16 tensors round where the
    published model rounds. Results do not depend on how tokens are grouped into steps. Collectives go over the
    communicator; without one, a call of one raises LaunchError.
    """

    def __init__(self, communicator: Communicator | None = None) -> None:
        self._communicator = communicator

    def run(self, op: Op[Any], args: Any) -> None:
        self.bind(op, args)()

    def bind(self, op: Op[Any], args: Any) -> Callable[[], None]:
        """Check the contract of a call; the call itself. It may be made again as long as the tensors have memory."""
        op.check(args)
        arrays = mapped(args, Tensor, Tensor.numpy)
        if not op.collective:
            return lambda: op.reference(arrays)
        ranks = getattr(args, "ranks", 1)
        communicator = member(self._communicator, op.name, ranks) if ranks > 1 else None
        return lambda: op.reference(arrays, communicator)
