"""DeepSeek-V4's accuracy gate, on the CPU: every path passes against the goldens, every control turns it red."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from openinfer.recipes.deepseek_v4 import gate

TINY = Path(__file__).parent / "goldens" / "deepseek_v4-tiny"
POSITIONS = {1: 6, 2: 8, 3: 8, 4: 8}
TOP = 32


def log_softmax(logits):
    wide = logits.astype(np.float64)
    wide = wide - wide.max(axis=1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))


def references(golden):
    """The goldens' last positions as the gate reads references."""
    found = []
    for index, count in POSITIONS.items():
        bf16 = log_softmax(golden.numbers[f"p{index}.logits_bf16"][-count:])
        fp32 = log_softmax(golden.numbers[f"p{index}.logits_fp32"][-count:])
        top = np.argsort(-bf16, axis=1, kind="stable")[:, :TOP]
        taken = (np.take_along_axis(values, top, 1) for values in (bf16, fp32))
        found.append(gate.Reference(golden.prompt(index), top, *taken))
    return found


@pytest.fixture
def engine(session):
    flags = {
        "max_num_seqs": 64,
        "max_num_batched_tokens": 512,
        "max_model_len": 1024,
        "activation_quantization": "off",
    }
    return session(TINY, **flags, kv_cache_memory_bytes=96 << 20).engine


def test_every_path_passes(engine, deepseek):
    verdicts = list(gate.run(engine.runner, references(deepseek)))
    assert len(verdicts) == 8
    assert [str(verdict) for verdict in verdicts if not verdict.passed] == []


def test_every_control_fails(engine, deepseek):
    verdicts = list(gate.negative_controls(engine.runner, references(deepseek)))
    assert len(verdicts) == 5
    assert [str(verdict) for verdict in verdicts if verdict.passed] == []
    sequences = references(deepseek)
    few = gate.decode_all(gate.Forced(engine.runner), sequences[:2], chunk=512)
    assert gate.judge("put right again", gate.limits(sequences), sequences[:2], few).passed
