"""What `openinfer bench` and `openinfer explain` say of the hybrid."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from openinfer.cli import explain
from openinfer.cli.bench import ops as bench_ops
from openinfer.cli.bench import step as bench_step
from openinfer.cli.explain.segments import Segment

TINY = Path(__file__).parent / "goldens" / "qwen3_5-tiny"
SIZES = ("--max-num-seqs", "3", "--max-num-batched-tokens", "32")
SMALL = ("--device", "cpu", "--kv-cache-memory-bytes", str(96 << 20), "--max-model-len", "256", *SIZES)


def test_steps_are_measured(tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    points = ["decode:2,20", "prefill:40", "mixed:2,20,10"]
    arguments = [str(TINY), *SMALL, "--points", *points, "--repeats", "2", "--json", str(path)]
    assert bench_step.main(arguments) == 0
    results = json.loads(path.read_text())["results"]
    assert [r["point"] for r in results] == points
    assert all(len(r["repeats"]["device_ms"]) == 2 for r in results)


def test_every_op_is_measured_and_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ops.json"
    arguments = [str(TINY), *SMALL, "--context", "20", "--tokens", "2", "--repeats", "1", "--json", str(path)]
    assert bench_ops.main(arguments) == 0
    results = json.loads(path.read_text())["results"]
    ours = {"gated_delta_net", "gated_attention"}
    assert ours < {r["op"] for r in results}
    capsys.readouterr()
    assert explain.main([str(TINY), *SIZES, "--decode", "2,20", "--ledger", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert not [line for line in lines if line.endswith(" -")]  # every op was measured
    (delta,) = (line.split() for line in lines if line.startswith("gated_delta_net"))
    assert delta[1] == "1"  # layers
    state = 2 * 2 * (4 * 128 * 128 * 4 + 4 * 1024 * 2)  # of two rows, read and written, in bf16
    assert state / 1e6 < float(delta[3]) < state / 1e6 * 1.02
    assert any(line.split()[:2] == ["cache:", "state"] for line in lines)


def test_prompts_follow_rows_with_more_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    segments: list[Segment] = []

    def measured(segment: Segment, *_: object) -> list[object]:
        segments.append(segment)
        return []

    monkeypatch.setattr(bench_ops, "ledger_entries", measured)
    sizes = ("--max-num-seqs", "2", "--max-num-batched-tokens", "128")
    assert bench_ops.main([str(TINY), *SMALL, *sizes, "--context", "100", "--tokens", "128"]) == 0
    assert any(segment.name.startswith("forward 128 tokens") for segment in segments)
