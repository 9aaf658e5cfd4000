"""What each policy promises, in virtual time or on plans by hand. The rules that all must keep: test_conformance.py."""

import math
import random
from collections import Counter
from dataclasses import replace

import pytest

from openinfer.scheduler import (
    POLICIES,
    Deadline,
    FairShare,
    FirstCome,
    InvalidSetup,
    LongestPrefix,
    Priority,
    Seq,
    SeqState,
    Step,
    View,
    make_policy,
)
from openinfer.scheduler.policies.batching import SortedQueue
from openinfer.scheduler.sim import LinearCost, Request, SimPool, chats, poisson, simulate
from openinfer.scheduler.testing import SimplePool

COST = LinearCost()


def view(*, now=0.0, free_slots=8, num_decode=0, prefilling=(), running=(), look_up=len):
    return View(
        1,
        now,
        8,
        free_slots,
        100,
        num_decode,
        dict.fromkeys(range(num_decode)),
        dict.fromkeys(prefilling),
        dict.fromkeys(running),
        0,
        look_up,
    )


def submit(policy, *seqs):
    for seq in seqs:
        policy.on_submit(seq)
    return list(seqs)


def seq(number, length=5, **options):
    return Seq(number, [number] * length, 4, **options)


def prefilling(number, length, done, **options):
    one = seq(number, length, **options)
    one.state, one.target, one.scheduled = SeqState.PREFILL, length, done
    return one


# Priority


def test_priority_goes_first_and_a_wait_is_worth_a_level():
    policy = Priority(64, ageing_s=10)
    low, high, old = submit(
        policy, seq(1, arrival=30, priority=2), seq(2, arrival=31), seq(3, arrival=5, priority=2)
    )
    assert policy.plan(view()).admit == [old, high, low]
    forever = Priority(64, ageing_s=math.inf)
    submit(forever, low, high, old)
    assert forever.plan(view()).admit == [high, low, old]


def test_an_urgent_newcomer_overtakes_a_prompt_that_prefills_but_does_not_stop_it():
    policy = Priority(64)
    slow = prefilling(9, 500, 0, priority=1)
    [urgent] = submit(policy, seq(1, 20))
    decision = policy.plan(view(prefilling=[slow]))
    assert (decision.admit, decision.chunks[slow], decision.admit_tokens) == ([urgent], 44, 20)
    submit(policy, seq(2, 900))
    decision = policy.plan(view(prefilling=[slow]))
    assert (decision.chunks[slow], decision.admit_tokens) == (16, 48)


def test_the_victim_is_the_least_urgent_and_of_equals_the_latest():
    running = [seq(1), seq(2, priority=1), seq(3, priority=1), seq(4)]
    assert Priority(64).victim(view(running=running)) is running[2]


# Deadline


def test_the_earliest_deadline_goes_first_and_who_is_late_gets_every_fourth_place():
    policy = Deadline(64, ttft_s=1.0)
    late = submit(policy, seq(1, arrival=0.0), seq(2, arrival=1.0))
    in_time = submit(policy, *[seq(10 + i, arrival=9.5 + i / 100) for i in range(5)])
    hurried = submit(policy, seq(20, arrival=9.9, ttft_s=0.2))
    order = list(policy.candidates(view(now=10.0)))
    assert order == [*hurried, *in_time[:2], late[0], *in_time[2:], late[1]]


def test_who_was_preempted_in_the_middle_of_its_answer_goes_before_all():
    policy = Deadline(64)
    [first] = submit(policy, seq(1, arrival=0.0))
    resumed = seq(2, arrival=5.0)
    resumed.tokens.append(7)
    resumed.num_preemptions = 1
    policy.on_preempt(resumed)
    assert list(policy.candidates(view(now=0.1))) == [resumed, first]


