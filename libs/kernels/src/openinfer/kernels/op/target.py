"""Target: what the choice of a kernel may depend on."""

from dataclasses import dataclass

from openinfer.tensor import Device

SHARED_BYTES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10, 103: 227 << 10}
"""Shared memory a block may have, by architecture; the others have CONSUMER_SHARED_BYTES."""
CONSUMER_SHARED_BYTES = 99 << 10


@dataclass(frozen=True, slots=True)
class Target:
    """A kind of GPU.

    arch: the compute capability as an int (90).
    cublas: whether matrix products may go to cuBLASLt.
    nvrtc: whether they may go to kernels of CUDA C++, which NVRTC compiled for the wheels or compiles here.
    gpu: the name that the measured tables are looked up by ("" = the generic choice).
    interpreted: launches are for Triton's interpreter, which has no Gluon.
    batch_invariant: one kernel an op for any number of tokens and rows, so that no row's result depends on the others.
    rank: of this process among those that share the model.
    """

    arch: int
    num_sms: int
    cublas: bool = False
    gpu: str = ""
    interpreted: bool = False
    batch_invariant: bool = False
    rank: int = 0
    nvrtc: bool = False

    def early(self, tokens: int) -> bool:
        """Whether the many kernels of a step of so many tokens start early. With more tokens, those that wait take the
        place of programs that run: DeepSeek-V4 gains at 1 and 8 rows, and loses 2 and 3 % at 32 and 128."""
        return self.starts_early and tokens <= 16 and not self.batch_invariant

    @property
    def starts_early(self) -> bool:
        """Whether a kernel may start before the one ahead has ended (launch.Launch)."""
        return self.arch >= 90 and not self.interpreted

    @classmethod
    def of(cls, device: Device, *, cublas: bool, nvrtc: bool = False) -> "Target":
        """The target that a real device is."""
        return cls(device.arch, device.num_sms, cublas, device.name, nvrtc=nvrtc)


H200 = Target(arch=90, num_sms=132, cublas=True, gpu="NVIDIA H200")
"""The target that plans are made for when no GPU is at hand."""


def shared_bytes(arch: int) -> int:
    """Bytes of shared memory a block may have."""
    return SHARED_BYTES.get(arch, CONSUMER_SHARED_BYTES)
