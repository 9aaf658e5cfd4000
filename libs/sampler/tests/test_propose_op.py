"""follow and propose: references and kernels against each other, and by hand."""

import numpy as np
import pytest

from openinfer.kernels import ContractError
from openinfer.sampler.gpu import follow, propose


def ints(*values):
    return np.array(values, np.int32)


def step():
    """A row that kept one of two drafts, a chunk that goes on, a row of one token, a chunk that ends its prompt, an
    empty row."""
    return {
        "next_ids": np.full(12, -9, np.int32),
        "lens": np.full(7, -9, np.int32),
        "ends": np.full(6, -9, np.int32),
        "spans": np.full(6, -9, np.int32),
        "token_ids": ints(50, 51, 52, 60, 61, 62, 70, 80, 81, 0, 0, 0),
        "positions": ints(10, 11, 12, 20, 21, 22, 5, 0, 1, 0, 0, 0),
        "slots": ints(3, 1, 4, 2, 0),
        "q_starts": ints(0, 3, 6, 7, 9, 9),
        "emits": ints(1, 0, 1, 1, 0),
        "num_drafts": ints(2, 0, 0, 0, 0),
        "accepted": ints(0, 0, 0, 1, 0, 0, 0),
        "last_tokens": ints(0, 91, 92, 93, 94, 95, 96),
        "following": ints(0, 63, 0, 0, 0),
    }


@pytest.mark.parametrize("run", ["run_cpu", "run_interpreter"])
def test_the_tokens_that_follow(request, run):
    got = request.getfixturevalue(run)(follow, **step())
    assert got["next_ids"].tolist()[:9] == [51, 93, 0, 61, 62, 63, 94, 81, 92]
    assert got["ends"].tolist() == [0, 2, 6, 7, 9, 9]
    assert got["lens"].tolist()[1:5] == [20, 0, 10, 5]
    assert got["spans"].tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("run", ["run_cpu", "run_interpreter"])
@pytest.mark.parametrize(("place", "sure"), [(1, None), (2, 0.3), (5, 0.1), (1, np.nan)])
def test_proposals_go_to_their_positions(request, run, place, sure):
    args = {
        "drafts": np.full((6, 8), -9, np.int32),
        "next_ids": np.full(5, -9, np.int32),
        "positions": np.full(5, -9, np.int32),
        "token_slots": np.full(5, -9, np.int32),
        "lens": np.full(6, -9, np.int32),
        "spans": ints(0, 1, 2, 3, 4, 5),
        "tokens": ints(31, 32, -1, 34, 35),
        "slots": ints(3, 1, 2, 4, 0),
        "emits": ints(1, 1, 0, 1, 1),
        "alive": ints(0, 1, 1, 1, 0, 1),
        "seq_lens": ints(0, 10, 20, 30, 40, 50),
        "reserved": ints(0, 10 + place, 99, 30 + place - 1, 99, 99),
        "place": place,
    }
    if sure is not None:
        args |= {"survival": np.full(5, sure, np.float32), "floor": np.full(1, 0.2, np.float32)}
    got = request.getfixturevalue(run)(propose, **args)
    wanted = args["drafts"].copy()
    both = (-1, -1) if sure == 0.1 else (31, 32)
    wanted[3, (30 + place) % 8], wanted[1, (10 + place) % 8] = both  # slot 4 is dead
    np.testing.assert_array_equal(got["drafts"], wanted)
    assert got["next_ids"].tolist() == [31, 32, 0, 0, 0]
    assert got["positions"].tolist() == [0, 10 + place - 1, 0, 0, 0]  # slot 3 has no block there
    assert got["token_slots"].tolist() == [0, 1, 0, 0, 0]
    assert got["lens"].tolist() == [-9, 10 + place - 1, -9, 30 + place - 1, -9, -9]
    assert got["spans"].tolist() == [0, *(n * (place + 1) for n in range(1, 6))]


def test_contracts_name_what_is_wrong(run_cpu):
    with pytest.raises(ContractError, match="ends has shape"):
        run_cpu(follow, **{**step(), "ends": ints(0)})
