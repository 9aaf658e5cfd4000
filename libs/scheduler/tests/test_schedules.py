"""Generated workloads against the sequential oracle; and broken parts, which must not pass them."""

import random
from collections import Counter
from itertools import islice

import pytest

from openinfer.scheduler import Decision, FirstCome, Row, SeqState, StepLoop, Tokens
from openinfer.scheduler.decoding import DecodeRows
from openinfer.scheduler.testing import DeviceFault, Mismatch, Schedule, SimpleLease, SimplePool


def play(seeds, **options):
    """Play many schedules; returns what happened in them, in sum."""
    seen = Counter()
    for seed in seeds:
        schedule = Schedule.generate(seed)
        try:
            stats = schedule.play(**options).stats
        except Exception as error:
            error.add_note(f"in {schedule}")
            raise
        seen.update(preemptions=stats.preemptions, dry=stats.dry, finished=stats.finished, steps=stats.steps)
    return seen


def watched(seen):
    """A loop and a pool that count the cases."""

    class Loop(StepLoop):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            begin_wanted = self._loads.begin_wanted

            def counted():
                short = begin_wanted()
                seen["load without room"] += len(self._loads.short)
                return short

            self._loads.begin_wanted = counted

        def _chunk(self, seq, num_tokens):
            chunk = super()._chunk(seq, num_tokens)
            if chunk.num_tokens < min(num_tokens, seq.remaining):
                seen["chunk cut" if chunk.num_tokens else "chunk of nothing"] += 1
            return chunk

        def _preempt(self, seq):
            seen["chunk preempted"] += not self._decode.rows
            super()._preempt(seq)

        def _gives_back(self, seqs):
            gives = super()._gives_back(seqs)
            seen["chunk given back"] += gives
            return gives

        def _launch(self, events):
            launched = super()._launch(events)
            if launched:
                step = self._in_flight[-1]
                seen["drafts"] += len(step.drafts)
                seen["drafts given up in flight"] += any(
                    row.seq.ahead for row in step.rows[: step.num_decode] if row.num_tokens == 1
                )
            return launched

        def _grow(self, index):
            wanted, preemptions = self._decode.drafts, self.stats.preemptions
            before = len(self._loads.ended)
            grown = super()._grow(index)
            if self.stats.preemptions > preemptions:
                seen["drafts preempted"] += len(wanted)
            else:
                seen["drafts without blocks"] += len(wanted) - len(self._decode.drafts)
            seen["load given up for a row"] += before - len(self._loads.ended)
            return grown

        def _reconcile(self, result, events):
            step = self._in_flight[0]
            for seq, count in step.drafts.items():
                kept = (result.advanced or {}).get(seq.slot, 1 + count)
                case = ("that stood still", "of which none is kept", "of which some are kept")[min(kept, 2)]
                seen[f"drafts {case}"] += kept <= count
                seen["drafts all kept"] += kept > count
            super()._reconcile(result, events)

        def _end(self, seq, reason, events):
            seen["load aborted"] += seq.state is SeqState.LOADING
            seen["load aborted when loaded"] += seq in self._loads.ended
            super()._end(seq, reason, events)

        def _lease(self, seq, num_tokens):
            loaded, before = seq in self._loads.ended, len(self._loads.ended)
            lease = super()._lease(seq, num_tokens)
            seen["load again after a preemption"] += seq in self._loads.wanted and seq.num_preemptions > 0
            seen["load given up for another"] += max(
                0, before - len(self._loads.ended) - (loaded and lease is not None)
            )
            return lease

    class Watched(SimplePool):
        def poll(self, wait_s=0.0):
            before = {lease: lease.num_cached for lease in (load.lease for load in self.loads.values())}
            promised = {
                lease: lease.num_cached + lease.num_loadable for lease in before if not lease.released
            }
            ended = super().poll(wait_s)
            for lease in ended:
                come = lease.num_cached
                if lease.released:
                    seen["load ended after the release"] += 1
                    continue
                seen[
                    "load failed"
                    if come == before[lease]
                    else "load of a part"
                    if come < promised[lease]
                    else "load come"
                ] += 1
            seen["load polled before the end"] += len(self.loads)
            return ended

    return {"loop_type": Loop, "make_pool": Watched}


