"""Products with INT4 weights as commands: one kernel for few tokens. For many, the weight is made bf16 first."""

from __future__ import annotations

from collections.abc import Iterator

from openinfer.kernels.errors import ContractError
from openinfer.kernels.linear.coded_products import Tile
from openinfer.kernels.linear.int4_cluster import int4_choice, int4_cluster
from openinfer.kernels.norms import silu_mul
from openinfer.kernels.op.launch import Aligned, Arg, Command, Scratch, launch, power_of_two
from openinfer.kernels.op.target import Target
from openinfer.tensor import Tensor, bfloat16, float32, int32

FEW_TOKENS = 64
"""Tokens up to which Triton's kernel unpacks the codes in the product. With more tokens each code would be unpacked for
several tiles, and a product of bf16 weights costs less, with the pass that makes them."""

_DEVICE = "openinfer.kernels.device.int4"
PACKED_GROUP = 128
"""Columns of a group whose codes go to the tensor cores without a detour through shared memory."""


def unpacked_in_product(
    target: Target, out: Tensor | Scratch, weight: Tensor, words: Tensor, *, gated: bool
) -> bool:
    """Whether the product's kernel unpacks the codes."""
    if int4_choice(target, out, weight, words, gated=gated) is not None:
        return True
    return out.shape[0] <= FEW_TOKENS and not target.batch_invariant


def few(
    target: Target,
    out: Tensor | Scratch,
    x: Tensor | Scratch,
    weight: Tensor,
    words: Tensor,
    *,
    add: bool,
    gated: bool,
) -> Iterator[Command]:
    """out [M, N] = x [M, K] @ weight^T, or out += with `add`, or the gated product, where
    `unpacked_in_product`. Raises ContractError for x of another dtype than bfloat16."""
    choice = int4_choice(target, out, weight, words, gated=gated)
    if choice is not None:
        yield int4_cluster(choice, out, x, weight, words, add=add, gated=gated)
        return
    whole = Scratch((out.shape[0], weight.shape[0]), bfloat16) if gated else out
    yield _project(target, whole, x, weight, words, add=add)
    if gated:
        yield silu_mul(out, whole)


def _project(
    target: Target, out: Tensor | Scratch, x: Tensor | Scratch, weight: Tensor, words: Tensor, *, add: bool
) -> Command:
    if x.dtype != bfloat16:
        raise ContractError(f"x is {x.dtype.name}; products of INT4 weights on a GPU are of bfloat16")
    (m, n), k = out.shape, x.shape[1]
    tile, group = few_tile(target, m, n, k), k // words.shape[1]
    columns, tiles = -(-n // tile.rows), -(-m // tile.bm)
    args: dict[str, Arg] = {
        "out": out,
        "x": x,
        "weight": weight,
        "words": words,
        "partial": Scratch((tile.split, m, n) if tile.split > 1 else (1,), float32),
        "counter": Scratch((columns * tiles if tile.split > 1 else 1,), int32, zeroed=True),
        "M": m,
        "N": Aligned(n),
        "K": Aligned(k),
    }
    grid, name = (columns, tile.split, tiles), "project_int4"
    constants: dict[str, int | bool] = {"BM": tile.bm, "SPLIT": tile.split, "ADD": add}
    if group == PACKED_GROUP:
        name, args["weight"] = "project_int4_packed", weight.view_as(int32)
        pairs = target.arch >= 90 and not target.interpreted
        constants |= {"ROWS": tile.rows, "WARPS": tile.warps, "PAIRS": pairs}
    else:
        constants |= {"BN": tile.rows, "GROUP": group}
    return launch(_DEVICE, name, grid, args, constants, num_warps=tile.warps, num_stages=tile.stages)


def few_tile(target: Target, m: int, n: int, k: int) -> Tile:
    """The tile of `_project`, as measured on an H200 for the weights of Qwen3-4B. K is split until the programs fill
    the GPU once, and twice with up to 32 tokens."""
    bm = min(64, max(16, power_of_two(m)))
    rows = 128 if bm == 16 and n >= 128 * target.num_sms else 64
    programs, split, fill = -(-n // rows) * -(-m // bm), 1, (2 if bm <= 32 else 1) * target.num_sms
    while split < 8 and split * programs <= fill and k // PACKED_GROUP >= 4 * split:
        split *= 2
    return Tile(rows, bm, split)


def widened(out: Scratch, weight: Tensor, words: Tensor) -> Command:
    """The weight made bf16, out [N, K]."""
    (n, k), block = out.shape, 32
    group = k // words.shape[1]
    args: dict[str, Arg] = {"out": out, "weight": weight, "words": words, "N": n, "K": Aligned(k)}
    constants = {"BN": block, "GROUP": group}
    return launch(_DEVICE, "dequantize_int4", (-(-n // block), k // group), args, constants)
