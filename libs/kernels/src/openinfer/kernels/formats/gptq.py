"""Weights as GPTQ stores them, with 4 or 8 bits; AutoRound exports the same. And weights of compressed-tensors whose
columns are in the order of their activations.

With B = 32 / bits codes in an int32, the first in the lowest bits: `qweight` [K / B, N], packed along K; `scales`
[K / G, N]; `qzeros` [K / G, N / B], the zero points less one ("gptq_v2": the zero points). `g_idx` [K] names the group
of each column; AutoRound writes none.

Where columns were quantised in the order of their activations (desc_act), the groups of neighbours differ. No product
here takes that, so the weight becomes plain while it is loaded.
"""

import functools

import numpy as np

from openinfer.kernels.formats.groups import ONE, Grouped, Stored, WeightPart, finite
from openinfer.kernels.formats.int4 import SYMMETRIC, Int4Groups, group_words, nibbles, of_rows
from openinfer.kernels.formats.int8 import Int8, of_words
from openinfer.kernels.op.rounding import Array
from openinfer.tensor import int32

ONE_GROUP = -1
"""The size of a group that has all columns."""


def gptq_packing(bits: int, group: int, *, v2: bool, ordered: bool) -> Grouped:
    """How GPTQ stores symmetric weights of 4 or 8 bits."""
    each, size = 32 // bits, ONE if group == ONE_GROUP else group
    stored = Stored(".qweight", 1, each, int32, True)
    scales = (
        Stored(".scales", 1, size, transposed=True),
        Stored(".qzeros", each, size, int32, True),
        Stored(".g_idx", None, 1, int32, optional=not ordered),
    )
    zero = (1 << bits - 1) - (not v2)
    if ordered:
        to_values = functools.partial(_ordered, bits, zero)
        return Grouped(f"INT{bits} in act-order", Int8(ONE), stored, scales, to_values=to_values)
    if bits == 8:
        return Grouped("INT8", Int8(size), stored, scales, _bytes, functools.partial(_scales, zero))
    to_scales = functools.partial(_words, zero)
    return Grouped("INT4", Int4Groups(group), stored, scales, _nibbles, to_scales)


def ordered_packing(bits: int, group: int) -> Grouped:
    """How compressed-tensors stores symmetric weights of 4 or 8 bits in act-order."""
    stored, scales = Stored(".weight_packed", 1, 32 // bits, int32), Stored(".weight_scale", 1, group)
    to_values = functools.partial(_by_index, 1 << bits - 1, bits)
    return Grouped(
        f"INT{bits} in act-order", Int8(ONE), stored, (scales, Stored(".weight_g_idx", None, 1, int32)),
        to_values=to_values, ignored=(".weight_shape",),
    )  # fmt: skip


def _nibbles(qweight: Array) -> Array:
    return of_rows(qweight.T)


def _bytes(qweight: Array) -> Array:
    return of_words(qweight.T)


def _checked(stored: int, part: WeightPart, scales: Array, qzeros: Array, g_idx: Array | None) -> Array:
    """The scales, if columns are in order, and all zero points are those of symmetric weights."""
    columns = 0 if g_idx is None else len(g_idx)
    if g_idx is not None and (g_idx != (part.column + np.arange(columns)) // (columns // len(scales))).any():
        raise ValueError(
            "columns are ordered by activations (g_idx), and config.json does not say so (desc_act is false)"
        )
    _same(stored, qzeros)
    return scales


def _same(stored: int, qzeros: Array) -> None:
    bits = 8 if stored > 15 else 4
    if (_unpacked(qzeros, bits) != stored).any():
        raise ValueError(f"a zero point is not {1 << bits - 1}, and the checkpoint says that it is symmetric")


def _words(stored: int, part: WeightPart, scales: Array, qzeros: Array, g_idx: Array | None = None) -> Array:
    return group_words(_checked(stored, part, scales, qzeros, g_idx), SYMMETRIC).T


def _scales(stored: int, part: WeightPart, scales: Array, qzeros: Array, g_idx: Array | None = None) -> Array:
    return finite(_checked(stored, part, scales, qzeros, g_idx)).T


def _ordered(bits: int, stored: int, qweight: Array, scales: Array, qzeros: Array, g_idx: Array) -> Array:
    _same(stored, qzeros)
    return _by_index(1 << bits - 1, bits, qweight.T, scales.T, g_idx)


def _by_index(zero: int, bits: int, packed: Array, scales: Array, g_idx: Array) -> Array:
    """The values [N, K], each column by its own group's scales [N, groups]."""
    if g_idx.min() < 0 or g_idx.max() >= scales.shape[1]:
        raise ValueError(f"g_idx names groups {g_idx.min()} to {g_idx.max()}; there are {scales.shape[1]}")
    return np.asarray((_unpacked(packed, bits).astype(np.float32) - zero) * finite(scales)[:, g_idx])


def _unpacked(words: Array, bits: int) -> Array:
    """Codes [..., B n] of int32 [..., n]."""
    return nibbles(words) if bits == 4 else np.ascontiguousarray(words).view(np.uint8)
