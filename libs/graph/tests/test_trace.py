from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from openinfer.graph import StepTrace
from openinfer.graph.watch import trace
from openinfer.tensor import Activity, ActivityNotAvailable

Event = dict[str, Any]


class FakeRecorder:
    """Gives the activities that the test puts into `done`."""

    def __init__(self) -> None:
        self.done: list[Activity] = []
        self.closed = False

    def since(self, start_ns: int) -> list[Activity]:
        return [activity for activity in self.done if activity.start_ns >= start_ns]

    def close(self) -> None:
        self.closed = True


def test_a_look_is_no_work_of_the_host_for_a_step() -> None:
    """Else a look of 25 ms would be the next thing that is slow."""
    traced = StepTrace()
    traced.launch(1, bucket="x", timed=True)
    traced.mark("reconcile")
    traced.result(0.001)
    traced.launch(2, bucket="x", timed=True)
    with traced.looking():
        time.sleep(0.05)
    traced.mark("")
    traced.result(0.001)
    assert traced.steps[-1].host_ns < 40_000_000
    assert [name for name, _, _ in traced.steps[-1].phases][:3] == ["reconcile", trace.LOOKING, "reconcile"]
    assert trace.LOOKING not in [name for name, _, _ in traced.steps[-1].work()]


def test_copies_and_kernels_have_their_names(tmp_path: Path, recorder: FakeRecorder) -> None:
    traced = StepTrace(tmp_path / "trace.json")
    run(traced, 1, recorder.done)
    first = recorder.done[0]
    recorder.done.append(first._replace(kind="copy", name="copy to device"))
    assert set(traced.times(list(traced.steps)[-1:])[0]) >= {"kernel attend of 1", "copy to device"}
    traced.close()


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> FakeRecorder:
    recorder = FakeRecorder()
    monkeypatch.setattr(trace, "ActivityRecorder", lambda: recorder)
    return recorder


@pytest.fixture
def no_cupti(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise ActivityNotAvailable("no libcupti")

    monkeypatch.setattr(trace, "ActivityRecorder", missing)


def run(steps: StepTrace, index: int, kernels: list[Activity] | None = None) -> None:
    steps.mark("plan")
    steps.launch(index, "decode, 2 rows", timed=True, rows=2)
    steps.mark("launch")
    if kernels is not None:
        now = time.perf_counter_ns()
        kernels.append(Activity("kernel", f"attend of {index}", now, now + 100, 7, index))
    steps.mark("read back")
    time.sleep(0.0001)
    steps.result(50e-6)
    steps.mark("")


def load(path: Path) -> tuple[dict[str, Any], dict[str, list[Event]]]:
    """The file, and its bars by the name of their process."""
    data = json.loads(path.read_text())
    names = {e["pid"]: e["args"]["name"] for e in data["traceEvents"] if e["ph"] == "M"}
    bars: dict[str, list[Event]] = {name: [] for name in names.values()}
    for event in data["traceEvents"]:
        if event["ph"] == "X":
            bars[names[event["pid"]]].append(event)
    return data, bars


def test_phases_steps_and_kernels_stand_side_by_side(tmp_path: Path, recorder: FakeRecorder) -> None:
    path = tmp_path / "deep" / "trace.json"
    steps = StepTrace(path)
    for index in (1, 2):
        run(steps, index, recorder.done)
    steps.close()
    data, bars = load(path)
    assert data["otherData"]["device"] == "CUPTI"
    assert recorder.closed
    assert [e["name"] for e in bars["host"]] == ["plan", "launch", "read back"] * 2
    for before, after in zip(bars["host"], bars["host"][1:3], strict=False):
        assert before["ts"] + before["dur"] == pytest.approx(after["ts"])
    first, second = bars["steps, launch to read-back"]
    assert first["args"] == {
        "bucket": "decode, 2 rows",
        "rows": 2,
        "kv_tokens": 0,
        "qk_pairs": 0,
        "timed": True,
        "device_us": 50.0,
    }
    assert first["tid"] != second["tid"]  # two may be in flight
    kernels = bars["device"]
    assert [(e["name"], e["tid"], e["args"]) for e in kernels] == [
        ("attend of 1", 7, {"launch": 1}), ("attend of 2", 7, {"launch": 2}),
    ]  # fmt: skip
    for step, kernel in zip((first, second), kernels, strict=True):
        assert step["ts"] < kernel["ts"] < step["ts"] + step["dur"]


def test_without_cupti_the_device_is_a_bar_a_step_and_the_file_says_so(
    tmp_path: Path, no_cupti: None
) -> None:
    steps = StepTrace(tmp_path / "trace.json")
    run(steps, 1)
    steps.close()
    data, bars = load(tmp_path / "trace.json")
    assert data["otherData"]["device"] == "events around each step (no libcupti)"
    (bar,) = bars["device"]
    assert bar["dur"] == pytest.approx(50)
    step = bars["steps, launch to read-back"][0]
    assert bar["ts"] + bar["dur"] == pytest.approx(step["ts"] + step["dur"])


def test_only_the_last_steps_are_written(tmp_path: Path, recorder: FakeRecorder) -> None:
    steps = StepTrace(tmp_path / "trace.json", steps=4)
    for index in range(1, 101):
        run(steps, index, recorder.done)
    steps.close()
    _, bars = load(tmp_path / "trace.json")
    assert [e["name"] for e in bars["steps, launch to read-back"]] == [f"step {n}" for n in range(97, 101)]
    assert len(bars["host"]) == 4 * 3 + 1  # the read-back of the last step has no result after it
    oldest = bars["host"][0]["ts"]
    assert bars["device"]
    assert all(e["ts"] >= oldest for e in bars["device"])


def test_an_outlier_is_kept_with_its_phases_and_kernels(
    tmp_path: Path, recorder: FakeRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace, "LOOK_EVERY_NS", 0)
    steps = StepTrace(tmp_path / "trace.json", steps=4, outliers=2)
    for index in range(1, 31):
        run(steps, index, recorder.done)
        if index in (3, 10, 20):
            steps.keep()
    steps.close()
    _, bars = load(tmp_path / "trace.json")
    assert "outlier: step 3" not in bars  # more than two
    for index in (10, 20):
        names = [e["name"] for e in bars[f"outlier: step {index}"]]
        assert names == [f"step {index}", "plan", "launch", "read back", f"attend of {index}"]


def test_a_run_of_outliers_is_looked_at_once_a_second(tmp_path: Path, recorder: FakeRecorder) -> None:
    steps = StepTrace(tmp_path / "trace.json")
    for index in range(20):
        run(steps, index, recorder.done)
        steps.keep()
    steps.close()
    _, bars = load(tmp_path / "trace.json")
    assert [name for name in bars if name.startswith("outlier")] == ["outlier: step 0"]


def test_a_path_that_cannot_be_written_is_said_at_once(tmp_path: Path, recorder: FakeRecorder) -> None:
    with pytest.raises(OSError):
        StepTrace(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        StepTrace(tmp_path / "file" / "trace.json")
