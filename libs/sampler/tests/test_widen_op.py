"""widen: reference and kernel by hand."""

import numpy as np
import pytest

from openinfer.kernels import ContractError
from openinfer.sampler.gpu import widen


@pytest.mark.parametrize("run", ["run_cpu", "run_interpreter"])
def test_tokens_outside_the_draft_vocabulary_cannot_be_drawn(request, run):
    rng = np.random.default_rng(0)
    sources = np.full(1500, -1, np.int32)
    ids = rng.permutation(1500)[:40]
    sources[ids] = np.arange(40)
    logits = rng.standard_normal((3, 40)).astype(np.float32)
    out = request.getfixturevalue(run)(
        widen, out=np.full((3, 1500), np.nan, np.float32), logits=logits, sources=sources
    )["out"]
    np.testing.assert_array_equal(out[:, ids], logits)
    assert np.isneginf(np.delete(out, ids, axis=1)).all()


def test_the_contract_names_what_is_wrong(run_cpu):
    logits = np.zeros((2, 4), np.float32)
    with pytest.raises(ContractError, match="sources has shape"):
        run_cpu(widen, out=np.zeros((2, 9), np.float32), logits=logits, sources=np.zeros(8, np.int32))
