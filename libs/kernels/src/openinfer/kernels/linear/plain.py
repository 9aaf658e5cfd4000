"""Products with weights of bf16, and with FP8 weights where activations are not quantised: Triton's kernels."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from openinfer.kernels.formats.fp8 import Fp8
from openinfer.kernels.formats.linear import Linear, Plain
from openinfer.kernels.linear.choices import planned
from openinfer.kernels.linear.int4 import int4_choice
from openinfer.kernels.linear.problem import Kernel, Operand, Problem, sums_of_parts
from openinfer.kernels.norms import launch_silu_mul, norm
from openinfer.kernels.op.launch import (
    Aligned,
    Arg,
    Command,
    Launch,
    Scratch,
    TensorMap,
    aligned,
    launch,
    launch_cuda,
    power_of_two,
)
from openinfer.kernels.op.rounding import SCALE_BLOCK
from openinfer.kernels.op.target import shared_bytes
from openinfer.tensor import bfloat16

GROUP = 8
"""Row tiles that run side by side, so that the weights they share are read from memory once."""
NORMING_PROGRAMS = 64
"""Programs an SM up to which a product of one token normalises the token in each program. With more, a kernel for that
costs less (docs/lessons). Products of float8 weights never do it, because they are short of instructions."""
GATED_TOKENS = 512
"""Tokens from which gated_product.cu is the fastest kernel of a gated product (docs/lessons/products.md)."""
GATED_COLUMNS, GATED_TILE, GATED_DEPTH = 152, 128, 64
"""The size of its tile: columns, tokens and depth. The kernel has these numbers too."""

_DEVICE = "openinfer.kernels.device.linear"


def _scaled(form: object) -> bool | int:
    """The kernels' constant SCALED: 2 for scales of rows."""
    return isinstance(form, Fp8) and (2 if form.by_row else True)


def _scales(p: Problem) -> Operand:
    return p.x if p.weight.scales is None else p.weight.scales


def _gemv_takes(p: Problem) -> bool:
    if not isinstance(p.form, Plain | Fp8) or (choice := planned(p)).kind != "gemv":
        return False
    if p.x_scales is not None:
        return p.k % SCALE_BLOCK == 0 or p.weight.coding != "block"
    whole = isinstance(p.form, Plain) and p.rows <= NORMING_PROGRAMS * choice.bn * p.target.num_sms
    return p.norm is None or whole


