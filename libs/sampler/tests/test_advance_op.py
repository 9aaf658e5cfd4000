"""advance: the reference and the kernel against a model in plain Python, over every combination."""

import itertools

import numpy as np
import pytest

from openinfer.kernels import ContractError, CpuPack
from openinfer.sampler.gpu import Adjustment, RowStatus, advance
from openinfer.tensor import Tensor

STOP_IDS, STOP_TOKEN, OTHER_TOKEN = (40, 41, -1), 41, 7
SEQ_LEN = 10
COUNT_WORDS, RECENT = 25, 4

# alive, tokens in the step, emits, token, limit, min_len; lengths around SEQ_LEN + tokens
CASES = list(
    itertools.product(
        (0, 1), (0, 1, 3), (0, 1), (-2, STOP_TOKEN, OTHER_TOKEN), range(11, 16), (0, 11, 12, 13, 14)
    )
)


def model(alive, q_len, emits, token, limit, min_len):
    """(status, token reported, tokens in the sequence, last token, alive) after the step."""
    if not alive or not q_len:
        return 0, -1, SEQ_LEN, 99, alive
    length = SEQ_LEN + q_len
    if not emits:
        return 1, -1, length, 99, 1
    if token == -2:
        return 4, -2, length, 99, 0
    if token in STOP_IDS and length >= min_len:
        return 2, token, length, token, 0
    if length + 1 >= limit:
        return 3, token, length, token, 0
    return 1, token, length, token, 1


def arguments(rng):
    """All cases in one step, in shuffled slots, with padding rows between them."""
    rows = [None if i % 3 == 0 else CASES[i - i // 3 - 1] for i in range(len(CASES) * 3 // 2)]
    assert sum(case is not None for case in rows) == len(CASES)
    slots = iter(rng.permutation(len(CASES)) + 1)
    size = len(CASES) + 1
    state = {name: np.full(size, -5, np.int32) for name in ("limits", "min_lens")}
    state |= {"alive": np.zeros(size, np.int32), "seq_lens": np.full(size, SEQ_LEN, np.int32)}
    state |= {
        "last_tokens": np.full(size, 99, np.int32),
        "stop_ids": np.tile(np.array(STOP_IDS, np.int32), (size, 1)),
    }
    counts = rng.integers(0, 2**16, (size, 2 * COUNT_WORDS)).astype(np.uint16)
    counts[rng.random(size) < 0.1, OTHER_TOKEN] = 0xFFFF
    state |= {
        "adjusts": rng.integers(0, 16, size).astype(np.int32),
        "output_counts": counts.view(np.int32),
        "recent_tokens": np.full((size, RECENT), -3, np.int32),
    }
    step = {name: np.zeros(len(rows), np.int32) for name in ("slots", "tokens", "emits")}
    lengths = np.ones(len(rows), int)  # padding rows have tokens too
    for r, case in enumerate(rows):
        if case is not None:
            step["slots"][r] = slot = next(slots)
            state["alive"][slot], lengths[r], step["emits"][r], step["tokens"][r] = case[:4]
            state["limits"][slot], state["min_lens"][slot] = case[4:]
    step["q_starts"] = np.concatenate([[0], lengths]).cumsum().astype(np.int32)
    step["logprobs"] = -rng.random(len(rows)).astype(np.float32)
    return rows, {"result": np.full((len(rows), 3), -9, np.int32), **step, **state}


@pytest.mark.parametrize("run", ["run_cpu", "run_interpreter"])
def test_every_combination(request, run):
    rows, args = arguments(np.random.default_rng(1))
    got = request.getfixturevalue(run)(advance, **args)
    logprob_bits = args["logprobs"].view(np.int32)
    for r, case in enumerate(rows):
        slot = args["slots"][r]
        status, token, length, last, alive = (0, -1, SEQ_LEN, 99, 0) if case is None else model(*case)
        bits = 0 if token == -1 else logprob_bits[r]
        assert got["result"][r].tolist() == [token, status, bits], case
        assert (got["seq_lens"][slot], got["last_tokens"][slot], got["alive"][slot]) == (
            length,
            last,
            alive,
        ), case
        token, had, has = got["result"][r, 0], *(a["output_counts"].view(np.uint16) for a in (args, got))
        flags = args["adjusts"][slot] if token >= 0 else 0
        counts, recent = had[slot].astype(int), np.full(RECENT, -3)
        counts[token] = min(counts[token] + 1, 0xFFFF) if flags & Adjustment.PENALTIES else counts[token]
        recent[length % RECENT] = token if flags & Adjustment.BAD_WORDS else -3
        assert has[slot].tolist() == counts.tolist(), case
        assert got["recent_tokens"][slot].tolist() == recent.tolist(), case
    written = {"result", "seq_lens", "last_tokens", "alive", "output_counts", "recent_tokens"}
    for name in args.keys() - written:
        np.testing.assert_array_equal(got[name], args[name], err_msg=name)


def test_the_cases_reach_every_status():
    of_accept = {RowStatus.DRAFTED_STOP, RowStatus.UNTRIED}
    assert {model(*case)[0] for case in CASES} == set(RowStatus) - of_accept == {0, 1, 2, 3, 4}


def test_the_contract_refuses_a_result_of_two_columns():
    args = arguments(np.random.default_rng(1))[1]
    args["result"] = args["result"][:, :2].copy()
    with pytest.raises(ContractError, match="result has shape"):
        advance(CpuPack(), **{name: Tensor.from_numpy(array) for name, array in args.items()})
