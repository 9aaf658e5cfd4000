"""benchmarks/deepseek_layers.py on CPU ranks: each layer of two is that of one, and faults show where they are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from module_files import module_at

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "deepseek_layers.py"
TINY = Path(__file__).parent / "goldens" / "deepseek_v4-tiny"


@pytest.mark.slow  # two engines, and each layer once for each fault
def test_each_layer_of_two_ranks_is_that_of_one(tmp_path, monkeypatch, capsys):
    """More layers than the engine of one rank has places for. Random weights this small hide a swap of gate and up."""
    script = module_at(SCRIPT)
    config = json.loads((TINY / "config.json").read_text())
    config |= {"num_hidden_layers": 6, "compress_ratios": [0, 4, 128, 4, 128, 4, 0]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(script, "LENGTHS", (1, 300))
    found = script.check(tmp_path, 2, device="cpu")
    said = capsys.readouterr().out
    failed = [line for line in said.splitlines() if line.startswith("FAIL")]
    assert [line.split(":")[0] for line in failed] == ["FAIL gate and up swapped in shared experts"]
    assert said.count("pass ") == len(script.FAULTS) + 1
    right = found["sublayers"]["right"]
    assert len(right) == 12
    assert max(one["median"] for one in right) < 1e-6
