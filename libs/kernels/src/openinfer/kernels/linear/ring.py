"""The product of a few tokens by a ring of weights in shared memory (device/ring.cu), and of one token with codes
(device/ring_groups.cu)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from openinfer.kernels.errors import ContractError
from openinfer.kernels.formats.codes import SCALE_BLOCK, Coding, of_rows
from openinfer.kernels.formats.int4 import is_int4
from openinfer.kernels.linear.choices import RING_COLUMNS, Choice, group_ring_choice
from openinfer.kernels.op.launch import Aligned, Arg, Launch, Scratch, launch_cuda
from openinfer.kernels.op.target import Target
from openinfer.tensor import Tensor, bfloat16, float32

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
    """out [M, N] = x [M, K] @ weight [N, K]^T in bf16, by `c.warps` warps and a ring of `c.stages` times `c.bn` rows.
    M is at most RING_TOKENS.

    `norm`: a gain in bf16 or float32, and eps; x is normalised first. No normalised value is rounded.
    """
    m, k = out.shape[0], weight.shape[1]
    how: dict[str, Any] = {"add": add, "gated": gated, "norm": norm}
    if m == 1:
        constants = {"CHUNKS": k // RING_COLUMNS // c.warps}
        kernel, row, sums = "ring", 2 * k, (c.warps | 1, c.warps)
    else:
        constants = {"TOKENS": m, "COLUMNS": k, "PARTS": c.split}
        row = 2 * k // c.split
        row += 0 if row % 128 else 64  # see ring_tokens.cu
        kernel, sums = "ring_tokens", (m * (c.warps | 1), m * c.warps)
    return _ring(
        kernel, c, num_sms, out, x, {"weight": weight}, constants, stage=c.bn * row, sums=sums, **how
    )


def _ring(
    kernel: str,
    c: Choice,
    num_sms: int,
    out: Tensor | Scratch,
    x: Tensor | Scratch,
    weights: Mapping[str, Arg],
    constants: Mapping[str, int],
    *,
    stage: int,
    sums: tuple[int, int],
    add: bool,
    gated: bool,
    norm: tuple[Tensor, float] | None,
) -> Launch:
    """The launch of a ring. weights, constants: its own arguments; stage: bytes; sums: float32 numbers for each row of
    a program's stages, and besides."""
    n, (gain, eps) = out.shape[1], norm or (x, 0.0)
    programs, rows = min(num_sms, n), c.bn // 2 if gated else c.bn
    most = -(-n // programs)
    turns = -(-most // rows)
    args: dict[str, Arg] = {"out": out, "x": x, "gain": gain, **weights, "N": Aligned(n), "eps": eps}
    shared = {
        "WARPS": c.warps,
        "ROWS": c.bn,
        "STAGES": c.stages,
        "TURNS": turns,
        "NORM": norm is not None,
        "WIDE": gain.dtype == float32,
        "ADD": add,
        "GATED": gated,
        "FLOAT": out.dtype == float32,
    }
    numbers = turns * c.bn * sums[0] + sums[1]
    return launch_cuda(
        _DEVICE,
        f"{kernel}.cu",
        f"gemv_{kernel}",
        (programs,),
        args,
        {**shared, **constants},
        threads=32 * c.warps + 32,
        shared=c.stages * (stage + 16) + -(-numbers // 4) * 16,
        early=True,
    )


_CODINGS: dict[Coding | None, int] = {None: 0, "block": 1, "token": 2, "tensor": 3}


def group_ring(
    target: Target,
    out: Tensor | Scratch,
    x: Tensor | Scratch,
    weight: Tensor,
    scales: Tensor | None,
    coding: Coding | None = None,
    x_scale: Tensor | None = None,
    *,
    add: bool = False,
    gated: bool = False,
    norm: tuple[Tensor, float] | None = None,
) -> Launch | None:
    """out [1, N] = x [1, K] @ weight^T with codes of FP8 or INT4, or None where no ring takes the call. x is quantised
    as `coding` says, in the kernel. Raises ContractError for x of another dtype than bfloat16."""
    if scales is None or x.shape[0] != 1:
        return None
    choice = group_choice(target, out, weight, scales, coding, gated=gated)
    if choice is None:
        return None
    if x.dtype != bfloat16:
        raise ContractError(f"x is {x.dtype.name}; on a GPU it is bfloat16 (float32: the cpu pack)")
    return group_ring_product(
        choice, target.num_sms, out, x, weight, scales, coding, x_scale, add=add, gated=gated, norm=norm
    )


def group_choice(
    target: Target,
    out: Tensor | Scratch,
    weight: Tensor,
    scales: Tensor,
    coding: Coding | None,
    *,
    gated: bool = False,
) -> Choice | None:
    """The ring for a weight of codes, or None. Weights of FP8 are for activations that are quantised, and INT4 for
    those that are not, with a scale for each 128 columns."""
    packed = is_int4(scales)
    k = weight.shape[1] * (2 if packed else 1)
    if packed != (coding is None) or (packed and k != SCALE_BLOCK * scales.shape[1]):
        return None
    return group_ring_choice(target, out.shape[1], k, packed=packed, gated=gated)


def group_ring_product(
    c: Choice,
    num_sms: int,
    out: Tensor | Scratch,
    x: Tensor | Scratch,
    weight: Tensor,
    scales: Tensor,
    coding: Coding | None,
    x_scale: Tensor | None,
    *,
    add: bool = False,
    gated: bool = False,
    norm: tuple[Tensor, float] | None = None,
) -> Launch:
    """The ring of `c` for a weight of codes."""
    k, packed = x.shape[1], is_int4(scales)
    groups = k // SCALE_BLOCK
    constants = {
        "COLUMNS": k,
        "GROUP_BYTES": SCALE_BLOCK // 2 if packed else SCALE_BLOCK,
        "CODING": _CODINGS[coding],
        "BY_ROW": not packed and of_rows(weight, scales),
    }
    return _ring(
        "ring_groups",
        c,
        num_sms,
        out,
        x,
        {"x_scale": scales if x_scale is None else x_scale, "weight": weight, "scales": scales},
        constants,
        stage=c.bn * (weight.shape[1] + (4 * groups if packed else 0)),
        sums=(groups | 1, 2 * c.warps),
        add=add,
        gated=gated,
        norm=norm,
    )
