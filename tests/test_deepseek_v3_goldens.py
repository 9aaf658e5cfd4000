"""The DeepSeek-V3 recipe against what transformers makes of the golden checkpoint, and models that are wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from deepseek_v3_form import CHECKPOINT, CONFIG
from golden_rows import start_row

from openinfer.kernels import CpuPack
from openinfer.kernels.formats.linear import Linear
from openinfer.recipes.deepseek_v3 import RECIPE
from openinfer.recipes.deepseek_v3.published import config_json
from openinfer.recipes.deepseek_v3.weights import Mixture
from openinfer.recipes.engine import Source
from openinfer.recipes.engine.testing import write_random_checkpoint
from openinfer.recipes.engine.testing.checkpoint import write_tensors
from openinfer.tensor import Checkpoint

TOLERANCE = 1e-3
PUBLISHED = config_json("DeepSeek-V3")


def logits(place: Any, golden: Any, index: int, change: Any = lambda model: model) -> Any:
    model, prompt = change(place(RECIPE, CHECKPOINT, [65])), golden.prompt(index)
    start_row(model, prompt)
    model.forward(CpuPack(), len(prompt), 1, len(prompt))
    return model.batch.logits.numpy()[0]


@pytest.fixture(scope="module")
def golden(golden_of: Any) -> Any:
    return golden_of("deepseek_v3-tiny")


@pytest.mark.parametrize("index", range(5))
def test_logits(place: Any, golden: Any, index: int) -> None:
    expected = golden.numbers[f"p{index}.logits_fp32"][-1]
    np.testing.assert_allclose(logits(place, golden, index), expected, atol=TOLERANCE, rtol=0)


def without(model: Any, fault: str) -> Any:
    """The model with a fault that only this family can have."""
    c, layers = model.config, model.weights.layers
    match fault:
        case "mscale left out of the scores":
            return replace(model, config=replace(c, scale=(c.nope_dim + c.rope_dim) ** -0.5))
        case "groups of experts left out":
            return replace(model, config=replace(c, groups=1, top_groups=1))
        case "weights of experts not scaled":
            return replace(model, config=replace(c, routed_scaling_factor=1.0))
    for layer in layers:
        if fault == "bias left out of the choice" and isinstance(layer.mlp, Mixture):
            layer.mlp.bias.numpy()[:] = 0
        if fault == "latents that are not normed":
            layer.attention.kv_norm.numpy()[:] = 1
        if fault == "values of other heads":
            values = layer.attention.values.numpy()
            values[:] = np.roll(values, c.value_dim, axis=0)
    return model


FAULTS = (
    "mscale left out of the scores",
    "groups of experts left out",
    "weights of experts not scaled",
    "bias left out of the choice",
    "latents that are not normed",
    "values of other heads",
)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_model_is_noticed(place: Any, golden: Any, fault: str) -> None:
    expected = golden.numbers["p3.logits_fp32"][-1]
    wrong = logits(place, golden, 3, lambda model: without(model, fault)) - expected
    assert np.abs(wrong).max() > 100 * TOLERANCE


def test_the_gates_own_controls_are_noticed(place: Any, golden: Any) -> None:
    model = place(RECIPE, CHECKPOINT, [65])
    with Checkpoint(CHECKPOINT) as checkpoint:
        blueprint = RECIPE.blueprint(
            replace(Source.read(CHECKPOINT), checkpoint=checkpoint), RECIPE.options()
        )
    names = [control.name for control in blueprint.controls(model)]
    assert "another choice of experts" in names
    for name in names:

        def changed(model: Any, name: str = name) -> Any:
            control = next(one for one in blueprint.controls(model) if one.name == name)
            for tensor, values in control.changes:
                tensor.numpy()[:] = values
            return model

        wrong = logits(place, golden, 3, changed) - golden.numbers["p3.logits_fp32"][-1]
        assert np.abs(wrong).max() > 100 * TOLERANCE, name


def in_fp8(folder: Path) -> tuple[Path, Path]:
    """A checkpoint in FP8 blocks, as published, and one with the same values in float32."""
    sizes = {
        "hidden_size": 128, "q_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64,
        "intermediate_size": 256, "moe_intermediate_size": 128, "num_nextn_predict_layers": 0,
    }  # fmt: skip
    packed = {**CONFIG, **sizes, "quantization_config": PUBLISHED["quantization_config"]}
    source = write_random_checkpoint(RECIPE, folder / "fp8", packed)
    with Checkpoint(source) as checkpoint:
        arrays = {name: np.array(checkpoint.array(name)) for name in checkpoint}
    plain = {name: array.astype(np.float32) for name, array in arrays.items() if "_scale_inv" not in name}
    for name in arrays:
        if name.endswith("_scale_inv"):
            weight = name.removesuffix("_scale_inv")
            plain[weight] = Linear(arrays[weight], arrays[name].astype(np.float32)).values()
    twin = folder / "plain"
    twin.mkdir()
    (twin / "config.json").write_text(json.dumps({**CONFIG, **sizes}))
    write_tensors(twin / "model.safetensors", plain)
    return source, twin


def test_fp8_checkpoints_and_their_ranks(session: Any, tmp_path: Path) -> None:
    """The absorbed projections are made of codes and scales: the tokens and log-probabilities of a plain twin."""
    found, prompt = [], [(7 * n * n + 11) % 512 for n in range(40)]
    source, twin = in_fp8(tmp_path)
    for path, flags in (
        (twin, {}),
        (source, {"activation_quantization": "off"}),
        (source, {"activation_quantization": "off", "tensor_parallel_size": 2}),
        (source, {}),
    ):
        asked = session(path, **flags)
        one = asked.submit(prompt, 8, ignore_eos=True, logprobs=0, prompt_logprobs=0)
        asked.finish()
        outcome = asked.outcomes[one]
        found.append(np.array([entry.logprob for entry in (*outcome.prompt_logprobs, *outcome.logprobs)]))
    for others in found[1:3]:
        np.testing.assert_allclose(others, found[0], atol=2e-4)
    rounded = np.abs(found[3] - found[0])
    assert rounded.max() > 1e-3  # activations are quantised
    assert rounded.mean() < 0.5
