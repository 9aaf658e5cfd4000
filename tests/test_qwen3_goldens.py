"""The Qwen3 recipe against the float32 goldens: hidden states, logits, greedy tokens, in any batch and any chunks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from golden_rows import TapPack, start_row

from openinfer.kernels import CpuPack
from openinfer.recipes.qwen3 import RECIPE
from openinfer.recipes.qwen3.model import Model

TOLERANCE = 1e-3


@pytest.fixture
def load_model(place: Any) -> Callable[[Any, int], Model]:
    """load_model(golden, max_tokens)"""
    return lambda golden, max_tokens: place(RECIPE, golden.path, [65], max_tokens=max_tokens)


def test_hidden_states_and_logits(load_model, golden):
    facts = golden.facts["hidden"]
    prompt = golden.prompt(facts["prompt"])
    model, pack = load_model(golden, 512), TapPack({"embed": "out", "linear_add": "x"})
    start_row(model, prompt)
    model.forward(pack, len(prompt), 1, len(prompt))
    positions = facts["positions"]
    after = [pack.streams[0], *pack.streams[2::2]]  # two additions a layer
    names = ["hidden.embed", *(f"hidden.layer{n}" for n in range(model.config.num_layers))]
    assert len(after) == len(names)
    for name, stream in zip(names, after, strict=True):
        np.testing.assert_allclose(
            stream[positions], golden.numbers[name], atol=TOLERANCE, rtol=0, err_msg=name
        )
    logits = model.batch.logits.numpy()[0]
    expected = golden.numbers[f"p{facts['prompt']}.logits_fp32"][-1]
    np.testing.assert_allclose(logits, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("prompt_index", range(5))
def test_logits_of_every_stored_position(load_model, golden, prompt_index):
    """Each stored position as the last one of a prompt: also what a cache filled token by token must give."""
    prompt = golden.prompt(prompt_index)
    expected = golden.numbers[f"p{prompt_index}.logits_fp32"]
    positions = golden.facts["prompts"][prompt_index]["logit_positions"]
    for position, row in list(zip(positions, expected, strict=True))[-4:]:
        model = load_model(golden, 512)
        start_row(model, prompt[: position + 1])
        model.forward(CpuPack(), position + 1, 1, position + 1)
        np.testing.assert_allclose(model.batch.logits.numpy()[0], row, atol=TOLERANCE, rtol=0)


def test_a_wrong_model_is_noticed(load_model, golden):
    """Negative control: with keys' norms swapped for queries', the same comparison fails."""
    facts = golden.facts["hidden"]
    prompt = golden.prompt(facts["prompt"])
    model = load_model(golden, 512)
    layer = model.weights.layers[0]
    swapped = layer.q_norm.numpy().copy()
    layer.q_norm.numpy()[:] = layer.k_norm.numpy()
    layer.k_norm.numpy()[:] = swapped
    start_row(model, prompt)
    model.forward(CpuPack(), len(prompt), 1, len(prompt))
    expected = golden.numbers[f"p{facts['prompt']}.logits_fp32"][-1]
    wrong = model.batch.logits.numpy()[0] - expected
    assert np.abs(wrong).max() > 10 * TOLERANCE
