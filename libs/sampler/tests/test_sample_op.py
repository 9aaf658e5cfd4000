"""sample: the op's reference against sample_arrays, and the kernels in the interpreter against the reference."""

import numpy as np
import pytest

from openinfer.kernels import ContractError, CpuPack
from openinfer.sampler import sample_arrays
from openinfer.sampler.gpu import ops as tiles
from openinfer.sampler.gpu import sample
from openinfer.sampler.gpu.ops import sample as sample_module
from openinfer.sampler.noise import gumbel, hash_u32
from openinfer.sampler.reference import _threshold
from openinfer.tensor import Tensor

MIXTURE = {
    "temperatures": [0, 0.5, 0.7, 1, 1.3, 2, 0.8, 1],
    "top_ks": [0, 0, 20, 1, 50, 0, 600, 5],
    "top_ps": [1, 0.9, 0.95, 0.5, 1, 0.3, 0.99, 1e-6],
    "min_ps": [0, 0, 0, 0.1, 0.02, 0, 0.001, 0],
}


@pytest.fixture
def small_tiles(monkeypatch):
    """Small vocabularies in many parts, groups and iterations."""
    monkeypatch.setattr(tiles, "CHUNK", 256)
    monkeypatch.setattr(tiles, "SMALLEST_GROUP", 16)
    monkeypatch.setattr(sample_module, "BLOCK", 64)
    monkeypatch.setattr(sample_module, "SLACK", 4)
    monkeypatch.setattr(sample_module, "LIST", 64)
    monkeypatch.setattr(sample_module, "SHORT", 16)


@pytest.fixture
def normal(request):
    rng = np.random.default_rng(list(request.node.name.encode()))
    return lambda rows, vocabulary, scale=3.0: (rng.standard_normal((rows, vocabulary)) * scale).astype(
        np.float32
    )


@pytest.fixture
def check(run_cpu, run_interpreter, check_tokens):
    """Run both, compare, and return what the kernels left."""

    def check(args):
        want, got = run_cpu(sample, **args), run_interpreter(sample, **args)
        check_tokens(args, got["tokens"])
        same = got["tokens"] == want["tokens"]
        np.testing.assert_allclose(got["logprobs"][same], want["logprobs"][same], atol=1e-4)
        np.testing.assert_array_equal(got["output_counts"], want["output_counts"])
        for name in args.keys() - {"tokens", "logprobs", "output_counts"}:
            np.testing.assert_array_equal(got[name], args[name], err_msg=name)
        return got

    return check


def test_the_reference_is_sample_arrays(run_cpu, step, normal):
    args = step(normal(8, 1000), **MIXTURE)
    slot = args["slots"]
    position = (args["seq_lens"][slot] + np.diff(args["q_starts"])).astype(np.int32)
    columns = (args[name][slot] for name in ("temperatures", "top_ks", "top_ps", "min_ps"))
    none = np.zeros(8, np.int32)
    want = sample_arrays(args["logits"], *columns, args["seeds"][slot].view(np.uint32), position, none)
    got = run_cpu(sample, **args)
    np.testing.assert_array_equal(got["tokens"], want.token_ids)
    np.testing.assert_array_equal(got["logprobs"], want.logprobs)


@pytest.mark.parametrize("vocabulary", [1000, 1024, 5000])
def test_kernels_agree_with_the_reference(check, step, normal, vocabulary):
    check(step(normal(8, vocabulary), **MIXTURE))


@pytest.mark.parametrize("vocabulary", [7, 1000])
def test_kernels_agree_in_many_small_tiles(check, step, normal, small_tiles, vocabulary):
    check(step(normal(8, vocabulary), **MIXTURE))


def decisive_seeds(logits, position, temperature, kept):
    """A seed for each row for which the first token that is dropped would win (even rows) or the last that is kept
    does (odd rows)."""
    seeds = []
    for r, row in enumerate(logits):
        order = np.argsort(-row, kind="stable")
        near, winner = (order[: kept[r] + 1], kept[r]) if r % 2 == 0 else (order[: kept[r]], kept[r] - 1)
        tries = np.arange(4000, dtype=np.uint32)[:, None]
        bits = hash_u32(tries, np.uint32(0), np.uint32(position[r]), near.astype(np.uint32)[None])
        winners = (row[near] / np.float32(temperature) + gumbel(bits)).argmax(axis=1)
        seeds.append((np.flatnonzero(winners == winner)[0], 0))
    return np.array(seeds)


@pytest.mark.parametrize(
    "filters",
    [
        {"top_ks": 7},
        {"top_ps": 0.4},
        {"min_ps": 0.8},
        {"top_ks": 9, "top_ps": 0.7},
        {"min_ps": 0.8, "top_ps": 0.6},
    ],
    ids=str,
)
def test_a_bound_that_is_off_by_one_token_would_show(check, step, normal, small_tiles, filters):
    logits, temperature = normal(16, 60, 0.1), 0.9
    args = step(logits, temperatures=temperature, **filters)
    columns = {"top_ks": 0, "top_ps": 1.0, "min_ps": 0.0} | filters
    scaled = logits / np.float32(temperature)
    threshold = [
        _threshold(
            row,
            row.max(),
            np.int32(columns["top_ks"]),
            np.float32(columns["top_ps"]),
            np.float32(columns["min_ps"]),
        )
        for row in scaled
    ]
    kept = (scaled >= np.array(threshold)[:, None]).sum(axis=1)
    position = args["seq_lens"][args["slots"]] + np.diff(args["q_starts"])
    args["seeds"][args["slots"]] = decisive_seeds(logits, position, temperature, kept)
    check(args)


