"""The launching pack: plans an op call, packs its commands' parameters, and gives them to a driver.

With a CudaDriver it is the `cuda` pack; with an InterpDriver, which runs the very same records through Triton's
interpreter on the CPU, it is `interp`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from openinfer.kernels.errors import LaunchError
from openinfer.kernels.launch import KernelSpec, Matmul, Scratch, TensorMap
from openinfer.kernels.op import Op
from openinfer.kernels.packing import Packed, pack
from openinfer.kernels.packs.null import place
from openinfer.kernels.target import Target
from openinfer.tensor import Tensor


class LaunchDriver(Protocol):
    """What runs packed launches."""

    def encode_tensor_map(self, spec: KernelSpec, tensor_map: TensorMap, address: int, index: int) -> bytes: ...
    def launch(self, spec: KernelSpec, grid: tuple[int, int, int], packed: Packed) -> None: ...
    def matmul(self, command: Matmul, out: int, x: int, weight: int, workspace: int) -> None: ...


class LaunchPack:
    """Runs ops as kernel launches on one stream.

    `scratch` and `zeroed` are the workspace: byte tensors at least as large as the null pack found for the same calls;
    `zeroed` must be zero when the first op runs. Calls share them, so they must be ordered on one stream.
    """

    def __init__(self, target: Target, driver: LaunchDriver, scratch: Tensor | None, zeroed: Tensor | None) -> None:
        self.target = target
        self.driver = driver
        self._regions = {False: scratch, True: zeroed}

    def run(self, op: Op[Any], args: Mapping[str, Any]) -> None:
        commands = op.plan(self.target, args)
        places: dict[Scratch, int] = {}
        for zeroed, region in self._regions.items():
            offsets, end = place(commands, zeroed=zeroed)
            have = region.nbytes if region is not None else 0
            if end > have:
                raise LaunchError(f"{op.name} needs {end} bytes of workspace (zeroed={zeroed}); the pack has {have}")
            if region is not None:
                places.update((s, region.ptr + o) for s, o in offsets.items())

        def address(tensor: Tensor | Scratch) -> int:
            return places[tensor] if isinstance(tensor, Scratch) else tensor.ptr

        for command in commands:
            if isinstance(command, Matmul):
                self.driver.matmul(
                    command,
                    address(command.out),
                    address(command.x),
                    command.weight.ptr,
                    address(command.workspace),
                )
                continue
            spec = command.spec
            packed = pack(
                spec, command.args, address, lambda m, a, i, spec=spec: self.driver.encode_tensor_map(spec, m, a, i)
            )
            self.driver.launch(spec, command.grid, packed)
