"""Target: what the choice of a kernel may depend on. GPUS: what is known of the speed of a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from openinfer.tensor import Device


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

    @classmethod
    def of(cls, device: Device, *, cublas: bool, nvrtc: bool = False) -> Target:
        """The target that a real device is."""
        return cls(device.arch, device.num_sms, cublas, device.name, nvrtc=nvrtc)


H200 = Target(arch=90, num_sms=132, cublas=True, gpu="NVIDIA H200")
"""The target that plans are made for when no GPU is at hand."""


class Speed(NamedTuple):
    """Bytes a second of a GPU's memory, FLOPs a second of its matrix units in bf16, and seconds that a kernel takes
    besides."""

    bytes_per_s: float
    flops_per_s: float
    kernel_s: float = 0.0


class Link(NamedTuple):
    """Bytes a second that a GPU sends to the others in a collective, and the seconds of a collective of few bytes."""

    bytes_per_s: float
    call_s: float = 0.0


class Figures(NamedTuple):
    """The figures of a GPU, each by where it comes from.

    `memory_bytes`: what a process can take. `peak`: the vendor's. `measured`: what one kernel reached that did nothing
    but copy, or multiply. `fitted`: the line through measured steps of recipes, which is what their kernels reach.
    `link_bytes_per_s`: the vendor's, to all other GPUs, one way. `links`: what collectives reached, by the number of
    GPUs.
    """

    memory_bytes: float
    peak: Speed
    measured: Speed
    fitted: Speed
    link_bytes_per_s: float
    links: Mapping[int, Link] = MappingProxyType({})

    def link(self, ranks: int) -> Link:
        """The link among `ranks` GPUs, at the vendor's speed where none was measured."""
        return self.links.get(ranks, Link(self.link_bytes_per_s))


GPUS = {
    "NVIDIA H200": Figures(
        memory_bytes=150.1e9,
        peak=Speed(4.8e12, 989e12),
        measured=Speed(4.59e12, 780e12),
        fitted=Speed(4.06e12, 600e12, 4.26e-6),
        link_bytes_per_s=450e9,
        links=MappingProxyType({2: Link(190e9, 3.4e-6), 4: Link(300e9, 16e-6), 8: Link(306e9, 21e-6)}),
    )
}
"""Figures by the GPU's name. `fitted` of the H200: `python benchmarks/predicted_steps.py --fit`, over the newest
recorded decode and prompt steps of Qwen3-4B, Qwen3-8B and Qwen3.5-4B. `links`: of two, benchmarks/ranks.py's pushes of
8 KB and NCCL's sums of 16 MB; of four and eight, the sums of benchmarks/deepseek_rank.py (ALL_REDUCE_US)."""
