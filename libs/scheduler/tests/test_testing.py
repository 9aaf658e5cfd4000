"""The test helpers themselves: the model, the small pool, and that the device in miniature notices misuse."""

import pytest

from openinfer.scheduler import BlockWrite, FinishReason, Row, Seq, Step
from openinfer.scheduler.testing import EOS, DeviceFault, FakeRunner, SimplePool, generate


def test_the_model_depends_on_every_token_and_ends_by_eos_or_length():
    outputs = [tuple(generate([first, 2, 3, 4], 30)[0]) for first in range(1, 20)]
    assert len(set(outputs)) == len(outputs)
    reasons = set()
    for first in range(1, 60):
        output, reason = generate([first], 20)
        reasons.add(reason)
        assert (output[-1] == EOS) == (reason is FinishReason.STOP)
        assert len(output) == 19 or reason is FinishReason.STOP
        assert EOS not in output[:-1]
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH}


def test_simple_pool_shares_whole_blocks_of_all_groups_and_keeps_one_token_to_compute():
    pool = SimplePool([(2, 20), (4, 20)])
    tokens = list(range(12))
    lease = pool.acquire(tokens)
    assert lease.reserve(12) == [(0, 0, [1, 2, 3, 4, 5, 6]), (1, 0, [1, 2, 3])]
    lease.commit(tokens, 11)
    assert pool.acquire(tokens).num_cached == 8  # ten in one group, eight in the other
    assert pool.acquire(tokens[:8]).num_cached == 4
    assert pool.acquire(tokens, salt=b"other").num_cached == 0
    assert lease.reserve(1000) is None
    lease.release()
    assert pool.acquire(tokens).block_table(1) == [1, 2]


def test_simple_pool_evicts_the_longest_unused_and_never_what_is_in_use():
    pool = SimplePool([(2, 4)])
    for first in (10, 20):
        lease = pool.acquire([first] * 3)
        lease.reserve(2)
        lease.commit([first] * 3, 2)
        lease.release()
    holder = pool.acquire([20] * 3)
    assert (holder.num_cached, pool.num_free) == (2, 2)
    assert pool.acquire([0] * 9).reserve(4) == [(0, 0, [3, 1])]
    assert pool.acquire([10] * 3).num_cached == 0
    assert pool.acquire([20] * 3).num_cached == 2


def test_simple_pool_gives_back_what_a_window_has_left_behind_and_finds_what_it_reaches():
    pool = SimplePool([(2, 20), (2, 5, 3)])
    assert pool.capacity_tokens == 38  # the window may lie on two blocks, and one is written: four are enough
    assert SimplePool([(2, 20), (2, 3, 3)]).capacity_tokens == 4
    tokens = list(range(12))
    lease = pool.acquire(tokens)
    assert lease.reserve(12) is None
    assert lease.reserve(8, 12, leave=0.1) is None
    assert lease.reserve(8, 12) == [(0, 0, [1, 2, 3, 4, 5, 6]), (1, 0, [1, 2, 3, 4])]
    assert (lease.num_tokens, lease.reach()) == (8, 8)
    lease.commit(tokens, 7)
    assert lease.block_table(1) == [0, 0, 3, 4]
    assert (lease.reach(), lease.reach(0.25)) == (12, 10)
    assert lease.reserve(10) == [(1, 4, [1])]
    assert lease.reserve(12) == [(1, 5, [2])]  # evicts
    hit = pool.acquire(tokens[:7])
    assert (hit.num_cached, hit.block_table(1)) == (
        0,
        [],
    )  # tokens 3 to 5 would be needed, and 2 and 3 are gone
    lease.commit(tokens, 12)
    assert pool.acquire([*tokens, 1]).block_table(1) == [0, 0, 0, 0, 1, 2]


def joined(runner, tokens, *, slot=1, blocks=(1, 2), max_len=20, index=1, num_tokens=None):
    """Launch a step in which a row joins with its prompt as a chunk."""
    seq = Seq(slot, tokens, 10)
    seq.slot, seq.max_len, seq.target = slot, max_len, len(tokens)
    seq.lease = SimplePool([(4, 9)]).acquire(tokens)
    row = Row(seq, num_tokens or len(tokens), True, 0)
    runner.launch(Step(index, [row], True, 0, [], [seq], [BlockWrite(seq, 0, 0, list(blocks))]))
    return seq


def decode(runner, *seqs, index=2, **changes):
    rows = [Row(seq, 1, True, None) for seq in seqs]
    step = Step(index, rows, True, len(rows), [], [], [])
    for name, value in changes.items():
        setattr(step, name, value)
    runner.launch(step)


