"""keep_states, take_states: kernels against the references, and what a row gets back."""

import numpy as np
import pytest

from openinfer.kernels import ContractError, CpuPack, keep_states, take_states
from openinfer.tensor import Tensor, bfloat16

KEPT, SLOTS = 8, 5


def ints(*values):
    return np.array(values, np.int32)


def kept(normal, width):
    """The memory of SLOTS slots, before anything was kept."""
    return {
        "states": normal(SLOTS, KEPT, width),
        "ids": np.full((SLOTS, KEPT), -7, np.int32),
        "places": np.full((SLOTS, KEPT), -1, np.int32),
    }


def steps(normal, width, first, count):
    """Steps of one token of the slots 3, 1 and a padding row, slot 3 at `first` and slot 1 five tokens ahead."""
    for n in range(count):
        yield {
            "x": normal(3, width),
            "token_ids": ints(100 + n, 200 + n, 0),
            "positions": ints(first + n, first + 5 + n, 0),
            "token_slots": ints(3, 1, 0),
        }


def taken(memory, x, seq_lens, slots=(3, 1, 0)):
    tokens = len(slots) * KEPT
    return {
        "x": np.full((tokens, x), np.nan, bfloat16),
        **{name: np.full(tokens, -9, np.int32) for name in ("next_ids", "positions", "token_slots")},
        **memory,
        "slots": ints(*slots),
        "seq_lens": ints(*seq_lens),
        "last_tokens": ints(0, 901, 902, 903, 904),
    }


OUTPUTS = {"x": 0, "next_ids": 0, "positions": 0, "token_slots": 0}


def run(op, args):
    op(CpuPack(), **{name: Tensor.from_numpy(array) for name, array in args.items()})


@pytest.mark.parametrize("width", [48, 1040])
@pytest.mark.parametrize("count", [1, 5, 11])
def test_kernels_agree_with_the_references(run_both, normal, width, count):
    memory = kept(normal, width)
    for step in steps(normal, width, 40, count):
        got, want = run_both(keep_states, {**memory, **step})
        for name in memory:
            # Padding has any value.
            np.testing.assert_array_equal(got[name][1:], want[name][1:], err_msg=name)
        memory = {name: want[name] for name in memory}
    args = taken(memory, width, (0, 45 + count, 9, 40 + count, 0))
    got, want = run_both(take_states, args)
    for name in OUTPUTS:
        np.testing.assert_array_equal(got[name], want[name], err_msg=name)


@pytest.mark.parametrize("count", [1, 5, 8, 11])
def test_a_row_gets_its_last_tokens_back_with_those_that_follow(normal, count):
    memory, states = kept(normal, 16), []
    for step in steps(normal, 16, 40, count):
        run(keep_states, {**memory, **step})
        states.append(step["x"])
    args = taken(memory, 16, (0, 45 + count, 9, 40 + count, 0))
    run(take_states, args)
    found = min(count, KEPT)
    for row, (slot, first, ids) in enumerate(((3, 40, 100), (1, 45, 200))):
        part = slice((row + 1) * KEPT - found, (row + 1) * KEPT)
        assert (args["token_slots"][part] == slot).all()
        assert args["positions"][part].tolist() == list(range(first + count - found, first + count))
        assert args["next_ids"][part].tolist() == [*range(ids + count - found + 1, ids + count), 900 + slot]
        np.testing.assert_array_equal(args["x"][part], [x[row] for x in states[-found:]])
        before = slice(row * KEPT, (row + 1) * KEPT - found)
        assert not args["token_slots"][before].any()
        assert not args["x"][before].astype(np.float32).any()
    assert not args["token_slots"][2 * KEPT :].any()


def test_what_was_kept_for_other_positions_is_no_tokens_of_the_row(normal):
    """Steps of other kinds keep no tokens, and the next sequence of a slot has other positions."""
    memory = kept(normal, 16)
    for step in steps(normal, 16, 40, 6):
        run(keep_states, {**memory, **step})
    # 46 and 47 were not kept, so 45 has no known token behind it.
    args = taken(memory, 16, (0, 300, 9, 48, 0))
    run(take_states, args)
    assert args["positions"][:KEPT].tolist() == [40, 41, 42, 43, 44, 0, 0, 0]
    assert not args["token_slots"][KEPT:].any()


@pytest.mark.parametrize(
    ("op", "change", "words"),
    [
        (keep_states, {"states": np.zeros((5, 6, 16), bfloat16)}, "6 places"),
        (take_states, {"x": np.zeros((17, 16), bfloat16)}, "17"),
    ],
)
def test_the_contracts_refuse(normal, op, change, words):
    memory = kept(normal, 16)
    args = {**memory, **next(steps(normal, 16, 3, 1))} if op is keep_states else taken(memory, 16, (0,) * 5)
    with pytest.raises(ContractError, match=words):
        run(op, {**args, **change})
