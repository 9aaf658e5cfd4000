"""Matrix products as commands: what norm_linear, linear_add and gate_up_silu have in common."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from openinfer.kernels.errors import ContractError
from openinfer.kernels.launch import Aligned, Arg, Command, Matmul, Scratch, TensorMap, launch
from openinfer.kernels.target import Target
from openinfer.kernels.tuning import Choice, choose
from openinfer.tensor import Tensor, bfloat16, int32

CUBLAS_WORKSPACE = 32 << 20
"""Bytes of scratch a cuBLASLt product may use."""

GROUP = 8
"""Row tiles that run side by side, so that the weights they share are read from memory once."""

_LINEAR = "openinfer.kernels.device.linear"
_NORM = "openinfer.kernels.device.norm"


def normed(x: Tensor, weight: Tensor, eps: float) -> tuple[Scratch, Command]:
    """The norm of x [T, H] as scratch, and the command that fills it."""
    rows, width = x.shape
    out = Scratch((rows, width), x.dtype)
    block = 1 << (width - 1).bit_length()
    args: dict[str, Arg] = {"out": out, "x": x, "weight": weight, "width": Aligned(width), "eps": eps}
    return out, launch(_NORM, "rms_norm", (rows,), args, {"BLOCK": block}, num_warps=8 if block > 2048 else 4)


def product(
    target: Target, op: str, out: Tensor, x: Tensor | Scratch, weight: Tensor, *, add: bool = False
) -> Iterator[Command]:
    """out [M, N] = x [M, K] @ weight [N, K]^T, or out += with `add`."""
    m, (n, k) = x.shape[0], weight.shape
    yield from _commands(choose(target, op, m, n, k), target, out, x, weight, add=add, gated=False)


def gated_product(target: Target, op: str, out: Tensor, x: Scratch, weight: Tensor) -> Iterator[Command]:
    """out [M, N] = silu(g) * u with [g, u] = x [M, K] @ weight [2 N, K]^T; in one kernel where M is small."""
    m, (n, k) = x.shape[0], weight.shape
    choice = choose(target, op, m, n, k)
    if choice.kind in ("gemv", "small"):
        yield from _commands(choice, target, out, x, weight, add=False, gated=True)
        return
    both = Scratch((m, n), bfloat16)
    yield from _commands(choice, target, both, x, weight, add=False, gated=False)
    width, block = n // 2, 1024
    args: dict[str, Arg] = {"out": out, "both": both, "width": Aligned(width)}
    yield launch(_NORM, "silu_mul", (m, -(-width // block)), args, {"BLOCK": block})


def _commands(
    choice: Choice,
    target: Target,
    out: Tensor | Scratch,
    x: Tensor | Scratch,
    weight: Tensor,
    *,
    add: bool,
    gated: bool,
) -> Iterator[Command]:
    if weight.dtype != bfloat16:
        raise ContractError(
            f"weight is {weight.dtype.name}; linear layers on a GPU are bfloat16 (float32: the cpu pack)"
        )
    (m, n), k = out.shape, weight.shape[1]
    c = choice
    if c.kind == "cublas":
        yield Matmul(out, x, weight, Scratch((CUBLAS_WORKSPACE,), np.dtype(np.uint8)), accumulate=add)
        return
    tiles = -(-n // c.bn)
    sizes: dict[str, Arg] = {"M": m, "N": Aligned(n), "K": Aligned(k)}
    constants = {"BN": c.bn, "BK": c.bk, "ADD": add}
    if c.kind == "gemv":
        args: dict[str, Arg] = {"out": out, "x": x, "weight": weight, "N": Aligned(n), "K": Aligned(k)}
        grid: tuple[int, ...] = (tiles,)
        constants |= {"STAGES": c.stages, "GATED": gated}
    elif c.kind == "small":
        parts = 2 * c.split if gated else c.split
        partial = Scratch((parts, c.bm, n) if c.split > 1 else (1,), np.dtype(np.float32))
        counter = Scratch((tiles if c.split > 1 else 1,), int32, zeroed=True)
        args = {"out": out, "x": x, "weight": weight, "partial": partial, "counter": counter, **sizes}
        grid = (tiles, c.split)
        constants |= {"BM": c.bm, "SPLIT": c.split, "GATED": gated}
    else:
        tiles *= -(-m // c.bm)
        constants |= {"BM": c.bm, "GROUP": GROUP}
        if c.kind == "tma":
            args = {
                "out": TensorMap(out, (c.bm, c.bn)),
                "old": out,
                "x": TensorMap(x, (c.bm, c.bk)),
                "weight": TensorMap(weight, (c.bn, c.bk)),
                **sizes,
            }
            grid = (min(tiles, target.num_sms),)
        else:
            args = {"out": out, "x": x, "weight": weight, **sizes}
            grid = (tiles,)
    function = {"gemv": "gemv", "small": "gemm_small", "tma": "gemm_tma", "pointer": "gemm"}[c.kind]
    yield launch(_LINEAR, function, grid, args, constants, num_warps=c.warps, num_stages=c.stages)
