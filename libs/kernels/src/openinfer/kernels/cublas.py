"""cuBLASLt through ctypes: the Matmul command."""

from __future__ import annotations

from openinfer.kernels.launch import Matmul


class CublasLt:
    """A cuBLASLt handle of the current device."""

    def matmul(self, command: Matmul, out: int, x: int, weight: int, workspace: int, stream: int) -> None:
        raise NotImplementedError