def test_300_schedules_yield_what_each_request_yields_alone_and_reach_the_hard_cases():
    cases = Counter()
    seen = play(range(300), **watched(cases))
    assert min(seen["preemptions"], seen["dry"]) > 100
    assert seen["finished"] > 1500
    for kind, number, least in (("chunk", 4, 10), ("drafts", 8, 50), ("load", 11, 5)):
        found = {case: count for case, count in cases.items() if case.startswith(kind)}
        assert len(found) == number
        assert min(found.values()) > least, found


def test_the_schedules_reach_lone_chunks():
    seen = Counter()

    class Watched(StepLoop):
        def _launch(self, events):
            launched = super()._launch(events)
            if launched:
                step = self._in_flight[-1]
                tokens = step.rows[0].num_tokens
                lone = tokens in self.lone_tokens and tokens > self._policy.max_batched_tokens
                seen["lone"] += lone
                seen["after a cached prefix"] += lone and bool(step.rows[0].start)
                seen["again"] += lone and step.rows[0].seq.num_preemptions > 0
                assert not lone or (len(step.rows) == 1 and not step.num_decode)
            return launched

    play(
        range(125),
        loop_type=Watched,
        make_policy=lambda schedule: FirstCome(min(schedule.max_batched_tokens, 8)),
    )
    assert min(seen[what] for what in ("lone", "after a cached prefix", "again")) > 3, seen


@pytest.mark.slow
def test_10_000_schedules_yield_what_each_request_yields_alone():
    assert play(range(1000, 11_000))["preemptions"] > 4000


class Whimsical(FirstCome):
    """Preempts at random, admits out of order, gives chunks to some, takes any victim: none of it may show."""

    def __init__(self, schedule):
        super().__init__(schedule.max_batched_tokens, schedule.max_chunk_tokens)
        self.random = random.Random(schedule.seed)
        self.left = 10  # preemptions; without end there would be no progress

    def plan(self, view):
        decision = super().plan(view)
        waiting = list(self.waiting)
        self.random.shuffle(waiting)
        chunks = {
            seq: self.random.randint(1, count)
            for seq, count in decision.chunks.items()
            if self.random.random() < 0.7
        }
        preempt = []
        if self.left and view.running and self.random.random() < 0.2:
            preempt = [self.random.choice(list(view.running))]
            self.left -= 1
        return Decision(chunks, list(islice(waiting, view.free_slots)), decision.admit_tokens, preempt)

    def victim(self, view):
        return self.random.choice(list(view.running))


def test_a_whimsical_policy_changes_when_tokens_come_but_not_which():
    assert play(range(60), make_policy=Whimsical)["preemptions"] > 200


def test_without_a_prefix_cache_the_tokens_are_the_same():
    play(range(40), make_pool=lambda groups, tier: SimplePool(groups, tier, prefix_cache=False))


def test_with_a_roomy_pool_rows_get_blocks_ahead_and_the_tokens_are_the_same():
    def roomy(groups, tier):
        return SimplePool([shape._replace(num_blocks=shape.num_blocks + 200) for shape in groups], tier)

    assert play(range(50), make_pool=roomy)["dry"] == 0


@pytest.mark.parametrize("tokens", [1, 5])
def test_commits_on_the_way_do_not_show(tokens, monkeypatch):
    monkeypatch.setattr("openinfer.scheduler.loop.COMMIT_EVERY", tokens)
    play(range(50))


# Negative controls: each of these breaks one rule, and the schedules must notice.


class CommitsUnconfirmed(StepLoop):
    """Registers the newest token, which was sampled but never fed."""

    def _commit(self, seq):
        if seq.lease:
            seq.lease.commit(seq.tokens, min(len(seq.tokens), seq.lease.num_tokens))


