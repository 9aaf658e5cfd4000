import numpy as np
import pytest
from scipy import special, stats

from openinfer.sampler import (
    InvalidLogits,
    SamplingParams,
    gumbel,
    hash_u32,
    sample,
    sample_arrays,
    seed_words,
)

LOGITS = np.array([2.0, 1.5, 1.5, 0.7, 0.1, -0.4, -1.0, -1.1, -2.5, -4.0, -np.inf, 0.3], np.float32)


def columns(rows, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, position=None, num_logprobs=-1):
    """The columns of sample_arrays, each scalar repeated for every row; positions count up by default."""

    def column(value, dtype):
        return np.broadcast_to(np.asarray(value, dtype), rows).copy()

    return (
        column(temperature, np.float32),
        column(top_k, np.int32),
        column(top_p, np.float32),
        column(min_p, np.float32),
        np.tile(np.array(seed_words(seed), np.uint32), (rows, 1)),
        column(np.arange(rows) if position is None else position, np.int32),
        column(num_logprobs, np.int32),
    )


def distribution(row, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """The exact probabilities, from the definition: every distinct value is tried as a threshold."""
    scaled = row.astype(np.float64) / temperature
    kept = scaled > -np.inf
    if min_p:
        kept &= scaled >= scaled.max() + np.log(min_p)
    values = sorted(set(scaled[kept]), reverse=True)
    if top_k:
        kept &= scaled >= next((v for v in values if (scaled[kept] >= v).sum() >= top_k), -np.inf)
        values = [v for v in values if v >= scaled[kept].min()]
    mass = special.softmax(np.where(kept, scaled, -np.inf))
    if top_p < 1:
        kept &= scaled >= next(v for v in values if mass[scaled >= v].sum() >= top_p)
    return special.softmax(np.where(kept, scaled, -np.inf))


SETTINGS = [
    {},
    {"temperature": 0.6},
    {"temperature": 2.0},
    {"top_k": 2},
    {"top_k": 6},
    {"top_p": 0.8},
    {"min_p": 0.2},
    {"temperature": 0.6, "top_k": 5, "top_p": 0.95},
    {"temperature": 1.7, "top_k": 9, "top_p": 0.9, "min_p": 0.05},
    {"top_p": 0.5, "min_p": 0.5},
]


def assert_drawn_from(expected, tokens):
    counts = np.bincount(tokens, minlength=expected.size)
    assert counts[expected == 0].sum() == 0
    possible = expected > 0
    assert stats.chisquare(counts[possible], expected[possible] * tokens.size).pvalue > 1e-3


@pytest.mark.parametrize("draws", [2000, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_frequencies_are_the_exact_distribution(setting, draws):
    logits = np.broadcast_to(LOGITS, (draws, LOGITS.size))
    tokens = sample_arrays(logits, *columns(draws, seed=11, **setting)).token_ids
    assert_drawn_from(distribution(LOGITS, **setting), tokens)


@pytest.mark.parametrize("varied", ["position", "seed"])
def test_frequencies_of_many_draws(varied):
    """A tenfold longer run of the noise itself, which the draws above share."""
    draws = np.arange(100_000, dtype=np.uint32)[:, None]
    fixed = np.uint32(5)
    lo, position = (draws, fixed) if varied == "seed" else (fixed, draws)
    noise = gumbel(hash_u32(lo, np.uint32(0), position, np.arange(LOGITS.size, dtype=np.uint32)))
    assert_drawn_from(distribution(LOGITS), (LOGITS + noise).argmax(axis=1))


def random_batch(rng, rows, vocabulary):
    """Logits on a coarse grid, so that ties are everywhere, and parameters of all kinds."""
    logits = (np.round(rng.normal(0, 2, (rows, vocabulary)) * 2) / 2).astype(np.float32)
    logits[rng.random(logits.shape) < 0.05] = -np.inf
    logits[:, 3] = 1
    temperature = rng.choice([0, 0.5, 1, 2], rows)
    return logits, columns(
        rows,
        temperature=temperature,
        top_k=rng.choice([0, 0, 1, 2, 5, vocabulary, 2 * vocabulary], rows),
        top_p=rng.choice([1, 1, 0.9, 0.55, 0.3, 1e-6], rows),
        min_p=rng.choice([0, 0, 0.07, 0.6, 1], rows),
        seed=int(rng.integers(2**62)),
        position=rng.integers(0, 40_000, rows),
        num_logprobs=rng.integers(-1, 4, rows),
    )


def test_each_draw_is_the_noisiest_token_of_the_exact_support():
    logits, batch = random_batch(np.random.default_rng(21), 1500, 40)
    temperature, top_k, top_p, min_p, seed, position, _ = batch
    tokens = sample_arrays(logits, *batch).token_ids
    for r, row in enumerate(logits):
        if temperature[r] == 0 or top_k[r] == 1:
            assert tokens[r] == row.argmax()
            continue
        setting = {"top_k": top_k[r], "top_p": float(top_p[r]), "min_p": float(min_p[r])}
        kept = distribution(row, temperature=temperature[r], **setting) > 0
        token = np.arange(row.size, dtype=np.uint32)
        noisy = row / temperature[r] + gumbel(hash_u32(*seed[r], np.uint32(position[r]), token))
        assert tokens[r] == np.where(kept, noisy, -np.inf).argmax()


def test_a_row_does_not_depend_on_the_batch_around_it():
    rng = np.random.default_rng(22)
    logits, batch = random_batch(rng, 64, 300)
    whole = sample_arrays(logits, *batch)
    order = rng.permutation(64)
    shuffled = sample_arrays(logits[order], *(column[order] for column in batch))
    np.testing.assert_array_equal(shuffled.token_ids, whole.token_ids[order])
    np.testing.assert_array_equal(shuffled.logprobs, whole.logprobs[order])
    for r in range(64):
        alone = sample_arrays(logits[r : r + 1], *(column[r : r + 1] for column in batch))
        assert alone.token_ids[0] == whole.token_ids[r]


def test_the_same_draw_twice_and_another_at_the_next_position_or_seed():
    logits = np.zeros((50, 1000), np.float32)
    first = sample_arrays(logits, *columns(50, seed=1)).token_ids
    np.testing.assert_array_equal(sample_arrays(logits, *columns(50, seed=1)).token_ids, first)
    assert (sample_arrays(logits, *columns(50, seed=1 << 32)).token_ids != first).mean() > 0.9
    assert np.unique(first).size > 45


def test_top_p_towards_zero_keeps_the_most_likely_token_and_its_ties():
    row = np.array([0, 3, 1, 3, -1], np.float32)
    logits = np.broadcast_to(row, (200, 5))
    tokens = sample_arrays(logits, *columns(200, top_p=1e-30)).token_ids
    assert set(tokens) == {1, 3}


@pytest.mark.parametrize("setting", [{"top_k": 3}, {"min_p": 1.0}, {"top_p": 0.5}], ids=str)
def test_ties_at_the_threshold_are_all_kept(setting):
    logits = np.broadcast_to(np.array([1, 0, 1, 1, 0, 1], np.float32) * 30, (400, 6))
    assert set(sample_arrays(logits, *columns(400, **setting)).token_ids) == {0, 2, 3, 5}


def test_greedy_takes_the_lowest_id_among_equals():
    logits = np.array([[1, 5, 5, 0]], np.float32)
    for setting in ({"temperature": 0.0}, {"top_k": 1}):
        assert sample_arrays(logits, *columns(1, **setting)).token_ids[0] == 1


def test_temperature_just_above_greedy_stays_finite():
    logits = np.array([[1e4, -1e38, 9e3, -np.inf]], np.float32)
    assert sample_arrays(logits, *columns(1, temperature=1e-5, top_p=0.9)).token_ids[0] == 0


def test_logprobs_are_of_the_raw_logits():
    rng = np.random.default_rng(23)
    logits, batch = random_batch(rng, 200, 30)
    samples = sample_arrays(logits, *batch)
    exact = special.log_softmax(logits.astype(np.float64), axis=1)
    asked = batch[-1]
    assert samples.top_ids.shape == samples.top_logprobs.shape == (200, 3)
    for r, n in enumerate(asked):
        if n < 0:
            assert np.isnan(samples.logprobs[r])
        else:
            assert samples.logprobs[r] == pytest.approx(exact[r, samples.token_ids[r]], abs=1e-5)
        best = np.argsort(-logits[r], kind="stable")[: max(n, 0)]
        np.testing.assert_array_equal(samples.top_ids[r], [*best, *[-1] * (3 - len(best))])
        np.testing.assert_allclose(samples.top_logprobs[r, : len(best)], exact[r, best], atol=1e-5)
        assert np.isnan(samples.top_logprobs[r, len(best) :]).all()


def test_more_logprobs_than_tokens_gives_every_token():
    samples = sample_arrays(np.array([[0, 1]], np.float32), *columns(1, num_logprobs=20))
    assert samples.top_ids.tolist() == [[1, 0]]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("forbidden", [False, True])
def test_rows_with_nan_or_infinity_are_named(bad, temperature, forbidden):
    logits = np.zeros((4, 6), np.float32)
    logits[1, 5] = bad
    logits[3, 0] = bad
    forbid = np.full((4, 2), -1, np.int32)
    forbid[1, 0] = 5 if forbidden else -1
    with pytest.raises(InvalidLogits) as caught:
        sample_arrays(logits, *columns(4, temperature=temperature, num_logprobs=2), forbid=forbid)
    assert caught.value.rows == (1, 3)


def test_rows_with_no_token_left_are_named():
    logits = np.zeros((3, 4), np.float32)
    logits[2] = -np.inf
    forbid = np.zeros((3, 4), np.bool_)
    forbid[0] = True
    with pytest.raises(InvalidLogits) as caught:
        sample_arrays(logits, *columns(3), forbid=forbid)
    assert caught.value.rows == (0, 2)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_forbidden_tokens_are_never_drawn_and_leave_the_logits_alone(temperature):
    logits = np.broadcast_to(LOGITS, (300, LOGITS.size)).copy()
    ids = np.full((300, 3), -1, np.int32)
    ids[::2] = [0, 2, -1]
    mask = np.zeros(logits.shape, np.bool_)
    mask[::2, [0, 2]] = True
    batch = columns(300, temperature=temperature, num_logprobs=1)
    by_id, by_mask = (sample_arrays(logits, *batch, forbid=forbid) for forbid in (ids, mask))
    np.testing.assert_array_equal(by_id.token_ids, by_mask.token_ids)
    assert not set(by_id.token_ids[::2]) & {0, 2}
    assert 0 in by_id.token_ids[1::2]
    assert (by_id.top_ids == 0).all()
    np.testing.assert_array_equal(logits[7], LOGITS)


def test_sample_speaks_in_params():
    logits = np.broadcast_to(LOGITS, (3, LOGITS.size))
    params = [
        SamplingParams(temperature=0.7, top_k=4, seed=-5, logprobs=2),
        SamplingParams(temperature=0),
        SamplingParams(top_p=0.9, min_p=0.1, seed=6, logprobs=0),
    ]
    samples = sample(logits, params, [10, 11, 12])
    rows = [
        columns(1, temperature=0.7, top_k=4, seed=-5, position=10, num_logprobs=2),
        columns(1, temperature=0, position=11),
        columns(1, top_p=0.9, min_p=0.1, seed=6, position=12, num_logprobs=0),
    ]
    expected = [sample_arrays(LOGITS[None], *row) for row in rows]
    assert samples.token_ids.tolist() == [int(s.token_ids[0]) for s in expected]
    np.testing.assert_array_equal(samples.logprobs, [s.logprobs[0] for s in expected])
    assert samples.top_ids.tolist() == [[0, 1], [-1, -1], [-1, -1]]


def test_sample_takes_seeds_and_forbidden_ids_from_the_owner():
    logits = np.zeros((20, 500), np.float32)
    unseeded = [SamplingParams()] * 20
    again = [sample(logits, unseeded, range(20), [3] * 20).token_ids for _ in range(2)]
    np.testing.assert_array_equal(*again)
    assert (sample(logits, unseeded, range(20)).token_ids != again[0]).any()
    stop = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=(1,))
    forbid = [stop.forbidden_ids(generated, [0]) for generated in (1, 2)]
    assert sample(logits[:2], [stop] * 2, [1, 2], forbid=forbid).token_ids.tolist() == [2, 0]


def test_an_empty_batch_is_fine():
    samples = sample(np.zeros((0, 5), np.float32), [], [])
    assert samples.token_ids.shape == (0,)
    assert samples.top_ids.shape == (0, 0)


def test_arrays_that_do_not_fit_are_refused_by_name():
    logits = np.zeros((2, 5), np.float32)
    with pytest.raises(ValueError, match=r"logits is float64\[2, 5\]"):
        sample_arrays(logits.astype(np.float64), *columns(2))
    with pytest.raises(ValueError, match=r"temperature is float32\[3\]"):
        sample_arrays(logits, *columns(3))
    for forbid in (np.zeros((2, 4), np.bool_), np.zeros((1, 3), np.int32), np.zeros((2, 3), np.int64)):
        with pytest.raises(ValueError, match="forbid is"):
            sample_arrays(logits, *columns(2), forbid=forbid)
    with pytest.raises(ValueError, match="forbid names token 5"):
        sample_arrays(logits, *columns(2), forbid=np.array([[-1], [5]], np.int32))
    params = [SamplingParams()] * 2
    for given, message in (
        ((logits, params, [4]), "positions has 1 items: it must have one for each of the 2 rows"),
        ((logits, params[:1], [4, 4]), "params has 1 items"),
        ((logits, params[0], [4, 4]), r"params has SamplingParams\(.*: it must have one for each"),
        ((logits, params, [4, 4], [1]), "seeds has 1 items"),
        ((logits.tolist(), params, [4, 4]), r"logits is list: it must be a numpy array float32\[rows, vocab"),
        ((logits[0], params, [4, 4]), r"logits is float32\[5\]: it must be"),
    ):
        with pytest.raises(ValueError, match=message):
            sample(*given)
