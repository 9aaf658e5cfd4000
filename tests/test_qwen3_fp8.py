"""Qwen3 in FP8, with scales of blocks as published or of rows as compressed-tensors has them: the codes stay codes, and
mean what their scales say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_lora import write_adapter
from test_weight_dtypes import write

from openinfer.cli.explain.segments import Outline
from openinfer.kernels import H200
from openinfer.kernels.formats.linear import Linear
from openinfer.recipes.engine import Source, UnsupportedModel
from openinfer.recipes.engine.startup import build
from openinfer.recipes.engine.testing import Session, write_random_checkpoint
from openinfer.recipes.qwen3 import RECIPE
from openinfer.recipes.qwen3.config import Config
from openinfer.tensor import Checkpoint, bfloat16, float8_e4m3fn

CONFIG = {
    "model_type": "qwen3", "hidden_size": 192, "num_hidden_layers": 3, "num_attention_heads": 16,
    "num_key_value_heads": 16, "head_dim": 16, "intermediate_size": 512, "vocab_size": 512,
    "max_position_embeddings": 512, "tie_word_embeddings": False,
}  # fmt: skip
QUANTIZED = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True}
BY_ROW = {
    "quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"], "kv_cache_scheme": None,
    "config_groups": {"group_0": {
        "targets": ["Linear"],
        "weights": {**FLOAT8, "strategy": "channel", "dynamic": False},
        "input_activations": {**FLOAT8, "strategy": "token", "dynamic": True},
    }},
}  # fmt: skip
FLAGS = {"device": "cpu", "max_model_len": 128, "max_num_seqs": 3, "kv_cache_memory_bytes": 16 << 20}


def quantized(weight: Any) -> tuple[Any, Any]:
    """Codes, and the scale of each block in bfloat16, as published."""
    rows, columns = (-(-n // 128) for n in weight.shape)
    scales = np.zeros((rows, columns), np.float32)
    codes = np.zeros(weight.shape, float8_e4m3fn)
    for i in range(rows):
        for j in range(columns):
            part = np.s_[i * 128 : (i + 1) * 128, j * 128 : (j + 1) * 128]
            scales[i, j] = np.float32(np.abs(weight[part]).max() / 448).astype(bfloat16)
            codes[part] = (weight[part] / scales[i, j]).astype(float8_e4m3fn)
    return codes, scales.astype(bfloat16)


def quantized_by_row(weight: Any) -> tuple[Any, Any]:
    """Codes, and the scale of each row in bfloat16, [N, 1]."""
    scales = (np.abs(weight).max(axis=1, keepdims=True) / np.float32(448)).astype(bfloat16)
    return (weight / scales.astype(np.float32)).astype(float8_e4m3fn), scales


@pytest.fixture(scope="module", params=["blocks", "rows"])
def folders(request: Any, tmp_path_factory: Any) -> tuple[Path, Path]:
    """A checkpoint in FP8, and one in float32 with the same values."""
    folder, rows = tmp_path_factory.mktemp("fp8"), request.param == "rows"
    source = write_random_checkpoint(RECIPE, folder / "source", CONFIG)
    with Checkpoint(source) as checkpoint:
        weights = {name: checkpoint.array(name).astype(np.float32) for name in checkpoint.names}
    packed, same = {}, {}
    for name, weight in weights.items():
        packed[name], same[name] = weight.astype(bfloat16), weight
        if name.endswith("_proj.weight"):
            codes, scales = (quantized_by_row if rows else quantized)(weight)
            packed[name], packed[name + ("_scale" if rows else "_scale_inv")] = codes, scales
            same[name] = Linear(codes, scales.astype(np.float32)).values()
    for name, tensors, config in (
        ("fp8", packed, CONFIG | {"quantization_config": BY_ROW if rows else QUANTIZED}),
        ("same", same, CONFIG),
    ):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
        write(folder / name / "model.safetensors", tensors)
    return folder / "fp8", folder / "same"


def answers(folder: Path, recipe: Any = RECIPE, **flags: Any) -> list[Any]:
    """Tokens and log-probabilities of three prompts."""
    session = Session(build(recipe, folder, **{**FLAGS, **flags}).engine)
    rng = np.random.default_rng(1)
    ids = [
        session.submit(rng.integers(0, 512, size).tolist(), 16, ignore_eos=True, logprobs=0)
        for size in (5, 40, 17)
    ]
    session.finish()
    session.engine.close()
    found = [session.outcomes[one] for one in ids]
    return [(one.tokens, [entry.logprob for entry in one.logprobs if entry]) for one in found]


PLAIN = {"activation_quantization": "off"}


def test_answers_are_those_of_the_dequantised_weights(folders: tuple[Path, Path]) -> None:
    """Bit for bit, because the sums are the same."""
    fp8, same = folders
    assert answers(fp8, **PLAIN) == answers(same)
    engine = build(RECIPE, fp8, **FLAGS).engine
    layer = engine.runner.model.weights.layers[1]
    assert layer.qkv.weight.dtype == layer.down.weight.dtype == float8_e4m3fn
    engine.close()


def test_activations_are_quantised_as_the_checkpoint_says(folders: tuple[Path, Path]) -> None:
    """Near the answers with plain activations, and not the same. Ranks quantise parts of 128 columns as one rank does;
    they sum in another order, and now and then a last bit chooses another code."""
    fp8, _ = folders
    plain, coded = answers(fp8, **PLAIN), answers(fp8)
    far = max(abs(a[1][0] - b[1][0]) for a, b in zip(plain, coded, strict=True))
    assert 0 < far < 0.5
    engine = build(RECIPE, fp8, **FLAGS).engine
    layer, blocks = engine.runner.model.weights.layers[1], engine.runner.model.config.packing.block_rows
    assert {layer.qkv.coding, layer.o.coding, layer.down.coding} == {"block" if blocks else "token"}
    engine.close()
    shared = answers(fp8, tensor_parallel_size=2)
    apart = np.mean([abs(a[1][0] - b[1][0]) for a, b in zip(shared, coded, strict=True)])
    changed = np.mean([abs(a[1][0] - b[1][0]) for a, b in zip(plain, coded, strict=True)])
    assert apart < changed


def test_ranks_share_codes_and_scales(folders: tuple[Path, Path]) -> None:
    fp8, same = folders
    got, want = answers(fp8, tensor_parallel_size=2, **PLAIN), answers(same)
    assert [tokens for tokens, _ in got] == [tokens for tokens, _ in want]


def test_adapters_go_with_codes(folders: tuple[Path, Path], tmp_path: Path) -> None:
    fp8, same = folders
    with Checkpoint(same) as checkpoint:
        weights = {name: checkpoint.array(name) for name in checkpoint.names}
    write_adapter(weights, tmp_path / "one", 8, 16, ("q_proj", "o_proj", "up_proj", "down_proj"), 0)
    found = []
    for folder in (fp8, same):
        lora = {"enable_lora": True, "lora_modules": [f"one={tmp_path / 'one'}"], **PLAIN}
        session = Session(build(RECIPE, folder, **FLAGS, **lora).engine)
        ids = [session.submit(range(9, 40), 16, ignore_eos=True, adapter=name) for name in ("", "one")]
        session.finish()
        session.engine.close()
        found.append([session.outcomes[one].tokens for one in ids])
    assert found[0] == found[1]
    assert found[0][0] != found[0][1]


def test_scales_in_another_order_would_be_noticed(folders: tuple[Path, Path], tmp_path: Path) -> None:
    fp8, same = folders
    with Checkpoint(fp8) as checkpoint:
        tensors = {name: checkpoint.array(name) for name in checkpoint.names}
    (name,) = (name for name in tensors if "layers.1.mlp.down_proj.weight_scale" in name)
    tensors[name] = tensors[name][::-1, ::-1]
    (tmp_path / "config.json").write_text((fp8 / "config.json").read_text())
    write(tmp_path / "model.safetensors", tensors)
    assert answers(tmp_path, **PLAIN) != answers(same)


def test_what_is_refused(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """A checkpoint without scales; parts of a rank that are no whole blocks; another way to quantise."""
    fp8, same = folders
    (tmp_path / "config.json").write_text((fp8 / "config.json").read_text())
    (tmp_path / "model.safetensors").symlink_to(same / "model.safetensors")
    with pytest.raises(ValueError, match=r"missing: .*weight_scale"):
        build(RECIPE, tmp_path, **FLAGS)
    whole = Config.parse(CONFIG | {"quantization_config": QUANTIZED})
    with pytest.raises(
        UnsupportedModel, match="queries of each of 4 ranks: 64; FP8 weights take multiples of 128"
    ):
        whole.of_rank(0, 4)
    with pytest.raises(UnsupportedModel, match="'fp8' in blocks of"):
        Config.parse(CONFIG | {"quantization_config": {"quant_method": "bitsandbytes"}})
    with pytest.raises(UnsupportedModel, match=r"weight_block_size is \[64, 64\]; it must be \[128, 128\]"):
        Config.parse(CONFIG | {"quantization_config": {**QUANTIZED, "weight_block_size": [64, 64]}})
    with pytest.raises(UnsupportedModel, match="activation_scheme is 'static'; it must be 'dynamic'"):
        Config.parse(CONFIG | {"quantization_config": {**QUANTIZED, "activation_scheme": "static"}})


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"weights": {**FLOAT8, "strategy": "group", "dynamic": False}}, "strategy is 'group'"),
        (
            {"weights": {**FLOAT8, "strategy": "block", "block_structure": [64, 64]}},
            r"block_structure is \[64, 64\]",
        ),
        ({"weights": {**FLOAT8, "num_bits": 6, "strategy": "channel"}}, "num_bits is 6; it must be 4 or 8"),
        ({"weights": {**FLOAT8, "type": "int", "strategy": "channel"}}, "format is 'float-quantized'"),
        ({"weights": None}, "group_0 must have weights"),
        ({"input_activations": "all"}, "input_activations: num_bits is None"),
        (
            {"input_activations": {**FLOAT8, "strategy": "token", "dynamic": "local"}},
            "dynamic is 'local'; it must be True or False",
        ),
        ({"input_activations": {**FLOAT8, "strategy": "channel", "dynamic": False}}, "strategy is 'channel'"),
        ({"input_activations": {**FLOAT8, "strategy": "group", "dynamic": True}}, "strategy is 'group'"),
        (
            {
                "weights": {**FLOAT8, "strategy": "block", "block_structure": [128, 128]},
                "input_activations": {**FLOAT8, "strategy": "token", "dynamic": True},
            },
            "strategy is 'token'; it must be 'group'",
        ),
    ],
)
def test_what_of_compressed_tensors_is_refused(change: Any, why: str) -> None:
    groups = BY_ROW["config_groups"]
    assert isinstance(groups, dict)
    group = {**groups["group_0"], **change}
    with pytest.raises(UnsupportedModel, match=why):
        Config.parse(CONFIG | {"quantization_config": {**BY_ROW, "config_groups": {"group_0": group}}})
    for odd in (None, [], {}, {"a": 1}):
        with pytest.raises(UnsupportedModel, match=r"must (be groups with|have) weights"):
            Config.parse(CONFIG | {"quantization_config": {**BY_ROW, "config_groups": odd}})
    with pytest.raises(UnsupportedModel, match="quantization_config: it is 'all'; it must be an object"):
        Config.parse(CONFIG | {"quantization_config": "all"})


@pytest.mark.parametrize(
    ("weights", "activations", "coding"),
    [
        ("channel", None, None),
        ("channel", {"strategy": "token", "dynamic": True}, "token"),
        ("tensor", {"strategy": "tensor", "dynamic": True}, "token"),
        ("tensor", {"strategy": "tensor", "dynamic": False}, "tensor"),
        ("block", {"strategy": "group", "group_size": 128, "dynamic": True}, "block"),
        ("block", None, None),
    ],
)
def test_how_activations_are_quantised(weights: str, activations: Any, coding: Any) -> None:
    given = None if activations is None else {**FLOAT8, **activations}
    group = {
        "weights": {**FLOAT8, "strategy": weights, "block_structure": [128, 128]},
        "input_activations": given,
    }
    raw = CONFIG | {"quantization_config": {**BY_ROW, "config_groups": {"group_0": group}}}
    assert Config.parse(raw).packing.coding == coding  # type: ignore[union-attr]
    assert Config.parse(raw, coded=False).packing.coding is None  # type: ignore[union-attr]


def test_fp8_takes_about_half_the_memory() -> None:
    """A plan for a GPU, with kernels that read the codes."""
    sizes = {}
    for name in ("8B", "8B-FP8"):
        source = Source(RECIPE.published()[name])
        sizes[name] = Outline(RECIPE, source, RECIPE.options(), H200).memory["weights"]
    assert 0.5 < sizes["8B-FP8"] / sizes["8B"] < 0.6
