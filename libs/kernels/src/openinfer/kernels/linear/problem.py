"""A product with the weight of a linear layer: everything that says which kernels make it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from openinfer.kernels.errors import ContractError
from openinfer.kernels.formats.linear import Form, Linear
from openinfer.kernels.lora.low_rank import Lora
from openinfer.kernels.norms import Norm
from openinfer.kernels.op.launch import Aligned, Arg, Command, Scratch
from openinfer.kernels.op.target import Target
from openinfer.kernels.store.tables import ProductChoice
from openinfer.tensor import Tensor, bfloat16, float32, int32

Operand = Tensor | Scratch
Epilogue = Literal["none", "add", "gated"]


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """out [M, N] = x [M, K] @ weight^T on a target, where `op` is the name that tables have.

    epilogue: "add" adds onto out; "gated" makes silu(g) * u of the product's halves [g, u], so the weight has 2 N rows.
    norm: x is normalised first. adapter: what adapters add to the product of the normalised x. x_scales: the scales of
    x, which is codes then: float32 of coded.QUANTISED, or bytes of op.coded.Coded. choice: the kernel and tile of plain
    numbers, in place of the chosen one.

    Of the op "project": groups share the columns of x and the rows of the weight; parts: projections that are stacked
    in the weight.
    """

    target: Target
    op: str
    out: Operand
    x: Operand
    weight: Linear[Operand]
    epilogue: Epilogue = "none"
    norm: Norm | None = None
    adapter: Lora[Tensor] | None = None
    x_scales: Operand | None = None
    choice: ProductChoice | None = None
    groups: int = 1
    parts: int = 1

    @property
    def m(self) -> int:
        return self.x.shape[0]

    @property
    def n(self) -> int:
        return self.out.shape[1]

    @property
    def rows(self) -> int:
        """Rows of the weight: N, or 2 N of a gated product."""
        return self.weight.weight.shape[0]

    @property
    def k(self) -> int:
        return self.weight.columns

    @property
    def operands(self) -> dict[str, Arg]:
        """The operands with those of their scales that there are, as arguments of a kernel."""
        x, weight = {"x": self.x, "x_scales": self.x_scales}, self.weight
        given = {"out": self.out, **x, "weight": weight.weight, "scales": weight.scales}
        return {name: one for name, one in given.items() if one is not None}

    @property
    def sizes(self) -> dict[str, Arg]:
        """M, N and K as arguments of a kernel."""
        return {"M": self.m, "N": Aligned(self.n), "K": Aligned(self.k)}

    @property
    def form(self) -> Form:
        return self.weight.form

    @property
    def add(self) -> bool:
        return self.epilogue == "add"

    @property
    def gated(self) -> bool:
        return self.epilogue == "gated"

    def ungated(self, out: Scratch) -> "Problem":
        """The product of a gated one, without the gate."""
        return replace(self, out=out, epilogue="none")

    def both(self) -> Scratch:
        """Memory for the product of a gated one, without the gate."""
        return Scratch((self.m, self.rows), bfloat16)


class Kernel(NamedTuple):
    """A way to make products: whether it takes one, and its launches. A problem among these is what is left to do then,
    by the kernel that takes it."""

    name: str
    takes: Callable[[Problem], bool]
    launches: Callable[[Problem], Iterable[Command | Problem]]


def expect_bf16(x: Operand, name: str = "x") -> None:
    """Raise ContractError unless x is bfloat16: only the cpu pack takes float32."""
    if x.dtype != bfloat16:
        raise ContractError(f"{name} is {x.dtype.name}; on a GPU it is bfloat16 (float32: the cpu pack)")


def expect_q8(target: Target, quantized: bool) -> None:
    """Raise ContractError if values are to be rounded to float8 on a GPU without float8 numbers."""
    if quantized and not has_float8(target):
        raise ContractError(f"q8 is asked for on sm_{target.arch}; float8 numbers are for sm_89 and up")


def expect_float8(target: Target) -> None:
    """Raise ContractError if the target cannot read weights of float8."""
    if not has_float8(target):
        raise ContractError(f"weights of float8 are given for sm_{target.arch}; float8 is for sm_89 and up")


def has_float8(target: Target) -> bool:
    """Whether the target reads float8 numbers, and its tensor cores multiply them."""
    return target.arch >= 89


def sums_of_parts(split: int, shape: tuple[int, ...], tiles: int) -> dict[str, Scratch]:
    """Memory where the programs of a tile add up their parts of K, and count who has arrived."""
    one = split == 1
    return {
        "partial": Scratch((1,) if one else shape, float32),
        "counter": Scratch((1,) if one else (tiles,), int32, zeroed=True),
    }
