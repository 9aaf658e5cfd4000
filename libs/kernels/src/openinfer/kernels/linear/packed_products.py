"""Linear layers as commands: packed weights in the kernel where tokens are few, made bf16 first where they are many."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from openinfer.kernels.errors import ContractError
from openinfer.kernels.formats.codes import SCALE_BLOCK
from openinfer.kernels.linear.choices import depth, measured, rule, shared_bytes
from openinfer.kernels.linear.products import matmul
from openinfer.kernels.op.launch import Aligned, Arg, Command, Launch, Scratch, aligned, launch, power_of_two
from openinfer.kernels.op.target import Target
from openinfer.tensor import Tensor, bfloat16, float8_e4m3fn, float32, int32

_DEVICE = "openinfer.kernels.device.packed_linear"

FEW, FEW_PACKED, FEW_IN_GROUPS, FEW_CODED = 64, 128, 512, 512
"""Up to this many tokens the time is that of reading the weights. The limits of packed weights and of groups are
higher: several reads cost less than making the weights bf16, or than one product a group."""

ROWS, WARPS = 64, 4


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows of float8 weights and tokens at a time, and how many programs share the columns."""

    rows: int
    bm: int
    split: int
    warps: int
    stages: int


def takes_codes(target: Target) -> bool:
    """Whether products of values that q8 gave are of float8 codes: on Hopper, whose tensor cores multiply them at twice
    the rate of bf16, without anything to unpack."""
    return target.arch == 90 and not target.batch_invariant


