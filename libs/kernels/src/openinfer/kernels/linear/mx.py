"""Products of the op "project", with bf16 weights and those with E8M0 scales: packed weights in the kernel where tokens
are few, made bf16 first where they are many."""

import dataclasses
from collections.abc import Iterator

import numpy as np

from openinfer.kernels.errors import ContractError
from openinfer.kernels.formats.linear import Linear, Plain
from openinfer.kernels.linear.choices import CodedTile, measured, rule
from openinfer.kernels.linear.cublas import CUBLAS_WORKSPACE
from openinfer.kernels.linear.few_bits import in_pairs
from openinfer.kernels.linear.problem import Kernel, Operand, Problem, sums_of_parts
from openinfer.kernels.op.coded import Coded, code_args
from openinfer.kernels.op.launch import (
    Aligned,
    Arg,
    Command,
    Launch,
    Matmul,
    Scratch,
    aligned,
    depth,
    launch,
    power_of_two,
)
from openinfer.kernels.op.rounding import SCALE_BLOCK
from openinfer.kernels.op.target import Target, shared_bytes
from openinfer.tensor import Tensor, bfloat16, float32, int32

_DEVICE = "openinfer.kernels.device.packed_linear"

FEW, FEW_PACKED, FEW_IN_GROUPS, FEW_CODED = 64, 128, 512, 512
"""Up to this many tokens the time is that of reading the weights. The limits of packed weights and of groups are
higher: several reads cost less than making the weights bf16, or than one product a group."""

MANY_BY_CUBLAS = 128
"""Tokens from which on all groups are one product of cuBLASLt, if it is there."""

SMALL_GROUP = 1 << 16
"""Numbers of a group's weight up to which all groups are one launch also with more tokens than FEW_IN_GROUPS: a launch
a group would take longer than its product."""
ROWS, WARPS = 64, 4
MOST_HELD = 32 << 10
"""The most bytes of a weight that a program keeps in registers, 64 a thread."""


def multiplies_codes(target: Target) -> bool:
    """Whether products of values that q8 gave are of float8 codes: on Hopper, whose tensor cores multiply them at twice
    the rate of bf16, without anything to unpack."""
    return target.arch == 90 and not target.batch_invariant


def packed_tile(target: Target, tokens: int, n: int, k: int) -> CodedTile:
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
    return CodedTile(rows, bm, split, WARPS, 3 if rows > ROWS else 4)


