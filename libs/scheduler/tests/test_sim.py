"""The simulator: its device, pool, cost, workloads, figures and command."""

import json
import random
import sys

import pytest

from openinfer.scheduler import Batching, FirstCome, InvalidSetup, SchedulerError
from openinfer.scheduler.sim import (
    LinearCost,
    Percentiles,
    Request,
    SimPool,
    SteadyDrafts,
    StepWork,
    bursts,
    chats,
    poisson,
    read_trace,
    simulate,
)
from openinfer.scheduler.sim.__main__ import main
from openinfer.scheduler.testing import Schedule, SimplePool


def flat(work):
    """A second a step, whatever is in it."""
    return 1.0


# Drafts


@pytest.mark.parametrize(("acceptance", "steps"), [(0.0, 13), (1.0, 5)])
def test_accepted_drafts_save_steps(acceptance, steps):
    drafts = SteadyDrafts([2], 64, acceptance, lambda rows, level: 1.0)
    workload = [Request(0.0, [1] * 10, [7] * 13, 13)]
    report = simulate(workload, FirstCome(64), SimPool(10), flat, max_rows=2, drafts=drafts)
    [record] = report.records
    assert record.num_output == 13
    assert record.last_token == steps  # the first token, then one or three a step


def test_every_token_comes_whatever_is_accepted():
    seen = []

    def cost(work):
        seen.append(work)
        return 0.01 + 0.001 * work.drafts

    workload = poisson(60, 40.0, (8, 40), (1, 30), seed=3)
    plain = simulate(workload, FirstCome(64), SimPool(40, 4), cost, max_rows=12)
    assert not any(work.drafts for work in seen)
    for acceptance in (0.2, 0.7):
        found = []
        for _ in range(2):
            drafts = SteadyDrafts([1, 2, 3], 64, acceptance, lambda rows, level: 0.01, seed=1)
            found.append(simulate(workload, FirstCome(64), SimPool(40, 4), cost, max_rows=12, drafts=drafts))
        assert [one.num_output for one in found[0].records] == [one.num_output for one in plain.records]
        assert found[0].steps < plain.steps
        assert found[0].preemptions > 0
        assert found[0].tpot == found[1].tpot  # seeded
    assert max(work.drafts for work in seen) > 3
    assert all(work.decode_rows + work.drafts + work.prefill_tokens <= 64 for work in seen)


def test_drafts_that_do_not_pay_are_left_out():
    dear = SteadyDrafts([1, 2], 64, 0.5, lambda rows, level: 1.0 + level)

    def cost(work):
        return 1.0 + work.drafts / max(1, work.decode_rows)

    workload = [Request(0.0, [1] * 10, [7] * 400, 400)]
    plain, drafting = (
        simulate(workload, FirstCome(64), SimPool(100), cost, max_rows=2, drafts=one) for one in (None, dear)
    )
    assert drafting.seconds < 1.05 * plain.seconds


# One request whose times can be counted on fingers


def test_a_request_alone_takes_its_steps():
    report = simulate(
        [Request(5.0, [1] * 10, [7] * 4, 4)], FirstCome(4), SimPool(10), flat, max_rows=2, ttft_s=3.0
    )
    [record] = report.records
    assert (record.ttft, record.tpot, report.seconds, report.steps) == (3.0, 1.0, 6.0, 6)
    assert (report.finished, report.output_tokens, report.itl.p50) == (1, 4, 1.0)
    assert report.goodput == report.requests_per_s == pytest.approx(1 / 6)


def test_an_answer_shorter_than_asked_for_ends_by_itself_and_the_next_turn_hits():
    first = Request(0.0, [1] * 32, [7] * 8, 100)
    second = Request(2.0, first.prompt + first.output + [9] * 8, [8] * 2, 2, after=0)
    report = simulate([first, second], FirstCome(64), SimPool(100, 4), flat, max_rows=4)
    one, two = report.records
    assert (one.num_output, one.last_token) == (8, 8.0)
    assert two.arrival == one.last_token + 2.0
    assert two.num_cached == 36  # 40 were said; the last token was never fed
    assert report.hit_rate == 36 / 80