def test_the_tightest_objective_of_those_that_run_sets_the_pace():
    policy = Deadline(64, tpot_s=0.05)
    hurried = seq(1, tpot_s=0.01)
    submit(policy, hurried)
    policy.on_admit(hurried)
    policy.on_step(Step(1, [], False, 0, [], [], []), 0.02)
    assert policy.pace.objective_s == 0.01
    policy.on_finish(hurried)
    policy.on_step(Step(2, [], False, 0, [], [], []), 0.02)
    assert policy.pace.objective_s == 0.05


def test_under_overload_deadlines_meet_more_objectives_than_first_come():
    workload = poisson(600, 90, (256, 2048), (32, 64), seed=2)
    good = {}
    for spec in ("fcfs", "deadline,ttft_s=0.5"):
        policy = make_policy(spec, max_batched_tokens=2048)
        good[spec] = simulate(workload, policy, SimPool(20000), COST, ttft_s=0.5).goodput
    assert good["deadline,ttft_s=0.5"] > 1.5 * good["fcfs"]


# FairShare


def shares(policy, until):
    """Output tokens by tenant up to a time, when one tenant sends ten times what the other does, all at once."""
    workload = [
        Request(0.0, [i] * 64, [1] * 64, 64, tenant="greedy" if i % 11 else "modest") for i in range(440)
    ]
    report = simulate(workload, policy, SimPool(4000), COST, max_rows=16)
    seen = Counter()
    for record in report.records:
        if record.last_token <= until:
            seen[record.request.tenant] += record.num_output
    return seen


def test_tenants_get_equal_shares_whoever_sends_more():
    fair, first_come = shares(FairShare(512), 1.0), shares(FirstCome(512), 1.0)
    assert fair["modest"] == pytest.approx(fair["greedy"], rel=0.3)
    assert first_come["greedy"] > 5 * first_come["modest"]


def test_a_tenant_that_was_away_has_saved_up_nothing_and_still_owes():
    policy = FairShare(64)
    busy = submit(policy, *[seq(i, 10, tenant="busy") for i in range(4)])
    for one in busy[:2]:
        one.target = 10
        policy.on_admit(one)  # 20 tokens
    [newcomer] = submit(policy, seq(10, 10, tenant="new"))
    assert policy._active["new"].served == 20
    for one in busy:
        policy.on_finish(one)
    back = seq(11, 10, tenant="busy")
    submit(policy, back)
    assert policy._active["busy"].served == 20
    assert list(policy.candidates(view())) == [back, newcomer]  # even; by name


def test_output_counts_as_it_comes_and_the_victim_is_of_the_tenant_served_most():
    policy = FairShare(64)
    one, other = submit(policy, seq(1, tenant="a"), seq(2, tenant="b"))
    policy.on_admit(one)
    policy.on_step(Step(10, [], False, 0, [], [], []), 0.01)
    policy.on_admit(other)
    assert policy._active["a"].counter(10) == 20
    assert policy.victim(view(running=[one, other])) is one
    policy.on_finish(one)
    assert "a" not in policy._active


def test_idle_tenants_are_forgotten_in_the_end():
    policy = FairShare(64)
    for number in range(5000):
        one = seq(number, tenant=str(number))
        submit(policy, one)
        policy.on_finish(one)
    assert len(policy._idle) <= 4096
    assert not policy._active


# LongestPrefix


def test_the_longest_cached_prefix_goes_first_and_look_ups_are_few():
    policy = LongestPrefix(64)
    cached = {1: 0, 2: 4, 3: 8, 4: 0, 5: 12}
    asked = []

    def look_up(one):
        asked.append(one.id)
        return cached[one.id]

    submit(policy, *[seq(number, 20) for number in cached])
    first = policy.plan(view(look_up=look_up))
    assert asked == [1, 2, 3, 4]
    assert [one.id for one in first.admit] == [3, 2, 1, 4, 5]
    second = policy.plan(view(look_up=look_up))
    assert asked[4:] == [5, 1, 2, 3]
    assert [one.id for one in second.admit] == [5, 3, 2, 1, 4]