def _gemv(p: Problem) -> Iterator[Command]:
    c, form = planned(p), p.form
    gain, eps = p.norm or (p.x_scales or p.x, 0.0)
    args: dict[str, Arg] = {"out": p.out, "x": p.x, "gain": gain, "weight": p.weight.weight}
    args |= {"scales": _scales(p), "N": Aligned(p.n), "K": Aligned(p.k), "eps": eps}
    constants = {"BN": c.bn, "STAGES": c.stages, "NORM": power_of_two(p.k) if p.norm else 0}
    constants |= {"ADD": p.add, "GATED": p.gated, "CODED": p.x_scales is not None}
    name = "gemv"
    early: bool | None = p.target.starts_early
    if form == Fp8(by_row=False) and c.bk % SCALE_BLOCK == 0:
        name, more, early = "gemv_scaled", {"BLOCKS": c.bk // SCALE_BLOCK}, None
    else:
        more = {"BK": c.bk, "SCALED": _scaled(form)}
    yield launch(_DEVICE, name, (-(-p.n // c.bn),), args, constants | more, num_warps=c.warps, early=early)


def _normed(p: Problem) -> Iterator[Command | Problem]:
    assert p.norm is not None
    few = planned(p).kind in ("cluster", "gemv", "small") or int4_choice(p) is not None
    hidden = Scratch(p.x.shape, p.x.dtype)
    yield norm(hidden, p.x, *p.norm, early=few and p.target.starts_early)
    yield replace(p, x=hidden, norm=None)


def _widened(p: Problem) -> Iterator[Command | Problem]:
    """A float8 weight made bf16; every half of a gated product's its blocks begin anew."""
    (n, k), block, weight, form = p.weight.weight.shape, 32, p.weight, p.form
    wide, grid = Scratch((n, k), bfloat16), (-(-n // block), -(-k // 128))
    args: dict[str, Arg] = {"out": wide, "weight": weight.weight, "scales": _scales(p)}
    by_row = isinstance(form, Fp8) and form.by_row
    part = {} if by_row else {"part": n // (2 if p.gated else 1)}
    name = "dequantize_rows" if by_row else "dequantize"
    yield launch(_DEVICE, name, grid, {**args, **part, "N": n, "K": Aligned(k)}, {"BN": block})
    yield replace(p, weight=Linear(wide), choice=None)


def _small(p: Problem) -> Iterator[Command]:
    c = planned(p)
    tiles = -(-p.n // c.bn)
    sums = sums_of_parts(c.split, ((2 if p.gated else 1) * c.split, c.bm, p.n), tiles)
    args: dict[str, Arg] = {**p.operands, "scales": _scales(p), **sums, **p.sizes}
    constants = {"BM": c.bm, "BN": c.bn, "BK": c.bk, "SPLIT": c.split}
    constants |= {"ADD": p.add, "GATED": p.gated, "SCALED": _scaled(p.form)}
    grid = (tiles, c.split)
    yield launch(_DEVICE, "gemm_small", grid, args, constants, num_warps=c.warps, num_stages=c.stages)


def _large(p: Problem) -> Iterator[Command]:
    if p.gated:
        both = p.both()
        yield _gemm(p.ungated(both))
        yield launch_silu_mul(p.out, both)
    else:
        yield _gemm(p)


def _gemm(p: Problem) -> Launch:
    c, weight = planned(p), p.weight.weight
    tiles = -(-p.m // c.bm) * -(-p.n // c.bn)
    constants = {"BM": c.bm, "BN": c.bn, "BK": c.bk, "GROUP": GROUP, "ADD": p.add}
    if c.kind == "pointer":
        args: dict[str, Arg] = {"out": p.out, "x": p.x, "weight": weight, **p.sizes}
        return launch(_DEVICE, "gemm", (tiles,), args, constants, num_warps=c.warps, num_stages=c.stages)
    args = {"out": TensorMap(p.out, (c.bm, c.bn)), "old": p.out, "x": TensorMap(p.x, (c.bm, c.bk))}
    args |= {"weight": TensorMap(weight, (c.bn, c.bk)), **p.sizes}
    grid = (min(tiles, p.target.num_sms),)
    return launch(_DEVICE, "gemm_tma", grid, args, constants, num_warps=c.warps, num_stages=c.stages)


def _gated_takes(p: Problem) -> bool:
    known = p.target.nvrtc and p.target.arch == 90 and not p.target.interpreted
    fits = p.m >= GATED_TOKENS and p.k % GATED_DEPTH == 0 and p.n % 8 == 0
    return p.gated and known and not p.target.batch_invariant and fits


def _gated(p: Problem) -> Iterable[Command]:
    """The gated product of many tokens by a kernel of CUDA C++: device/gated_product.cu."""
    results = GATED_TILE * GATED_COLUMNS * 2
    stage = (GATED_TILE + 2 * GATED_COLUMNS) * GATED_DEPTH * 2
    stages = (shared_bytes(p.target.arch) - results) // (stage + 16)
    args: dict[str, Arg] = {
        "out": TensorMap(p.out, (64, GATED_COLUMNS)),
        "x": TensorMap(p.x, (GATED_TILE, GATED_DEPTH)),
        "weight": TensorMap(p.weight.weight, (GATED_COLUMNS, GATED_DEPTH)),
    }
    args |= {"M": p.m, "I": aligned(p.n), "K": Aligned(p.k)}
    kernel = "openinfer.kernels.device", "gated_product.cu", "gated_product", (p.target.num_sms // 2 * 2,)
    shared = results + stages * (stage + 16)
    yield launch_cuda(*kernel, args, {"STAGES": stages}, threads=384, shared=shared)


GEMV = Kernel("gemv", _gemv_takes, _gemv)
NORMED = Kernel("norm", lambda p: p.norm is not None, _normed)
WIDENED = Kernel("FP8 to bf16", lambda p: p.form != Plain() and planned(p).kind != "small", _widened)
SMALL = Kernel("small", lambda p: planned(p).kind == "small", _small)
GATED = Kernel("gated product", _gated_takes, _gated)
LARGE = Kernel("large", lambda p: True, _large)
