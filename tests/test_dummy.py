"""`--load-format dummy`: every model of the recipes runs on random weights, from config.json alone."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from openinfer.kernels.testing import of_the_day

GOLDENS = Path(__file__).parent / "goldens"


NAMES = ("qwen3-tiny", "qwen3_5-tiny", "qwen3_5-moe-tiny", "deepseek_v4-tiny")


@pytest.mark.parametrize(
    ("name", "ranks"), of_the_day([*((name, 1) for name in NAMES), ("qwen3-tiny", 2)], 2)
)
def test_random_weights_give_numbers(tmp_path, session, name, ranks):
    shutil.copy(GOLDENS / name / "config.json", tmp_path)
    run = session(tmp_path, load_format="dummy", tensor_parallel_size=ranks)
    for temperature in (0.0, 1.0):
        run.submit(range(5, 45), 4, temperature=temperature, seed=1, ignore_eos=True)
    run.finish()
    for outcome in run.outcomes.values():
        assert len(outcome.tokens) == 4
        assert outcome.terminals[0].reason == "length"
