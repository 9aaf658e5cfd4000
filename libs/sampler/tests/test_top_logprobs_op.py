"""top_logprobs: kernels in the interpreter against the reference."""

import numpy as np
import pytest

from openinfer.kernels import ContractError, CpuPack
from openinfer.sampler import sample_arrays
from openinfer.sampler.gpu import ops as tiles
from openinfer.sampler.gpu import top_logprobs
from openinfer.tensor import Tensor


@pytest.fixture
def rng(request):
    return np.random.default_rng(list(request.node.name.encode()))


def arguments(logits, asked, columns=5):
    """Row r is the sequence in slot r + 1; `asked` by row."""
    rows = len(logits)
    return {
        "ids": np.full((rows, columns), -7, np.int32),
        "values": np.full((rows, columns), np.nan, np.float32),
        "logits": logits.astype(np.float32),
        "slots": np.arange(1, rows + 1, dtype=np.int32),
        "alive": np.arange(rows + 1, dtype=np.int32),  # 0 for slot 0 alone
        "emits": np.ones(rows, np.int32),
        "num_logprobs": np.array([20, *asked], np.int32),
    }


@pytest.fixture
def check(run_cpu, run_interpreter):
    def check(args):
        want, got = run_cpu(top_logprobs, **args), run_interpreter(top_logprobs, **args)
        np.testing.assert_allclose(got.pop("values"), want.pop("values"), atol=1e-4)
        for name, array in got.items():
            np.testing.assert_array_equal(array, want[name], err_msg=name)
        return want

    return check


def test_the_reference_is_sample_arrays(run_cpu, rng):
    logits = rng.normal(0, 3, (3, 900)).astype(np.float32)
    asked, zeros = np.array([2, 0, 5], np.int32), np.zeros(3, np.float32)
    none = zeros.astype(np.int32)
    want = sample_arrays(logits, zeros, none, zeros, zeros, np.zeros((3, 2), np.uint32), none, asked)
    got = run_cpu(top_logprobs, **arguments(logits, asked))
    np.testing.assert_array_equal(got["ids"], want.top_ids)
    np.testing.assert_array_equal(got["values"], np.nan_to_num(want.top_logprobs))


@pytest.mark.parametrize("vocabulary", [3, 1000, 1024, 5000])
@pytest.mark.parametrize("columns", [1, 5, 20])
def test_kernels_agree_with_the_reference(check, rng, vocabulary, columns):
    got = check(arguments(rng.normal(0, 3, (4, vocabulary)), [20, 3, 0, -1], columns))
    assert (got["ids"][0] >= 0).sum() == min(columns, vocabulary)
    assert (got["ids"][2:] == -1).all()


def test_ties_give_the_lowest_id_first(check, rng, monkeypatch):
    monkeypatch.setattr(tiles, "CHUNK", 64)
    monkeypatch.setattr(tiles, "SMALLEST_GROUP", 16)
    check(arguments(np.round(rng.normal(0, 1, (3, 200))), [20, 20, 7], 20))
    got = check(arguments(np.zeros((1, 200)), [20], 20))
    assert got["ids"].tolist() == [list(range(20))]


def test_tokens_that_cannot_come_are_not_listed(check):
    logits = np.full((1, 300), -np.inf)
    logits[0, [250, 3]] = 1.0, 2.0
    assert check(arguments(logits, [4], 4))["ids"].tolist() == [[3, 250, -1, -1]]


def test_rows_without_a_finite_maximum_list_nothing(check, rng):
    logits = rng.normal(0, 3, (4, 300))
    logits[0, 5], logits[1, 200], logits[2] = np.nan, np.inf, -np.inf
    got = check(arguments(logits, [2, 2, 2, 2]))
    assert (got["ids"][:3] == -1).all()
    assert (got["ids"][3, :2] >= 0).all()


def test_rows_that_do_not_sample_list_nothing(check, rng):
    args = arguments(rng.normal(0, 3, (4, 300)), [3, 3, 3, 3])
    args["alive"][2], args["emits"][2], args["slots"][3] = 0, 0, 0
    got = check(args)
    assert (got["ids"][:, 0] >= 0).tolist() == [True, False, False, False]


def test_more_columns_than_a_request_may_ask_for_are_refused(rng):
    args = arguments(rng.normal(0, 3, (1, 300)), [3], columns=21)
    with pytest.raises(ContractError, match="ids has 21 columns; it must have 1 to 20"):
        top_logprobs(CpuPack(), **{name: Tensor.from_numpy(array) for name, array in args.items()})
