"""check() notices books that were tampered with."""

import pytest

from openinfer.scheduler import FirstCome, IntegrityError, Seq, SeqState, StepLoop
from openinfer.scheduler.testing import FakeRunner, SimplePool


@pytest.fixture
def loop():
    runner = FakeRunner([4], delay=lambda index: 2)
    loop = StepLoop(runner, SimplePool([(4, 40)]), FirstCome(16), max_rows=3, max_model_len=40)
    for number in range(5):
        loop.submit(Seq(number, [3 + number] * 9, 20))
    for _ in range(2):
        loop.step()
    loop.abort(0)
    loop.check()
    return loop


def decoding(loop):
    return next(iter(loop._decode.rows))


TAMPERINGS = {
    "steps in flight": lambda loop: loop._in_flight.pop(),
    "list of decode rows": lambda loop: setattr(loop._decode, "listed", [None]),
    "finished sequence": lambda loop: setattr(decoding(loop), "state", SeqState.FINISHED),
    "PREFILL": lambda loop: loop._prefilling.update({decoding(loop): None}),
    "state DECODE": lambda loop: loop._decode.rows.clear(),
    "prefill or decode": lambda loop: loop._running.popitem(),
    "stats count": lambda loop: setattr(loop.stats, "waiting", 77),
    "waiting sequence holds": lambda loop: setattr(loop.live[-1], "lease", 1),
    "slots held": lambda loop: loop._free_slots.append(1),
    "run or leave": lambda loop: loop._leaving.clear(),
    "fences do not hold": lambda loop: loop._fences.clear(),
    "are not in flight": lambda loop: loop._fences.update({99: []}),
    "without a lease": lambda loop: setattr(decoding(loop), "lease", None),
    "<= bound": lambda loop: setattr(decoding(loop), "base", 999),
    "was launched": lambda loop: setattr(decoding(loop), "crossing", 1),
    "a row of": lambda loop: setattr(loop._decode, "drafts", {decoding(loop): 2}),
    "drafts in flight": lambda loop: setattr(decoding(loop), "ahead", 2),
    "calendar": lambda loop: loop._decode.calendar.clear(),
}


@pytest.mark.parametrize("complaint", TAMPERINGS)
def test_each_contradiction_is_named(loop, complaint):
    TAMPERINGS[complaint](loop)
    with pytest.raises(IntegrityError, match=complaint) as caught:
        loop.check()
    assert caught.value.problems