def test_the_device_yields_what_the_oracle_yields():
    runner = FakeRunner([4], depth=9)
    seq = joined(runner, [5, 6, 7], max_len=8)
    for index in range(2, 8):
        decode(runner, seq, index=index)
    results = [runner.collect(None) for _ in range(7)]
    output, reason = generate([5, 6, 7], 8)
    tokens = [token for result in results for row in result.payload for token in row]
    assert tokens == output
    assert [ended for result in results for ended in result.finished] == [(1, reason)]


def test_results_come_late_unless_waited_for_without_limit():
    runner = FakeRunner([4], delay=lambda index: 2)
    assert runner.collect(0.0) is None
    joined(runner, [5, 6])
    assert runner.collect(0.0) is None
    assert runner.collect(1.0) is None
    assert runner.collect(0.0).index == 1
    decode(runner, *[joined(runner, [5], slot=2, blocks=[3], index=2)], index=3)
    assert [runner.collect(None).index, runner.collect(None).index] == [2, 3]


@pytest.mark.parametrize(
    ("misuse", "complaint"),
    [
        (lambda runner, seq: decode(runner, seq, index=5), "step 5 is launched as number 2"),
        (lambda runner, seq: decode(runner, seq, changed=False), "changed=False"),
        (lambda runner, seq: decode(runner, seq, seq), r"has the slots \[1, 1\]"),
        (lambda runner, seq: decode(runner, seq, num_decode=0), "first 0 rows"),
        (lambda runner, seq: joined(runner, [8], index=2, blocks=[5]), "while its row is in use"),
        (lambda runner, seq: joined(runner, [8], index=2, slot=0), "joins with slot 0"),
        (lambda runner, seq: joined(runner, [8], index=2, slot=2), "block 1, which other rows use"),
        (lambda runner, seq: joined(runner, [8], index=2, slot=2, blocks=[0]), "block 0"),
        (lambda runner, seq: joined(runner, [8] * 5, index=2, slot=2, blocks=[5]), "past its table"),
        (
            lambda runner, seq: joined(runner, [8], index=2, slot=2, blocks=[5], num_tokens=3),
            "is fed 1 tokens",
        ),
        (lambda runner, seq: decode(runner, seq, blocks=[BlockWrite(seq, 0, 5, [3])]), "entry 5 is written"),
    ],
)
def test_the_device_notices(misuse, complaint):
    runner = FakeRunner([4])
    seq = joined(runner, [5, 6, 7])
    with pytest.raises(DeviceFault, match=complaint):
        misuse(runner, seq)


def test_the_device_notices_a_prefix_that_was_never_written():
    runner = FakeRunner([2])
    pool = SimplePool([(2, 9)])
    writer = pool.acquire([1, 2, 3])
    writer.reserve(3)
    writer.commit([1, 2, 3], 2)  # a lie: nothing ran
    seq = Seq(1, [1, 2, 3], 10)
    seq.slot, seq.max_len, seq.target, seq.lease = 1, 20, 3, pool.acquire([1, 2, 3])
    seq.lease.reserve(3)
    step = Step(
        1, [Row(seq, 1, True, 2)], True, 0, [], [seq], [BlockWrite(seq, 0, 0, seq.lease.block_table())]
    )
    with pytest.raises(DeviceFault, match="reads token 1 from block 1, which holds None"):
        runner.launch(step)


@pytest.mark.parametrize(
    ("tables", "complaint"),
    [
        ([[1, 2, 3], [1, 2, 1]], None),  # the first block of the window group is behind its window by then
        ([[1, 2, 1], [1, 2, 3]], "reads token 0 from block 1"),
        ([[1, 2, 3], [1, 1, 3]], "reads token 0 from block 1"),
    ],
)
def test_the_device_reads_what_a_window_reaches_and_nothing_else(tables, complaint):
    runner = FakeRunner([2, 2], windows=[None, 2])
    seq = Seq(1, [5, 6, 7, 8, 9], 10)
    seq.slot, seq.max_len, seq.target = 1, 20, 5
    seq.lease = SimplePool([(2, 9), (2, 9, 2)]).acquire(seq.tokens)
    writes = [BlockWrite(seq, group, 0, table) for group, table in enumerate(tables)]
    step = Step(1, [Row(seq, 5, True, 0)], True, 0, [], [seq], writes)
    if complaint is None:
        runner.launch(step)
        assert runner.collect(None).payload == [[generate(seq.tokens, 20)[0][0]]]
    else:
        with pytest.raises(DeviceFault, match=complaint):
            runner.launch(step)
