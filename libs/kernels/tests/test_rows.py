"""embed, select_rows, apply_writes, expand_rows: kernels in the interpreter against the references."""

import numpy as np
import pytest

from openinfer.kernels import (
    ContractError,
    CpuPack,
    apply_writes,
    copy_words,
    embed,
    expand_rows,
    select_rows,
)
from openinfer.tensor import Tensor, bfloat16, float32

WRONG = -123456789


def nans(*shape, dtype=bfloat16):
    return np.full(shape, np.nan, dtype)


def ints(*values):
    return np.array(values, np.int32)


@pytest.mark.parametrize("width", [16, 1024, 1040, 2560])
def test_embed_gathers_rows_of_any_width(check_op, rng, normal, width):
    table = normal(37, width)
    ids = rng.integers(0, 37, 5).astype(np.int32)
    check_op(embed, {"out": 0}, out=nans(5, width), token_ids=ids, table=table)


def test_embed_takes_float32(check_op, rng):
    table = rng.standard_normal((9, 48)).astype(float32)
    check_op(embed, {"out": 0}, out=nans(3, 48, dtype=float32), token_ids=ints(8, 0, 8), table=table)


def test_select_rows_takes_the_last_token_of_each_row(check_op, normal):
    x = normal(11, 80)
    got = check_op(select_rows, {"out": 0}, out=nans(4, 80), x=x, q_starts=ints(0, 3, 4, 4, 11))
    np.testing.assert_array_equal(got["out"], x[[2, 3, 3, 10]])


def test_select_rows_gives_row_zero_for_a_step_without_tokens(check_op, normal):
    x = normal(2, 16)
    got = check_op(select_rows, {"out": 0}, out=nans(2, 16), x=x, q_starts=ints(0, 0, 0))
    np.testing.assert_array_equal(got["out"], x[[0, 0]])


@pytest.mark.parametrize(("count", "capacity"), [(0, 4), (3, 4), (4, 4), (300, 700)])
def test_apply_writes_writes_the_first_count(check_op, rng, count, capacity):
    words = rng.integers(-9, 9, 1000).astype(np.int32)
    where = rng.permutation(1000)[:capacity].astype(np.int32)
    values = rng.integers(100, 200, capacity).astype(np.int32)
    got = check_op(
        apply_writes, {"words": 0}, words=words, writes=np.concatenate([ints(count), where, values])
    )
    assert (got["words"] >= 100).sum() == count


@pytest.mark.parametrize("count", [1, 1024, 3000])
def test_copy_words_copies_every_word_and_no_other(check_op, rng, count):
    x = rng.integers(-9, 9, count).astype(np.int32)
    got = check_op(copy_words, {"out": 0}, out=ints(*[77] * count), x=x)
    np.testing.assert_array_equal(got["out"], x)


def rows_of_a_step(rng, lengths, tokens, size=9):
    """Arguments of expand_rows for rows of these many tokens; slot 4 is dead."""
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    alive = np.ones(size, np.int32)
    alive[[0, 4]] = 0
    return {
        "token_ids": np.full(tokens, WRONG, np.int32),
        "positions": np.full(tokens, WRONG, np.int32),
        "token_slots": np.full(tokens, WRONG, np.int32),
        "prompt": np.where(rng.random(tokens) < 0.5, -1, rng.integers(0, 99, tokens)).astype(np.int32),
        "slots": rng.permutation(np.arange(1, size))[: len(lengths)].astype(np.int32),
        "q_starts": starts,
        "seq_lens": rng.integers(0, 5000, size).astype(np.int32),
        "last_tokens": rng.integers(100, 200, size).astype(np.int32),
        "alive": alive,
    }


OUTPUTS = {"token_ids": 0, "positions": 0, "token_slots": 0}


@pytest.mark.parametrize(
    ("lengths", "tokens"),
    [
        ([1], 1),
        ([5], 8),
        ([1] * 7, 7),
        ([3, 0, 0, 2, 1], 8),
        ([0, 4, 1], 5),
        ([2, 1, 0, 0], 4),
        ([0, 0], 4),
        ([130, 1, 90], 256),
    ],
)
def test_expand_rows(check_op, rng, lengths, tokens):
    check_op(expand_rows, OUTPUTS, **rows_of_a_step(rng, lengths, tokens))


