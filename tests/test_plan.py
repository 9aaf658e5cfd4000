"""`openinfer plan` on the CPU: what it says of a server, and that it stays near what servers did."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from module_files import module_at

from openinfer.cli import plan, recipe_flags, tune
from openinfer.cli.bench import ops as bench_ops
from openinfer.cli.bench.serve import OfferedLoad
from openinfer.cli.explain import segments
from openinfer.cli.plan import text as plan_text
from openinfer.cli.plan.compare import Objectives, Variant, choice
from openinfer.cli.plan.load import PROMPT_STEP_S, PlannedServer, Point, StepCost
from openinfer.cli.tune import speed as tune_speed
from openinfer.kernels import GPUS, H200, Prediction, Speed, Workload
from openinfer.kernels.measure.speed_fit import errors
from openinfer.kernels.measure.speeds import dump_lines
from openinfer.scheduler.sim import StepWork

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "demo" / "qwen3"
TINY = Path(__file__).parent / "goldens" / "qwen3-tiny"
FLAGS = ["--input", "100", "--output", "20", "--rate", "4,64"]


@pytest.fixture(autouse=True, scope="module")
def plans() -> Iterator[None]:
    """Start plans are kept from test to test: half of them are asked for again, and they take a third of the time.
    A load has a third of the usual requests."""
    kept: dict[str, Any] = {}
    make = segments.make_start_plan

    def once(*given: Any) -> Any:
        if (key := repr(given)) not in kept:
            kept[key] = given, make(*given)  # what is alive shares its address with nothing else
        return kept[key][1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segments, "make_start_plan", once)
        patch.setattr(plan, "SECONDS", 5.0)
        patch.setattr(plan, "FEWEST", 32)
        patch.setattr(plan, "MOST", 320)
        yield


def served(tmp_path: Path, *words: str) -> dict[str, Any]:
    """The JSON of a plan."""
    path = tmp_path / "plan.json"
    assert plan.main([*words, "--json", str(path)]) == 0
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def server(model: str, *flags: str) -> PlannedServer:
    _, asked = recipe_flags.parse([model, *flags], "plan", None, lambda parser: None, named=True)
    return PlannedServer(asked, H200, GPUS[H200.gpu], 1)


def test_a_plan_has_every_load_and_the_flags_to_take(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = served(tmp_path, str(TINY), *FLAGS, "--tpot-ms", "50")
    text = capsys.readouterr().out
    for words in ("TTFT p50/p99", "TPOT p50/p99", "all at once", "1 at a time", "64 req/s", "knee:", "launches",
                  "take: openinfer serve"):  # fmt: skip
        assert words in text
    first, *others = found["results"]
    assert [point["request_rate"] for point in first["points"]] == ["inf", "inf", 4.0, 64.0]
    assert len(others) == 4  # three other budgets of a step, a pace
    for point in first["points"]:
        assert point["ttft_ms"]["p50"] <= point["ttft_ms"]["p99"]
        assert sum(point["binds"].values()) == pytest.approx(1)
    alone, *rated = first["points"][1:]
    times = [point["tpot_ms"]["p50"] for point in (alone, *rated)]
    assert all(first < 1.000001 * second for first, second in itertools.pairwise(times))
    assert rated[1]["requests_per_s"] == pytest.approx(64, rel=0.1)


def test_a_published_name_needs_no_folder(tmp_path: Path) -> None:
    flags = ["--rate", "8", "--compare", "qwen3_5-0.8B --max-num-seqs 32"]
    first, other = served(tmp_path, "Qwen/Qwen3-0.6B", *flags)["results"]
    assert first["memory"]["weights"] == pytest.approx(1.2e9, rel=0.05)
    assert other["flags"].startswith("qwen3_5-0.8B")
    assert "inputs of drafts" in other["memory"]


@pytest.mark.slow
def test_drafts_help_few_requests_and_not_many(tmp_path: Path) -> None:
    drafts = """--speculative-config '{"method": "mtp", "num_speculative_tokens": 2}' --acceptance"""
    flags = ["--rate", "4", "--compare", f"{drafts} 0.8", "--compare", f"{drafts} 0.0"]
    plain, often, never = (one["points"] for one in served(tmp_path, "qwen3_5-4B", *flags)["results"])
    rush, alone = (index for index in (0, 1))
    gained = 1 + 0.8 + 0.8**2  # tokens a step
    ratio = plain[alone]["tpot_ms"]["p50"] / often[alone]["tpot_ms"]["p50"]
    assert 1.4 < ratio < gained  # the layer that drafts and the wider step cost something
    # Its states wait for drafts.
    assert never[alone]["tpot_ms"]["p50"] < 1.12 * plain[alone]["tpot_ms"]["p50"]
    for drafted in (often, never):  # steps without drafts where they do not pay
        assert drafted[rush]["requests_per_s"] > 0.95 * plain[rush]["requests_per_s"]


@pytest.mark.slow
def test_policies_quantised_weights_and_gpus_stand_beside_each_other(tmp_path: Path) -> None:
    compared = [
        "qwen3_5-4B-FP8",
        "--scheduling-policy fcfs,tpot_s=0.0060",
        "--scheduling-policy fair-share",
        "--gpus 2",
    ]
    words = [word for flags in compared for word in ("--compare", flags)]
    first, fp8, paced, fair, two = served(tmp_path, "qwen3_5-4B", "--rate", "32", *words)["results"]
    assert fp8["memory"]["weights"] < 0.75 * first["memory"]["weights"]
    assert fp8["points"][1]["tpot_ms"]["p50"] < first["points"][1]["tpot_ms"]["p50"]
    assert paced["points"][2]["tpot_ms"]["p99"] < first["points"][2]["tpot_ms"]["p99"]
    assert fair["points"][0]["requests_per_s"] == pytest.approx(first["points"][0]["requests_per_s"], rel=0.1)
    assert two["points"][0]["requests_per_s"] > 1.3 * first["points"][0]["requests_per_s"]


def test_gpus_that_share_a_model_are_named_either_way(tmp_path: Path) -> None:
    flags = ["--rate", "8", "--compare", "--tensor-parallel-size 2"]
    one, two = served(tmp_path, "qwen3-4B", *flags)["results"]
    (again,) = served(tmp_path, "qwen3-4B", "--gpus", "2", "--rate", "8", "--compare", "--gpus 2")["results"][
        1:
    ]
    assert two["memory"] == again["memory"]
    assert two["memory"]["weights"] < 0.6 * one["memory"]["weights"]
    assert again["points"] == two["points"]
    assert "links" in two["points"][0]["binds"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["qwen9-4B"], "nor one of"),
        ([str(TINY), "--gpu", "H999"], "the speed is known of NVIDIA H200"),
        ([str(TINY), "--gpus", "0"], "at least one GPU"),
        ([str(TINY), "--gpu", "CPU"], "no CPU's speed is known"),
        ([str(TINY), "--gpus", "2", "--tensor-parallel-size", "4"], "--tensor-parallel-size is 4"),
        ([str(TINY), "--speculative-config", '{"method": "ngram", "num_speculative_tokens": 2}'], "drafts"),
        ([str(TINY), "--acceptance", "0.5"], "need each other"),
        (
            [
                str(TINY),
                "--speculative-config",
                '{"method": "ngram", "num_speculative_tokens": 2}',
                "--acceptance",
                "2",
            ],
            "from 0 to 1",
        ),
        ([str(TINY), "--input", "99999999"], "together at most"),
        ([str(TINY), "--output", "1"], "at least 1 and 2"),
        ([str(TINY), "--scheduling-policy", "best"], "best"),
        (["qwen3-32B", "--gpu-memory-utilization", "0.4"], "no room"),
    ],
)
def test_it_says_what_is_wrong(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main([words[0], *FLAGS, *words[1:]]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("openinfer plan: error:")
    assert message in error


def test_the_costs_are_those_of_the_engines_steps() -> None:
    one = server("qwen3-4B")
    cost = StepCost(one.outline.steps, one.outline.buckets, one.figures)
    shape = one.outline.buckets.choose(9, 9)
    step = Prediction.of(one.outline.steps[shape], shape.tokens, shape.rows, one.figures)
    assert shape.rows == 16
    assert cost(StepWork(9, 9 * 1024, 0, 0)) == step.seconds(9 * 1024, 9 * 1024, 9)
    assert next(iter(cost.shares())) == "bandwidth"
    shape = one.outline.buckets.choose(1024, 1)
    step = Prediction.of(one.outline.steps[shape], shape.tokens, shape.rows, one.figures)
    prompt = cost(StepWork(0, 0, 1024, 1024 * 1025 // 2))
    assert prompt == pytest.approx(step.seconds(1024, 1024 * 1025 // 2, 1) + PROMPT_STEP_S)
    assert next(iter(cost.shares())) == "tensor cores"
    assert cost.most_rows == 9


def test_rows_and_room_that_run_out_are_named() -> None:
    rush = OfferedLoad(float("inf"), 12, 0, 200, 60, 0)
    assert server(str(TINY), "--max-num-seqs", "4").serve(rush).limits == ["rows"]
    tight = server(str(TINY), "--kv-cache-memory-bytes", "4000000", "--max-model-len", "300").serve(rush)
    assert tight.limits == ["KV room"]
    assert "queue for KV room" in plan_text.row(tight, tight.requests_per_s)
    calm = server(str(TINY)).serve(OfferedLoad(4.0, 8, 0, 200, 60, 0))
    assert calm.limits == []
    assert "queue" not in plan_text.row(calm, 100.0)


def test_steps_with_drafts_are_verifying_steps() -> None:
    config = '{"method": "ngram", "num_speculative_tokens": 2}'
    one = server(str(TINY), "--speculative-config", config)
    cost = StepCost(one.outline.steps, one.outline.buckets, one.figures)
    shape = one.outline.buckets.choose(24, 8, drafts=2, chunks=False)
    assert shape[:4] == (24, 8, 3, 2)
    step = Prediction.of(one.outline.steps[shape], shape.tokens, shape.rows, one.figures)
    assert cost(StepWork(8, 800, 0, 0, 16)) == step.seconds(800, 2400, 8) > cost(StepWork(8, 800, 0, 0))
    alone = OfferedLoad(
        float("inf"), 3, 1, 50, 400, 0
    )  # a step this short has drafts only after trials of them
    never, often = (dataclasses.replace(one, acceptance=chance).serve(alone) for chance in (0.0, 1.0))
    assert never.tpot_ms["p50"] > 1.4 * often.tpot_ms["p50"]


def point(rate: float, ttft_ms: float, tpot_ms: float) -> Point:
    load = OfferedLoad(rate, 100, 0, 1024, 128, 0)
    ttft, tpot, e2el = ({"mean": x, "p50": x, "p99": x} for x in (ttft_ms, tpot_ms, ttft_ms + 127 * tpot_ms))
    return Point(load, rate, 128 * rate, ttft, tpot, e2el, 1.0, {"launches": 1.0}, [], 9, 0.1, 0, 0)


def test_the_largest_load_within_the_objectives_wins() -> None:
    one = server(str(TINY))
    usual = Variant("as asked", one, [point(8, 20, 5), point(16, 40, 9), point(32, 90, 30)])
    paced = Variant("--scheduling-policy x", one, [point(8, 40, 5), point(16, 90, 6), point(32, 190, 8)])
    assert choice([usual, paced], Objectives(200, 10)) is paced
    assert choice([usual, paced], Objectives(50, 10)) is usual
    assert choice([usual, paced], Objectives(None, None)) is usual
    assert usual.score(Objectives(1, None)) == 0
    assert usual.knee.load.request_rate == 16
    text = plan_text.advice(usual, paced, Objectives(200, 10), ["--a", "b c"])
    assert text.startswith(f"take: openinfer serve {TINY} --a 'b c', and")


def test_the_largest_load_within_the_objectives_is_looked_for(tmp_path: Path) -> None:
    flags = ["--rate", "16:64", "--tpot-ms", "12", "--compare", "--max-num-batched-tokens 1024"]
    for one, rates in zip(
        served(tmp_path, "qwen3-4B", *flags)["results"], ([16, 32, 64], [16, 32]), strict=True
    ):
        rated = [point for point in one["points"] if point["request_rate"] != "inf"]
        # The compared server completes 45 requests/s, so 64 are not tried.
        assert [point["request_rate"] for point in rated[: len(rates)]] == rates
        assert len(rated) == len(rates) + 3
        assert all(32 < point["request_rate"] < 64 for point in rated[len(rates) :])
        kept = [point for point in rated if point["tpot_ms"]["p99"] <= 12]
        assert one["score"] == max(point["requests_per_s"] for point in kept) > 30


def test_a_picture_has_a_curve_for_each(tmp_path: Path) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        assert plan.main([str(TINY), *FLAGS, "--plot", str(tmp_path / "plan.png")]) == 1
        return
    assert plan.main([str(TINY), *FLAGS, "--plot", str(tmp_path / "plan.png")]) == 0
    assert (tmp_path / "plan.png").stat().st_size > 10_000


# -- agents and tiers --


def test_agents_find_more_where_there_are_tiers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--kv-cache-memory-bytes", "8000000", "--max-model-len", "700", "--max-num-seqs", "8"]
    flags = ["--turns", "5", "--input", "100", "--output", "20", "--system", "50", "--rate", "18", *small]
    tiers = "--kv-offload-gb 0.001 --kv-offload-dir kv --kv-offload-disk-gb 1 --disk-rate 50,50"
    compared = ("--compare", "--kv-offload-gb 0.1", "--compare", tiers)
    alone, host, disk = served(tmp_path, str(TINY), *flags, *compared)["results"]
    assert 0 < alone["points"][2]["hits"] < 0.9 * host["points"][2]["hits"]
    assert alone["points"][2]["hits"] < disk["points"][2]["hits"]
    assert "% cached" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--kv-offload-gb", "1"], "give --turns too"),
        (["--turns", "3", "--kv-offload-dir", "kv"], "need each other"),
        (["--turns", "900"], "a prompt has up to"),
        (["--disk-rate", "7"], "READ,WRITE such as 6,3"),
    ],
)
def test_tiers_that_cannot_be_planned_are_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan.main([str(TINY), *FLAGS, *words]) > 0
    assert message in capsys.readouterr().err


# -- predictions beside measured servers --


@pytest.fixture(scope="module")
def predicted() -> ModuleType:
    return module_at(ROOT / "benchmarks" / "predicted.py")


@pytest.mark.slow
def test_the_page_has_the_table_of_tiers(predicted: ModuleType) -> None:
    found = predicted.part_of_page("tiers")
    assert found == predicted.tiers_table().strip(), "python benchmarks/predicted.py tiers --write"


@pytest.mark.slow
def test_the_page_has_the_rows_of_servers(predicted: ModuleType) -> None:
    found = predicted.part_of_page("rows")
    assert found == predicted.rows_table().strip(), "python benchmarks/predicted.py rows --write"
    rows = [line for line in found.splitlines() if line.startswith("| ")]
    assert sum(line.count("**") // 2 for line in rows) <= 4, "more figures than before are outside the limits"


@pytest.mark.slow
def test_the_page_has_the_steps_of_several_gpus(predicted: ModuleType) -> None:
    found = predicted.part_of_page("steps")
    assert found == predicted.steps_table().strip(), "python benchmarks/predicted.py rows --write"
    dense = "".join(line for line in found.splitlines() if line.startswith("| Qwen3"))
    assert dense.count(" / ") == 20
    assert dense.count("**") // 2 <= 1, "more steps than before are outside the limit"


def test_no_plan_has_grown_unseen(predicted: ModuleType) -> None:
    before = json.loads(predicted.PLANS.read_text())
    changed = predicted.differences(before, predicted.plans())
    assert changed == [], "python benchmarks/predicted.py plans --write, and say in the commit why it changed"
    before["qwen3-4B"]["decode:1,1024"]["kernels"] -= 36
    assert predicted.differences(before, json.loads(predicted.PLANS.read_text())) == [
        "qwen3-4B decode:1,1024: kernels 156 -> 192"
    ]


@pytest.mark.slow
def test_the_lines_of_ops_are_those_of_the_recorded_calls(predicted: ModuleType) -> None:
    found = {name: lines for make, _ in predicted.FITS.values() for name, lines in make().items()}
    assert dump_lines(GPUS[H200.gpu].ops) == dump_lines(found), (
        "python benchmarks/predicted.py ops --write; also products and mixtures"
    )


def test_the_speeds_are_those_of_the_recorded_steps(predicted: ModuleType) -> None:
    found, errors = predicted.fitted_speed()
    assert GPUS[H200.gpu].fitted == pytest.approx(found, rel=0.005)
    assert max(map(abs, errors)) < 0.07


# -- measured steps refit the speeds --


def test_recorded_steps_refit_the_speeds_and_a_plan_takes_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = ROOT / "benchmarks" / "results" / "qwen3_5-4b" / "2026-11-23-h200-step-one-commit.json"
    out = tmp_path / "speeds.json"
    assert tune.main(["qwen3_5-4B", "--from-trace", str(steps), "--out", str(out)]) == 0
    assert "10 steps:" in capsys.readouterr().out
    flags = ["--rate", "4", "--compare", f"--speeds {out}"]
    usual, own = served(tmp_path, "qwen3_5-4B", *flags)["results"]
    ratio = own["points"][1]["tpot_ms"]["p50"] / usual["points"][1]["tpot_ms"]["p50"]
    assert ratio != 1
    assert 0.95 < ratio < 1.05
    data = json.loads(out.read_text())
    out.write_text(json.dumps({**data, "gpu": "NVIDIA H999"}))
    assert plan.main(["qwen3_5-4B", "--speeds", str(out)]) == 1
    assert "has the speeds of NVIDIA H999" in capsys.readouterr().err
    assert tune.main(["qwen3-4B", "--from-trace", __file__]) == 1
    assert "is neither a file of --trace" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--rate", "64:4"], "argument --rate: '64:4' is not LOW:HIGH or a list"),
        (["--rate=-4"], "argument --rate: '-4' is not LOW:HIGH"),
        (["--rate", "8:4:2"], "argument --rate: '8:4:2' is not LOW:HIGH"),
        (["--rate", "0"], "argument --rate: '0' is not LOW:HIGH"),
        (["--compare", "--gpus '3"], "cannot be split into flags: No closing quotation"),
        (["--compare", ""], "argument --compare: it is empty"),
        (["--ttft-ms", "0"], "argument --ttft-ms: 0 is no time above 0"),
        (["--tpot-ms", "nan"], "argument --tpot-ms: nan is no time above 0"),
        (["--turns", "0"], "--turns 0 --system 2048 --think-s 5: at least one turn"),
        (["--turns", "2", "--think-s", "-1"], "no number below 0"),
        (["--scheduling-policy", "lifo"], "no policy is called 'lifo'"),
        (["--compare", "--gpus 3"], "num_attention_heads is 32; 3 ranks cannot share it"),
    ],
)
def test_what_cannot_be_planned_is_one_line_before_the_work(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with contextlib.suppress(SystemExit):
        assert plan.main(["qwen3-4B", *words]) == 1
    out, err = capsys.readouterr()
    (line,) = [line for line in err.splitlines() if not line.startswith("openinfer: the steps of ")]
    assert told in line
    assert out == ""


def test_an_engines_trace_refits_the_speeds(tmp_path: Path) -> None:
    """A trace of the form that engines write, with times of other speeds."""
    made = server("qwen3-4B").outline
    true, events = GPUS[H200.gpu].at(Speed(3e12, 500e12, 5e-6)), []
    for rows, context in ((1, 300), (8, 1000), (64, 900), (200, 500)):
        shape = made.buckets.choose(rows, rows)
        facts = {"bucket": str(shape), "rows": rows, "kv_tokens": rows * context, "qk_pairs": rows * context}
        took = Prediction.of(made.steps[shape], shape.tokens, shape.rows, true).seconds(
            rows * context, rows * context, rows
        )
        step = {"pid": 1, "ts": 0.0, "dur": 1.0}
        events += [{**step, "args": {**facts, "timed": True, "device_us": took * 1e6}}] * 3
        events += [{**step, "args": {**facts, "timed": False, "device_us": 9e9}}, {"name": "plan"}]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    found, _ = tune_speed.fitted_figures(made, [path])
    speed = found.fitted
    assert speed.bytes_per_s == pytest.approx(true.fitted.bytes_per_s, rel=0.02)
    assert speed.kernel_s == pytest.approx(true.fitted.kernel_s, rel=0.05)


def test_a_cpus_trace_counts_the_hosts_work_and_no_hiccup(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Steps one after the other, with 2 ms of the host between two, and one in eight held up."""
    flags = ["--max-num-seqs", "16"]
    _, asked = recipe_flags.parse([str(TINY), *flags], "plan", None, lambda parser: None, named=True)
    made = PlannedServer(asked, tune_speed.CPU, tune_speed.target_figures(tune_speed.CPU), 1).outline
    true, events, now = tune_speed.target_figures(tune_speed.CPU).at(Speed(4e9, 8e9, 60e-6)), [], 0.0
    for tokens, rows in ((1, 1), (4, 4), (16, 16), (64, 1), (256, 4)):
        shape = made.buckets.choose(tokens, rows)
        facts = {"bucket": str(shape), "rows": rows, "kv_tokens": rows * 100, "qk_pairs": tokens * 100}
        took = 1e6 * Prediction.of(made.steps[shape], shape.tokens, shape.rows, true).seconds(
            rows * 100, tokens * 100, rows
        )
        for number in range(24):
            begin, now = now - 1.0, now + took + (50_000 if number % 8 == 0 else 0)  # microseconds
            device = {"timed": True, "device_us": 0.7 * took}
            events.append({"pid": 1, "ts": begin, "dur": now - begin, "args": {**facts, **device}})
    trace, speeds = tmp_path / "trace.json", tmp_path / "cpu.json"
    trace.write_text(json.dumps({"traceEvents": events}))
    words = [str(TINY), *flags, "--gpu", "CPU"]
    assert tune.main([*words, "--from-trace", str(trace), "--out", str(speeds)]) == 0
    speed = Speed(*(json.loads(speeds.read_text())[name] for name in Speed._fields))
    steps = tune_speed.measured_steps(made, trace)
    assert max(map(abs, errors(steps, tune_speed.target_figures(tune_speed.CPU).at(speed)))) < 0.02
    assert plan.main([*words, *FLAGS, "--speeds", str(speeds), "--compare", "--max-num-seqs 8"]) == 0
    assert "on 1 x CPU" in capsys.readouterr().out


