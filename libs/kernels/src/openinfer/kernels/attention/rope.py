"""Rotary embedding: its frequencies, plain and by YaRN, and the table of cosines and sines that ops take."""

import math

import numpy as np

from openinfer.kernels.op.reference import Array
from openinfer.tensor import Arena, Stream, Tensor, float32


def rope_frequencies(theta: float, rotary: int) -> Array:
    """The frequencies of plain rotary embedding, float32 [rotary / 2]: theta to the power of -2 i / rotary."""
    exponent = np.arange(0, rotary, 2, dtype=np.float32) / np.float32(rotary)
    return (np.float32(1.0) / np.float32(theta) ** exponent).astype(np.float32)


def yarn_frequencies(
    theta: float,
    rotary: int,
    *,
    factor: float,
    original: int,
    fast: float,
    slow: float,
    truncate: bool = True,
) -> Array:
    """The frequencies of static YaRN, float32 [rotary / 2]: long wavelengths are `factor` times as long.

    original: positions of the training before it. Between `fast` and `slow` turns over these positions the change sets
    in gradually; truncate: both bounds are rounded outwards to whole frequencies. The factor on cosines and sines is
    not in here.
    """
    plain = rope_frequencies(theta, rotary)
    low, high = (
        rotary * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta)) for turns in (fast, slow)
    )
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary - 1)
    ramp = np.clip((np.arange(rotary // 2, dtype=np.float32) - low) / np.float32(high - low or 0.001), 0, 1)
    return np.asarray(plain * (1 - ramp) + plain / np.float32(factor) * ramp, np.float32)


def rope_table(inv_freq: Array, num_positions: int) -> Array:
    """The argument cos_sin of ops, float32 [num_positions, 2, r/2], of frequencies float32 [r/2]."""
    angles = np.arange(num_positions, dtype=np.float32)[:, None] * inv_freq[None, :]
    return np.stack([np.cos(angles), np.sin(angles)], axis=1)


def place_rope_table(
    arena: Arena, stream: Stream, inv_freq: Array, num_positions: int, scale: float = 1.0
) -> Tensor:
    """rope_table times `scale`, in memory of the arena. On a null device it has no values."""
    placed = arena.alloc((num_positions, 2, len(inv_freq)), float32, "cos_sin")
    if arena.device.kind != "null":
        placed.copy_from(rope_table(inv_freq, num_positions) * np.float32(scale), stream)
    return placed
