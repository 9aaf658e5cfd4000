"""The interp driver: unpacks launch records and runs them in Triton's interpreter, on host memory, without a GPU.

Triton decides at import whether it interprets: `TRITON_INTERPRET=1` must be in the environment before anything imports
triton, so an interpreting process does not compile and a compiling one does not interpret.
"""

import importlib
import itertools
import os
import struct
from collections.abc import Sequence
from typing import Any

from openinfer.kernels.errors import LaunchError, MissingExtra
from openinfer.kernels.op.launch import Collective, CudaSpec, Matmul, PeerTable, Spec, TensorMap
from openinfer.kernels.op.packing import Parameters
from openinfer.kernels.ops.collectives import combine
from openinfer.kernels.ranks import Communicator, member
from openinfer.tensor import Device, Tensor

SIZES = {"i32": (4, "<i"), "fp32": (4, "<f")}


class InterpDriver:
    """Runs packed launches in the interpreter, on tensors in host memory. `launched` counts launches by kernel.
    Collectives go over the communicator."""

    def __init__(self, communicator: Communicator | None = None) -> None:
        self._communicator = communicator
        if os.environ.get("TRITON_INTERPRET") != "1":
            raise LaunchError(
                "set TRITON_INTERPRET=1 before triton is imported: the interp driver needs the interpreter"
            )
        try:
            from openinfer.kernels.op import interpreter
        except ImportError as e:
            raise MissingExtra(
                "Triton's interpreter needs triton: pip install 'openinfer-kernels[jit]'"
            ) from e
        self._interpreter = interpreter
        self.launched: dict[str, int] = {}

    def encode_tensor_map(self, spec: Spec, tensor_map: TensorMap, address: int, index: int) -> bytes:
        return struct.pack("<Qii", address, *tensor_map.block).ljust(128, b"\0")

    def launch(self, spec: Spec, grid: tuple[int, int, int], parameters: Parameters, early: bool) -> None:
        if isinstance(spec, CudaSpec):
            raise LaunchError(f"the interpreter has no {spec}: plan for a Target that is interpreted")
        function = getattr(importlib.import_module(spec.module), spec.function)
        index = itertools.count()
        args: dict[str, Any] = dict(spec.constants)
        for name, kind in spec.signature:
            if kind.startswith("tensordesc"):
                address, *block = struct.unpack_from("<Qii", parameters.read(next(index), 128))
                shape = [struct.unpack("<i", parameters.read(next(index), 4))[0] for _ in range(2)]
                strides = [struct.unpack("<q", parameters.read(next(index), 8))[0] for _ in range(2)]
                dtype = kind[len("tensordesc<") :].partition("[")[0]
                args[name] = self._interpreter.descriptor(address, dtype, shape, strides, block)
            elif kind.startswith("*"):
                (address,) = struct.unpack("<Q", parameters.read(next(index), 8))
                args[name] = self._interpreter.Pointer(address, kind[1:])
            else:
                size, form = SIZES[kind]
                (args[name],) = struct.unpack(form, parameters.read(next(index), size))
        self.launched[str(spec)] = self.launched.get(str(spec), 0) + 1
        function[grid](**args)

    def matmul(self, command: Matmul, operands: Sequence[int], workspace: int) -> None:
        raise LaunchError("the interpreter has no cuBLASLt: plan for a Target with cublas=False")

    def collective(self, command: Collective, out: int, x: int) -> None:
        communicator = member(self._communicator, command.kind, command.ranks)
        host = Device("cpu")
        ends = (out, command.out), (x, command.x)
        to, source = (Tensor(at, t.shape, t.dtype, host).numpy() for at, t in ends)
        combine(command.kind, to, source, communicator)

    def peers(self, table: PeerTable) -> int:
        raise LaunchError("the interpreter has no peers' memory: plan for a Target that is interpreted")

    def branch(self, number: int) -> None:
        """Branches run one after the other."""
