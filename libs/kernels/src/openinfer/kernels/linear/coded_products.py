"""Products of float8 codes as commands: activations are quantised, and weights of float8 are not unpacked."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from openinfer.kernels.errors import ContractError
from openinfer.kernels.formats.codes import SCALE_BLOCK, Coding, of_rows
from openinfer.kernels.linear.choices import Choice, cluster_choice
from openinfer.kernels.op.launch import (
    Aligned,
    Arg,
    Command,
    Launch,
    Matmul,
    Scratch,
    aligned,
    launch,
    power_of_two,
)
from openinfer.kernels.op.target import Target
from openinfer.tensor import Tensor, bfloat16, float8_e4m3fn, float32, int32

FEW_TOKENS, FEW_IN_BLOCKS = 128, 64
"""Tokens up to which the kernel here is faster than cuBLASLt: with scales of tokens and rows, and of blocks."""
SMALL = 12 << 20
"""Numbers of a weight up to which FEW_TOKENS holds for scales of blocks too."""
CUBLAS_WORKSPACE = 32 << 20
"""Bytes of scratch a cuBLASLt product may use."""

_DEVICE = "openinfer.kernels.device.coded_linear"


class Coded(NamedTuple):
    """Activations [T, K] as codes, and their scales [ceil(K / 128) or 1, T]."""

    codes: Scratch
    scales: Scratch


class Tile(NamedTuple):
    """Rows of the weight and tokens at a time, and how many programs share the columns."""

    rows: int
    bm: int
    split: int
    warps: int = 4
    stages: int = 4


def takes_codes(target: Target) -> bool:
    """Whether the tensor cores of the target multiply float8 codes."""
    return target.arch >= 89


def expect_coded(target: Target, x: Tensor | Scratch) -> None:
    """Raise ContractError where activations cannot be quantised."""
    if not takes_codes(target):
        raise ContractError(
            f"activations are quantised to float8 on sm_{target.arch}; float8 is for sm_89 and up"
        )
    if x.dtype != bfloat16:
        raise ContractError(f"x is {x.dtype.name}; on a GPU it is bfloat16 (float32: the cpu pack)")


def tile(target: Target, tokens: int, n: int, k: int, *, sets: int = 1) -> Tile:
    """The tile for `sets` of n rows of weights, as measured on an H200 for the weights of Qwen3-4B. K is split until
    the programs fill the GPU, twice with few tokens, and further while each has many blocks of 128 columns."""
    if target.batch_invariant:
        return Tile(64, 16, 1)
    bm = min(64, max(16, power_of_two(tokens)))
    rows = 128 if tokens > 256 and sets == 1 else 64
    if bm == 64 and sets == 1 and -(-n // rows) * -(-tokens // 32) <= 1.25 * target.num_sms:
        bm = 32  # few rows of weights: two programs have the tokens of one
    programs, blocks, split = -(-n // rows) * -(-tokens // bm), -(-k // SCALE_BLOCK), 1
    fill = (2.0 if bm == 16 else 1.0) * target.num_sms
    while split < 8 and blocks >= 8 * split:
        full = programs * split >= fill
        if full and (
            sets == 2
            or blocks <= (12 if bm == 32 < tokens else 20) * split
            or programs * split > 1.25 * target.num_sms
        ):
            break
        split *= 2
    return Tile(rows, bm, split)


def coded_clusters(target: Target, op: str, tokens: int, weight: Tensor) -> Choice | None:
    """The clusters that multiply codes, or None where another kernel does."""
    return cluster_choice(target, op, tokens, *weight.shape, codes=True)


def coded_rows(
    x: Tensor | Scratch, coding: Coding, x_scale: Tensor | None, *, early: bool = False
) -> tuple[Launch, Coded]:
    """The command that quantises x [T, K], and its result. early: as for norms.norm."""
    (tokens, width), made = x.shape, _empty(x.shape, coding)
    blocks = -(-width // SCALE_BLOCK)
    size = power_of_two(blocks) if coding == "token" else min(8, power_of_two(blocks))
    args: dict[str, Arg] = {**_places(made), "x": x, **_sizes(made, x_scale, width, tokens)}
    grid = (tokens, -(-blocks // size))
    constants, warps = _constants(size, coding, early), 8 if size > 16 else 4
    return launch(_DEVICE, "code_rows", grid, args, constants, num_warps=warps, early=early), made


def normed_codes(
    x: Tensor, gain: Tensor, eps: float, coding: Coding, x_scale: Tensor | None, *, early: bool = False
) -> tuple[Launch, Coded]:
    """The command that quantises rms_norm(x; gain, eps), and its result. early: as for norms.norm."""
    (tokens, width), made = x.shape, _empty(x.shape, coding)
    size = power_of_two(-(-width // SCALE_BLOCK))
    args: dict[str, Arg] = {
        **_places(made),
        "x": x,
        "weight": gain,
        **_sizes(made, x_scale, width, tokens),
        "eps": eps,
    }
    constants, warps = _constants(size, coding, early), 8 if size > 16 else 4
    return launch(_DEVICE, "norm_codes", (tokens,), args, constants, num_warps=warps, early=early), made


def coded_product(
    target: Target,
    out: Tensor | Scratch,
    x: Coded,
    weight: Tensor,
    scales: Tensor,
    *,
    add: bool = False,
    gated: bool = False,
) -> Command:
    """out [M, N] = x @ weight^T, or out += with `add`, or its gated form with weight [2 N, K], which cuBLASLt has
    not."""
    tokens, (n, k) = out.shape[0], weight.shape
    if for_cublas(target, tokens, weight, scales, gated=gated):
        workspace = Scratch((CUBLAS_WORKSPACE,), np.dtype(np.uint8))
        return Matmul(out, x.codes, weight, workspace, add, scales=(x.scales, scales))
    sets = 2 if gated else 1
    stride = tokens if target.batch_invariant else aligned(tokens)  # a mark would make a kernel of its own
    return _project(tile(target, tokens, n // sets, k, sets=sets), out, x, weight, scales, add, gated, stride)


def for_cublas(target: Target, tokens: int, weight: Tensor, scales: Tensor, *, gated: bool) -> bool:
    """Whether cuBLASLt multiplies the codes: it takes scales of blocks in fours, and no half of a block."""
    (n, k), whole = weight.shape, of_rows(weight, scales)
    fits = whole or (k % (4 * SCALE_BLOCK) == 0 and not (gated and n // 2 % SCALE_BLOCK))
    fits = fits and tokens % 16 == 0 and k % 16 == 0
    few = FEW_TOKENS if whole or n * k <= SMALL else FEW_IN_BLOCKS
    return target.cublas and tokens > few and fits and not target.batch_invariant


def _project(
    tile: Tile,
    out: Tensor | Scratch,
    x: Coded,
    weight: Tensor,
    scales: Tensor,
    add: bool,
    gated: bool,
    stride: Aligned | int,
) -> Launch:
    """`stride`: of the scales of a block of columns, in tokens."""
    (tokens, n), k = out.shape, weight.shape[1]
    rows, bm, split, warps, stages = tile
    grid = (-(-n // rows), split, -(-tokens // bm))
    args: dict[str, Arg] = {
        "out": out,
        "x": x.codes,
        "x_scales": x.scales,
        "weight": weight,
        "scales": scales,
        "partial": Scratch((split, 2 if gated else 1, tokens, n) if split > 1 else (1,), float32),
        "counter": Scratch((grid[0] * grid[2] if split > 1 else 1,), int32, zeroed=True),
        "M": tokens,
        "N": Aligned(n),
        "K": Aligned(k),
        "TOKENS": stride,
    }
    constants = {"BM": bm, "ROWS": rows, "SPLIT": split, "BLOCKS": not of_rows(weight, scales)}
    constants |= {"EVEN": k % SCALE_BLOCK == 0, "ADD": add, "GATED": gated}
    return launch(_DEVICE, "project_coded", grid, args, constants, num_warps=warps, num_stages=stages)


def _empty(shape: tuple[int, ...], coding: Coding) -> Coded:
    tokens, width = shape
    blocks = -(-width // SCALE_BLOCK) if coding == "block" else 1
    return Coded(Scratch((tokens, width), float8_e4m3fn), Scratch((blocks, tokens), float32))


def _places(made: Coded) -> dict[str, Arg]:
    return {"codes": made.codes, "scales": made.scales}


def _sizes(made: Coded, x_scale: Tensor | None, width: int, tokens: int) -> dict[str, Arg]:
    return {
        "x_scale": made.scales if x_scale is None else x_scale,
        "width": aligned(width),
        "TOKENS": tokens,
    }


def _constants(size: int, coding: Coding, early: bool) -> dict[str, int | bool]:
    return {"SIZE": size, "BLOCKS": coding == "block", "STATIC": coding == "tensor", "EARLY": early}