def test_the_work_of_a_step_is_counted():
    seen = []

    def cost(work):
        seen.append(work)
        return 0.1

    simulate([Request(0.0, [1] * 6, [7] * 3, 3)], FirstCome(4), SimPool(10, 4), cost, max_rows=1)
    assert seen[:4] == [
        StepWork(0, 0, 4, 1 + 2 + 3 + 4),
        StepWork(0, 0, 2, 5 + 6),
        StepWork(1, 7, 0, 0),
        StepWork(1, 8, 0, 0),
    ]


def test_what_the_queue_refuses_is_counted_and_nobody_waits_for_it():
    workload = [Request(0.0, [1] * 4, [7], 1) for _ in range(6)] + [Request(1.0, [1] * 4, [7], 1, after=5)]
    report = simulate(workload, FirstCome(8), SimPool(10), flat, max_rows=1, max_queued=3)
    assert (report.finished, report.rejected) == (4, 3)


def test_a_policy_that_lets_all_wait_is_noticed():
    class Never(Batching):
        def candidates(self, view):
            return []

    with pytest.raises(SchedulerError, match="1 requests wait, and the policy runs none"):
        simulate([Request(0.0, [1], [1], 1)], Never(512), SimPool(10), flat)


def test_headroom_spares_preemptions_under_pressure():
    workload = poisson(200, 50, (256, 512), (200, 1000), seed=3)
    with_guard, without = (
        simulate(workload, FirstCome(), SimPool(1500), LinearCost(), max_headroom=headroom)
        for headroom in (0.1, 0.0)
    )
    assert 0 < with_guard.preemptions < without.preemptions / 2
    assert with_guard.output_tokens == without.output_tokens
    assert with_guard.seconds < without.seconds * 1.02


# The pool


def test_the_pool_shares_evicts_and_refuses_as_the_simple_one_does():
    for seed in range(60):
        schedule = Schedule.generate(seed)
        if len(schedule.groups) > 1 or schedule.groups[0].window is not None:
            continue
        [(size, count, _)] = schedule.groups
        pools = SimPool(count - 1, size), SimplePool(schedule.groups)
        rng, leases = random.Random(seed), []
        for _ in range(40):
            if leases and rng.random() < 0.4:
                for lease in leases.pop(rng.randrange(len(leases))):
                    lease.release()
            else:
                tokens = [rng.randrange(2) for _ in range(rng.randint(1, 12))]
                pair = [pool.acquire(tokens) for pool in pools]
                grown = [lease.reserve(len(tokens)) is None for lease in pair]
                if True in grown:
                    for lease in pair:
                        lease.release()
                else:
                    for lease in pair:
                        lease.commit(tokens, len(tokens))
                    leases.append(pair)
            assert 0 <= pools[0].num_free <= count - 1
            assert len(pools[0].cached) <= pools[0].num_free
            assert pools[0].num_free >= pools[1].num_free  # equal blocks of two sequences are one here
        for pair in leases:
            pair[0].release()
        assert pools[0].num_free == count - 1
        assert not pools[0].users


# Costs


def records(cost, seed=0):
    rng = random.Random(seed)
    for _ in range(60):
        rows, tokens = rng.randint(0, 256), rng.choice([0, 0, rng.randint(1, 2048)])
        work = StepWork(rows, rows * rng.randint(64, 4096), tokens, tokens * rng.randint(1, 8192))
        yield work, cost(work)


def test_a_cost_is_found_again_in_what_it_made():
    cost = LinearCost(2e-3, 2e-5, 1e-8, 1e-5, 5e-10)
    found = LinearCost.fit(records(cost))
    assert max(map(abs, found.errors(records(cost, seed=1)))) < 1e-6
    assert "step 0.002 s" in str(found)


