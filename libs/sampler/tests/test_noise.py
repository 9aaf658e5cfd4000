import bisect

import numpy as np
import pytest
from scipy import stats

from openinfer.sampler import fresh_seed, gumbel, hash_u32, seed_words

U = np.uint32


def random_u32(rng, *shape):
    return rng.integers(0, 2**32, shape, dtype=U)


def hash_in_plain_integers(lo, hi, position, token):
    def mix(x):
        x ^= x >> 16
        x = x * 0x7FEB352D & 0xFFFFFFFF
        x ^= x >> 15
        x = x * 0x846CA68B & 0xFFFFFFFF
        return x ^ x >> 16

    a = mix((lo + 0x9E3779B9) & 0xFFFFFFFF)
    b = mix(hi ^ a)
    first = mix((token + mix((a + position) & 0xFFFFFFFF)) & 0xFFFFFFFF)
    return mix(first ^ mix(b ^ position))


@pytest.mark.parametrize(
    ("arguments", "bits"),
    [
        ((0, 0, 0, 0), 0),
        ((1, 0, 0, 0), 0),
        ((0, 1, 0, 0), 323860838),
        ((0, 0, 1, 0), 3770009422),
        ((0, 0, 0, 1), 3174722974),
        ((4294967295, 4294967295, 4294967295, 4294967295), 2434811169),
        ((42, 0, 1000, 151935), 704048188),
    ],
)
def test_the_bits_never_change(arguments, bits):
    assert int(hash_u32(*map(U, arguments))) == bits


def test_wraps_like_32_bit_integers():
    words = random_u32(np.random.default_rng(1), 200, 4)
    words[:8] = [0xFFFFFFFF * np.array([k & 1, k >> 1 & 1, k >> 2, 1], np.uint64) for k in range(8)]
    expected = [hash_in_plain_integers(*map(int, row)) for row in words]
    assert hash_u32(*words.T).tolist() == expected


def test_arguments_broadcast():
    rng = np.random.default_rng(2)
    lo, hi, position = (random_u32(rng, 5, 1) for _ in range(3))
    token = np.arange(7, dtype=U)
    table = hash_u32(lo, hi, position, token)
    assert table.shape == (5, 7)
    assert table.dtype == np.uint32
    assert table[3, 4] == hash_u32(lo[3, 0], hi[3, 0], position[3, 0], token[4])


@pytest.mark.parametrize("argument", range(4), ids=["seed_lo", "seed_hi", "position", "token"])
@pytest.mark.parametrize("counters", [False, True], ids=["random", "small"])
def test_each_input_bit_flips_each_output_bit_half_of_the_time(argument, counters):
    n = 4000
    rng = np.random.default_rng(3)
    words = random_u32(rng, 4, n)
    if counters:  # what real inputs look like: small seeds, positions and ids
        words = rng.integers(0, 2**16, (4, n), dtype=U)
    before = hash_u32(*words)
    flipped = words.copy()
    rates = np.empty((32, 32))
    for bit in range(32):
        flipped[argument] = words[argument] ^ U(1 << bit)
        change = before ^ hash_u32(*flipped)
        rates[bit] = np.unpackbits(change.view(np.uint8)).reshape(n, 32).mean(axis=0)
    # 1024 rates with a standard deviation of 0.5 / sqrt(n) each: one beyond five of them is rare
    assert np.abs(rates - 0.5).max() < 5 * 0.5 / np.sqrt(n)


@pytest.mark.parametrize("argument", range(4), ids=["seed_lo", "seed_hi", "position", "token"])
@pytest.mark.parametrize("shift", [0, 12, 24])
def test_counting_up_one_argument_gives_uniform_bytes_and_pairs(argument, shift):
    words = [np.full(2**18, k, U) for k in (0, 0, 17, 3)]
    words[argument] = np.arange(2**18, dtype=U)
    byte = hash_u32(*words) >> U(shift) & U(0xFF)
    assert stats.chisquare(np.bincount(byte, minlength=256)).pvalue > 1e-4
    neighbours = (byte[:-1] >> U(4)) * U(16) + (byte[1:] >> U(4))
    assert stats.chisquare(np.bincount(neighbours, minlength=256)).pvalue > 1e-4


def test_streams_of_neighbouring_seeds_and_positions_share_no_values():
    """64 streams of 16,384 values: chance repeats about 128, a permuted or shifted stream would 16,384."""
    seeds, positions, tokens = (np.arange(n, dtype=U) for n in (8, 8, 2**14))
    values = hash_u32(seeds[:, None, None], U(0), positions[:, None], tokens).ravel()
    repeated = values.size - np.unique(values).size
    expected = values.size**2 / 2 / 2**32
    assert abs(repeated - expected) < 6 * np.sqrt(expected)


def test_gumbel_follows_its_distribution():
    bits = random_u32(np.random.default_rng(5), 200_000)
    assert stats.kstest(gumbel(bits), "gumbel_r").pvalue > 1e-3


def test_gumbel_is_accurate_and_finite_everywhere():
    bits = random_u32(np.random.default_rng(6), 100_000) >> random_u32(np.random.default_rng(7), 100_000) % U(
        32
    )
    bits = np.concatenate([bits, np.arange(300, dtype=U), U(2**24) + np.arange(-300, 300).astype(U)])
    v = (bits.astype(np.float64) + 0.5) / 2**32
    # near v = 1 fp32 rounds v itself: there g is near -2 and decides nothing, so only v < 1/2 is held to 1e-6
    low = v < 0.5
    noise = gumbel(bits)
    assert noise.dtype == np.float32
    np.testing.assert_allclose(noise[low], -np.log(-np.log1p(-v[low])), rtol=3e-6, atol=3e-6)
    ends = gumbel(np.array([0, 2**32 - 1], U))
    assert ends[0] == pytest.approx(22.874, abs=1e-3)
    assert ends[1] == pytest.approx(-2.811, abs=1e-3)


def test_gumbel_falls_as_the_bits_rise():
    bits = np.unique(random_u32(np.random.default_rng(8), 100_000))
    assert (np.diff(gumbel(bits)) <= 1e-6).all()


@pytest.mark.parametrize("level", [-2, 0, 2, 5, 10, 15, 17, 18, 20, 21])
def test_the_upper_tail_has_its_exact_probability(level):
    """What decides how often unlikely tokens are drawn. A 24-bit uniform ends at 16.6."""
    beyond = bisect.bisect_left(
        range(2**32), True, key=lambda bits: bool(gumbel(np.array([bits], U))[0] <= level)
    )
    assert beyond == pytest.approx(-np.expm1(-np.exp(-level)) * 2**32, rel=1e-5, abs=1)


@pytest.mark.parametrize("seed", [0, 1, -1, 2**32, 2**63 - 1, -(2**63)])
def test_seed_words_hold_the_whole_seed(seed):
    low, high = seed_words(seed)
    assert 0 <= low < 2**32
    assert 0 <= high < 2**32
    assert (high << 32 | low) == seed % 2**64


def test_fresh_seeds_are_int64_and_differ():
    seeds = {fresh_seed() for _ in range(100)}
    assert len(seeds) == 100
    assert all(0 <= seed < 2**63 for seed in seeds)
