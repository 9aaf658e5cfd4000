"""--quantization fp8: plain weights become FP8 by row while they are loaded. And FP8 of compressed-tensors with a scale
for each weight, or for each block."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_int4 as int4
import test_qwen3_fp8 as fp8

from openinfer.kernels.authoring import Linear
from openinfer.recipes.engine import SetupError, UnsupportedModel
from openinfer.recipes.engine.startup import build
from openinfer.recipes.engine.testing import write_random_checkpoint
from openinfer.recipes.qwen3 import RECIPE
from openinfer.recipes.qwen3_5 import RECIPE as HYBRID_RECIPE
from openinfer.tensor import Checkpoint, float8_e4m3fn

ROOT = Path(__file__).parents[1]


write, answers, FLAGS = fp8.write, fp8.answers, int4.FLAGS
SMALL = ("in_proj_a.weight", "in_proj_b.weight")


def is_projection(name: str) -> bool:
    return "_proj" in name and name.endswith(".weight") and not name.endswith(SMALL)


@pytest.fixture(scope="module", params=["qwen3", "qwen3_5"])
def plain(request: Any, tmp_path_factory: Any) -> tuple[Any, Path, Path]:
    """A recipe, a plain checkpoint, and one in float32 with the values of the codes."""
    recipe, config = {"qwen3": (RECIPE, int4.CONFIG), "qwen3_5": (HYBRID_RECIPE, int4.HYBRID)}[request.param]
    folder = tmp_path_factory.mktemp("plain")
    source = write_random_checkpoint(recipe, folder / "source", config)
    same = {}
    with Checkpoint(source) as checkpoint:
        for name in checkpoint.names:
            same[name] = weight = checkpoint.array(name).astype(np.float32)
            if is_projection(name):
                scales = np.abs(weight).max(axis=1, keepdims=True) / np.float32(448)
                same[name] = (weight / scales).astype(float8_e4m3fn).astype(np.float32) * scales
    (folder / "same").mkdir()
    (folder / "same" / "config.json").write_text(json.dumps(config))
    write(folder / "same" / "model.safetensors", same)
    return recipe, source, folder / "same"


def test_answers_are_those_of_the_codes(plain: tuple[Any, Path, Path]) -> None:
    """On one rank and on two: the scale of a row is that of the whole row."""
    recipe, source, same = plain
    want = answers(same, recipe=recipe)
    assert want != answers(source, recipe=recipe)  # codes are not the plain weights
    for ranks in (1, 2):
        flags = {"quantization": "fp8", "activation_quantization": "off", "tensor_parallel_size": ranks}
        got = answers(source, recipe=recipe, **flags)
        for (tokens, logprobs), (same_tokens, same_logprobs) in zip(got, want, strict=True):
            assert tokens == same_tokens
            np.testing.assert_allclose(logprobs, same_logprobs, atol=1e-4)


def test_weights_stay_in_one_byte(plain: tuple[Any, Path, Path]) -> None:
    recipe, source, _ = plain
    engine = build(recipe, source, **FLAGS, quantization="fp8").engine
    places = engine.runner.model.weights.places
    codes = {one.names[0] for one in places.conversions if one.dst.dtype == float8_e4m3fn}
    with Checkpoint(source) as checkpoint:
        assert codes == {name for name in checkpoint.names if is_projection(name)}
    engine.close()


def test_values_that_float8_cannot_hold_are_refused(plain: tuple[Any, Path, Path], tmp_path: Path) -> None:
    recipe, source, _ = plain
    with Checkpoint(source) as checkpoint:
        tensors = {name: np.array(checkpoint.array(name)) for name in checkpoint.names}
    name = next(name for name in tensors if is_projection(name))
    tensors[name][0, 0] = np.inf
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    write(tmp_path / "model.safetensors", tensors)
    with pytest.raises(ValueError, match="has values that are not finite, which float8 cannot hold"):
        build(recipe, tmp_path, **FLAGS, quantization="fp8")


def test_what_is_refused(plain: tuple[Any, Path, Path], tmp_path: Path) -> None:
    """A packed checkpoint; another format."""
    recipe, source, _ = plain
    (tmp_path / "model.safetensors").symlink_to(source / "model.safetensors")
    raw = json.loads((source / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "quantization_config": fp8.QUANTIZED}))
    with pytest.raises(UnsupportedModel, match="quantised already"):
        build(recipe, tmp_path, **FLAGS, quantization="fp8")
    with pytest.raises(SetupError, match="--quantization int8: fp8 are possible"):
        build(recipe, source, **FLAGS, quantization="int8")


def test_experts_become_fp8_in_blocks(tmp_path: Path) -> None:
    """The tokens are of the codes' values. Other projections are in FP8 by row."""
    width = {"moe_intermediate_size": 192, "shared_expert_intermediate_size": 128, "hidden_size": 160}
    text = int4.MIXTURE["text_config"]
    assert isinstance(text, dict)
    config = int4.MIXTURE | {"text_config": text | width}
    source, same = write_random_checkpoint(HYBRID_RECIPE, tmp_path / "source", config), {}
    with Checkpoint(source) as checkpoint:
        for name in checkpoint.names:
            same[name] = weight = checkpoint.array(name).astype(np.float32)
            if is_projection(name):
                scales = np.abs(weight).max(axis=1, keepdims=True) / np.float32(448)
                same[name] = (weight / scales).astype(float8_e4m3fn).astype(np.float32) * scales
            elif ".experts." in name:
                parts = 2 if name.endswith("gate_up_proj") else 1
                experts = [[in_blocks(part) for part in np.split(one, parts)] for one in weight]
                same[name] = np.array([np.concatenate(one) for one in experts])
    (tmp_path / "same").mkdir()
    (tmp_path / "same" / "config.json").write_text(json.dumps(config))
    write(tmp_path / "same" / "model.safetensors", same)
    want = answers(tmp_path / "same", recipe=HYBRID_RECIPE)
    flags = {"quantization": "fp8", "activation_quantization": "off", "tensor_parallel_size": 2}
    got = answers(source, recipe=HYBRID_RECIPE, **flags)
    for (tokens, logprobs), (same_tokens, same_logprobs) in zip(got, want, strict=True):
        assert tokens == same_tokens
        np.testing.assert_allclose(logprobs, same_logprobs, atol=1e-4)
    engine = build(HYBRID_RECIPE, source, **FLAGS, quantization="fp8").engine
    mixture = engine.runner.model.weights.layers[1].mlp
    assert mixture.gate_up.weight.dtype == mixture.down.weight.dtype == float8_e4m3fn
    assert (mixture.gate_up.scales.shape, mixture.down.scales.shape) == ((4, 4, 2), (4, 2, 2))
    engine.close()


