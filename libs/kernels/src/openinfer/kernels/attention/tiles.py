"""Tiles of attention: a program's share of a step's queries and keys."""

from dataclasses import dataclass
from typing import ClassVar

from openinfer.kernels.op.launch import power_of_two
from openinfer.kernels.op.target import Target, shared_bytes


@dataclass(frozen=True, slots=True)
class Tile:
    """A program's share: `bm` (token, query head) pairs against `bn` keys at a time."""

    bm: int
    bn: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class HopperTile:
    """A program's share in the kernel for Hopper: two warpgroups of 64 pairs each against `bn` keys at a time, two
    blocks of them in shared memory."""

    bn: int

    bm: ClassVar[int] = 128


def short_tile(target: Target, programs: int, group: int, dim: int) -> Tile:
    """The tile for rows of few tokens, which are bound by reading the cache. `programs`: rows times key heads; `group`:
    query heads a key head.

    One wave of programs is best, because a second wave that is not full costs up to a third. Steps that leave SMs idle
    are split into parts. Up to five programs an SM fit with small blocks; with more, large blocks cost least.
    """
    keys, stages = _keys(target, dim), _stages(target, dim)
    if dim <= 128 and stages == 5 and programs > 2 * target.num_sms:
        keys, stages = (32, 5) if programs <= 5 * target.num_sms else (128, 3)
    if dim == 256 and keys == 64:
        # Measured: small blocks for some programs an SM or fewer, and for three and more.
        if programs > 3 * target.num_sms:
            keys, stages = 16, 5
        elif target.num_sms // 8 < programs <= target.num_sms:
            keys, stages = 32, 5
    return Tile(max(16, power_of_two(group)), keys, 4, stages)


def coded_attention_tile(target: Target, programs: int, group: int, dim: int) -> Tile:
    """short_tile for an FP8 cache: its codes are unpacked between two barriers a block. So larger blocks are better
    where there are more programs than SMs."""
    tile = short_tile(target, programs, group, dim)
    if dim <= 128 and _stages(target, dim) == 5 and programs > target.num_sms:
        return Tile(tile.bm, 128, 8 if programs <= 2 * target.num_sms else 4, 3)
    return tile


def long_tile(target: Target, group: int, dim: int) -> Tile:
    """The tile for rows of many tokens."""
    if dim <= 128 and _stages(target, dim) == 5:
        return Tile(max(128, power_of_two(group)), 64, 8, 5)
    if dim == 256 and _keys(target, dim) == 64:
        return Tile(max(128, power_of_two(group)), 64, 8, 3)
    warps = 4 if dim <= 128 else 8
    return Tile(max(64, power_of_two(group)), _keys(target, dim), warps, _stages(target, dim))


def _keys(target: Target, dim: int) -> int:
    """Keys at a time. They must fit into shared memory twice with their values, beside the other data there."""
    return 64 if 2 * 64 * 4 * dim <= shared_bytes(target.arch) * 3 // 4 else 32


def _stages(target: Target, dim: int) -> int:
    """One or two blocks of keys and values ahead, whichever lets two programs share an SM. A block ahead takes two of
    the compiler's stages: it is read in one, its pages are looked up in the other."""
    block = _keys(target, dim) * 4 * dim
    return 5 if 2 * block <= shared_bytes(target.arch) * 7 // 16 else 3