def _scale_rows(p: Problem) -> int:
    """Rows of a float8 weight that share scales: fewer than 128 where a rank has a part of a block of each stacked
    projection."""
    return SCALE_BLOCK if p.parts == 1 else min(p.rows // p.parts, SCALE_BLOCK)


def _takes_codes(p: Problem) -> bool:
    coded = p.op == "project" and p.form != Plain() and p.x_scales is not None
    return coded and multiplies_codes(p.target) and p.k % 128 == 0 and _scale_rows(p) == SCALE_BLOCK


def _takes_codes_of_many(p: Problem) -> bool:
    """cuBLASLt takes scales of blocks in fours."""
    fits = p.m % 16 == 0 and p.k % (4 * SCALE_BLOCK) == 0 and p.rows % SCALE_BLOCK == 0
    return _takes_codes(p) and p.target.cublas and p.m > FEW_CODED and fits


def _takes_groups(p: Problem) -> bool:
    large = p.groups > 1 and p.m >= MANY_BY_CUBLAS and not _small_groups(p)
    dense = isinstance(p.x, Tensor) and p.x.is_contiguous and p.x.dtype == bfloat16
    known = p.target.cublas and p.target.arch >= 90 and not p.target.batch_invariant
    return p.op == "project" and large and dense and known


def _groups(p: Problem) -> Iterator[Command]:
    """All groups as one product."""
    weight: Operand = p.weight.weight
    if p.form != Plain():
        weight = Scratch((p.rows, p.k), bfloat16)
        yield _dequantized(p, weight, 0)
    workspace = Scratch((CUBLAS_WORKSPACE,), np.dtype(np.uint8))
    yield Matmul(p.out, _tensor(p.x), weight, workspace, groups=p.groups)


def _takes_few(p: Problem) -> bool:
    """No part of scratch memory is an operand, so groups that are written there are one launch for any number of
    tokens."""
    few = FEW_IN_GROUPS if p.groups > 1 else FEW if p.form == Plain() else FEW_PACKED
    small = p.m <= few or _small_groups(p) or (p.groups > 1 and isinstance(p.out, Scratch))
    return p.op == "project" and (small or p.target.arch < 90 or p.target.batch_invariant)


def _small_groups(p: Problem) -> bool:
    return p.groups > 1 and p.form == Plain() and p.rows // p.groups * p.k <= SMALL_GROUP


def _many(p: Problem) -> Iterator[Command | Problem]:
    """Products of bf16 matrices; of columns of wider ones by the kernel that reads through tensor maps."""
    op, rows = "linear_add" if p.out.dtype == bfloat16 else "logits", p.rows // p.groups
    for g in range(p.groups):
        ours: Operand
        if p.form == Plain():
            ours = _tensor(p.weight.weight)[g * rows : (g + 1) * rows]
        else:
            ours = Scratch((rows, p.k), bfloat16)
            yield _dequantized(p, ours, g * rows)
        out, x = p.out, p.x
        if p.groups > 1:
            out, x = _tensor(out)[:, g * rows : (g + 1) * rows], _tensor(x)[:, g * p.k : (g + 1) * p.k]
        if all(isinstance(one, Scratch) or one.is_contiguous for one in (out, x)):
            choice = measured(p.target, op, p.m, rows, p.k)
        else:
            choice = rule(dataclasses.replace(p.target, cublas=False), op, p.m, rows, p.k)
        if choice.kind in ("gemv", "small"):
            choice = rule(p.target, op, FEW + 1, rows, p.k)
        yield Problem(p.target, op, out, x, Linear(ours), choice=choice)


def _tensor(operand: Operand | None) -> Tensor:
    assert isinstance(operand, Tensor)
    return operand


def _few(p: Problem) -> Iterator[Command]:
    x, weight, k, float8 = p.x, _tensor(p.weight.weight), p.k, p.form != Plain()
    if float8 and k % 64:
        raise ContractError(f"a float8 weight has {k} columns; on a GPU they are a multiple of 64")
    rows, bm = p.n // p.groups, min(FEW, max(16, power_of_two(p.m)))
    if p.target.batch_invariant:
        bm = 16
    many = p.m > FEW_IN_GROUPS and _small_groups(p) and not p.target.batch_invariant
    bk, height = 64 if float8 else depth(k, 128 if bm <= 32 else 64), 2 * ROWS if many else ROWS
    tiles, columns, split = -(-p.m // bm) * p.groups, -(-rows // height), 1
    while split < 16 and not p.target.batch_invariant:
        # As measured on an H200: with more programs, sums of parts cost more than they hide.
        if columns * tiles * split * weight.itemsize >= 1.2 * p.target.num_sms or k // bk < split * 8:
            break
        split *= 2
    words = weight.view_as(int32) if float8 else weight
    args: dict[str, Arg] = {"out": p.out, "x": x, "weight": words, "scales": p.weight.scales or weight}
    args |= {**sums_of_parts(split, (split, p.m, p.n), columns * tiles), **p.sizes}
    args |= {"K_WORDS": Aligned(words.shape[1]), "GROUP_ROWS": Aligned(rows)}
    args |= {"x_stride": aligned(x.strides[0]), "scale_blocks": -(-k // 128)}
    constants = {"BM": bm, "ROWS": height, "BK": bk, "SPLIT": split, "WARPS": WARPS}
    constants |= {"FLOAT8": float8, "SCALE_ROWS": _scale_rows(p), "PAIRS": in_pairs(p.target)}
    constants["HELD"] = _held(p, k // bk, split, height * bk) if float8 else 0
    turn = bk * (height * weight.itemsize + 2 * bm)  # bytes of one stage
    stages = min(2 if many else 4 if float8 else 5, (shared_bytes(p.target.arch) - 1024) // turn)
    grid, early = (columns, split, tiles), p.target.early(p.m)
    yield launch(
        _DEVICE, "project_few", grid, args, constants, num_warps=WARPS, num_stages=stages, early=early
    )


def _held(p: Problem, turns: int, split: int, size: int) -> int:
    """The turns of a program that starts early and has registers for its part of the weight, of `size` bytes a turn."""
    own = turns // split
    return own if p.target.early(p.m) and turns % split == 0 and own * size <= MOST_HELD else 0


def _codes_of_many(p: Problem) -> Iterator[Command]:
    """The same by cuBLASLt, whose scales are float32, and those of x [K / 128, M]."""
    own, blocks = _tensor(p.weight.scales), p.k // SCALE_BLOCK
    scales, x_scales = Scratch(own.shape, float32), Scratch((blocks, p.m), float32)
    workspace = Scratch((CUBLAS_WORKSPACE,), np.dtype(np.uint8))
    args: dict[str, Arg] = {"out": scales, "x_out": x_scales, "scales": own, "x_scales": _tensor(p.x_scales)}
    args |= {"count": own.numel, "tokens": p.m, "blocks": blocks}
    grid = (-(-own.numel // 256) + -(-blocks * p.m // 256),)
    yield launch(_DEVICE, "float_scales", grid, args, {"BLOCK": 256}, num_warps=2)
    yield Matmul(p.out, p.x, p.weight.weight, workspace, scales=(x_scales, scales))


def _codes(p: Problem) -> Iterator[Launch]:
    """Products of float8 codes."""
    tile = packed_tile(p.target, p.m, p.rows, p.k)
    columns, tiles = -(-p.n // tile.rows), -(-p.m // tile.bm)
    sums = sums_of_parts(tile.split, (tile.split, p.m, p.n), columns * tiles)
    args: dict[str, Arg] = {**p.operands, **sums, **p.sizes, "K_BLOCKS": p.k // 128}
    constants, early = {"BM": tile.bm, "ROWS": tile.rows, "SPLIT": tile.split}, p.target.early(p.m)
    constants["HELD"] = _held(p, p.k // 128, tile.split, tile.rows * 128)
    warps, stages, grid = tile.warps, tile.stages, (columns, tile.split, tiles)
    yield launch(
        _DEVICE, "project_codes", grid, args, constants, num_warps=warps, num_stages=stages, early=early
    )


def _widened(p: Problem) -> Iterator[Launch | Problem]:
    """Products of bf16, for what takes no codes."""
    x = Scratch(p.x.shape, bfloat16)
    args: dict[str, Arg] = {"out": x, "codes": p.x, "scales": _tensor(p.x_scales)}
    yield _by_rows(p.target, "widen_rows", x.shape, args | {"width": Aligned(p.x.shape[1])})
    yield dataclasses.replace(p, x=x, x_scales=None)


def _dequantized(p: Problem, out: Scratch, first: int) -> Launch:
    """Some rows of a float8 weight made bf16."""
    (n, k), scales = out.shape, _tensor(p.weight.scales)
    args: dict[str, Arg] = {"out": out, "weight": p.weight.weight, "scales": scales, "first": first}
    args |= {"N": n, "K": Aligned(k), "scale_blocks": scales.shape[1]}
    constants = {"BN": 32, "SCALE_ROWS": _scale_rows(p)}
    return launch(_DEVICE, "dequantize", (-(-n // 32), -(-k // 128)), args, constants)


KERNELS = (
    Kernel("projection of codes", lambda p: p.m <= FEW_CODED and _takes_codes(p), _codes),
    Kernel("projection of many codes", _takes_codes_of_many, _codes_of_many),
    Kernel("projection of widened codes", lambda p: p.op == "project" and p.x_scales is not None, _widened),
    Kernel("projection in groups", _takes_groups, _groups),
    Kernel("projection of few", _takes_few, _few),
    Kernel("projection of many", lambda p: p.op == "project", _many),
)


def _by_rows(
    target: Target, function: str, shape: tuple[int, ...], args: dict[str, Arg], **constants: bool
) -> Launch:
    """A kernel whose programs have up to 1,024 columns of a row each."""
    rows, width = shape
    blocks = min(8, power_of_two(-(-width // SCALE_BLOCK)))
    grid = (rows, -(-width // (SCALE_BLOCK * blocks)))
    return launch(_DEVICE, function, grid, args, {"BLOCKS": blocks, **constants}, early=target.early(rows))


def launch_code_rows(target: Target, out: Coded[Tensor], x: Operand) -> Launch:
    """out = x through q8; rows of x at any stride."""
    args: dict[str, Arg] = {"codes": out.codes, "scales": out.scales, "x": x}
    args |= {"width": aligned(x.shape[1]), "x_stride": aligned(x.strides[0])}
    return _by_rows(target, "code_rows", x.shape, args)


def launch_clamped_gate(target: Target, out: Coded[Tensor] | Tensor, both: Scratch, limit: float) -> Launch:
    """out [T, I] from the gate's and the up projection's columns."""
    args = {**code_args(out), "both": both, "limit": limit, "width": Aligned(out.shape[1])}
    return _by_rows(target, "clamped_gate", out.shape, args, CODED=isinstance(out, Coded))


def launch_norm_rows(
    target: Target, out: Coded[Tensor] | Tensor, x: Tensor, norm_weight: Tensor, eps: float
) -> Launch:
    """out = the RMS norm of x."""
    rows, width = x.shape
    args = {**code_args(out), "x": x, "norm_weight": norm_weight, "width": aligned(width), "eps": eps}
    constants = {"BLOCKS": power_of_two(-(-width // 128)), "CODED": isinstance(out, Coded)}
    warps, early = 8 if width > 2048 else 4, target.early(rows)
    return launch(_DEVICE, "norm_rows", (rows,), args, constants, num_warps=warps, early=early)
