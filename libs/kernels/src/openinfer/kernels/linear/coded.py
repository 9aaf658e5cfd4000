"""Products of float8 or int8 codes: activations are quantised, and weights are not unpacked."""

from collections.abc import Iterator
from dataclasses import replace

from openinfer.kernels.errors import ContractError
from openinfer.kernels.formats.fp8 import Fp8
from openinfer.kernels.formats.int8 import Int8
from openinfer.kernels.linear.choices import CodedTile
from openinfer.kernels.linear.cluster import coded_clusters
from openinfer.kernels.linear.problem import Kernel, Problem, sums_of_parts
from openinfer.kernels.op.launch import Arg, Command, Scratch, aligned, launch, power_of_two
from openinfer.kernels.op.rounding import BEFOREHAND, SCALE_BLOCK
from openinfer.kernels.op.target import Target
from openinfer.tensor import float8_e4m3fn, float32, int8

_DEVICE = "openinfer.kernels.device.coded_linear"


def coded_tile(target: Target, tokens: int, n: int, k: int, *, sets: int = 1) -> CodedTile:
    """The tile for `sets` of n rows of weights, as measured on an H200 for the weights of Qwen3-4B. K is split until
    the programs fill the GPU, twice with few tokens, and further while each has many blocks of 128 columns."""
    if target.batch_invariant:
        return CodedTile(64, 16, 1)
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
    return CodedTile(rows, bm, split)


def _quantised(p: Problem) -> Iterator[Command | Problem]:
    """x, or its norm, as codes [T, K] with scales [ceil(K / 128) or 1, T]."""
    coding, (tokens, width) = p.weight.coding, p.x.shape
    if not isinstance(p.form, Fp8 | Int8):
        raise ContractError("x is to be quantised and weight is plain; on a GPU both are codes")
    integers = isinstance(p.form, Int8)
    early = not integers and coded_clusters(p) is not None
    blocks = -(-width // SCALE_BLOCK)
    codes = Scratch((tokens, width), int8 if integers else float8_e4m3fn)
    scales = Scratch((blocks if coding == "block" else 1, tokens), float32)
    whole = p.norm is not None or coding in ("token", "int8 token")  # a program has all columns of a token
    size = power_of_two(blocks) if whole else min(8, power_of_two(blocks))
    args: dict[str, Arg] = {"codes": codes, "scales": scales, "x": p.x}
    args |= {"weight": p.norm.weight} if p.norm else {}
    args |= {"x_scale": scales if p.weight.x_scale is None else p.weight.x_scale}
    args |= {"width": aligned(width), "TOKENS": tokens} | ({"eps": p.norm.eps} if p.norm else {})
    constants = {"SIZE": size, "BLOCKS": coding == "block", "STATIC": coding in BEFOREHAND}
    name, grid = ("norm_codes", (tokens,)) if p.norm else ("code_rows", (tokens, -(-blocks // size)))
    warps = 8 if size > 16 else 4
    yield launch(_DEVICE, name, grid, args, constants, num_warps=warps, early=early)
    yield replace(p, x=codes, x_scales=scales, norm=None)


def _project(p: Problem) -> Iterator[Command]:
    sets = 2 if p.gated else 1
    tile = coded_tile(p.target, p.m, p.n, p.k, sets=sets)
    columns, tiles = -(-p.n // tile.rows), -(-p.m // tile.bm)
    sums = sums_of_parts(tile.split, (tile.split, sets, p.m, p.n), columns * tiles)
    # A mark would make a kernel of its own.
    tokens = p.m if p.target.batch_invariant else aligned(p.m)
    args: dict[str, Arg] = {**p.operands, **sums, **p.sizes, "TOKENS": tokens}
    constants = {"BM": tile.bm, "ROWS": tile.rows, "SPLIT": tile.split, "BLOCKS": p.form == Fp8(by_row=False)}
    constants |= {"EVEN": p.k % SCALE_BLOCK == 0, "ADD": p.add, "GATED": p.gated}
    grid, warps = (columns, tile.split, tiles), tile.warps
    yield launch(_DEVICE, "project_coded", grid, args, constants, num_warps=warps, num_stages=tile.stages)


QUANTISED = Kernel("codes of x", lambda p: p.weight.coding is not None and p.x_scales is None, _quantised)
TILES = Kernel("tiles of codes", lambda p: p.x_scales is not None, _project)
