"""The product of a few tokens, up to 128, by clusters of blocks: device/cluster_product.cu."""

from __future__ import annotations

from openinfer.kernels.formats import of_rows
from openinfer.kernels.launch import Aligned, Arg, Launch, Scratch, TensorMap, launch_cuda
from openinfer.kernels.tuning import ROW_BYTES, Choice, copied_tokens
from openinfer.tensor import Tensor


def cluster_product(
    c: Choice,
    out: Tensor | Scratch,
    x: Tensor | Scratch,
    weight: Tensor | Scratch,
    scales: tuple[Tensor | Scratch, Tensor] | None = None,
    *,
    add: bool = False,
    gated: bool = False,
) -> Launch:
    """out [M, N] = x [M, K] @ weight [N, K]^T, M at most `c.bm`, by clusters of `c.split` blocks.

    `scales`: of x and of weight, both float8 codes (coded_products.Coded, formats.of_rows); without them both are bf16.
    The launch is early where the weight is a tensor: the kernel reads it at once, so no kernel ahead may write it."""
    (m, n), k = out.shape, x.shape[1]
    halves, parts = 2 if gated else 1, 2 if c.bm == 64 else 1
    rows, row = copied_tokens(m), halves * c.bn
    stage = (rows + row) * ROW_BYTES
    sums = parts * c.bm * (row + (40 - row % 32) % 32) * 4
    codes, held, steps = 0, 0, -(-k // c.bk // c.split)
    args: dict[str, Arg] = {
        "out": out,
        "x": TensorMap(x, (rows, c.bk)),
        "weight": TensorMap(weight, (c.bn, c.bk)),
    }
    if scales is not None:
        args["x_scales"], args["scales"] = scales
        codes = 2 if of_rows(weight, scales[1]) else 1
        held = (2 * halves + rows) * steps * 4 if codes == 1 else 0
    return launch_cuda(
        "openinfer.kernels.device",
        "cluster_product.cu",
        "cluster_product",
        (-(-n // c.bn) * c.split,),
        {**args, "M": m, "N": Aligned(n), "K": Aligned(k)},
        {
            "TOKENS": c.bm,
            "ROWS": rows,
            "COLUMNS": c.bn,
            "SPLIT": c.split,
            "STAGES": c.stages,
            "GATED": gated,
            "ADD": add,
            "CODES": codes,
            "STEPS": steps if codes == 1 else 0,
        },
        threads=384,
        shared=max(c.stages * stage, sums) + 16 * c.stages + held,
        early=isinstance(weight, Tensor),
    )
