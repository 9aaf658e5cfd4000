"""Qwen3's accuracy gate, on the CPU: every path passes against the goldens, every control turns it red."""

from __future__ import annotations

from pathlib import Path

import pytest

from openinfer.recipes.qwen3 import gate

TINY = Path(__file__).parent / "goldens" / "qwen3-tiny"


@pytest.fixture
def engine(session):
    flags = {"max_num_seqs": 64, "max_num_batched_tokens": 512, "max_model_len": 1024}
    return session(TINY, **flags, kv_cache_memory_bytes=256 << 20).engine


def test_every_path_passes(references, engine, tiny):
    verdicts = list(gate.run(engine.runner, references(gate, tiny)))
    assert len(verdicts) == 8
    assert [str(verdict) for verdict in verdicts if not verdict.passed] == []


def test_long_prompts_pass(references, engine, tiny):
    verdicts = list(gate.run_long(engine.runner, references(gate, tiny)[1:3]))
    assert len(verdicts) == 3
    assert all(v.passed for v in verdicts)


def test_every_control_fails(references, engine, tiny):
    verdicts = list(gate.negative_controls(engine.runner, references(gate, tiny)))
    assert len(verdicts) == 3
    assert [str(verdict) for verdict in verdicts if verdict.passed] == []
    few = gate.decode_all(gate.Forced(engine.runner), references(gate, tiny)[:2], chunk=512)
    assert gate.judge("put right again", references(gate, tiny)[:2], few).passed
