"""Products with INT4 weights as commands: one kernel for few tokens; for many, the weight is made bf16 first."""

from __future__ import annotations

from openinfer.kernels.errors import ContractError
from openinfer.kernels.launch import Aligned, Arg, Command, Scratch, launch
from openinfer.kernels.target import Target
from openinfer.tensor import Tensor, bfloat16, float32, int32

FEW_TOKENS = 256
"""Tokens up to which the codes are unpacked in the product. With more tokens each code would be unpacked for several
tiles, and a product of bf16 weights costs less, with the pass that makes them."""

_DEVICE = "openinfer.kernels.device.int4"
_ROWS = 64


def few(
    target: Target, out: Tensor | Scratch, x: Tensor | Scratch, weight: Tensor, words: Tensor, *, add: bool
) -> Command:
    """out [M, N] = x [M, K] @ weight^T, or out += with `add`, for M up to FEW_TOKENS. Raises
    ContractError for x of another dtype than bfloat16."""
    if x.dtype != bfloat16:
        raise ContractError(f"x is {x.dtype.name}; products of INT4 weights on a GPU are of bfloat16")
    (m, n), k = out.shape, x.shape[1]
    group = k // words.shape[1]
    bm = min(64, max(16, 1 << (m - 1).bit_length()))
    columns, tiles, split = -(-n // _ROWS), -(-m // bm), 1
    while split < 8 and split * columns * tiles <= target.num_sms and k // group >= 4 * split:
        split *= 2
    args: dict[str, Arg] = {
        "out": out,
        "x": x,
        "weight": weight,
        "words": words,
        "partial": Scratch((split, m, n) if split > 1 else (1,), float32),
        "counter": Scratch((columns * tiles if split > 1 else 1,), int32, zeroed=True),
        "M": m,
        "N": Aligned(n),
        "K": Aligned(k),
    }
    constants = {"BM": bm, "BN": _ROWS, "GROUP": group, "SPLIT": split, "ADD": add}
    return launch(
        _DEVICE, "project_int4", (columns, split, tiles), args, constants, num_warps=4, num_stages=4
    )


def widened(out: Scratch, weight: Tensor, words: Tensor) -> Command:
    """The weight made bf16, out [N, K]."""
    (n, k), block = out.shape, 32
    group = k // words.shape[1]
    args: dict[str, Arg] = {"out": out, "weight": weight, "words": words, "N": n, "K": Aligned(k)}
    constants = {"BN": block, "GROUP": group}
    return launch(_DEVICE, "dequantize_int4", (-(-n // block), k // group), args, constants)
