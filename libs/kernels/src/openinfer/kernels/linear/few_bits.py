"""Products with FP4 and INT8 weights: Triton's kernels for few tokens. For many, the weight is made bf16 first."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from openinfer.kernels.formats.fp4 import Fp4
from openinfer.kernels.formats.int8 import Int8
from openinfer.kernels.formats.linear import Linear
from openinfer.kernels.linear.int4 import FEW_TOKENS, few_tile
from openinfer.kernels.linear.problem import Kernel, Operand, Problem, sums_of_parts
from openinfer.kernels.norms import launch_silu_mul
from openinfer.kernels.op.launch import Aligned, Arg, Command, Scratch, launch
from openinfer.kernels.op.target import Target
from openinfer.tensor import Tensor, bfloat16, float32, int32, uint8

DEPTH = 128
"""Columns that a turn of FP4's kernel multiplies, and at most of INT8's."""


class FormKernels(NamedTuple):
    """The kernels of a form, whose names end with `name`. args, constants: what they are given of the weight."""

    name: str
    device: str
    args: dict[str, Arg]
    constants: dict[str, int | bool]

    def words(self) -> dict[str, Arg]:
        """`args` with bytes as words, as products read FP4's codes."""
        weight = self.args["weight"]
        assert isinstance(weight, Tensor)
        return self.args | ({"weight": weight.view_as(int32)} if weight.dtype == uint8 else {})

    def in_pairs(self, target: Target, warps: int) -> dict[str, int | bool]:
        """The constants of FP4's products besides."""
        if self.name != "fp4":
            return {}
        return {"WARPS": warps, "PAIRS": target.arch >= 90 and not target.interpreted}


def form_kernels(weight: Linear[Operand]) -> FormKernels | None:
    """The kernels of a weight, None for one of another format."""
    form, scales = weight.form, weight.scales
    if isinstance(form, Int8):
        assert scales is not None
        constants = {"GROUP": form.group, "CHUNK": _chunk(form, weight.columns)}
        args: dict[str, Arg] = {"weight": weight.weight, "scales": scales}
        return FormKernels("int8", "openinfer.kernels.device.int8", args, constants)
    if isinstance(form, Fp4):
        assert isinstance(scales, Tensor)
        last = (*(slice(None) for _ in scales.shape[1:]), slice(scales.shape[-1] - 1, None))
        args = {"weight": weight.weight, "scales": scales, "factors": scales.view_as(float32)[last]}
        return FormKernels("fp4", "openinfer.kernels.device.fp4", args, {})
    return None


def _chunk(form: Int8, k: int) -> int:
    """Columns of a turn: a power of two that divides a group, or K."""
    size = form.group or k
    return min(DEPTH, size & -size)


def unpacks(form: object, k: int) -> bool:
    """Whether a kernel unpacks the codes in the product."""
    if isinstance(form, Fp4):
        return k % DEPTH == 0
    return isinstance(form, Int8) and _chunk(form, k) >= 16


def _few(p: Problem) -> Iterator[Command]:
    if p.gated:
        both = p.both()
        yield from [*_few(p.ungated(both)), launch_silu_mul(p.out, both)]
        return
    own = form_kernels(p.weight)
    assert own is not None
    tile = few_tile(p.target, p.m, p.n, p.k)
    columns, tiles = -(-p.n // tile.rows), -(-p.m // tile.bm)
    args: dict[str, Arg] = {
        "out": p.out,
        "x": p.x,
        **own.words(),
        **sums_of_parts(tile.split, (tile.split, p.m, p.n), columns * tiles),
        "M": p.m,
        "N": Aligned(p.n),
        "K": Aligned(p.k),
    }
    constants = {"BM": tile.bm, "ROWS": tile.rows, "SPLIT": tile.split, "ADD": p.add, **own.constants}
    constants |= own.in_pairs(p.target, tile.warps)
    grid = (columns, tile.split, tiles)
    name = f"project_{own.name}"
    yield launch(own.device, name, grid, args, constants, num_warps=tile.warps, num_stages=tile.stages)


def _widened(p: Problem) -> Iterator[Command | Problem]:
    own, wide, block = form_kernels(p.weight), Scratch((p.rows, p.k), bfloat16), 32
    assert own is not None
    columns = int(own.constants.get("CHUNK", 32))
    args: Mapping[str, Arg] = {"out": wide, **own.args, "N": p.rows, "K": Aligned(p.k)}
    grid = (-(-p.rows // block), p.k // columns)
    yield launch(own.device, f"dequantize_{own.name}", grid, args, {"BN": block, **own.constants})
    yield replace(p, weight=Linear(wide), choice=None)


def _is_few(p: Problem) -> bool:
    return unpacks(p.form, p.k) and p.m <= FEW_TOKENS and not p.target.batch_invariant


KERNELS = (
    Kernel("few of FP4 or INT8", _is_few, _few),
    Kernel("FP4 or INT8 to bf16", lambda p: isinstance(p.form, Fp4 | Int8), _widened),
)