@pytest.mark.parametrize("filters", [{"top_ks": 5}, {"top_ps": 0.6}, {"top_ks": 12, "top_ps": 0.5}], ids=str)
def test_ties_are_kept(check, step, normal, small_tiles, filters):
    check(step(np.round(normal(5, 60, 0.8)) + 0.0, temperatures=0.7, **filters))


def test_zeros_of_both_signs_tie(check, step, small_tiles):
    logits = np.where(np.arange(64) % 2, 0.0, -0.0).astype(np.float32)
    check(step(np.tile(logits, (6, 1)), top_ks=3))


@pytest.mark.parametrize("filters", [{"top_ks": 6}, {"top_ps": 0.3}, {"min_ps": 1.0}], ids=str)
def test_logits_that_tie_only_once_divided_are_kept(check, step, small_tiles, filters):
    neighbours = (np.arange(32) + np.float32(1.9).view(np.int32)).astype(np.int32).view(np.float32)
    assert len(np.unique(neighbours / np.float32(1.8))) < len(neighbours)
    check(step(np.tile(neighbours, (6, 1)), temperatures=1.8, **filters))


def test_greedy_takes_the_lowest_id_among_equals(check, step):
    logits = np.zeros((2, 700), np.float32)
    logits[:, [650, 300]] = 1.0
    assert check(step(logits, temperatures=0))["tokens"].tolist() == [300, 300]


def test_more_is_asked_of_top_k_than_is_finite(check, step, normal, small_tiles):
    logits = normal(4, 200)
    logits[:, 5:] = -np.inf
    assert (check(step(logits, top_ks=20))["tokens"] < 5).all()


def test_stop_ids_are_forbidden_below_the_least_length(check, step, normal):
    logits = normal(6, 300)
    best = logits.argmax(axis=1)
    stop_ids = np.stack(
        [np.full(6, -1), best, np.full(6, 10**6)], axis=1
    )  # an id past the vocabulary is no id
    args = step(logits, temperatures=0, stop_ids=stop_ids, seq_lens=[5, 6, 7, 5, 6, 7], min_lens=8)
    args["q_starts"] = np.arange(7, dtype=np.int32)  # positions 6, 7, 8, 6, 7, 8
    got = check(args)["tokens"]
    assert (got == best).tolist() == [False, False, True] * 2


@pytest.mark.parametrize(
    "filters", [{}, {"top_ks": 3, "top_ps": 0.9, "min_ps": 0.01}], ids=["plain", "filtered"]
)
def test_stop_ids_stay_forbidden_when_sampling(check, step, filters):
    logits = np.zeros((12, 40), np.float32)
    logits[:, :8] = 5.0
    got = check(step(logits, stop_ids=np.tile(np.arange(5), (12, 1)), min_lens=1000, **filters))["tokens"]
    assert set(got) <= {5, 6, 7}


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
@pytest.mark.parametrize(
    "filters", [{"temperatures": 0}, {}, {"top_ks": 4}], ids=["greedy", "plain", "filtered"]
)
def test_rows_that_cannot_be_sampled_fail_alone(check, step, normal, filters):
    logits = normal(7, 300)
    logits[1, 40] = np.nan
    logits[2, 290] = np.inf
    logits[3] = -np.inf
    logits[4, 2:] = -np.inf  # what is left is forbidden
    logits[5, 0] = np.nan  # so is the NaN, and fails the row all the same
    args = step(logits, stop_ids=np.tile([0, 1], (7, 1)), min_lens=1000, **filters)
    got = check(args)
    assert (got["tokens"] == -2).tolist() == [False, True, True, True, True, True, False]
    assert (got["logprobs"][1:6] == 0).all()


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
def test_a_peak_that_overflows_once_divided_fails_the_row(check, step, normal):
    logits = normal(2, 300)
    logits[0, 7] = 1e38
    assert check(step(logits, temperatures=0.001))["tokens"][0] == -2


def test_rows_that_do_not_sample_and_padding(check, step, normal):
    args = step(normal(6, 300), alive=[1, 0, 1, 1, 1, 1], emits=[1, 1, 0, 1, 1, 1])
    args["slots"][4:] = 0
    got = check(args)
    assert (got["tokens"] == -1).tolist() == [False, True, True, False, True, True]
    assert (got["logprobs"][[1, 2, 4, 5]] == 0).all()


def test_what_the_contract_refuses(step, normal):
    args = {k: Tensor.from_numpy(v) for k, v in step(normal(2, 30)).items()}
    with pytest.raises(ContractError, match="top_ps is int32; it must be float32"):
        sample(CpuPack(), **args | {"top_ps": args["top_ks"]})
    with pytest.raises(ContractError, match="q_starts has shape"):
        sample(CpuPack(), **args | {"q_starts": args["slots"]})
