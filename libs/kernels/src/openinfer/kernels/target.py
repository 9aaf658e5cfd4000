"""Target: what the choice of a kernel may depend on."""

from __future__ import annotations

from dataclasses import dataclass

from openinfer.tensor import Device


@dataclass(frozen=True, slots=True)
class Target:
    """A kind of GPU. `arch` is the compute capability as an int (90); `cublas` says whether matrix products may go to
    cuBLASLt; `gpu` is the name that the measured tables are looked up by ("" = the generic choice); `interpreted` says
    that launches are for Triton's interpreter, which has no Gluon; `batch_invariant` asks for one kernel an op,
    whatever the number of tokens and rows, so that what is computed for a row does not depend on the others."""

    arch: int
    num_sms: int
    cublas: bool = False
    gpu: str = ""
    interpreted: bool = False
    batch_invariant: bool = False

    @classmethod
    def of(cls, device: Device, *, cublas: bool) -> Target:
        """The target that a real device is."""
        return cls(device.arch, device.num_sms, cublas, device.name)


H200 = Target(arch=90, num_sms=132, cublas=True, gpu="NVIDIA H200")
"""The target that plans are made for when no GPU is at hand."""
