"""Four ways to run the same op calls: CpuPack here (references), cuda and interp (kernels), null (write them down)."""

from collections.abc import Callable
from functools import partial
from typing import Any

from openinfer.kernels.op.cores import HOST_WAY, HostWay, lone_blas
from openinfer.kernels.op.op import Op, mapped
from openinfer.kernels.ranks import Communicator, member
from openinfer.tensor import Tensor


class CpuPack:
    """Runs each op's numpy reference on tensors in host memory.

    The compute dtype is that of the tensors: float32 tensors give the float32 model, bf16 tensors round where the
    published model rounds. batch_invariant: results do not depend on how tokens are grouped into steps, which takes two
    to four times as long. threads: cores to use, besides which numpy's BLAS has none of its own from then on; None: the
    caller's, and those of BLAS. Collectives go over the communicator; without one, a call of one raises LaunchError.
    """

    def __init__(
        self,
        communicator: Communicator | None = None,
        *,
        batch_invariant: bool = False,
        threads: int | None = None,
    ) -> None:
        self._communicator = communicator
        self._way = HostWay(threads if threads and lone_blas() else 1, batch_invariant)

    def run(self, op: Op[Any], args: Any) -> None:
        self.bind(op, args)()

    def bind(self, op: Op[Any], args: Any) -> Callable[[], None]:
        """Check the contract of a call; the call itself. It may be made again as long as the tensors have memory."""
        op.check(args)
        arrays = mapped(args, Tensor, Tensor.numpy)
        if not op.collective:
            return partial(self._call, op.reference, arrays)
        ranks = getattr(args, "ranks", 1)
        communicator = member(self._communicator, op.name, ranks) if ranks > 1 else None
        return partial(self._call, op.reference, arrays, communicator)

    def _call(self, reference: Callable[..., None], *args: Any) -> None:
        token = HOST_WAY.set(self._way)
        try:
            reference(*args)
        finally:
            HOST_WAY.reset(token)
