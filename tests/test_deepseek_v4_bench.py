"""What `openinfer bench` and `openinfer explain` say of DeepSeek-V4."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from openinfer.cli import explain
from openinfer.cli.bench import ops as bench_ops
from openinfer.cli.bench import step as bench_step
from openinfer.recipes.deepseek_v4.published import config_json

TINY = Path(__file__).parent / "goldens" / "deepseek_v4-tiny"
SIZES = ("--max-num-seqs", "3", "--max-num-batched-tokens", "32")
SMALL = (
    "--device",
    "cpu",
    "--dtype",
    "bfloat16",
    "--kv-cache-memory-bytes",
    str(96 << 20),
    "--max-model-len",
    "256",
    *SIZES,
)


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
    ours = {"hc_pre", "compress", "index_topk", "sparse_attend", "experts", "route"}
    assert ours < {r["op"] for r in results}
    capsys.readouterr()
    assert explain.main([str(TINY), *SIZES, "--decode", "2,20", "--ledger", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert not [line for line in lines if line.endswith(" -")]  # every op was measured
    (line,) = (line.split() for line in lines if line.startswith("experts"))
    assert line[1] == "3"  # layers
    expert = 3 * 128 * 128 // 2 * 17 / 16  # in FP4, with a byte of scale for 32 weights
    hit = 4 * (1 - (1 - 3 / 4) ** 2)  # of two rows with three of four experts each
    assert 3 * hit * expert / 1e6 < float(line[3]) < 3 * hit * expert / 1e6 * 1.05
    assert any("rotary tables" in line for line in lines)


def test_one_gpus_part_of_a_whole_model_is_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_json("Flash")))
    few = ["--max-num-seqs", "8", "--max-num-batched-tokens", "64", "--max-model-len", "8192"]
    flags = [str(tmp_path), *few, "--decode", "8,4096"]
    weights = {}
    for ranks in ("1", "4"):
        assert explain.main([*flags, "--ranks", ranks]) == 0
        lines = [line.split() for line in capsys.readouterr().out.splitlines()]
        (weights[ranks],) = (float(words[1]) for words in lines if words[:1] == ["weights"])
        heads = 64 // int(ranks)
        assert any(words[:2] == ["project", f"{heads * 512}x1024"] for words in lines)
    assert weights["4"] == pytest.approx(44.4, abs=0.1)
    assert 3.3 < weights["1"] / weights["4"] < 4
    assert explain.main([*flags, "--ranks", "3"]) == 1
    assert "3 ranks cannot share it" in capsys.readouterr().err
