"""Products with adapters (LoRA): one kernel for few tokens; else the product, and the low-rank products apart."""

import dataclasses
from collections.abc import Iterator
from dataclasses import replace

from openinfer.kernels.formats.linear import Plain
from openinfer.kernels.linear.choices import measured, rule
from openinfer.kernels.linear.cluster import adapted_choice, cluster_product
from openinfer.kernels.linear.problem import Kernel, Operand, Problem, sums_of_parts
from openinfer.kernels.lora.launches import low_rank_product, many, takes_few
from openinfer.kernels.lora.low_rank import Lora
from openinfer.kernels.norms import Norm, launch_silu_mul, norm
from openinfer.kernels.op.launch import Aligned, Command, Launch, Scratch, aligned, launch, power_of_two
from openinfer.kernels.op.op import tensors
from openinfer.kernels.store.tables import ProductChoice
from openinfer.tensor import Tensor, float32, int32

FEW_TOKENS = 64
"""The most tokens of the one kernel, which has a tile for all of them."""
COLUMNS = 128
"""The most columns that the adapters of one turn add to K."""
NUMBERS = 1 << 12
"""The most numbers of B that a warp keeps while it waits for the first product, because more do not fit into registers.
Of that product it has a quarter of this at once, in float32."""
CHUNK, CHUNKS = 1024, 4
"""Columns of x that a program of the first product has, about, and the most parts of K: a thread adds up all of them at
once. The numbers are fixed, so that sums do not depend on the step."""
ROWS = 64
"""The most rows of A that such a program has."""
MOST_UNITS = 256
"""The most such programs. A program whose adapter no token has costs its start."""

_DEVICE = "openinfer.kernels.device.adapted_linear"


def _lora(p: Problem) -> Lora[Tensor]:
    assert p.adapter is not None
    return p.adapter


def _normed(p: Problem, *, early: bool = False) -> tuple[list[Command], Problem]:
    """The norm of x where there is one, and what is left then."""
    if p.norm is None:
        return [], p
    hidden = Scratch(p.x.shape, p.x.dtype)
    return [norm(hidden, p.x, *p.norm, early=early)], replace(p, x=hidden, norm=None)


def _clusters(p: Problem) -> Iterator[Command]:
    choice = adapted_choice(p, _lora(p))
    assert choice is not None
    first, rest = _normed(p, early=True)
    yield from first
    yield cluster_product(choice, rest)


def _together(p: Problem) -> Iterator[Command]:
    tile = _few_tile(p, _lora(p))
    assert tile is not None
    first, rest = _normed(p)
    yield from first
    yield _small(tile, rest, _lora(p))


def _apart(p: Problem) -> Iterator[Command | Problem]:
    lora, few = _lora(p), takes_few(p.target, p.m, _lora(p))
    product = replace(p, adapter=None)
    if p.gated:
        both = p.both()
        if few:
            yield from _after(p, both, p.x, p.norm, add=False)
        first, rest = _normed(product)
        yield from first
        yield replace(rest, out=both, epilogue="add" if few else "none")
        yield from [launch_silu_mul(p.out, both)] if few else many(p.target, p.out, rest.x, lora, both=both)
    elif p.norm is None or p.weight.coding is not None or few:
        yield product
        yield from _after(p, p.out, p.x, p.norm, add=True)
    else:
        first, rest = _normed(product)
        yield from [*first, rest]
        yield from _after(p, p.out, rest.x, None, add=True)


def _after(p: Problem, out: Operand, x: Operand, normed: Norm | None, *, add: bool) -> Iterator[Command]:
    own = out if isinstance(out, Scratch) else out[:, : sum(_lora(p).parts)]
    yield from low_rank_product(p.target, own, x, normed, _lora(p), add=add)


def _few_tile(p: Problem, lora: Lora[Tensor]) -> ProductChoice | None:
    """The tile of the one kernel, or None where it does not take the product."""
    parts, (places, rows, _), rank = lora.parts, lora.a.shape, lora.b.shape[2]
    if p.target.batch_invariant or p.form != Plain() or p.m > FEW_TOKENS:
        return None
    tile = measured(p.target, p.op, p.m, p.rows, p.k)
    if tile.kind != "small":  # one token: the kernel has no form for it
        tile = rule(p.target, p.op, max(2, p.m), p.rows, p.k)
    if p.gated:
        tile = dataclasses.replace(tile, warps=8)
    elif tile.bk > 128:  # two programs fit on an SM
        tile = dataclasses.replace(tile, bk=128, stages=4)
    units = places * _chunks(p.k) * -(-rows // ROWS)
    whole = parts == (p.rows // 2,) * 2 if p.gated else not any(size % tile.bn for size in parts)
    return tile if whole and rank <= COLUMNS and units <= MOST_UNITS else None


def _chunks(k: int) -> int:
    return min(CHUNKS, -(-k // CHUNK))


def _small(c: ProductChoice, p: Problem, lora: Lora[Tensor]) -> Launch:
    a, b, halves = lora.a, lora.b, 2 if p.gated else 1
    (places, rows, _), rank = a.shape, b.shape[2]
    chunks, block = _chunks(p.k), min(ROWS, power_of_two(rows))
    width = -(-p.k // (chunks * c.bk)) * c.bk
    units, tiles = places * chunks * -(-rows // block), -(-p.n // c.bn)
    programs = 1 if c.split == 1 else c.split + 1  # of a tile; with parts of K the adapters are one more
    args = {**p.operands, **tensors(lora, "a", "b", "adapters", "token_slots")}
    args["low"] = Scratch((chunks, c.bm, rows), float32)
    args["state"] = Scratch((2,), int32, zeroed=True)
    args |= {**sums_of_parts(c.split, (halves * programs, c.bm, p.n), tiles), **p.sizes}
    args |= {"a_stride": aligned(a.strides[0]), "b_stride": aligned(b.strides[0])}
    args |= {"places": places, "rows": Aligned(rows), "units": units, **lora.sizes}
    constants = {"BM": c.bm, "BN": c.bn, "BK": c.bk, "SPLIT": c.split, "PARTS": programs}
    constants |= {"ADD": p.add, "GATED": p.gated}
    columns = min(COLUMNS, c.warps * NUMBERS // max(c.bn * halves, 4 * c.bm))
    constants |= {"RANK": rank, "PLACES": min(power_of_two(places), max(1, columns // rank))}
    constants |= {"BR": block, "CHUNK": width, "CHUNKS": chunks}
    grid, stages = (units + tiles * programs,), c.stages
    return launch(_DEVICE, "gemm_small_adapted", grid, args, constants, num_warps=c.warps, num_stages=stages)


KERNELS = (
    Kernel("clusters with adapters", lambda p: bool(p.adapter and adapted_choice(p, p.adapter)), _clusters),
    Kernel("small with adapters", lambda p: bool(p.adapter and _few_tile(p, p.adapter)), _together),
    Kernel("adapters apart", lambda p: bool(p.adapter), _apart),
)
