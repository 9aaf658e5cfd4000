"""Adapters (LoRA) on a GPU: the log-probabilities of prompts are near those of a CPU in float32, in recorded steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_lora as L

from openinfer.frontend.contract import LoadAdapter
from openinfer.recipes.engine.testing import Session

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu")]

DEVICE = "cuda"
PLACES = 2


def logprobs(session: Session, asked: list[tuple[list[int], str]]) -> list[Any]:
    """Log-probabilities of each prompt's tokens under an adapter, all asked for at once."""
    ids = [
        session.submit(prompt, 8, ignore_eos=True, prompt_logprobs=0, adapter=name) for prompt, name in asked
    ]
    session.finish()
    return [np.array([one.logprob for one in session.outcomes[n].prompt_logprobs]) for n in ids]


@pytest.mark.parametrize("name", ["qwen3-tiny", "qwen3_5-tiny"])
def test_log_probabilities_are_near_those_of_a_cpu(name: str, tmp_path: Path) -> None:
    made = L.Made(name, tmp_path)
    asked = [(prompt, adapter) for prompt in made.prompts for adapter in ("", *L.ADAPTERS)]
    reference = made.serving(*L.ADAPTERS, max_loras=3)
    want = logprobs(reference, asked)
    reference.engine.close()
    session = made.serving("all", device=DEVICE, dtype="bfloat16", max_loras=PLACES)
    for adapter in ("two", "mlp"):  # while it serves
        session.engine.control(LoadAdapter(adapter, str(tmp_path / adapter))).result(30)
    got = logprobs(session, asked)
    errors = [np.abs(a - b).mean() for a, b in zip(got, want, strict=True)]
    assert max(errors) < 0.12, errors
    turned = want[1:] + want[:1]  # negative control: each prompt under the next adapter
    same = [n for n, (a, b) in enumerate(zip(want, turned, strict=True)) if len(a) == len(b)]
    assert min(np.abs(got[n] - turned[n]).mean() for n in same) > 0.3
    stats = session.engine.stats()
    assert (stats.compiles_after_ready, stats.allocations_after_ready) == (0, 0)
    session.engine.close()
