"""The low-rank products of adapters (LoRA) as commands."""

from collections.abc import Iterator

from openinfer.kernels.lora.low_rank import Lora
from openinfer.kernels.norms import Norm, norm
from openinfer.kernels.op.launch import Arg, Command, Scratch, aligned, launch, power_of_two
from openinfer.kernels.op.op import tensors
from openinfer.kernels.op.target import Target
from openinfer.tensor import Tensor, float32, int32

SPLIT = 512
"""Columns of x that a program of the first product has. The number is fixed, so that sums do not depend on the step."""
FEW_TILE, FEW_PROGRAMS = 16, 64
"""Tokens of a program in a step of few tokens, and the most pairs of an adapter and such a tile: with more, programs
without work cost more than one adapter after the other."""
_DEVICE = "openinfer.kernels.device.lora"


def low_rank_product(
    target: Target,
    out: Tensor | Scratch,
    x: Tensor | Scratch,
    normed: Norm | None,
    lora: Lora[Tensor],
    *,
    add: bool,
) -> Iterator[Command]:
    """out += what the adapters add to a product of x, or of its norm. `add` false: out is set."""
    if takes_few(target, x.shape[0], lora):
        yield from _few(out, x, normed, lora, add=add)
        return
    if normed is not None:
        hidden = Scratch(x.shape, x.dtype)
        yield norm(hidden, x, *normed)
        x = hidden
    yield from many(target, out, x, lora, add=add)


def takes_few(target: Target, tokens: int, lora: Lora[Tensor]) -> bool:
    """Whether each program has one adapter."""
    places = lora.a.shape[0]
    return not target.batch_invariant and places * -(-tokens // FEW_TILE) <= FEW_PROGRAMS


def many(
    target: Target,
    out: Tensor | Scratch,
    x: Tensor | Scratch,
    lora: Lora[Tensor],
    *,
    both: Scratch | None = None,
    add: bool = True,
) -> Iterator[Command]:
    """low_rank_product of x for tokens that are not few (takes_few). With both [T, 2 N], which is gate and up and gets
    what the adapters add, out [T, N] = silu(gate) * up."""
    parts = lora.parts
    (tokens, columns), (places, rows, _), rank = x.shape, lora.a.shape, lora.b.shape[2]
    few = tokens <= 128 or target.batch_invariant
    tile, block, width = (16, 16, 64) if few else (64, min(64, power_of_two(rows)), 64 if both else 128)
    tiles, splits, blocks = -(-tokens // tile), -(-columns // SPLIT), -(-rows // block)
    low = Scratch((tokens, rows), x.dtype)
    args: dict[str, Arg] = {"low": low, "partial": Scratch((splits, tokens, rows), float32)}
    args["counter"] = Scratch((tiles * blocks,), int32, zeroed=True)
    args |= {"x": x, **_of_a(x, lora), "places": places}
    constants = {"BM": tile, "BR": block, "BK": 128, "SPLIT": SPLIT}
    yield launch(_DEVICE, "lora_shrink", (tiles, splits, blocks), args, constants)
    args = {"out": out, "both": both or out, "low": low, **_of_b(out, lora), "places": places}
    constants = {"BM": tile, "BN": width, "BR": min(rank, 64), "RANK": rank, "PARTS": len(parts)}
    constants |= {"ADD": add, "GATED": both is not None}
    grid = (tiles, -(-max(parts) // width), 1 if both else len(parts))
    yield launch(_DEVICE, "lora_expand", grid, args, constants)


def _of_a(x: Tensor | Scratch, lora: Lora[Tensor]) -> dict[str, Arg]:
    (tokens, columns), (_, rows, _) = x.shape, lora.a.shape
    args: dict[str, Arg] = {**tensors(lora, "a", "adapters", "token_slots"), "tokens": tokens}
    args |= {"x_stride": aligned(columns), "a_stride": aligned(lora.a.strides[0])}
    return args | {"K": aligned(columns), "rows": aligned(rows)}


def _of_b(out: Tensor | Scratch, lora: Lora[Tensor]) -> dict[str, Arg]:
    args: dict[str, Arg] = {**tensors(lora, "b", "adapters", "token_slots"), "tokens": out.shape[0]}
    args |= {"out_stride": aligned(out.strides[0]), "b_stride": aligned(lora.b.strides[0])}
    return args | lora.sizes


def _few(
    out: Tensor | Scratch, x: Tensor | Scratch, normed: Norm | None, lora: Lora[Tensor], *, add: bool
) -> Iterator[Command]:
    """The launches of a step of few tokens: programs of one adapter each. The norm's factor comes last."""
    parts = lora.parts
    (tokens, columns), (places, rows, _), rank = x.shape, lora.a.shape, lora.b.shape[2]
    width = 256 if columns <= 4096 else 512  # columns of a program
    tiles, splits = -(-tokens // FEW_TILE), -(-columns // width)
    partial, squares = Scratch((splits, tokens, rows), float32), Scratch((splits, tokens), float32)
    gain, eps = normed or (x, 0.0)
    args: dict[str, Arg] = {"partial": partial, "squares": squares, "x": x, "gain": gain}
    args |= {**_of_a(x, lora), "tiles": tiles}
    constants = {"BM": FEW_TILE, "BR": 16, "BK": 256, "SPLIT": width, "NORM": normed is not None}
    yield launch(_DEVICE, "lora_shrink_few", (places * tiles, splits, rows // 16), args, constants)
    block = 256 if max(parts) > 8192 else 128
    args = {"out": out, "partial": partial, "squares": squares, **_of_b(out, lora), "splits": splits}
    args |= {"tiles": tiles, "places": places, "K": columns, "eps": eps}
    constants = {"BM": FEW_TILE, "BN": block, "RANK": rank, "SPLITS": power_of_two(splits)}
    constants |= {"PARTS": len(parts), "ADD": add, "NORM": normed is not None}
    grid = (tiles * (places + (not add)), -(-max(parts) // block), len(parts))
    yield launch(_DEVICE, "lora_expand_few", grid, args, constants)
