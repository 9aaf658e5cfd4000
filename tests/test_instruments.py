"""What looks into the engine while it runs: the trace of steps, the profile of gaps, counters of driver calls."""

from __future__ import annotations

import argparse
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import invariance
import pytest

from openinfer.cli.api import Api
from openinfer.cli.bench import idle as bench_idle
from openinfer.cli.bench import serve as bench_serve
from openinfer.cli.bench import step as bench_gaps
from openinfer.cli.bench import step as bench_step
from openinfer.cli.bench.server import free_port, running
from openinfer.graph import Readback, StepTrace, Watch
from openinfer.recipes.engine.forced import Forced
from openinfer.recipes.engine.startup import build
from openinfer.recipes.qwen3 import RECIPE
from openinfer.tensor import Activity, ActivityNotAvailable, Device, PinnedBuffer, Stream, Tensor
from openinfer.tensor.testing import FakeDriver, fake_driver

TINY = Path(__file__).parent / "goldens" / "qwen3-tiny"
SMALL = ["--device", "cpu", "--max-num-seqs", "3", "--max-num-batched-tokens", "32",
         "--kv-cache-memory-bytes", "8000000"]  # fmt: skip


# -- the profile of gaps --


def step(*spans: tuple[float, float], name: str = "k") -> list[Activity]:
    """Kernels of these microseconds."""
    return [
        Activity("kernel", f"{name}{n}", round(1e3 * start), round(1e3 * end), 7, 1)
        for n, (start, end) in enumerate(spans)
    ]


def test_a_gap_is_time_in_which_nothing_runs() -> None:
    # The second overlaps the first and ends before it, so the third starts 3 us after the first.
    assert bench_gaps.gaps(step((0, 10), (8, 9), (13, 14), (14, 15))) == [0.0, 3.0, 0.0]


def test_the_profile_is_of_the_median_step_and_names_the_longest_gaps() -> None:
    steady = step((0, 10), (11, 20), (26, 30))
    disturbed = step((0, 10), (50, 60), (66, 70))  # 40 us once is not the kernels' doing
    other = step((0, 1), (2, 3), name="prefill")
    found = bench_gaps.gap_summary([steady, other, steady, disturbed])
    assert (found["steps"], found["kernels_a_step"]) == (3, 3)
    assert found["idle_us"] == 7.0
    assert (found["longest_gap_us"], found["over_limit"]) == (6.0, 1)
    assert found["longest"][0] == {"after": "k1", "before": "k2", "p50_us": 6.0, "max_us": 6.0}
    assert found["longest"][1]["max_us"] == 40.0
    assert found["repeats"]["longest_gap_us"] == [6.0, 6.0, 40.0]
    k1 = {"name": "k1", "calls": 1, "us": 10.0, "gaps_us": 1.0}
    assert found["kernels"] == [
        {**k1, "name": "k0", "gaps_us": 0.0}, {**k1, "us": 9.0}, {**k1, "name": "k2", "us": 4.0, "gaps_us": 6.0},
    ]  # fmt: skip
    assert "after k1" in bench_gaps.gap_table({"point": "p", "how": "h", "device_ms": 0.03, **found})


def test_without_kernels_there_is_no_profile() -> None:
    with pytest.raises(ValueError, match="CUPTI recorded no kernels"):
        bench_gaps.gap_summary([[], []])


class FakeRecorder:
    """A device that is busy but for `gap_us` in every step, whatever it is asked to do."""

    gap_us = 1.0

    def __init__(self) -> None:
        self.recording = True

    def pause(self) -> None:
        self.recording = False

    def resume(self) -> None:
        self.recording = True

    def read(self) -> list[Activity]:
        assert self.recording
        a = step((0, 100), (100 + self.gap_us, 200))
        return [activity for _ in range(8) for activity in (*a, Activity("copy", "copy to host", 0, 0, 7, 1))]

    def close(self) -> None:
        pass


@pytest.mark.parametrize(("gap_us", "code"), [(1.0, 0), (6.0, 1)])
def test_bench_step_profiles_gaps_and_fails_on_a_long_one(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    gap_us: float,
    code: int,
) -> None:
    monkeypatch.setattr(bench_gaps, "ActivityRecorder", FakeRecorder)
    monkeypatch.setattr(FakeRecorder, "gap_us", gap_us)
    path = tmp_path / "gaps.json"
    flags = ["--gaps", "--points", "decode:2,16", "--repeats", "2", "--json", str(path), "--commit", "abc"]
    assert bench_step.main([str(TINY), *SMALL, *flags]) == code
    data = json.loads(path.read_text())
    assert (data["bench"], data["commit"]) == ("gaps", "abc")
    assert [r["how"] for r in data["results"]] == ["replayed alone", "through the engine"]
    assert all(r["device_ms"] > 0 and r["longest_gap_us"] == gap_us for r in data["results"])
    assert "longest gap" in capsys.readouterr().out