def test_nobody_is_asked_about_while_there_is_no_slot():
    policy = LongestPrefix(64)
    submit(policy, seq(1))
    assert not policy.plan(view(free_slots=0, look_up=None)).admit


def test_the_head_of_the_queue_is_overtaken_64_times_at_most():
    policy = LongestPrefix(64)
    head, *_ = submit(policy, seq(0), *[seq(number, 9) for number in range(1, 71)])
    for _ in range(64):
        [one] = policy.plan(view(free_slots=1, look_up=lambda one: one.id)).admit
        assert one is not head
        policy.on_admit(one)
    assert policy.plan(view(free_slots=1, look_up=lambda one: one.id)).admit == [head]


def test_prefixes_are_used_before_they_are_evicted():
    documents = random.Random(1).choices(range(12), k=200)  # of 128 blocks; the pool has room for seven
    workload = [Request(0.0, [d] * 2048 + [i] * 20, [1] * 8, 8) for i, d in enumerate(documents)]
    hits = {
        spec: simulate(workload, make_policy(spec), SimPool(900), COST, max_rows=4).hit_rate
        for spec in ("fcfs", "longest-prefix")
    }
    assert hits["longest-prefix"] > hits["fcfs"] + 0.1


# By name; what they share


def test_policies_are_made_by_name_by_place_and_with_options():
    assert {type(make_policy(name)) for name in POLICIES} == set(POLICIES.values())
    policy = make_policy("deadline,ttft_s=0.2,tpot_s=0.01", max_batched_tokens=99)
    assert (policy.max_batched_tokens, policy._ttft_s, policy.pace.objective_s) == (99, 0.2, 0.01)
    assert isinstance(make_policy("openinfer.scheduler:FairShare,max_chunk_tokens=8"), FairShare)


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        ("lottery", "no policy is called 'lottery'; there are deadline"),
        ("fcfs,tpot_s", "'tpot_s' in the policy"),
        ("fcfs,colour=3", "argument 'colour'; its options are max_batched_tokens, .*tpot_s"),
        ("fcfs,tpot_s=0", "tpot_s must be positive"),
        ("fcfs,max_chunk_tokens=2.5", "must be integers of at least 1"),
        ("fcfs,max_chunk_tokens=inf", "must be integers of at least 1"),
        ("priority,ageing_s=nan", "'ageing_s=nan' in the policy .* is not OPTION=NUMBER"),
        ("fcfs,tpot_s=²", "'tpot_s=²' in the policy"),
        ("priority,ageing_s=-1", "ageing_s must be positive"),
        ("deadline,ttft_s=0", "ttft_s must be positive"),
        ("nowhere.at.all:f", "cannot be imported"),
        ("openinfer.scheduler:nothing", "has no function 'nothing'"),
    ],
)
def test_what_cannot_be_made_is_refused(spec, complaint):
    with pytest.raises(InvalidSetup, match=complaint):
        make_policy(spec)


class Starving(FirstCome):
    """Admits nobody whose priority is not 0."""

    def plan(self, view):
        decision = super().plan(view)
        return replace(decision, admit=[one for one in decision.admit if one.priority == 0])


class Overrunning(FirstCome):
    def __init__(self, max_batched_tokens, by=2):
        super().__init__(max_batched_tokens + by)


def test_a_policy_that_breaks_a_rule_is_refused_with_its_name():
    make_policy(f"{__name__}:Overrunning,by=0", max_batched_tokens=64)
    for broken in ("Starving", "Overrunning", *["Overrunning,by=1"] * 2):
        with pytest.raises(InvalidSetup, match=rf"{broken}' fails test_\w+ of .*PolicyConformance"):
            make_policy(f"{__name__}:{broken}", max_batched_tokens=64)


