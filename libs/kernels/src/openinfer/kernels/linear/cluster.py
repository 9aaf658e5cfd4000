"""The product of a few tokens, up to 128, by clusters of blocks: device/cluster_product.cu."""

from collections.abc import Iterator

from openinfer.kernels.formats.fp8 import Fp8
from openinfer.kernels.formats.linear import Plain
from openinfer.kernels.linear.choices import (
    ROW_BYTES,
    adapters_bytes,
    cluster_choice,
    copied_tokens,
    planned,
    sent_bytes,
    under_way,
)
from openinfer.kernels.linear.problem import Kernel, Problem
from openinfer.kernels.lora.low_rank import Lora
from openinfer.kernels.op.launch import Arg, Command, Launch, Scratch, TensorMap, launch_cuda
from openinfer.kernels.op.op import tensors
from openinfer.kernels.store.tables import ProductChoice
from openinfer.tensor import Tensor, float32, int32

WORKERS = 192
"""The most warps that multiply with A. Their blocks run at once on any GPU that takes clusters."""
MOST_TASKS = 2048
"""The most tasks of these warps. A task whose adapter no token has costs some instructions."""
MOST_PLACES = 32
"""The most places of adapters. A block keeps a bit for each."""
MOST_RANK = 64


def coded_clusters(p: Problem) -> ProductChoice | None:
    """The clusters that multiply codes, or None where another kernel does."""
    return cluster_choice(p.target, p.op, p.m, p.rows, p.k, codes=True)


def cluster_product(c: ProductChoice, p: Problem) -> Launch:
    """By clusters of `c.split` blocks, M at most `c.bm`. x and the weight are both float8 codes, or both bf16; an
    adapter is one of a choice by adapted_choice.

    The launch is early where the weight is a tensor: the kernel reads it at once, so no kernel ahead may write it."""
    weight, k = p.weight.weight, p.k
    halves, parts = 2 if p.gated else 1, 2 if c.bm == 64 else 1
    rows, row = copied_tokens(p.m), halves * c.bn
    stage = (rows + row) * ROW_BYTES
    sums = parts * c.bm * (row + (40 - row % 32) % 32) * 4
    codes, held, steps = 0, 0, -(-k // c.bk // c.split)
    args: dict[str, Arg] = {"out": p.out, "x": TensorMap(p.x, (rows, c.bk))}
    args["weight"] = TensorMap(weight, (c.bn, c.bk))
    if p.x_scales is not None and p.weight.scales is not None:
        args |= {"x_scales": p.x_scales, "scales": p.weight.scales}
        codes = 2 if p.form == Fp8(by_row=True) else 1
        held = (2 * halves + rows) * steps * 4 if codes == 1 else 0
    constants, grid = {"PROJECTIONS": 0}, -(-p.n // c.bn) * c.split
    if p.adapter:
        held = adapters_bytes(c.bm, rows, p.adapter.b.shape[2])
        more, constants = _adapters(c, p, p.adapter, grid)
        args |= more
    most = under_way(c.stages, row * ROW_BYTES, rows, codes=codes > 0)
    constants |= {"TOKENS": c.bm, "ROWS": rows, "COLUMNS": c.bn, "SPLIT": c.split, "STAGES": c.stages}
    constants |= {"UNDER_WAY": most, "GATED": p.gated, "ADD": p.add, "CODES": codes}
    constants["STEPS"] = steps if codes == 1 else 0
    shared = max(c.stages * stage, sums) + sent_bytes(rows, row, c.split, parts) + 16 * (c.stages + 1) + held
    kernel = "openinfer.kernels.device", "cluster_product.cu", "cluster_product", (grid,)
    early = isinstance(weight, Tensor)
    return launch_cuda(*kernel, {**args, **p.sizes}, constants, threads=384, shared=shared, early=early)


def adapted_choice(p: Problem, lora: Lora[Tensor]) -> ProductChoice | None:
    """The clusters of a bf16 product with adapters, or None where their kernel does not take it: a block has columns of
    at most two projections, and copies begin at multiples of 16 bytes."""
    a, b, parts = lora.a, lora.b, lora.parts
    (places, width, k), rank = a.shape, b.shape[2]
    if p.form != Plain() or rank > MOST_RANK or places > MOST_PLACES:
        return None
    choice = cluster_choice(p.target, p.op, max(2, p.m), p.rows, p.k, rank=rank)
    if choice is None or places * width // 16 * _chunks(lora) > MOST_TASKS:
        return None
    if any(t.ptr % 16 or t.strides[0] % 8 for t in (a, b)):
        return None
    whole = parts == (p.rows // 2,) * 2 if p.gated else min(parts) >= choice.bn
    fits = whole and not any(size % 8 for size in parts) and k >= 2 * choice.split * choice.bk
    return choice if fits else None


def _chunks(lora: Lora[Tensor]) -> int:
    """Parts of K of a product with A. The number is fixed, so that sums do not depend on the step. One projection alone
    has few tasks, and its K is long."""
    return 16 if len(lora.parts) == 1 else 8


def _adapters(
    c: ProductChoice, p: Problem, lora: Lora[Tensor], blocks: int
) -> tuple[dict[str, Arg], dict[str, int]]:
    """Arguments and constants of the adapters."""
    a, b, parts = lora.a, lora.b, lora.parts
    (places, width, _), chunks = a.shape, _chunks(lora)
    ends = [sum(parts[: i + 1]) for i in range(len(parts) - 1)]
    args: dict[str, Arg] = {"hidden": p.x, **tensors(lora, "a", "b", "adapters", "token_slots")}
    args["low_sums"] = Scratch((chunks, c.bm, width), float32, zeroed=True)
    args["state"] = Scratch((3,), int32, zeroed=True)
    args |= {"a_stride": a.strides[0], "b_stride": b.strides[0], "places": places}
    args |= {"workers": min(WORKERS, 2 * blocks)}
    args |= {f"end{i}": ends[i] if i < len(ends) else 0 for i in range(3)}
    args["columns"] = sum(parts)
    return args, {"RANK": b.shape[2], "PROJECTIONS": len(parts), "CHUNKS": chunks}


def _of_codes(p: Problem) -> Iterator[Command]:
    choice = coded_clusters(p)
    assert choice is not None
    yield cluster_product(choice, p)


def _takes_codes(p: Problem) -> bool:
    return p.x_scales is not None and isinstance(p.form, Fp8) and coded_clusters(p) is not None


OF_CODES = Kernel("clusters of codes", _takes_codes, _of_codes)
PLAIN = Kernel("clusters", lambda p: planned(p).kind == "cluster", lambda p: [cluster_product(planned(p), p)])
