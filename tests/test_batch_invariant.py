"""--batch-invariant as on a GPU: whole engines, whose kernels run in Triton's interpreter."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from pathlib import Path
from typing import Any

import invariance
import numpy as np
import pytest

from openinfer.cli import recipes
from openinfer.kernels import InterpDriver, LaunchPack, Op, Target
from openinfer.recipes.engine import startup
from openinfer.recipes.engine.startup import build
from openinfer.tensor import Tensor, uint8

GOLDENS = Path(__file__).parent / "goldens"
TODAY = datetime.date.today().toordinal()
NAMES = ["qwen3-tiny", "qwen3_5-tiny", "qwen3_5-moe-tiny"]
OF_THE_DAY = [
    pytest.param(name, marks=() if TODAY % len(NAMES) == n else pytest.mark.slow)
    for n, name in enumerate(NAMES)
]
FLAGS: dict[str, Any] = {
    "device": "cpu", "dtype": "bfloat16", "max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 128,
    "kv_cache_memory_bytes": 32 << 20, "batch_invariant": True, "snapshot_interval": 64,
    "speculative_config": '{"method": "ngram", "num_speculative_tokens": 2}',
}  # fmt: skip


class Interpreted:
    """The pack of an engine: what a GPU of `target` would launch, in the interpreter."""

    def __init__(self, target: Target) -> None:
        regions = (Tensor.from_numpy(np.zeros(64 << 20, uint8)) for _ in range(2))
        self._inner = LaunchPack(target, InterpDriver(), *regions)

    def bind(self, op: Op[Any], args: Any) -> Callable[[], None]:
        return lambda: self.run(op, args)

    def run(self, op: Op[Any], args: Any) -> None:
        self._inner.run(op, args)


def interpreted(monkeypatch: pytest.MonkeyPatch, name: str, invariant: bool) -> Any:
    target = Target(arch=90, num_sms=4, interpreted=True, batch_invariant=invariant)
    monkeypatch.setattr(startup, "CpuPack", lambda *_, **__: Interpreted(target))
    flags = {k: v for k, v in FLAGS.items() if k != "snapshot_interval" or "3_5" in name}
    return build(recipes.find(GOLDENS / name), GOLDENS / name, **flags).engine


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_logits_are_the_same_bits_on_every_path(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    engine = interpreted(monkeypatch, name, True)
    found = invariance.differences(engine, 70)
    engine.close()
    assert found.keys() >= {"chunks of 7", "beside 3 others", "cached prefix", "preempted"}
    assert not any(map(max, found.values())), found


@pytest.mark.parametrize("name", OF_THE_DAY)
def test_drafts_and_company_change_no_log_probability(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    engine = interpreted(monkeypatch, name, True)
    found = invariance.drafts(engine, 9, 6)
    engine.close()
    assert {*found.values()} == {"equal"}, found


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_other_kernels_are_seen(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A control: kernels that are chosen by the number of tokens."""
    engine = interpreted(monkeypatch, name, False)
    found = invariance.differences(engine, 70)
    engine.close()
    assert any(map(max, found.values()))