def test_gaps_need_cupti_and_decode_points(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing() -> Any:
        raise ActivityNotAvailable("no libcupti; run: pip install 'openinfer-tensor[cupti]'")

    monkeypatch.setattr(bench_gaps, "ActivityRecorder", missing)
    assert bench_step.main([str(TINY), *SMALL, "--gaps"]) == 1
    assert "pip install 'openinfer-tensor[cupti]'" in capsys.readouterr().err
    assert bench_step.main([str(TINY), *SMALL, "--gaps", "--points", "prefill:8"]) == 1
    assert "only decode steps" in capsys.readouterr().err
    assert bench_step.main([str(TINY), *SMALL, "--gaps", "--trace", "x.json"]) == 1
    assert "give one of them" in capsys.readouterr().err


# -- the trace --


def test_bench_step_traces_the_steps_it_runs(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    assert (
        bench_step.main(
            [str(TINY), *SMALL, "--points", "decode:2,16", "--repeats", "2", "--trace", str(path)]
        )
        == 0
    )
    data = json.loads(path.read_text())
    assert data["otherData"]["device"].startswith("events around each step")
    bars = [e for e in data["traceEvents"] if e["ph"] == "X"]
    host = {e["name"] for e in bars if e["pid"] == 0}
    phases = {"plan", "write rows", "upload", "launch", "read back", "reconcile", "outputs"}
    assert host > phases  # and on a CPU the ops, which run within the launch
    assert {"gate_up_silu", "greedy"} < host - phases
    steps = [e for e in bars if e["pid"] == 1]
    assert {e["args"]["rows"] for e in steps} == {2}
    device = [e for e in bars if e["pid"] == 2]
    assert [e["name"] for e in device] == [e["name"] for e in steps]
    assert all(e["dur"] > 0 for e in device)


def test_a_server_writes_its_trace_when_it_stops(tmp_path: Path) -> None:
    path, port = tmp_path / "trace.json", free_port()
    command = ["openinfer.cli", "serve", str(TINY), "--port", str(port), "--trace", str(path), *SMALL]
    with running(command, port, tmp_path / "log") as server:
        body = json.dumps({"prompt": [1, 2, 3], "max_tokens": 4, "ignore_eos": True}).encode()
        headers = {"Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(f"{server.url}/v1/completions", body, headers)):
            pass
        assert path.read_text() == ""
    names = [
        e["name"] for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X" and e["pid"] == 1
    ]
    assert names == ["step 1", "step 2", "step 3", "step 4"]  # and none behind the last token


# -- counters of what a step must not do --


@pytest.fixture
def fake() -> Iterator[FakeDriver]:
    """A driver without a GPU, as the process's."""
    with fake_driver() as driver:
        yield driver


RECIPES = bench_idle.recipes_that_can()
OURS = ("deepseek_v4", "qwen3", "qwen3_5")


@pytest.mark.parametrize("recipe", OURS)
def test_a_serving_engine_allocates_nothing_and_waits_for_its_results_only(fake: Any, recipe: str) -> None:
    device = Device("cuda", 0)
    host = bench_idle.IdleEngine(RECIPES[recipe], 4, device)
    host.submit(8)
    host.fill()
    host.changes_us(12)  # rows leave, rows join, block tables grow
    steps, stats = fake.count("cuEventSynchronize"), host.engine.stats()
    assert stats.steps >= 20
    assert steps >= stats.steps - 2  # the driver was waited for, once a step
    assert (stats.allocations_after_ready, stats.host_waits_after_ready) == (0, 0)

    buffer = PinnedBuffer(device, 64)  # the counters count
    host.engine.runner.stream.synchronize()
    stats = host.engine.stats()
    assert (stats.allocations_after_ready, stats.host_waits_after_ready) == (1, 1)
    buffer.close()
    host.close()


def test_the_host_s_work_for_one_row_is_measured() -> None:
    times = bench_idle.measure_idle(RECIPES["qwen3"], 1, steps=4 * bench_idle.BLOCK, changes=2, waiting=2)
    assert {name: len(found) for name, found in times.items()} == {
        "steady": 64,
        "watch": 1,
        "ranks": 16,
        "change": 2,
    }


def test_a_busy_device_is_not_made_to_pause_to_time_its_steps(fake: Any) -> None:
    device = Device("cuda", 0)
    stream, readback = Stream(device), Readback(device, 256, depth=2)
    result = Tensor.empty((4,), "int32", device)
    for _ in range(2):
        readback.begin(stream)
        readback.enqueue(stream, [result])
    assert fake.count("cuEventRecord") == 3  # the second step begins where the first ends
    for launched in (4, 5, 7):  # with one under way; with one under way; with none
        assert readback.take(wait=True) is not None
        assert readback.seconds == 0.25
        if launched == 7:
            assert readback.take(wait=True) is not None
        readback.begin(stream)
        readback.enqueue(stream, [result])
        assert fake.count("cuEventRecord") == launched
    readback.close()
    stream.close()


def test_bench_serve_runs_for_seconds_and_says_what_the_counters_did(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "serve.json"
    flags = ["--rates", "20", "--seconds", "0.2", "--random-input-len", "8", "--random-output-len", "3"]
    assert bench_serve.main([str(TINY), *flags, "--num-warmups", "1", "--json", str(path), "--", *SMALL]) == 0
    (result,) = json.loads(path.read_text())["results"]
    assert result["num_prompts"] == 4
    found = result["counters"]
    assert found.pop("steps") > 0
    assert found == {"compiles_after_ready": 0, "allocations_after_ready": 0, "host_waits_after_ready": 0}
    assert "allocations_after_ready +0" in capsys.readouterr().out
    assert bench_serve.main([str(TINY), "--seconds", "5"]) == 1
    assert "needs finite rates" in capsys.readouterr().err
    assert bench_serve.counters(Api(f"http://127.0.0.1:{free_port()}")) == {}  # nobody counts there


# -- prediction and measurement --


class TenMilliseconds:
    """What every step should take."""

    def seconds(self, kv_tokens: int, qk_pairs: int) -> float:
        return 0.01


@pytest.mark.parametrize("recipe", OURS)
def test_an_engine_tells_the_times_of_its_steps_and_keeps_traces_of_outliers(
    recipe: str, tmp_path: Path
) -> None:
    host = bench_idle.IdleEngine(RECIPES[recipe], 4)
    runner, trace = host.engine.runner, StepTrace(tmp_path / "trace.json")
    runner.pace.predictions = dict.fromkeys(runner.buckets.segments(), TenMilliseconds())
    runner.watch = Watch(trace)
    host.submit(4)
    host.fill()
    host.steps_us(10)
    late, take = 0, runner.readback.take

    def slow(*, wait: bool) -> Any:
        found = take(wait=wait)
        runner.readback.seconds = 0.03 if late else runner.readback.seconds
        return found

    runner.readback.take = slow
    late = 1
    host.steps_us(1)
    late = 0
    host.steps_us(1)
    host.close()
    trace.close()
    stats = host.engine.stats()
    times = {t.key: t for t in stats.step_times}
    decode = times["decode, 4 rows"]
    assert decode.steps >= 10
    assert decode.predicted_s == pytest.approx(0.01 * decode.steps)
    assert 0.03 <= decode.measured_s < 0.02 * decode.steps
    assert stats.outlier_steps == 1
    (outlier,) = runner.pace.outliers
    assert (outlier.measured_s, outlier.shape) == (0.03, (4, 4, 1, 0))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    kept = [e["args"]["name"] for e in events if e["ph"] == "M" and e["args"]["name"].startswith("outlier")]
    assert len(kept) == 1


# -- batch invariance --


def nine_rows() -> Any:
    flags = {"device": "cpu", "max_num_seqs": 9, "kv_cache_memory_bytes": 64_000_000}
    return build(RECIPE, TINY, **flags, batch_invariant=True).engine


def test_on_a_cpu_logits_are_the_same_bits_in_any_company_and_chunks() -> None:
    engine = nine_rows()
    found = invariance.differences(engine, 90)
    engine.close()
    assert {"beside 8 others", "chunks of 33 beside 8 others"} <= found.keys()
    assert not any(map(max, found.values()))


def test_a_row_that_sees_its_company_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = nine_rows()
    step = Forced.step

    def disturbed(self: Forced, items: Any) -> Any:
        return step(self, items) + (1e-6 if len(items) > 3 else 0)

    monkeypatch.setattr(Forced, "step", disturbed)
    found = invariance.differences(engine, 90)
    engine.close()
    assert max(found["chunks of 7"]) == 0
    assert min(found["beside 8 others"]) > 0


def _args(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    RECIPE.add_arguments(parser)
    return parser.parse_args(["--device", "cpu", "--kv-cache-memory-bytes", "64000000", *flags])
