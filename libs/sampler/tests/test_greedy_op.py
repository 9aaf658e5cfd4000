"""greedy: the tokens of `sample` for greedy rows, from the reference and from the kernels in the interpreter."""

import numpy as np
import pytest

from openinfer.sampler.gpu import greedy, sample
from openinfer.sampler.gpu import ops as tiles
from openinfer.sampler.gpu.ops.state import GREEDY_FIELDS
from openinfer.sampler.gpu.ops.step import STEP

NAMES = ("tokens", "logprobs", "logits", *STEP, *GREEDY_FIELDS)


def logits_of(vocabulary):
    """Rows in which the choice is easy to get wrong."""
    rng = np.random.default_rng(vocabulary)
    logits = rng.standard_normal((14, vocabulary)).astype(np.float32)
    logits[1] = 2.0  # a tie of all
    logits[2, [3, vocabulary - 1]] = 9.0
    logits[3, [vocabulary - 2, vocabulary - 1]] = 9.0
    logits[4, 5] = np.nan
    logits[5, 6] = np.inf
    logits[6] = -np.inf
    logits[7] = -np.inf
    logits[7, 4] = -3.4028235e38
    logits[8, 1] = 9.0  # a stop id: forbidden while the row is early
    logits[9, 1] = np.inf  # the same, infinite
    logits[10] = -np.inf
    logits[10, 1] = 1.0  # nothing is left
    logits[11] = [-0.0, 0.0] * (vocabulary // 2) + [-0.0] * (vocabulary % 2)
    return logits


@pytest.fixture
def args(step, request):
    logits = logits_of(request.param)
    rows = len(logits)
    stop_ids = np.full((rows, 3), -1)
    stop_ids[:, 1] = 1
    min_lens = np.zeros(rows)
    min_lens[8:11] = 10_000
    emits = np.ones(rows)
    emits[12] = 0
    made = step(logits, temperatures=0.0, stop_ids=stop_ids, min_lens=min_lens, emits=emits)
    made["alive"][made["slots"][13]] = 0
    return made


@pytest.mark.parametrize("args", [7, 1000, 5001], indirect=True)
@pytest.mark.parametrize("chunk", [256, tiles.CHUNK])
@pytest.mark.parametrize("run", ["run_cpu", "run_interpreter"])
def test_the_tokens_are_those_of_sample(request, monkeypatch, run_cpu, args, chunk, run):
    want = run_cpu(sample, **args)
    assert set(want["tokens"]) >= {-2, -1, 0}
    monkeypatch.setattr(tiles, "CHUNK", chunk)
    given = {name: args[name] for name in NAMES}
    got = request.getfixturevalue(run)(greedy, **given)
    np.testing.assert_array_equal(got["tokens"], want["tokens"])
    assert np.isnan(got["logprobs"]).all()
    for name in given.keys() - {"tokens", "logprobs"}:
        np.testing.assert_array_equal(got[name], given[name], err_msg=name)


@pytest.mark.parametrize("args", [1000], indirect=True)
def test_a_row_that_is_not_greedy_would_be_seen(run_cpu, args):
    """So the comparison above tells the two apart."""
    args["temperatures"][:] = 5.0
    given = {name: args[name] for name in NAMES}
    assert (run_cpu(sample, **args)["tokens"] != run_cpu(greedy, **given)["tokens"]).any()
