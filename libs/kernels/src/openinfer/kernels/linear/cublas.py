"""Products by cuBLASLt: of bf16 numbers, and of float8 codes."""

from collections.abc import Iterator

import numpy as np

from openinfer.kernels.formats.fp8 import Fp8
from openinfer.kernels.linear.choices import planned
from openinfer.kernels.linear.problem import Kernel, Problem
from openinfer.kernels.norms import launch_silu_mul
from openinfer.kernels.op.launch import Command, Matmul, Scratch
from openinfer.kernels.op.rounding import SCALE_BLOCK

CUBLAS_WORKSPACE = 32 << 20
"""Bytes of scratch a cuBLASLt product may use."""
FEW_TOKENS, FEW_IN_BLOCKS = 128, 64
"""Tokens up to which coded.TILES is faster than cuBLASLt: with scales of tokens and rows, and of blocks."""
SMALL = 12 << 20
"""Numbers of a weight up to which FEW_TOKENS holds for scales of blocks too."""


def _takes_codes(p: Problem) -> bool:
    """cuBLASLt takes scales of blocks in fours, and no half of a block."""
    if p.x_scales is None or not isinstance(p.form, Fp8) or not p.target.cublas or p.target.batch_invariant:
        return False
    by_row = p.form == Fp8(by_row=True)
    fits = by_row or (p.k % (4 * SCALE_BLOCK) == 0 and not (p.gated and p.rows // 2 % SCALE_BLOCK))
    few = FEW_TOKENS if by_row or p.rows * p.k <= SMALL else FEW_IN_BLOCKS
    return fits and p.m > few and p.m % 16 == 0 and p.k % 16 == 0


def _launches(p: Problem) -> Iterator[Command]:
    out = p.both() if p.gated else p.out
    scales = None if p.x_scales is None or p.weight.scales is None else (p.x_scales, p.weight.scales)
    workspace = Scratch((CUBLAS_WORKSPACE,), np.dtype(np.uint8))
    yield Matmul(out, p.x, p.weight.weight, workspace, p.add, scales=scales)
    if p.gated:
        yield launch_silu_mul(p.out, out)


OF_CODES = Kernel("cublas of codes", _takes_codes, _launches)
PLAIN = Kernel("cublas", lambda p: planned(p).kind == "cublas", _launches)
