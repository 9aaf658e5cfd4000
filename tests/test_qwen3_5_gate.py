"""The hybrid's accuracy gate, on the CPU: every path passes against the goldens, every control turns it red."""

from __future__ import annotations

from pathlib import Path

import pytest

from openinfer.recipes.qwen3_5 import gate

TINY = Path(__file__).parent / "goldens" / "qwen3_5-tiny"

pytestmark = pytest.mark.parametrize("hybrid", ["qwen3_5-tiny"], indirect=True)  # one is enough for this


@pytest.fixture
def engine(session):
    flags = {"max_num_seqs": 64, "max_num_batched_tokens": 512, "max_model_len": 1024}
    return session(TINY, **flags, kv_cache_memory_bytes=256 << 20).engine


def test_every_path_passes(references, engine, hybrid):
    verdicts = list(gate.run(engine.runner, references(gate, hybrid)))
    assert len(verdicts) == 8
    assert [str(verdict) for verdict in verdicts if not verdict.passed] == []


def test_every_control_fails(references, engine, hybrid):
    verdicts = list(gate.negative_controls(engine.runner, references(gate, hybrid)))
    assert len(verdicts) == 5
    assert [str(verdict) for verdict in verdicts if verdict.passed] == []
    sequences = references(gate, hybrid)
    few = gate.decode_all(gate.Forced(engine.runner), sequences[:2], chunk=512)
    assert gate.judge("put right again", gate.limits(sequences), sequences[:2], few).passed
