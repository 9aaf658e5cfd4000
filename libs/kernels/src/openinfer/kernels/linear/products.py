"""Matrix products as commands: what norm_linear, linear_add and gate_up_silu have in common."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from openinfer.kernels.errors import ContractError
from openinfer.kernels.formats.codes import SCALE_BLOCK, Coding, of_rows
from openinfer.kernels.formats.int4 import is_int4
from openinfer.kernels.linear import gated_product
from openinfer.kernels.linear.choices import Choice, choose, scaled_rule
from openinfer.kernels.linear.cluster_product import cluster_product
from openinfer.kernels.linear.coded_products import (
    CUBLAS_WORKSPACE,
    Coded,
    coded_clusters,
    coded_product,
    coded_rows,
    expect_coded,
    for_cublas,
    normed_codes,
)
from openinfer.kernels.linear.int4_cluster import int4_choice
from openinfer.kernels.linear.int4_products import few, unpacked_in_product, widened
from openinfer.kernels.linear.ring import group_ring, ring_product
from openinfer.kernels.norms import norm, silu_mul
from openinfer.kernels.op.launch import Aligned, Arg, Command, Matmul, Scratch, TensorMap, launch
from openinfer.kernels.op.target import Target
from openinfer.tensor import Tensor, bfloat16, int32

GROUP = 8
"""Row tiles that run side by side, so that the weights they share are read from memory once."""

_LINEAR = "openinfer.kernels.device.linear"

NORMING_PROGRAMS = 64
"""Programs an SM up to which a product of one token normalises the token in each program. With more, a kernel for that
costs less (docs/lessons). Products of float8 weights never do it, because they are short of instructions."""


def normed_product(
    target: Target,
    op: str,
    out: Tensor,
    x: Tensor,
    gain: Tensor | None,
    eps: float | None,
    weight: Tensor,
    scales: Tensor | None,
    *,
    gated: bool = False,
    coding: Coding | None = None,
    x_scale: Tensor | None = None,
) -> Iterator[Command]:
    """out [M, N] = rms_norm(x [M, K]; gain, eps) @ weight [N, K]^T, or its gated form with weight [2 N, K]. `op`: the
    name the choice is looked up by. For M = 1 the product normalises x itself, unless it is large or of float8,
    and so does a ring; else the norm is a kernel before it. Without `gain` x is normalised already. The norm's kernel
    also quantises its result as `coding` says. For M = 1 a ring of codes does all of it."""
    normalised = None if gain is None or eps is None else (gain, eps)
    ring = group_ring(target, out, x, weight, scales, coding, x_scale, gated=gated, norm=normalised)
    if ring is not None:
        yield ring
        return
    if coding is not None:
        hidden: Tensor | Coded = x
        if gain is not None and eps is not None:
            expect_coded(target, x)
            early = coded_clusters(target, op, x.shape[0], weight) is not None
            command, hidden = normed_codes(x, gain, eps, coding, x_scale, early=early)
            yield command
        yield from _coded(target, op, out, hidden, weight, scales, coding, x_scale, gated=gated)
        return
    choice = _choose(target, op, x.shape[0], weight, scales)
    yield from normed(choice, target, op, out, x, gain, eps, weight, scales, gated=gated)


def normed(
    choice: Choice,
    target: Target,
    op: str,
    out: Tensor,
    x: Tensor,
    gain: Tensor | None,
    eps: float | None,
    weight: Tensor,
    scales: Tensor | None = None,
    *,
    gated: bool = False,
) -> Iterator[Command]:
    """normed_product by the kernel of `choice`."""
    if gain is None or eps is None:
        yield from _product(choice, target, op, out, x, weight, scales, gated=gated)
        return
    norms = scales is None and weight.shape[0] <= NORMING_PROGRAMS * choice.bn * target.num_sms
    if choice.kind == "gemv" and norms:
        yield _gemv(choice, out, x, weight, scales, gated=gated, norm=(gain, eps))
        return
    if choice.kind == "ring" and scales is None and x.dtype == bfloat16:
        yield ring_product(choice, target.num_sms, out, x, weight, gated=gated, norm=(gain, eps))
        return
    hidden = Scratch(x.shape, x.dtype)
    early = choice.kind == "cluster" or int4_choice(target, out, weight, scales, gated=gated) is not None
    yield norm(hidden, x, gain, eps, early=early)
    yield from _product(choice, target, op, out, hidden, weight, scales, gated=gated)


def product(
    target: Target,
    op: str,
    out: Tensor | Scratch,
    x: Tensor | Scratch,
    weight: Tensor,
    scales: Tensor | None,
    *,
    add: bool = False,
    coding: Coding | None = None,
    x_scale: Tensor | None = None,
) -> Iterator[Command]:
    """out [M, N] = x [M, K] @ weight [N, K]^T, or out += with `add`. `op`: the name the choice is looked up by. x is
    quantised as `coding` says."""
    ring = group_ring(target, out, x, weight, scales, coding, x_scale, add=add)
    if ring is not None:
        yield ring
        return
    if coding is not None:
        yield from _coded(target, op, out, x, weight, scales, coding, x_scale, add=add)
        return
    choice = _choose(target, op, x.shape[0], weight, scales)
    yield from _product(choice, target, op, out, x, weight, scales, add=add)


def _coded(
    target: Target,
    op: str,
    out: Tensor | Scratch,
    x: Tensor | Scratch | Coded,
    weight: Tensor,
    scales: Tensor | None,
    coding: Coding,
    x_scale: Tensor | None,
    *,
    add: bool = False,
    gated: bool = False,
) -> Iterator[Command]:
    """The product of float8 codes; x in bf16 is quantised first."""
    if scales is None:
        raise ContractError("x is to be quantised and weight is not float8; on a GPU both are float8")
    if not isinstance(x, Coded):
        expect_coded(target, x)
        early = coded_clusters(target, op, x.shape[0], weight) is not None
        command, x = coded_rows(x, coding, x_scale, early=early)
        yield command
    tokens, k = x.codes.shape
    clusters = coded_clusters(target, op, tokens, weight)
    if clusters is not None:
        yield cluster_product(clusters, out, x.codes, weight, (x.scales, scales), add=add, gated=gated)
    elif tokens == 1 and not target.batch_invariant and (k % SCALE_BLOCK == 0 or coding != "block"):
        choice = scaled_rule(target, op, 1, *weight.shape)
        yield _gemv(choice, out, x.codes, weight, scales, add=add, gated=gated, x_scales=x.scales)
    elif gated and for_cublas(target, tokens, weight, scales, gated=True):
        both = Scratch((tokens, weight.shape[0]), bfloat16)
        yield coded_product(target, both, x, weight, scales)
        yield silu_mul(out, both)
    else:
        yield coded_product(target, out, x, weight, scales, add=add, gated=gated)


def _choose(target: Target, op: str, m: int, weight: Tensor, scales: Tensor | None) -> Choice:
    """The tables are of bf16 weights. For INT4 the choice is that of the weight made bf16."""
    if is_int4(scales):
        return choose(target, op, m, weight.shape[0], 2 * weight.shape[1])
    expect_float8(target, scales)
    return (choose if scales is None else scaled_rule)(target, op, m, *weight.shape)


def _product(
    choice: Choice,
    target: Target,
    op: str,
    out: Tensor | Scratch,
    x: Tensor | Scratch,
    weight: Tensor,
    scales: Tensor | None,
    *,
    add: bool = False,
    gated: bool = False,
) -> Iterator[Command]:
    """The product by the kernel of `choice`. Where that takes no scales, the weight is made bf16 first, which pays for
    many tokens only."""
    wide: Tensor | Scratch = weight
    if scales is not None and is_int4(scales):
        if unpacked_in_product(target, out, weight, scales, gated=gated):
            yield from few(target, out, x, weight, scales, add=add, gated=gated)
            return
        wide = Scratch((weight.shape[0], x.shape[1]), bfloat16)
        yield widened(wide, weight, scales)
        scales = None
    elif scales is not None and choice.kind not in ("gemv", "small"):
        wide, choice = Scratch(weight.shape, bfloat16), choose(target, op, x.shape[0], *weight.shape)
        yield _dequantize(wide, weight, scales, weight.shape[0] // (2 if gated else 1))
        scales = None
    if gated:
        yield from gated_matmul(choice, target, out, x, wide, scales)
    else:
        yield matmul(choice, target, out, x, wide, scales, add=add)


def matmul(
    choice: Choice,
    target: Target,
    out: Tensor | Scratch,
    x: Tensor | Scratch,
    weight: Tensor | Scratch,
    scales: Tensor | None = None,
    *,
    add: bool = False,
    gated: bool = False,
) -> Command:
    """The product by the kernel of `choice`; `gated` and `scales` are for the kinds gemv and small."""
    if x.dtype != bfloat16:
        raise ContractError(f"x is {x.dtype.name}; products on a GPU are bfloat16 (float32: the cpu pack)")
    match choice.kind:
        case "cublas":
            return Matmul(out, x, weight, Scratch((CUBLAS_WORKSPACE,), np.dtype(np.uint8)), accumulate=add)
        case "gemv":
            return _gemv(choice, out, x, weight, scales, add=add, gated=gated)
        case "ring":
            return ring_product(choice, target.num_sms, out, x, weight, add=add, gated=gated)
        case "cluster":
            return cluster_product(choice, out, x, weight, add=add, gated=gated)
        case "small":
            return _gemm_small(choice, out, x, weight, scales, add, gated)
        case "tma" | "pointer":
            return _gemm(choice, target, out, x, weight, add)


def gated_matmul(
    choice: Choice,
    target: Target,
    out: Tensor | Scratch,
    x: Tensor | Scratch,
    weight: Tensor | Scratch,
    scales: Tensor | None = None,
) -> Iterator[Command]:
    """The gated product by the kernel of `choice`, and then by silu_mul if that kernel cannot do it itself."""
    if choice.kind in ("gemv", "ring", "cluster", "small"):
        yield matmul(choice, target, out, x, weight, scales, gated=True)
    elif gated_product.takes(target, out, x, weight):
        yield gated_product.gated_product(target, out, x, weight)
    else:
        both = Scratch((out.shape[0], 2 * out.shape[1]), bfloat16)
        yield matmul(choice, target, both, x, weight)
        yield silu_mul(out, both)


def expect_float8(target: Target, scales: Tensor | None) -> None:
    """Raise ContractError if a weight has scales and the target cannot read float8."""
    if scales is not None and target.arch < 89:
        raise ContractError(f"weights of float8 are given for sm_{target.arch}; float8 is for sm_89 and up")


def _dequantize(out: Scratch, weight: Tensor, scales: Tensor, part: int) -> Command:
    """A float8 weight made bf16; every `part` rows its blocks begin anew."""
    (n, k), block = weight.shape, 32
    grid = (-(-n // block), -(-k // 128))
    if of_rows(weight, scales):
        rows: dict[str, Arg] = {"out": out, "weight": weight, "scales": scales, "N": n, "K": Aligned(k)}
        return launch(_LINEAR, "dequantize_rows", grid, rows, {"BN": block})
    args: dict[str, Arg] = {
        "out": out,
        "weight": weight,
        "scales": scales,
        "part": part,
        "N": n,
        "K": Aligned(k),
    }
    return launch(_LINEAR, "dequantize", grid, args, {"BN": block})


def _scaled(weight: Tensor | Scratch, scales: Tensor | None) -> bool | int:
    """The kernels' constant SCALED: 2 for scales of rows."""
    return 2 if scales is not None and of_rows(weight, scales) else scales is not None


