"""score: the reference against a plain softmax, and the kernels in the interpreter against the reference."""

import numpy as np
import pytest
from scipy import special

from openinfer.kernels import ContractError, CpuPack
from openinfer.sampler.gpu import ops as tiles
from openinfer.sampler.gpu import score
from openinfer.tensor import Tensor


def arguments(logits, targets):
    rows = len(logits)
    return {
        "logprobs": np.full(rows, 9, np.float32),
        "ranks": np.full(rows, 9, np.int32),
        "logits": logits,
        "targets": np.array(targets, np.int32),
    }


@pytest.fixture
def mixed():
    """Rows with ties, -inf, NaN, inf, and without a target."""
    rng = np.random.default_rng(3)
    logits = (np.round(rng.normal(0, 3, (8, 1000)) * 4) / 4).astype(np.float32)
    logits[2, ::3] = -np.inf
    logits[3, 5] = np.nan
    logits[4, 999] = np.inf
    return arguments(logits, [7, 999, 1, 8, 8, -1, 0, 3])


def test_the_reference_is_a_softmax_and_a_rank(run_cpu):
    logits = np.random.default_rng(4).normal(0, 3, (5, 300)).astype(np.float32)
    targets = [0, 299, 17, -1, 5]
    got = run_cpu(score, **arguments(logits, targets))
    exact = special.log_softmax(logits.astype(np.float64), axis=1)
    for r, target in enumerate(targets):
        if target < 0:
            assert (got["logprobs"][r], got["ranks"][r]) == (0, 0)
        else:
            assert got["logprobs"][r] == pytest.approx(exact[r, target], abs=1e-5)
            assert np.argsort(-logits[r])[got["ranks"][r] - 1] == target


def test_rows_that_are_not_finite_get_nan(run_cpu, mixed):
    got = run_cpu(score, **mixed)
    assert np.isnan(got["logprobs"]).tolist() == [False, False, False, True, True, False, False, False]
    assert got["ranks"][3:6].tolist() == [0, 0, 0]


def test_kernels_agree_with_the_reference(run_cpu, run_interpreter, mixed, monkeypatch):
    monkeypatch.setattr(tiles, "CHUNK", 256)
    monkeypatch.setattr(tiles, "SMALLEST_GROUP", 16)
    want, got = run_cpu(score, **mixed), run_interpreter(score, **mixed)
    np.testing.assert_allclose(got["logprobs"], want["logprobs"], atol=1e-5)
    np.testing.assert_array_equal(got["ranks"], want["ranks"])


def test_what_the_contract_refuses(mixed):
    tensors = {name: Tensor.from_numpy(array) for name, array in mixed.items()}
    with pytest.raises(ContractError, match="targets is float32"):
        score(CpuPack(), **tensors | {"targets": tensors["logprobs"]})
