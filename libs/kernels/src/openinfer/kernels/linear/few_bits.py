"""Products with FP4, INT4 and INT8 weights: Triton's kernels for few tokens. Else the weight is made bf16 first."""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from openinfer.kernels.formats.fp4 import FP4_TAIL, Fp4
from openinfer.kernels.formats.int4 import Int4Groups
from openinfer.kernels.formats.int8 import Int8
from openinfer.kernels.formats.linear import Linear
from openinfer.kernels.linear.choices import CodedTile
from openinfer.kernels.linear.problem import Kernel, Operand, Problem, sums_of_parts
from openinfer.kernels.norms import launch_silu_mul
from openinfer.kernels.op.launch import Aligned, Arg, Command, Scratch, launch, power_of_two
from openinfer.kernels.op.target import Target
from openinfer.tensor import Tensor, bfloat16, float32, int32

FEW_TOKENS = 64
"""Tokens up to which Triton's kernel unpacks the codes in the product. With more tokens each code would be unpacked for
several tiles, and a product of bf16 weights costs less, with the pass that makes them."""
PACKED_GROUP = 128
"""Columns of a group of INT4 whose codes go to the tensor cores without a detour through shared memory."""
DEPTH = 128
"""Columns that a turn of FP4's kernel multiplies, and at most of INT8's."""


class FormKernels(NamedTuple):
    """The kernels of a form, whose names end with `name`. args, constants: what they are given of the weight. paired:
    products read its codes as words, and make bf16 of two at once."""

    name: str
    device: str
    args: dict[str, Arg]
    constants: dict[str, int | bool]
    paired: bool = False

    def words(self) -> dict[str, Arg]:
        """`args` with the codes in words."""
        weight = self.args["weight"]
        assert isinstance(weight, Tensor)
        return self.args | {"weight": weight.view_as(int32)}

    def of_products(self, target: Target, warps: int) -> dict[str, int | bool]:
        """The constants of products."""
        if not self.paired:
            return self.constants
        return {"WARPS": warps, "PAIRS": in_pairs(target)}


def in_pairs(target: Target) -> bool:
    """Whether kernels make bf16 of two codes at once, by assembly."""
    return target.arch >= 90 and not target.interpreted


def form_kernels(weight: Linear[Operand]) -> FormKernels | None:
    """The kernels of a weight, None for one of another format."""
    form, scales = weight.form, weight.scales
    if isinstance(form, Int8):
        assert scales is not None
        args: dict[str, Arg] = {"weight": weight.weight, "scales": scales}
        chunk = _chunk(form.group or weight.columns)
        constants: dict[str, int | bool] = {"GROUP": form.group, "CHUNK": chunk}
        return FormKernels("int8", "openinfer.kernels.device.int8", args, constants)
    if isinstance(form, Fp4):
        assert isinstance(scales, Tensor)
        factors = scales.view_as(float32)
        last = (*(slice(None) for _ in scales.shape[1:]), slice(factors.shape[-1] - FP4_TAIL // 4, None))
        args = {"weight": weight.weight, "scales": scales.view_as(int32), "factors": factors[last]}
        return FormKernels("fp4", "openinfer.kernels.device.fp4", args, {}, paired=True)
    if isinstance(form, Int4Groups):
        assert scales is not None
        args, group = {"weight": weight.weight, "words": scales}, form.group
        device, paired = "openinfer.kernels.device.int4", group == PACKED_GROUP
        return FormKernels("int4", device, args, {"GROUP": group}, paired)
    return None


def _chunk(size: int, most: int = DEPTH) -> int:
    """Columns of a turn: a power of two that divides a group, or K."""
    return min(most, size & -size)


def unpacks(form: object, k: int) -> bool:
    """Whether a kernel unpacks the codes in the product."""
    if isinstance(form, Fp4):
        return k % DEPTH == 0
    return isinstance(form, Int4Groups) or (isinstance(form, Int8) and _chunk(form.group or k) >= 16)


def _few(p: Problem) -> Iterator[Command]:
    if p.gated:
        both = p.both()
        yield from [*_few(p.ungated(both)), launch_silu_mul(p.out, both)]
        return
    own = form_kernels(p.weight)
    assert own is not None
    tile = few_tile(p.target, p.m, p.n, p.k)
    columns, tiles = -(-p.n // tile.rows), -(-p.m // tile.bm)
    sums = sums_of_parts(tile.split, (tile.split, p.m, p.n), columns * tiles)
    args = {"out": p.out, "x": p.x, **(own.words() if own.paired else own.args), **sums, **p.sizes}
    name = f"project_{own.name}" + "_packed" * (own.name == "int4" and own.paired)
    height = "BN" if name == "project_int4" else "ROWS"
    constants = {"BM": tile.bm, height: tile.rows, "SPLIT": tile.split, "ADD": p.add}
    constants |= own.of_products(p.target, tile.warps)
    grid = (columns, tile.split, tiles)
    yield launch(own.device, name, grid, args, constants, num_warps=tile.warps, num_stages=tile.stages)


def few_tile(target: Target, m: int, n: int, k: int) -> CodedTile:
    """The tile of a product of few tokens, as measured on an H200 for INT4 weights of Qwen3-4B. K is split until the
    programs fill the GPU once, and twice with up to 32 tokens."""
    bm = min(64, max(16, power_of_two(m)))
    rows = 128 if bm == 16 and n >= 128 * target.num_sms else 64
    programs, split, fill = -(-n // rows) * -(-m // bm), 1, (2 if bm <= 32 else 1) * target.num_sms
    while split < 8 and split * programs <= fill and k // PACKED_GROUP >= 4 * split:
        split *= 2
    return CodedTile(rows, bm, split)


def _widened(p: Problem) -> Iterator[Command | Problem]:
    own, wide, block = form_kernels(p.weight), Scratch((p.rows, p.k), bfloat16), 32
    assert own is not None
    args, constants, warps, columns = own.args, own.constants, 4, own.constants.get("CHUNK")
    if columns is None:
        args, warps, columns = own.words(), 8, _chunk(p.k, 256)
        constants = {**constants, "RUN": columns, "PAIRS": in_pairs(p.target)}
    args = {"out": wide, **args, "N": p.rows, "K": Aligned(p.k)}
    name, grid = f"dequantize_{own.name}", (-(-p.rows // block), p.k // columns)
    yield launch(own.device, name, grid, args, {"BN": block, **constants}, num_warps=warps)
    yield replace(p, weight=Linear(wide), choice=None)


def _is_few(p: Problem) -> bool:
    return unpacks(p.form, p.k) and p.m <= FEW_TOKENS and not p.target.batch_invariant


KERNELS = (
    Kernel("few tokens", _is_few, _few),
    Kernel("few bits to bf16", lambda p: isinstance(p.form, Fp4 | Int4Groups | Int8), _widened),
)
