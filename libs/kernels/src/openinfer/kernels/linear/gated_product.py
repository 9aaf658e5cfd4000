"""The gated product of many tokens by a kernel of CUDA C++: device/gated_product.cu."""

from __future__ import annotations

from openinfer.kernels.linear.choices import shared_bytes
from openinfer.kernels.op.launch import Aligned, Launch, Scratch, TensorMap, launch_cuda
from openinfer.kernels.op.target import Target
from openinfer.tensor import Tensor, bfloat16

FEWEST = 512
"""Tokens from which the kernel is the fastest one (docs/lessons/products.md)."""
COLUMNS, TOKENS, DEPTH = 152, 128, 64
"""The size of a tile. The kernel has these numbers too."""


def takes(target: Target, out: Tensor | Scratch, x: Tensor | Scratch, weight: Tensor | Scratch) -> bool:
    """Whether the kernel takes out [M, I] from x [M, K] and weight [2 I, K]."""
    (m, width), k = out.shape, x.shape[1]
    return (
        target.nvrtc
        and target.arch == 90
        and not target.interpreted
        and not target.batch_invariant
        and m >= FEWEST
        and k % DEPTH == 0
        and width % 8 == 0
        and weight.dtype == bfloat16
    )


def gated_product(
    target: Target, out: Tensor | Scratch, x: Tensor | Scratch, weight: Tensor | Scratch
) -> Launch:
    """out = silu(x @ gate^T) * (x @ up^T), the rows of `weight` being gate and then up."""
    (m, width), k = out.shape, x.shape[1]
    stage, results = (TOKENS + 2 * COLUMNS) * DEPTH * 2, TOKENS * COLUMNS * 2
    stages = (shared_bytes(target.arch) - results) // (stage + 16)
    return launch_cuda(
        "openinfer.kernels.device",
        "gated_product.cu",
        "gated_product",
        (target.num_sms // 2 * 2,),
        {
            "out": TensorMap(out, (64, COLUMNS)),
            "x": TensorMap(x, (TOKENS, DEPTH)),
            "weight": TensorMap(weight, (COLUMNS, DEPTH)),
            "M": m,
            "I": Aligned(width) if width % 16 == 0 else width,
            "K": Aligned(k),
        },
        {"STAGES": stages},
        threads=384,
        shared=results + stages * (stage + 16),
    )
