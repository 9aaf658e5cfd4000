"""The product of a few tokens, up to 128, by clusters of blocks: device/cluster_product.cu."""

from __future__ import annotations

from openinfer.kernels.formats.codes import of_rows
from openinfer.kernels.linear.choices import Choice, cluster_choice
from openinfer.kernels.linear.cluster_memory import ROW_BYTES, adapters_bytes, copied_tokens, sent_bytes
from openinfer.kernels.lora.low_rank import Lora
from openinfer.kernels.op.launch import Aligned, Arg, Launch, Scratch, TensorMap, launch_cuda
from openinfer.kernels.op.target import Target
from openinfer.tensor import Tensor, float32, int32

WORKERS = 192
"""The most warps that multiply with A. Their blocks run at once on any GPU that takes clusters."""
MOST_TASKS = 2048
"""The most tasks of these warps. A task whose adapter no token has costs some instructions."""
MOST_PLACES = 32
"""The most places of adapters. A block keeps a bit for each."""
MOST_RANK = 64


def cluster_product(
    c: Choice,
    out: Tensor | Scratch,
    x: Tensor | Scratch,
    weight: Tensor | Scratch,
    scales: tuple[Tensor | Scratch, Tensor] | None = None,
    *,
    lora: Lora | None = None,
    add: bool = False,
    gated: bool = False,
) -> Launch:
    """out [M, N] = x [M, K] @ weight [N, K]^T, M at most `c.bm`, by clusters of `c.split` blocks.

    `scales`: of x and of weight, both float8 codes (coded_products.Coded, formats.of_rows); without them both are bf16.
    `lora`: adapters of a choice by adapted_choice.
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
    constants, grid = {"PROJECTIONS": 0}, -(-n // c.bn) * c.split
    if lora:
        held = adapters_bytes(c.bm, rows, lora["lora_b"].shape[2])
        more, constants = _adapters(c, x, lora, grid)
        args |= more
    return launch_cuda(
        "openinfer.kernels.device",
        "cluster_product.cu",
        "cluster_product",
        (grid,),
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
            **constants,
        },
        threads=384,
        shared=max(c.stages * stage, sums)
        + sent_bytes(rows, row, c.split, parts)
        + 16 * (c.stages + 1)
        + held,
        early=isinstance(weight, Tensor),
    )


def adapted_choice(
    target: Target, op: str, x: Tensor, weight: Tensor, lora: Lora, *, gated: bool
) -> Choice | None:
    """The clusters of a bf16 product with adapters, or None where their kernel does not take it: a block has columns of
    at most two projections, and copies begin at multiples of 16 bytes."""
    a, b, parts = lora["lora_a"], lora["lora_b"], lora["lora_parts"]
    (places, width, k), rank = a.shape, b.shape[2]
    choice = cluster_choice(target, op, max(2, x.shape[0]), *weight.shape, rank=rank)
    if choice is None or rank > MOST_RANK or places > MOST_PLACES:
        return None
    if places * width // 16 * _chunks(lora) > MOST_TASKS or any(
        t.ptr % 16 or t.strides[0] % 8 for t in (a, b)
    ):
        return None
    whole = parts == (weight.shape[0] // 2,) * 2 if gated else min(parts) >= choice.bn
    fits = whole and not any(size % 8 for size in parts) and k >= 2 * choice.split * choice.bk
    return choice if fits else None


def _chunks(lora: Lora) -> int:
    """Parts of K of a product with A. The number is fixed, so that sums do not depend on the step. One projection alone
    has few tasks, and its K is long."""
    return 16 if len(lora["lora_parts"]) == 1 else 8


def _adapters(
    c: Choice, x: Tensor | Scratch, lora: Lora, blocks: int
) -> tuple[dict[str, Arg], dict[str, int]]:
    """Arguments and constants of the adapters."""
    a, b, parts = lora["lora_a"], lora["lora_b"], lora["lora_parts"]
    (places, width, _), chunks = a.shape, _chunks(lora)
    ends = [sum(parts[: i + 1]) for i in range(len(parts) - 1)]
    args: dict[str, Arg] = {
        "hidden": x,
        "a": a,
        "b": b,
        "adapters": lora["adapters"],
        "token_slots": lora["token_slots"],
        "low_sums": Scratch((chunks, c.bm, width), float32, zeroed=True),
        "state": Scratch((3,), int32, zeroed=True),
        "a_stride": a.strides[0],
        "b_stride": b.strides[0],
        "places": places,
        "workers": min(WORKERS, 2 * blocks),
        **{f"end{i}": ends[i] if i < len(ends) else 0 for i in range(3)},
        "columns": sum(parts),
    }
    return args, {"RANK": b.shape[2], "PROJECTIONS": len(parts), "CHUNKS": chunks}
