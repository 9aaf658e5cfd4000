"""The product of one token by a ring of weights in shared memory: device/ring.cu."""

from __future__ import annotations

from openinfer.kernels.launch import Aligned, Arg, Launch, Scratch, launch_cuda
from openinfer.kernels.tuning import RING_COLUMNS, Choice
from openinfer.tensor import Tensor, float32

_DEVICE = "openinfer.kernels.device"


def ring_product(
    c: Choice,
    num_sms: int,
    out: Tensor | Scratch,
    x: Tensor | Scratch,
    weight: Tensor | Scratch,
    *,
    add: bool = False,
    gated: bool = False,
    norm: tuple[Tensor, float] | None = None,
) -> Launch:
    """out [1, N] = x [1, K] @ weight [N, K]^T in bf16, by `c.warps` warps and a ring of `c.stages` times `c.bn` rows.

    `norm`: a gain in bf16 or float32, and eps; x is normalised first. No normalised value is rounded.
    """
    n, k = out.shape[1], weight.shape[1]
    gain, eps = norm or (x, 0.0)
    programs = min(num_sms, n)
    most, rows = -(-n // programs), c.bn // 2 if gated else c.bn
    turns = -(-most // rows)
    args: dict[str, Arg] = {"out": out, "x": x, "gain": gain, "weight": weight, "N": Aligned(n), "eps": eps}
    constants = {
        "WARPS": c.warps,
        "CHUNKS": k // RING_COLUMNS // c.warps,
        "ROWS": c.bn,
        "STAGES": c.stages,
        "TURNS": turns,
        "NORM": norm is not None,
        "WIDE": gain.dtype == float32,
        "ADD": add,
        "GATED": gated,
        "FLOAT": out.dtype == float32,
    }
    sums = turns * c.bn * (c.warps | 1) + c.warps
    return launch_cuda(
        _DEVICE,
        "ring.cu",
        "gemv_ring",
        (programs,),
        args,
        constants,
        threads=32 * c.warps + 32,
        shared=c.stages * (c.bn * k * 2 + 16) + -(-sums // 4) * 16,
        early=True,
    )