class ReleasesBeforeTheFence(StepLoop):
    """Gives slot and blocks back when a sequence ends, though a launched step still has the row."""

    def _end(self, seq, reason, events):
        super()._end(seq, reason, events)
        self._let_go(seq)


class ChunksWithoutRoom(StepLoop):
    """Launches chunks for which the windows have no room."""

    def _chunk(self, seq, num_tokens):
        end = min(seq.scheduled + num_tokens, seq.target)
        return Row(seq, end - seq.scheduled, end == seq.target, seq.scheduled)


class GivesUpNobody(StepLoop):
    """Lets prompts wait for each other's blocks."""

    def _preempt(self, seq):
        if self._decode.rows:
            super()._preempt(seq)


class ReportsDeadRows(StepLoop):
    """Passes on what a row yields after its end."""

    def _reconcile(self, result, events):
        first = len(events)
        super()._reconcile(result, events)
        for index, event in enumerate(events[first:], first):
            if isinstance(event, Tokens):
                events[index] = Tokens(event.step, event.rows, frozenset(), event.payload, event.advanced)


class ChunkOneShort(StepLoop):
    """Feeds a token less than the prompt has."""

    def _chunk(self, seq, num_tokens):
        row = super()._chunk(seq, num_tokens)
        return row._replace(num_tokens=max(1, row.num_tokens - 1))


class ReservesForOneToken(DecodeRows):
    """Looks for blocks as if rows had no drafts."""

    def launched(self):
        pass

    def advance(self, step, advanced, gone):
        for seq, count in step.drafts.items():
            seq.base, seq.ahead = seq.base + count, seq.ahead + count
        super().advance(step, advanced, gone)


class BlocksForOneToken(StepLoop):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self._decode = ReservesForOneToken()


class TakesDraftsAsKept(StepLoop):
    """Does not read how far rows with drafts advanced."""

    def _reconcile(self, result, events):
        drafted = {seq.slot for seq in self._in_flight[0].drafts}
        advanced, result.advanced = result.advanced or {}, None
        result.advanced = {slot: count for slot, count in advanced.items() if slot not in drafted}
        super()._reconcile(result, events)


class CommitsDrafts(StepLoop):
    """Registers what may be refused."""

    def _commit(self, seq):
        if seq.lease:
            seq.lease.commit([*seq.tokens, *[9] * seq.bound][: seq.bound], seq.bound)


class LateCrossings(DecodeRows):
    def schedule(self, seq):
        super().schedule(seq)
        if seq.crossing:
            self.calendar[seq.crossing].remove(seq)
            seq.crossing += 1
            self.calendar.setdefault(seq.crossing, []).append(seq)


