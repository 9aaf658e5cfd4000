"""Randomness as a pure function: Gumbel noise from a hash of (seed, position, token id).

No state is carried from step to step. So a draw does not depend on the batch around it, on the order of
rows, or on how often a step was replayed. The hash is uint32 adds, multiplies, xors and shifts only: numpy
and a GPU kernel give the same bits. The logarithms that follow may differ between them in the last place.
"""

import os

import numpy as np
from numpy.typing import NDArray

U32 = NDArray[np.uint32]
F32 = NDArray[np.float32]


def fresh_seed() -> int:
    """A non-negative int64 from the operating system, for a sequence whose request names no seed."""
    return int.from_bytes(os.urandom(8), "little") >> 1


def seed_words(seed: int) -> tuple[int, int]:
    """An int64 seed as the (low, high) uint32 words that the hash takes (two's complement)."""
    return seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF


def _mix(x: U32) -> U32:
    """lowbias32 of the hash-prospector project: a bijection of uint32 with little avalanche bias."""
    x = x ^ (x >> np.uint32(16))
    x = x * np.uint32(0x7FEB352D)
    x = x ^ (x >> np.uint32(15))
    x = x * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def hash_u32(seed_lo: U32, seed_hi: U32, position: U32, token: U32) -> U32:
    """32 well mixed bits for each (seed, position, token); the arguments broadcast, all uint32.

    Seed and position make two 32-bit keys and each token goes through both. With a single key two draws
    whose keys differ in low bits alone would see one set of noise, permuted among the tokens.
    """
    with np.errstate(over="ignore"):  # wrapping is meant; numpy warns of it for 0-d operands
        a = _mix(seed_lo + np.uint32(0x9E3779B9))
        b = _mix(seed_hi ^ a)
        key0 = _mix(a + position)
        key1 = _mix(b ^ position)
        return _mix(_mix(token + key0) ^ key1)


def gumbel(bits: U32) -> F32:
    """Standard Gumbel noise g = -log(E), E = -log(1 - v) with v = (bits + 0.5) * 2^-32, all in fp32.

    The largest g decide a draw, and they come from small v, where fp32 resolves all 32 bits; from the upper
    end of a 24-bit uniform they would be quantised so coarsely that a tail of unlikely tokens could never be
    drawn. Below 2^-8 a series replaces the logarithm, since 1 - v would round those bits away again.
    g lies in [-2.9, 22.9]: v is kept below 1, so every value is finite.
    """
    v = (bits.astype(np.float32) + np.float32(1 / 2)) * np.float32(2**-32)
    v = np.minimum(v, np.float32(1 - 2**-24))
    series = v * (1 + v * (np.float32(1 / 2) + v * (np.float32(1 / 3) + v * np.float32(1 / 4))))
    exponential: F32 = np.where(v < np.float32(2**-8), series, -np.log(1 - v))
    return -np.log(exponential)