def tile(target: Target, tokens: int, n: int, k: int) -> Tile:
    """The tile for a float8 weight [n, k], as measured on an H200 for the weights of V4-Flash.

    K is split further while each program keeps enough blocks of 128 columns and the programs do not yet fill the GPU
    several times. With at least eight blocks left, the split goes on up to more programs than with four."""
    bm = min(64, max(16, power_of_two(tokens)))
    rows = 2 * ROWS if n >= 2 * ROWS * target.num_sms or tokens > 256 else ROWS
    programs, blocks, split = -(-n // rows) * -(-tokens // bm), k // 128, 1
    few, many = (2.0, 4.0) if bm == 16 else (1.5, 2.0)
    while blocks >= 8 * split:
        if programs * split * 2 > (many if blocks >= 16 * split else few) * target.num_sms:
            break
        split *= 2
    return Tile(rows, bm, split, WARPS, 3 if rows > ROWS else 4)


def expect_bf16(x: Tensor) -> None:
    """Raise ContractError unless x is bfloat16: only the cpu pack takes float32."""
    if x.dtype != bfloat16:
        raise ContractError(f"x is {x.dtype.name}; on a GPU it is bfloat16 (float32: the cpu pack)")


def expect_q8(target: Target, quantized: bool) -> None:
    """Raise ContractError if values are to be rounded to float8 on a GPU without float8 numbers."""
    if quantized and target.arch < 89:
        raise ContractError(f"q8 is asked for on sm_{target.arch}; float8 numbers are for sm_89 and up")


def projection(
    target: Target,
    out: Tensor | Scratch,
    x: Tensor,
    weight: Tensor,
    scales: Tensor | None,
    *,
    groups: int = 1,
    rounded: bool = False,
    scale_rows: int = SCALE_BLOCK,
) -> Iterator[Command]:
    """out [T, N] = x @ weight^T in `groups` (ops.project.project); with groups `out` is a tensor. scale_rows: rows of a
    float8 weight that share scales; fewer than 128 where a rank has a part of a block of each stacked projection."""
    expect_bf16(x)
    tokens, (n, k) = x.shape[0], weight.shape
    if (
        scales is not None
        and rounded
        and groups == 1
        and tokens <= FEW_CODED
        and takes_codes(target)
        and k % 128 == 0
        and scale_rows == SCALE_BLOCK
    ):
        yield from _coded(target, out, x, weight, scales, tile(target, tokens, n, k))
        return
    few = FEW_IN_GROUPS if groups > 1 else FEW if scales is None else FEW_PACKED
    if tokens <= few or target.arch < 90 or target.batch_invariant:
        if scales is not None and k % 64:
            raise ContractError(f"a float8 weight has {k} columns; on a GPU they are a multiple of 64")
        yield _few(target, out, x, weight, scales, groups, scale_rows)
        return
    for g in range(groups):
        rows = n // groups
        ours: Tensor | Scratch = weight[g * rows : (g + 1) * rows]
        if scales is not None:
            ours = Scratch((rows, k), bfloat16)
            yield _dequantize(ours, weight, scales, g * rows, scale_rows)
        if isinstance(out, Scratch):
            yield _many(target, out, x, ours)
        else:
            yield _many(target, out[:, g * rows : (g + 1) * rows], x[:, g * k : (g + 1) * k], ours)


def _many(target: Target, out: Tensor | Scratch, x: Tensor, weight: Tensor | Scratch) -> Command:
    """A product of bf16 matrices; of columns of wider ones by the kernel that reads through tensor maps."""
    (n, k), op = weight.shape, "linear_add" if out.dtype == bfloat16 else "logits"
    dense = x.is_contiguous and (isinstance(out, Scratch) or out.is_contiguous)
    if dense:
        choice = measured(target, op, x.shape[0], n, k)
    else:
        choice = rule(dataclasses.replace(target, cublas=False), op, x.shape[0], n, k)
    if choice.kind in ("gemv", "small"):
        choice = rule(target, op, FEW + 1, n, k)
    return matmul(choice, target, out, x, weight)


def _few(
    target: Target,
    out: Tensor | Scratch,
    x: Tensor,
    weight: Tensor,
    scales: Tensor | None,
    groups: int,
    scale_rows: int,
) -> Launch:
    (tokens, n), (_, k), float8 = out.shape, weight.shape, scales is not None
    rows, bm = n // groups, min(FEW, max(16, power_of_two(tokens)))
    if target.batch_invariant:
        bm = 16
    bk = 64 if float8 else depth(k, 128 if bm <= 32 else 64)
    tiles, columns, split = -(-tokens // bm) * groups, -(-rows // ROWS), 1
    while split < 16 and not target.batch_invariant:
        if columns * tiles * split >= 2 * target.num_sms or k // bk < split * 8:
            break
        split *= 2
    words = weight.view_as(int32) if float8 else weight
    args: dict[str, Arg] = {
        "out": out,
        "x": x,
        "weight": words,
        "scales": weight if scales is None else scales,
        "partial": Scratch((split, tokens, n) if split > 1 else (1,), float32),
        "counter": Scratch((columns * tiles if split > 1 else 1,), int32, zeroed=True),
        "M": tokens,
        "N": Aligned(n),
        "K": Aligned(k),
        "K_WORDS": Aligned(words.shape[1]),
        "GROUP_ROWS": Aligned(rows),
        "x_stride": aligned(x.strides[0]),
        "scale_blocks": -(-k // 128),
    }
    constants = {
        "BM": bm,
        "ROWS": ROWS,
        "BK": bk,
        "SPLIT": split,
        "WARPS": WARPS,
        "FLOAT8": float8,
        "SCALE_ROWS": scale_rows,
        "PAIRS": target.arch >= 90 and not target.interpreted,
    }
    turn = bk * (ROWS * weight.itemsize + 2 * bm)  # bytes of one stage
    stages = min(5 if bm <= 32 else 4, (shared_bytes(target.arch) - 1024) // turn)
    grid = (columns, split, tiles)
    return launch(_DEVICE, "project_few", grid, args, constants, num_warps=WARPS, num_stages=stages)


def _coded(
    target: Target, out: Tensor | Scratch, x: Tensor, weight: Tensor, scales: Tensor, tile: Tile
) -> Iterator[Launch]:
    """out [T, N] = x @ weight^T, of float8 codes: x is what q8 gave."""
    (tokens, n), k = out.shape, weight.shape[1]
    padded = -(-tokens // tile.bm) * tile.bm
    codes, x_scales = Scratch((tokens, k), float8_e4m3fn), Scratch((k // 128, padded), float32)
    blocks = min(8, power_of_two(k // 128))
    args: dict[str, Arg] = {
        "codes": codes,
        "scales": x_scales,
        "x": x,
        "width": Aligned(k),
        "x_stride": aligned(x.strides[0]),
        "TOKENS": Aligned(padded),
    }
    yield launch(_DEVICE, "code_rows", (tokens, -(-k // (128 * blocks))), args, {"BLOCKS": blocks})
    columns, tiles, split = -(-n // tile.rows), -(-tokens // tile.bm), tile.split
    args = {
        "out": out,
        "x": codes,
        "x_scales": x_scales,
        "weight": weight,
        "scales": scales,
        "partial": Scratch((split, tokens, n) if split > 1 else (1,), float32),
        "counter": Scratch((columns * tiles if split > 1 else 1,), int32, zeroed=True),
        "M": tokens,
        "N": Aligned(n),
        "K": Aligned(k),
        "K_BLOCKS": k // 128,
        "TOKENS": Aligned(padded),
    }
    constants = {"BM": tile.bm, "ROWS": tile.rows, "SPLIT": split}
    grid = (columns, split, tiles)
    yield launch(
        _DEVICE, "project_codes", grid, args, constants, num_warps=tile.warps, num_stages=tile.stages
    )


def _dequantize(out: Scratch, weight: Tensor, scales: Tensor, first: int, scale_rows: int) -> Launch:
    """Some rows of a float8 weight made bf16."""
    n, k = out.shape
    args: dict[str, Arg] = {
        "out": out,
        "weight": weight,
        "scales": scales,
        "first": first,
        "N": n,
        "K": Aligned(k),
        "scale_blocks": scales.shape[1],
    }
    return launch(
        _DEVICE, "dequantize", (-(-n // 32), -(-k // 128)), args, {"BN": 32, "SCALE_ROWS": scale_rows}
    )


def q8_rows(out: Tensor) -> Launch:
    """out through q8, in place."""
    rows, width = out.shape
    blocks = min(8, power_of_two(width // 128))
    args: dict[str, Arg] = {"x": out, "width": Aligned(width)}
    return launch(_DEVICE, "q8_rows", (rows, -(-width // (128 * blocks))), args, {"BLOCKS": blocks})


def clamped_gate(out: Tensor, both: Scratch, limit: float, quantized: bool) -> Launch:
    """out [T, I] from the gate's and the up projection's columns."""
    rows, width = out.shape
    blocks = min(8, power_of_two(width // 128))
    args: dict[str, Arg] = {"out": out, "both": both, "limit": limit, "width": Aligned(width)}
    constants = {"BLOCKS": blocks, "QUANTIZED": quantized}
    return launch(_DEVICE, "clamped_gate", (rows, -(-width // (128 * blocks))), args, constants)


def norm_rows(out: Tensor, x: Tensor, norm_weight: Tensor, eps: float, quantized: bool) -> Launch:
    """out = the RMS norm of x, rounded by q8 if asked."""
    rows, width = out.shape
    args: dict[str, Arg] = {
        "out": out,
        "x": x,
        "norm_weight": norm_weight,
        "width": aligned(width),
        "eps": eps,
    }
    constants = {"BLOCKS": power_of_two(-(-width // 128)), "QUANTIZED": quantized}
    return launch(_DEVICE, "norm_rows", (rows,), args, constants, num_warps=8 if width > 2048 else 4)
