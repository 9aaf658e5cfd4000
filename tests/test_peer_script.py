"""benchmarks/peer: a peer's offline API is asked for the points of `openinfer bench step`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from module_files import module_at

from openinfer.cli.bench import points as steps

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "peer" / "vllm_steps.py"


@pytest.fixture
def script() -> ModuleType:
    return module_at(SCRIPT)


def test_it_measures_a_peer_that_takes_known_times(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert script.POINTS == steps.POINTS
    now, rows = [0.0], []
    monkeypatch.setattr(script.time, "perf_counter", lambda: now[0])

    def answer(prompts: list[list[int]], tokens: int) -> None:
        assert all(0 <= token < 900 for prompt in prompts for token in prompt)
        rows.append([(len(prompt), tokens) for prompt in prompts])
        now[0] += sum(map(len, prompts)) * 1e-5 + (tokens - 1) * 3e-3  # 3 ms a step

    decode, prefill, offline = script.measure(
        answer, ["decode:8,1024", "prefill:4096", "offline:4,10,5"], 900, 2
    )
    assert decode["wall_ms"] == pytest.approx(3.0)
    contexts = [length + tokens for length, tokens in (rows[0][0], rows[1][0])]
    assert sum(contexts) / 2 == pytest.approx(1024, abs=1)
    assert prefill["wall_ms"] == pytest.approx(40.96)
    assert offline["output_tokens_per_s"] == pytest.approx(20 / (4e-4 + 12e-3))
    assert len(decode["repeats"]["wall_ms"]) == 2


def test_a_dry_run_needs_no_peer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 9}))
    command = [
        sys.executable,
        str(SCRIPT),
        str(tmp_path),
        "--dry-run",
        "--points",
        "prefill:7",
        "decode:2,200",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "1 x 7 in / 1 out" in done.stdout
    assert "2 x 104 in / 65 out, then 2 x 104 in / 129 out" in done.stdout
    wrong = subprocess.run([*command[:-3], "prefil:7"], capture_output=True, text=True)
    assert wrong.returncode == 2
    assert "prefil:7" in wrong.stderr