def test_a_cpus_trace_gives_a_line_to_each_op(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One op is ten times slower than bytes and FLOPs say, and the host takes 2 ms between two decode steps."""
    _, asked = recipe_flags.parse([str(DEMO)], "plan", None, lambda parser: None, named=True)
    made = PlannedServer(asked, tune_speed.CPU, tune_speed.target_figures(tune_speed.CPU), 1).outline
    true, events, now = tune_speed.target_figures(tune_speed.CPU).at(Speed(4e9, 8e9, 60e-6)), [], 0.0
    for tokens, rows in ((1, 1), (4, 4), (64, 1)):
        shape = made.buckets.choose(tokens, rows)
        workload = Workload(shape.tokens, rows, rows * 100, tokens * 100)
        facts = {"bucket": str(shape), "rows": rows, "kv_tokens": rows * 100, "qk_pairs": tokens * 100}
        for number in range(24):
            began, now = now, now + (100_000 if number == 7 else 0)  # microseconds; a hiccup
            for call in made.steps[shape]:
                for _ in range(call.times):
                    cost = call.cost(workload)
                    us = 1e6 * (60e-6 + cost.floor_s(4e9, 8e9)) * (10 if call.op.name == "linear_add" else 1)
                    events.append({"ph": "X", "pid": 0, "name": call.op.name, "ts": now, "dur": us})
                    now += us
            device = {"timed": True, "device_us": now - began}
            events.append({"pid": 1, "ts": began, "dur": now - began, "args": {**facts, **device}})
            now += 2000
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    found, text = tune_speed.fitted_figures(made, [path])
    assert "ops have lines of their own" in text
    assert tune.main([str(DEMO), "--from-trace", str(path)]) == 1
    assert "has steps of a CPU, and the speeds are to be those of NVIDIA H200" in capsys.readouterr().err
    greedy = tmp_path / "greedy.json"  # steps of greedy rows choose their tokens by other ops
    others = [
        {**event, "name": {"sample": "greedy"}.get(event.get("name"), event.get("name"))} for event in events
    ]
    greedy.write_text(json.dumps({"traceEvents": [one for one in others if one["name"] != "top_logprobs"]}))
    lines = tune_speed.fitted_figures(made, [greedy])[0].ops
    assert found.ops.keys() - lines.keys() == {"sample", "top_logprobs"} & found.ops.keys()
    words = [str(TINY.parent / "qwen3_5-tiny"), "--gpu", "CPU", "--from-trace"]
    for file in (path, greedy):
        assert tune.main([*words, str(file)]) == 1
        assert "no step has the ops of this model; it is the trace of another one" in capsys.readouterr().err
    assert 0.003 < found.host_s < 0.008  # with its part of the hiccups
    one = next(call for call in made.steps[made.buckets.choose(64, 1)] if call.op.name == "linear_add")
    cost, speed = one.cost(Workload(64, 1, 100, 6400)), found.speed("linear_add", 64, 1)
    took = speed.kernel_s + cost.floor_s(speed.bytes_per_s, speed.flops_per_s)
    assert took == pytest.approx(10 * (60e-6 + cost.floor_s(4e9, 8e9)), rel=0.15)
    out = tmp_path / "cpu.json"
    tune_speed.save_figures(out, tune_speed.CPU, found)
    again = tune_speed.load_figures(out, tune_speed.CPU, true)
    assert again.host_s == found.host_s
    assert again.speed("linear_add", 64, 1) == pytest.approx(speed, rel=0.01)


# -- ledgers beside each other --


def ledger(path: Path, **us: float) -> Path:
    entries = [
        {"key": key, "calls_a_step": 36, "us": t, "repeats": {"us": [0.99 * t, t, t, 1.01 * t]}}
        for key, t in us.items()
    ]
    path.write_text(json.dumps({"results": entries}))
    return path


def test_ops_that_got_slower_are_named_the_largest_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = ledger(tmp_path / "old.json", attend=10.0, linear=20.0, sample=5.0, embed=2.0, gone=1.0)
    new = ledger(tmp_path / "new.json", attend=14.0, linear=22.0, sample=4.0, embed=2.02, new=1.0)
    assert bench_ops.main([str(TINY), "--ledger", str(new), "--against", str(old)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "4 ops in both ledgers: 2 slower, 1 faster"
    assert [line.rsplit(" x ", 1)[-1] for line in lines[1:4]] == ["attend", "linear", "sample"]
    assert "1.40 x" in lines[1]
    assert "+144.0 us a step" in lines[1]
    assert lines[4:] == ["only in the new ledger: new", "only in the old ledger: gone"]
    assert bench_ops.main([str(TINY), "--ledger", str(old), "--against", str(old)]) == 0
    assert bench_ops.main([str(TINY), "--ledger", str(old)]) == 1
    assert "--against FILE" in capsys.readouterr().err
    other = ledger(tmp_path / "other.json", scan=1.0)
    assert bench_ops.main([str(TINY), "--ledger", str(other), "--against", str(old)]) == 1
    assert "the ledgers have no op and shape in common" in capsys.readouterr().err
