"""Frequencies of rotary embedding, and their table."""

import math

import numpy as np
import pytest

from openinfer.kernels import place_rope_table, rope_frequencies, rope_table, yarn_frequencies
from openinfer.tensor import Arena, Device, Stream, float32

YARN = {"factor": 4.0, "original": 4096, "fast": 32.0, "slow": 1.0}


def test_plain_frequencies():
    found = rope_frequencies(1e4, 8)
    assert found.dtype == float32
    np.testing.assert_allclose(found, [1.0, 0.1, 0.01, 0.001], rtol=1e-6)


def test_yarn_leaves_short_wavelengths_and_stretches_long_ones():
    plain, found = rope_frequencies(1e6, 128), yarn_frequencies(1e6, 128, **YARN)
    turns = YARN["original"] * plain / (2 * math.pi)
    np.testing.assert_array_equal(found[turns > 2 * YARN["fast"]], plain[turns > 2 * YARN["fast"]])
    long = turns < YARN["slow"] / 2
    assert long.any()
    np.testing.assert_allclose(found[long], plain[long] / YARN["factor"], rtol=1e-6)
    between = found / plain
    assert (np.diff(between) <= 0).all()
    assert ((between > 0.26) & (between < 0.99)).sum() > 5


@pytest.mark.parametrize("kind", ["cpu", "null"])
def test_the_table_in_memory(kind):
    device = Device(kind)
    inv_freq = rope_frequencies(1e4, 16)
    placed = place_rope_table(
        Arena(device, None if kind == "null" else 1 << 16), Stream(device), inv_freq, 20, 1.5
    )
    assert (placed.shape, placed.dtype) == ((20, 2, 8), float32)
    if kind == "cpu":
        np.testing.assert_array_equal(placed.numpy(), rope_table(inv_freq, 20) * np.float32(1.5))
        np.testing.assert_allclose(placed.numpy()[:, 0] ** 2 + placed.numpy()[:, 1] ** 2, 2.25, rtol=1e-5)
