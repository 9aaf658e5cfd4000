"""The norm and the gate as commands: the neighbours of products."""

from typing import NamedTuple

from openinfer.kernels.op.launch import Aligned, Arg, Command, Scratch, launch
from openinfer.tensor import Tensor

_NORM = "openinfer.kernels.device.norm"


class Norm(NamedTuple):
    """The norm of x ahead of a product."""

    weight: Tensor
    eps: float

    @classmethod
    def of(cls, weight: Tensor | None, eps: float | None) -> "Norm | None":
        """None without a weight."""
        return None if weight is None or eps is None else cls(weight, eps)


def norm(
    out: Tensor | Scratch, x: Tensor | Scratch, gain: Tensor, eps: float, *, early: bool = False
) -> Command:
    """out = rms_norm(x; gain, eps). early: see launch.Launch; the kernel behind it may be early, too."""
    rows, width = x.shape
    block, warps = 1 << (width - 1).bit_length(), 8 if width > 2048 else 4
    args: dict[str, Arg] = {"out": out, "x": x, "weight": gain, "width": Aligned(width), "eps": eps}
    return launch(_NORM, "rms_norm", (rows,), args, {"BLOCK": block}, num_warps=warps, early=early)


def launch_silu_mul(out: Tensor | Scratch, both: Tensor | Scratch) -> Command:
    """out [M, N] = silu(g) * u, where both [M, 2 N] is g and then u."""
    (m, width), block = out.shape, 1024
    args: dict[str, Arg] = {"out": out, "both": both, "width": Aligned(width)}
    return launch(_NORM, "silu_mul", (m, -(-width // block)), args, {"BLOCK": block})