class BlocksOneStepLate(StepLoop):
    """Looks for new blocks one step after the one that needs them."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self._decode = LateCrossings()


class PreemptsWithoutDraining(StepLoop):
    """Takes blocks away from rows in flight."""

    def _grow(self, index):
        in_flight, self._in_flight = self._in_flight, []
        try:
            return super()._grow(index)
        finally:
            self._in_flight = in_flight


class GivesABlockTwice(SimplePool):
    """Forgets that a block is in use."""

    def take(self, group, count):
        blocks = super().take(group, count)
        for block in blocks[1:]:
            self.users[group][block] = 0
        return blocks


class AsksWindowsForAll(SimplePool):
    """Admits a prompt when all of it fits the windows too."""

    def acquire(self, tokens, salt=b"", hashes=None):
        lease = super().acquire(tokens, salt, hashes)
        lease.reserve = lambda num_tokens, kept_tokens=0, leave=0.0: SimpleLease.reserve(
            lease, max(num_tokens, kept_tokens), leave=leave
        )
        return lease


class ShortWindows(SimplePool):
    """Gives blocks back that the window still reaches."""

    def __init__(self, groups, tier):
        super().__init__(groups, tier)
        self.shapes = [shape._replace(window=shape.window and shape.window // 2) for shape in self.shapes]


class Deaf(set):
    def add(self, element):
        pass


class TrustsEveryLoad(SimplePool):
    """Takes what did not come for what was asked for."""

    def poll(self, wait_s=0.0):
        for load in self.tier.loads:
            load.failed = Deaf()
        return super().poll(wait_s)


class ReportsTooEarly(SimplePool):
    """Says that blocks have come while they are on their way."""

    def poll(self, wait_s=0.0):
        early = []
        for record in self.loads.values():
            for name, (group, block) in zip(record.names, record.users[-len(record.names) :], strict=True):
                self.index[group].setdefault(name, block)
            if not record.lease.released:
                record.lease.clear()
                record.lease.share(self.longest(record.lease, lambda group, name: name in self.index[group]))
                early.append(record.lease)
                record.lease.released = True
        super().poll(wait_s)
        return early


class ReusesBlocksOnTheirWay(SimplePool):
    """Gives out again what a released lease was loading."""

    def acquire(self, tokens, salt=b"", hashes=None):
        for load, record in list(self.loads.items()):
            if record.lease.released:
                for group, block in record.users:
                    self.users[group][block] -= 1
                self.loads[load] = record._replace(users=[])
        return super().acquire(tokens, salt, hashes)


class KeepsWhatIsLoaded(StepLoop):
    """Never takes blocks back from sequences that wait with a loaded prefix."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self._loads.drop_latest = lambda spared=None: False


class NeverPolls(StepLoop):
    """Waits for loads without asking."""

    def _turn(self, wait_s, events):
        under_way, self._loads.under_way = self._loads.under_way, {}
        super()._turn(wait_s, events)
        self._loads.under_way.update(under_way)


class ForgetsAPreempted(FirstCome):
    """Loses whom it preempted."""

    def __init__(self, schedule):
        super().__init__(schedule.max_batched_tokens)

    def on_preempt(self, seq):
        assert seq.state is SeqState.WAITING


@pytest.mark.parametrize(
    "broken",
    [
        {"loop_type": CommitsUnconfirmed},
        {"loop_type": ReleasesBeforeTheFence},
        {"loop_type": ReportsDeadRows},
        {"loop_type": ChunkOneShort},
        {"loop_type": ChunksWithoutRoom},
        {"loop_type": BlocksOneStepLate},
        {"loop_type": PreemptsWithoutDraining},
        {"loop_type": BlocksForOneToken},
        {"loop_type": TakesDraftsAsKept},
        {"loop_type": CommitsDrafts},
        {"make_pool": GivesABlockTwice},
        {"make_pool": ShortWindows},
        {"make_pool": TrustsEveryLoad},
        {"make_pool": ReportsTooEarly},
        {"make_pool": ReusesBlocksOnTheirWay},
        {"make_policy": ForgetsAPreempted},
        # Most schedules do without what these break, so that they play a hundred and more.
        pytest.param({"loop_type": GivesUpNobody}, marks=pytest.mark.slow),
        pytest.param({"make_pool": AsksWindowsForAll}, marks=pytest.mark.slow),
        pytest.param({"loop_type": KeepsWhatIsLoaded}, marks=pytest.mark.slow),
        pytest.param({"loop_type": NeverPolls}, marks=pytest.mark.slow),
    ],
    ids=lambda broken: next(iter(broken.values())).__name__,
)
def test_a_broken_part_does_not_pass(broken):
    caught = 0
    for seed in range(400):
        try:
            # Without the loop's own check, so that it is the device or the oracle that notices.
            Schedule.generate(seed).play(after_step=lambda loop: None, **broken)
        except (DeviceFault, Mismatch):
            caught += 1
        except Exception:  # the loop itself stumbles
            pass
        if caught == 2:
            return
    raise AssertionError(f"it was noticed {caught} times in 400 schedules")
