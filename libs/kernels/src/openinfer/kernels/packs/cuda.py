"""The launching pack: plans an op call, packs its commands' parameters, and gives them to a driver.

With a CudaDriver it is the `cuda` pack; with an InterpDriver, which runs the very same records through Triton's
interpreter on the CPU, it is `interp`.
"""

import functools
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, Protocol

from openinfer.kernels.errors import LaunchError
from openinfer.kernels.op.launch import Collective, Command, Matmul, PeerTable, Scratch, Spec, TensorMap
from openinfer.kernels.op.op import Op, tensors_in
from openinfer.kernels.op.packing import Parameters
from openinfer.kernels.op.target import Target
from openinfer.kernels.packs.null import Placement, place
from openinfer.kernels.packs.recall import Recall
from openinfer.tensor import Tensor


class LaunchDriver(Protocol):
    """Runs packed launches."""

    def encode_tensor_map(self, spec: Spec, tensor_map: TensorMap, address: int, index: int) -> bytes: ...
    def launch(self, spec: Spec, grid: tuple[int, int, int], parameters: Parameters, early: bool) -> None: ...
    def matmul(self, command: Matmul, operands: Sequence[int], workspace: int) -> None:
        """operands: the addresses of the command's."""

    def collective(self, command: Collective, out: int, x: int) -> None: ...
    def peers(self, table: PeerTable) -> int: ...
    def branch(self, number: int) -> None:
        """The next commands are of this branch; 0: of no branch, and after all branches. Called at each change."""


class LaunchPack:
    """Runs ops as kernel launches on one stream.

    `scratch` and `zeroed` are the workspace: byte tensors at least as large as the null pack found for the same calls;
    `zeroed` must be zero when the first op runs. Calls share them, so they must be ordered on one stream.
    """

    def __init__(
        self, target: Target, driver: LaunchDriver, scratch: Tensor | None, zeroed: Tensor | None
    ) -> None:
        self.target = target
        self.driver = driver
        self._scratch_bytes, self._scratch_ptr = (
            (scratch.nbytes, scratch.ptr) if scratch is not None else (0, 0)
        )
        self._zeroed_bytes, self._zeroed_ptr = (zeroed.nbytes, zeroed.ptr) if zeroed is not None else (0, 0)
        self._workspace = (scratch, zeroed)  # keeps the memory alive
        self._parameters: dict[Spec, Parameters] = {}
        self._recall = Recall(target)

    def run(self, op: Op[Any], args: Any) -> None:
        prepared = self._recall.prepare(op, args)
        where = prepared.sources
        given = [] if where is None else tensors_in(args)

        def address(tensor: Tensor) -> int:
            if where is None:
                return tensor.ptr
            number, offset = where[id(tensor)]
            return given[number].ptr + offset

        self._launch(op.name, prepared.commands, prepared.placement, address)

    def submit(self, name: str, commands: Sequence[Command]) -> None:
        """Launch the commands of one call; `name` is for messages. Raises LaunchError if the workspace is too small."""
        self._launch(name, commands, place(commands), attrgetter("ptr"))

    def _launch(
        self,
        name: str,
        commands: Sequence[Command],
        placement: Placement,
        address_of: Callable[[Tensor], int],
    ) -> None:
        offsets, plain, zeroed = placement
        if plain > self._scratch_bytes or zeroed > self._zeroed_bytes:
            raise LaunchError(
                f"{name} needs {plain} bytes of scratch and {zeroed} of zeroed scratch; the pack has "
                f"{self._scratch_bytes} and {self._zeroed_bytes}: make them as large as the null pack's workspace_bytes"
            )

        def address(tensor: Tensor | Scratch | PeerTable) -> int:
            if isinstance(tensor, Tensor):
                return address_of(tensor)
            if isinstance(tensor, PeerTable):
                return self.driver.peers(tensor)
            return offsets[tensor] + (self._zeroed_ptr if tensor.zeroed else self._scratch_ptr)

        at = 0
        try:
            for command in commands:
                if command.branch < at:  # the command comes after all branches, or starts another beside()
                    self.driver.branch(0)
                if command.branch not in (0, at):
                    self.driver.branch(command.branch)
                at = command.branch
                self._run(command, address)
        finally:
            if at:
                self.driver.branch(0)

    def _run(self, command: Command, address: Callable[[Tensor | Scratch | PeerTable], int]) -> None:
        if isinstance(command, Matmul):
            operands = [address(operand) for operand in command.operands]
            self.driver.matmul(command, operands, address(command.workspace))
            return
        if isinstance(command, Collective):
            self.driver.collective(command, address(command.out), address(command.x))
            return
        spec = command.spec
        parameters = self._parameters.get(spec)
        if parameters is None:
            parameters = self._parameters[spec] = Parameters(spec)
        parameters.pack(command.args, address, functools.partial(self.driver.encode_tensor_map, spec))
        self.driver.launch(spec, command.grid, parameters, command.early and not command.branch)
