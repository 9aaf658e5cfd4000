"""The product of a few tokens, up to 128, by clusters of blocks: device/cluster_product.cu."""

from __future__ import annotations

from openinfer.kernels.launch import Aligned, Launch, Scratch, TensorMap, launch_cuda
from openinfer.kernels.tuning import Choice
from openinfer.tensor import Tensor

FEW = 16
"""Tokens up to which no more rows of x are copied, because fewer bytes pass."""


def cluster_product(
    c: Choice,
    out: Tensor | Scratch,
    x: Tensor | Scratch,
    weight: Tensor | Scratch,
    *,
    add: bool = False,
    gated: bool = False,
) -> Launch:
    """out [M, N] = x [M, K] @ weight [N, K]^T in bf16, M at most `c.bm`, by clusters of `c.split` blocks.

    The launch is early where the weight is a tensor: the kernel reads it at once, so no kernel ahead may write it."""
    (m, n), k = out.shape, x.shape[1]
    halves, parts = 2 if gated else 1, 2 if c.bm == 64 else 1
    stage, row = (c.bm + halves * c.bn) * c.bk * 2, halves * c.bn
    sums = parts * c.bm * (row + (40 - row % 32) % 32) * 4
    rows = FEW if m <= FEW else c.bm
    return launch_cuda(
        "openinfer.kernels.device",
        "cluster_product.cu",
        "cluster_product",
        (-(-n // c.bn) * c.split,),
        {
            "out": out,
            "x": TensorMap(x, (rows, c.bk)),
            "weight": TensorMap(weight, (c.bn, c.bk)),
            "M": m,
            "N": Aligned(n),
            "K": Aligned(k),
        },
        {
            "TOKENS": c.bm,
            "ROWS": rows,
            "COLUMNS": c.bn,
            "SPLIT": c.split,
            "STAGES": c.stages,
            "GATED": gated,
            "ADD": add,
        },
        threads=384,
        shared=max(c.stages * stage, sums) + 16 * c.stages,
        early=isinstance(weight, Tensor),
    )