def test_a_sorted_queue_is_sorted_and_lets_go_of_anyone():
    queue = SortedQueue(lambda one: one.priority)
    seqs = [seq(i, priority=p) for i, p in enumerate([3, 1, 2, 1, 3])]
    for one in seqs:
        queue.push(one)
    queue.discard(seqs[1])
    queue.discard(seqs[1])
    assert [one.id for one in queue] == [3, 2, 0, 4]
    assert [one.id for one in queue.before(3)] == [3, 2]
    assert [one.id for one in queue.since(3)] == [0, 4]
    assert len(queue) == 4


def test_policies_run_over_a_pool_that_is_not_the_simulators():
    workload = chats(20, 20, (3, 9), (3, 9), turns=2, system_tokens=8, seed=3)
    reports = [
        simulate(workload, make_policy("longest-prefix", max_batched_tokens=16), pool, COST, max_rows=4)
        for pool in (SimplePool([(4, 101)]), SimPool(100, 4))
    ]
    assert reports[0].hit_rate == reports[1].hit_rate > 0.2
    assert reports[0].as_dict() == reports[1].as_dict()


# Lone chunks


def lone_view(**options):
    made = view(**options)
    made.lone_tokens = (32, 128, 256)  # 32 is within the budget
    return made


@pytest.mark.parametrize("name", POLICIES)
def test_a_long_prompt_takes_a_lone_chunk_where_nothing_decodes(name):
    policy = make_policy(name, max_batched_tokens=64)
    [long] = submit(policy, seq(1, 130))
    decision = policy.plan(lone_view(look_up=lambda seq: 2))
    assert (decision.chunks, list(decision.admit), decision.admit_tokens) == ({long: 128}, [long], 128)
    # The rest is shorter than the chunk.
    assert policy.plan(lone_view(look_up=lambda seq: 3)).admit_tokens == 64
    assert policy.plan(lone_view(num_decode=1, look_up=lambda seq: 0)).admit_tokens == 63
    assert policy.plan(view(look_up=lambda seq: 0)).admit_tokens == 64
    policy.on_admit(long)
    half = prefilling(2, 300, 100)
    assert policy.plan(lone_view(prefilling=[half])).chunks == {half: 128}
    assert policy.plan(lone_view(prefilling=[half], num_decode=2)).chunks == {half: 62}
    assert policy.plan(lone_view(prefilling=[prefilling(3, 300, 173)])).chunks != {half: 128}
    longer = prefilling(4, 400, 144)
    assert policy.plan(lone_view(prefilling=[longer])).chunks == {longer: 256}


def test_the_limit_of_a_chunk_holds_for_lone_chunks():
    policy = FirstCome(64, max_chunk_tokens=32)
    [long] = submit(policy, seq(1, 500))
    assert policy.plan(lone_view(look_up=lambda seq: 0)).chunks == {long: 32}


def test_a_ranked_policy_makes_no_lone_chunk_where_another_prompt_waits():
    policy = Priority(64)
    slow = prefilling(9, 500, 0, priority=1)
    assert policy.plan(lone_view(prefilling=[slow])).chunks == {slow: 256}
    submit(policy, seq(1, 20))
    assert policy.plan(lone_view(prefilling=[slow])).chunks[slow] == 44


def test_a_row_that_begins_to_decode_waits_for_no_lone_chunk():
    widths, tokens = [], [[1] * 100, [2] * 600]

    def cost(work):
        widths.append((work.decode_rows, work.prefill_tokens))
        return COST(work)

    workload = [Request(0.0, tokens[1], [1] * 20, 20), Request(0.001, tokens[0], [1] * 20, 20)]
    simulate(workload, FirstCome(64), SimPool(1000, 16), cost, max_rows=8, lone_tokens=(128,))
    assert widths[:5] == [(0, 128), (0, 128), (0, 128), (0, 128), (0, 64)]
    assert 0 < max(prompt for rows, prompt in widths if rows) < 64
    assert sum(prompt for _, prompt in widths) == 700