def _gemv(
    c: Choice,
    out: Tensor | Scratch,
    x: Tensor | Scratch,
    weight: Tensor | Scratch,
    scales: Tensor | None,
    *,
    add: bool = False,
    gated: bool = False,
    norm: tuple[Tensor, float] | None = None,
    x_scales: Scratch | None = None,
) -> Command:
    n, k = out.shape[1], weight.shape[1]
    programs = -(-n // c.bn)
    gain, eps = norm or (x_scales or x, 0.0)
    args: dict[str, Arg] = {
        "out": out,
        "x": x,
        "gain": gain,
        "weight": weight,
        "scales": x if scales is None else scales,
        "N": Aligned(n),
        "K": Aligned(k),
        "eps": eps,
    }
    constants = {
        "BN": c.bn,
        "STAGES": c.stages,
        "NORM": 1 << (k - 1).bit_length() if norm else 0,
        "ADD": add,
        "GATED": gated,
        "CODED": x_scales is not None,
    }
    if scales is not None and c.bk % SCALE_BLOCK == 0 and not of_rows(weight, scales):
        constants |= {"BLOCKS": c.bk // SCALE_BLOCK}
        return launch(_LINEAR, "gemv_scaled", (programs,), args, constants, num_warps=c.warps)
    constants |= {"BK": c.bk, "SCALED": _scaled(weight, scales)}
    return launch(_LINEAR, "gemv", (programs,), args, constants, num_warps=c.warps)


def _gemm_small(
    c: Choice,
    out: Tensor | Scratch,
    x: Tensor | Scratch,
    weight: Tensor | Scratch,
    scales: Tensor | None,
    add: bool,
    gated: bool,
) -> Command:
    (m, n), k = out.shape, weight.shape[1]
    tiles, whole = -(-n // c.bn), c.split == 1
    args: dict[str, Arg] = {
        "out": out,
        "x": x,
        "weight": weight,
        "scales": x if scales is None else scales,
        "partial": Scratch((1,) if whole else ((2 if gated else 1) * c.split, c.bm, n), np.dtype(np.float32)),
        "counter": Scratch((1,) if whole else (tiles,), int32, zeroed=True),
        "M": m,
        "N": Aligned(n),
        "K": Aligned(k),
    }
    constants = {"BM": c.bm, "BN": c.bn, "BK": c.bk, "SPLIT": c.split}
    constants |= {"ADD": add, "GATED": gated, "SCALED": _scaled(weight, scales)}
    grid = (tiles, c.split)
    return launch(_LINEAR, "gemm_small", grid, args, constants, num_warps=c.warps, num_stages=c.stages)


def _gemm(
    c: Choice, target: Target, out: Tensor | Scratch, x: Tensor | Scratch, weight: Tensor | Scratch, add: bool
) -> Command:
    (m, n), k = out.shape, weight.shape[1]
    tiles = -(-m // c.bm) * -(-n // c.bn)
    sizes: dict[str, Arg] = {"M": m, "N": Aligned(n), "K": Aligned(k)}
    constants = {"BM": c.bm, "BN": c.bn, "BK": c.bk, "GROUP": GROUP, "ADD": add}
    if c.kind == "pointer":
        args: dict[str, Arg] = {"out": out, "x": x, "weight": weight, **sizes}
        return launch(_LINEAR, "gemm", (tiles,), args, constants, num_warps=c.warps, num_stages=c.stages)
    args = {
        "out": TensorMap(out, (c.bm, c.bn)),
        "old": out,
        "x": TensorMap(x, (c.bm, c.bk)),
        "weight": TensorMap(weight, (c.bn, c.bk)),
        **sizes,
    }
    grid = (min(tiles, target.num_sms),)
    return launch(_LINEAR, "gemm_tma", grid, args, constants, num_warps=c.warps, num_stages=c.stages)