def test_no_coefficient_is_negative_and_what_never_varied_costs_nothing():
    falling = LinearCost.fit([(StepWork(n, 0, 0, 0), 0.01 - n * 1e-5) for n in range(1, 200)])
    assert falling.decode_row == falling.prefill_token == 0.0
    assert 0.007 < falling.step < 0.01
    with pytest.raises(InvalidSetup, match="0 records"):
        LinearCost.fit([])


def test_measured_steps_are_read_from_json(tmp_path):
    cost = LinearCost()
    rows = [{**work._asdict(), "seconds": seconds} for work, seconds in records(cost)]
    path = tmp_path / "steps.json"
    path.write_text(json.dumps(rows))
    assert LinearCost.load(path).prefill_token == pytest.approx(cost.prefill_token)
    path.write_text('[{"decode_rows": 1}]')
    with pytest.raises(InvalidSetup, match="is not a list of measured steps: KeyError"):
        LinearCost.load(path)


# Workloads


@pytest.mark.parametrize("make", [poisson, bursts, chats])
def test_workloads_are_seeded_and_of_the_rate_asked_for(make):
    workload = make(800, 10.0, seed=4)
    assert workload == make(800, 10.0, seed=4) != make(800, 10.0, seed=5)
    opened = [request.arrival for request in workload if request.after is None]
    assert 800 / opened[-1] == pytest.approx(10, rel=0.35)


def test_a_trace_is_read_and_equal_ids_are_equal_blocks(tmp_path):
    path = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 1000, "input_length": 1100, "output_length": 3, "hash_ids": [4, 5, 6]},
        {"timestamp": 3000, "input_length": 600, "output_length": 2, "hash_ids": [4, 9], "tenant": "t"},
        {"timestamp": 3000, "input_length": 7, "output_length": 1},
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    one, two, three = read_trace(path, speed=2)
    assert (one.arrival, two.arrival, two.tenant, two.max_tokens) == (0.5, 1.5, "t", 2)
    assert [len(r.prompt) for r in (one, two, three)] == [1100, 600, 7]
    assert one.prompt[:512] == two.prompt[:512]
    assert one.prompt[512:600] != two.prompt[512:]
    path.write_text('{"timestamp": 3}')
    with pytest.raises(InvalidSetup, match="line 1 is no request"):
        read_trace(path)


def test_percentiles():
    assert Percentiles.of([]) == Percentiles()
    found = Percentiles.of(list(range(1000, 0, -1)))
    assert (found.p50, found.p90, found.p99, found.mean) == (501, 901, 991, 500.5)


# The command


def test_the_command_compares_policies(capsys):
    arguments = [
        "--policy",
        "fcfs",
        "fcfs,tpot_s=0.005",
        "--num-requests",
        "30",
        "--input",
        "10-20",
        "--output",
        "5",
    ]
    assert main(arguments) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[0].startswith("policy")
    assert [line.split()[0] for line in table[1:3]] == ["fcfs", "fcfs,tpot_s=0.005"]
    assert main([*arguments, "--json", "--pool", "openinfer.scheduler.sim:SimPool", "--ttft-ms", "100"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["fcfs"]["finished"] == 30
    assert set(figures["fcfs"]["itl"]) == {"p50", "p90", "p99", "mean"}


def test_the_command_says_what_is_wrong(capsys, monkeypatch):
    assert main(["--policy", "lottery"]) == 2
    assert "no policy is called 'lottery'" in capsys.readouterr().err
    assert main(["--workload", "nowhere.jsonl"]) == 2
    assert "nowhere.jsonl" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setattr("openinfer.scheduler.sim.__main__._simulate", None)  # it is told before the work
    assert main(["--num-requests", "3", "--plot", "x.png"]) == 2
    assert "pip install 'openinfer-scheduler[plot]'" in capsys.readouterr().err


def test_the_plot_is_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "latency.png"
    assert main(["--num-requests", "20", "--policy", "fcfs", "priority", "--plot", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