def in_blocks(weight: Any) -> Any:
    """The values of FP8 codes in blocks of 128 x 128, in float32."""
    meant = np.empty_like(weight)
    for row in range(0, weight.shape[0], 128):
        for column in range(0, weight.shape[1], 128):
            block = weight[row : row + 128, column : column + 128]
            scale = np.abs(block).max() / np.float32(448)
            values = (block / scale).astype(float8_e4m3fn).astype(np.float32) * scale
            meant[row : row + 128, column : column + 128] = values
    return meant


@pytest.mark.parametrize("strategy", ["tensor", "block"])
def test_other_scales_of_compressed_tensors(strategy: str, tmp_path: Path) -> None:
    """Scales of a tensor with static activations, and of blocks. Stacked projections take the largest static scale."""
    source = write_random_checkpoint(RECIPE, tmp_path / "source", fp8.CONFIG)
    packed, same = {}, {}
    with Checkpoint(source) as checkpoint:
        for name in checkpoint.names:
            packed[name] = same[name] = weight = checkpoint.array(name).astype(np.float32)
            if not is_projection(name):
                continue
            if strategy == "block":
                packed[name], scales = fp8.quantized(weight)
                same[name] = Linear(packed[name], scales.astype(np.float32)).values()
            else:
                scales = np.array([np.abs(weight).max() / 448], np.float32)
                packed[name] = (weight / scales).astype(float8_e4m3fn)
                same[name] = packed[name].astype(np.float32) * scales
                least = 0.025 if "k_proj" in name else 0.05
                packed[name.replace(".weight", ".input_scale")] = np.full(1, least, np.float32)
            packed[name + "_scale"] = scales
    weights = {**fp8.FLOAT8, "strategy": strategy, "dynamic": False, "block_structure": [128, 128]}
    activations = {"strategy": "tensor", "dynamic": False}
    if strategy == "block":
        activations = {"strategy": "group", "group_size": 128, "dynamic": True}
    group = {"weights": weights, "input_activations": {**fp8.FLOAT8, **activations}}
    said = {**fp8.BY_ROW, "config_groups": {"group_0": group}}
    for name, tensors, config in (
        ("packed", packed, {**fp8.CONFIG, "quantization_config": said}),
        ("same", same, fp8.CONFIG),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        write(tmp_path / name / "model.safetensors", tensors)
    plain = answers(tmp_path / "packed", activation_quantization="off")
    assert plain == answers(tmp_path / "same")
    coded = answers(tmp_path / "packed")
    assert 0 < max(abs(a[1][0] - b[1][0]) for a, b in zip(plain, coded, strict=True)) < 0.5
    engine = build(RECIPE, tmp_path / "packed", **FLAGS).engine
    for layer in engine.runner.model.weights.layers:
        scales = [one.x_scale for one in (layer.qkv, layer.o, layer.gate_up, layer.down)]
        assert [scale and scale.numpy().tolist() for scale in scales] == [
            None if strategy == "block" else [np.float32(0.05)]
        ] * 4
    engine.close()