@pytest.mark.parametrize(("lengths", "tokens"), [([3, 1, 2], 8), ([1, 4, 0, 2], 7), ([130, 3], 256)])
def test_expand_rows_takes_drafts_by_position(check_op, rng, lengths, tokens):
    args = rows_of_a_step(rng, lengths, tokens)
    args["prompt"][: tokens // 2] = -1
    args["drafts"] = rng.integers(300, 400, (9, 8)).astype(np.int32)
    got = check_op(expand_rows, OUTPUTS, **args)
    assert (got["token_ids"] >= 300).any()
    live = got["token_slots"] > 0
    args["drafts"][:] = -1  # none: no more than padding
    got = check_op(expand_rows, OUTPUTS, **args)
    assert (got["token_ids"] >= 0).all()
    assert (got["token_slots"] > 0).sum() < live.sum()


def test_drafts_need_a_power_of_two(rng):
    args = {**rows_of_a_step(rng, [2], 2), "drafts": np.zeros((9, 6), np.int32)}
    with pytest.raises(ContractError, match="6 columns; it must have a power of two"):
        expand_rows(CpuPack(), **{k: Tensor.from_numpy(v) for k, v in args.items()})


def test_expand_rows_by_hand():
    args = {
        "token_ids": ints(*[WRONG] * 5),
        "positions": ints(*[WRONG] * 5),
        "token_slots": ints(*[WRONG] * 5),
        "prompt": ints(7, 8, -1, 9, 9),
        "slots": ints(2, 1, 3),
        "q_starts": ints(0, 2, 3, 4),
        "seq_lens": ints(0, 40, 10, 5),
        "last_tokens": ints(0, 77, 66, 55),
        "alive": ints(0, 1, 1, 0),
    }
    expand_rows(CpuPack(), **{k: Tensor.from_numpy(v) for k, v in args.items()})
    assert args["token_ids"].tolist() == [7, 8, 77, 0, 0]
    assert args["positions"].tolist() == [10, 11, 40, 0, 0]
    assert args["token_slots"].tolist() == [2, 2, 1, 0, 0]


def test_drafts_by_hand():
    args = {
        **{name: ints(*[WRONG] * 5) for name in OUTPUTS},
        "prompt": ints(-1, -1, -1, -1, 5),
        "slots": ints(2, 1),
        "q_starts": ints(0, 3, 5),
        "seq_lens": ints(0, 40, 10),
        "last_tokens": ints(0, 77, 66),
        "alive": ints(0, 1, 1),
        "drafts": np.stack([np.zeros(4), np.arange(100, 104), np.arange(200, 204)]).astype(np.int32),
    }
    expand_rows(CpuPack(), **{k: Tensor.from_numpy(v) for k, v in args.items()})
    assert args["token_ids"].tolist() == [66, 203, 200, 77, 5]  # positions 10, 11, 12 and 40, 41


@pytest.mark.parametrize(
    ("op", "change", "words"),
    [
        (embed, {"token_ids": ((5,), float32)}, "token_ids is float32"),
        (embed, {"out": ((5, 31), bfloat16)}, r"out has shape \(5, 31\); it must be \[5, 32\]"),
        (select_rows, {"q_starts": ((7,), np.int32)}, "q_starts has shape"),
        (apply_writes, {"writes": ((8,), np.int32)}, "writes has 8 words"),
        (copy_words, {"out": ((9,), np.int32)}, "out has shape"),
    ],
)
def test_contracts_name_the_wrong_argument(arena, op, change, words):
    given = {
        embed: {"out": ((5, 32), bfloat16), "token_ids": ((5,), np.int32), "table": ((9, 32), bfloat16)},
        select_rows: {"out": ((5, 32), bfloat16), "x": ((8, 32), bfloat16), "q_starts": ((6,), np.int32)},
        apply_writes: {"words": ((8,), np.int32), "writes": ((9,), np.int32)},
        copy_words: {"out": ((8,), np.int32), "x": ((8,), np.int32)},
    }[op]
    with pytest.raises(ContractError, match=words):
        op(CpuPack(), **{k: arena.alloc(shape, dtype) for k, (shape, dtype) in {**given, **change}.items()})


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "tokens"), [(1, 1), (512, 512), (37, 8192)])
def test_on_gpu(check_op_gpu, rng, normal, rows, tokens):
    table = normal(4096, 2560)
    ids = rng.integers(0, 4096, tokens).astype(np.int32)
    check_op_gpu(embed, {"out": 0}, out=nans(tokens, 2560), token_ids=ids, table=table)
    lengths = rng.multinomial(tokens, np.ones(rows) / rows)
    args = rows_of_a_step(rng, lengths, tokens, size=rows + 5)
    check_op_gpu(expand_rows, OUTPUTS, **args)
    check_op_gpu(
        select_rows, {"out": 0}, out=nans(rows, 2560), x=normal(tokens, 2560), q_starts=args["q_starts"]
    )
    words = rng.integers(-9, 9, 100000).astype(np.int32)
    writes = np.concatenate([ints(rows), rng.permutation(100000)[: 2 * tokens].astype(np.int32)])
    check_op_gpu(apply_writes, {"words": 0}, words=words, writes=writes)
    check_op_gpu(copy_words, {"out": 0}, out=ints(*[0] * tokens), x=words[:tokens])
