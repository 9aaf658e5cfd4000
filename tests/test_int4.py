"""INT4 checkpoints as compressed-tensors, GPTQ and AWQ publish them: answers are those of the values that they mean."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import int4_packers as P
import numpy as np
import pytest
import test_qwen3_fp8 as fp8

from openinfer.cli import main
from openinfer.cli.explain.segments import Outline
from openinfer.kernels import H200
from openinfer.recipes.engine import SetupError, Source, UnsupportedModel
from openinfer.recipes.engine.startup import build
from openinfer.recipes.engine.testing import Session, write_random_checkpoint
from openinfer.recipes.qwen3 import RECIPE
from openinfer.recipes.qwen3.config import Config
from openinfer.recipes.qwen3_5 import RECIPE as HYBRID_RECIPE
from openinfer.tensor import Checkpoint, int32, uint8

ROOT = Path(__file__).parents[1]
PUBLISHED = ROOT / "libs/kernels/tests/published_int4.safetensors"
CONFIG = {
    "model_type": "qwen3", "hidden_size": 192, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 16, "intermediate_size": 256, "vocab_size": 512,
    "max_position_embeddings": 512, "tie_word_embeddings": False,
}  # fmt: skip
FLAGS = {"device": "cpu", "max_model_len": 128, "max_num_seqs": 3, "kv_cache_memory_bytes": 16 << 20}


write, write_adapter, answers = fp8.write, fp8.write_adapter, fp8.answers


def folders_of(folder: Path, recipe: Any, config: Any, form: str, packs: Any) -> tuple[Path, Path]:
    """A checkpoint in a format, and one in float32 with the same values. packs: whether a tensor is packed."""
    source = write_random_checkpoint(recipe, folder / "source", config)
    with Checkpoint(source) as checkpoint:
        weights = {name: checkpoint.array(name).astype(np.float32) for name in checkpoint.names}
    packed: dict[str, Any] = {}
    same = dict(weights)
    for name, weight in weights.items():
        if ".experts." in name:
            same[name], apart = experts_of(name, weight, form)
            packed |= apart
            continue
        if not packs(name):
            packed[name] = weight
            continue
        tensors, same[name] = P.packed(form, weight)
        packed |= {f"{name.removesuffix('.weight')}.{key}": value for key, value in tensors.items()}
    said = config | {"quantization_config": P.FORMATS[form][2]}
    for name, tensors, raw in (("packed", packed, said), ("same", same, config)):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(raw))
        write(folder / name / "model.safetensors", tensors)
    return folder / "packed", folder / "same"


def experts_of(name: str, weight: Any, form: str) -> tuple[Any, dict[str, Any]]:
    """The values of all experts in one tensor [E, N, K], and the packed tensors of each, as published."""
    at, kind = name.rsplit(".", 1)
    modules = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
    found, values = {}, []
    for expert, one in enumerate(weight):
        for module, part in zip(modules, np.split(one, len(modules)), strict=True):
            tensors, meant = P.packed(form, part)
            values.append(meant)
            found |= {f"{at}.{expert}.{module}.{key}": value for key, value in tensors.items()}
    return np.concatenate(values).reshape(weight.shape), found


def some(usual: str) -> list[Any]:
    """All formats; those beside the usual one are slow tests."""
    return [pytest.param(form, marks=() if form == usual else pytest.mark.slow) for form in P.FORMATS]


@pytest.fixture(scope="module", params=P.FORMATS)
def folders(request: Any, tmp_path_factory: Any) -> tuple[Path, Path]:
    """Of each format."""
    folder = tmp_path_factory.mktemp("int4")
    return folders_of(folder, RECIPE, CONFIG, request.param, lambda name: name.endswith("_proj.weight"))


def test_the_packers_of_these_tests_are_the_published_ones(tmp_path: Path) -> None:
    """From the codes and zero points that a public packer wrote, the same tensors."""
    (tmp_path / "model.safetensors").write_bytes(PUBLISHED.read_bytes())
    with Checkpoint(tmp_path) as checkpoint:
        for module, pack, order in (
            ("symmetric", lambda q: P.compressed(q, True), "N"),
            ("zeros", lambda q: P.compressed(q, False), "N"),
            ("gptq", P.gptq, "K"),
            ("awq", P.awq, "K"),
        ):
            values = checkpoint.array(f"{module}.values")
            scales = checkpoint.array(f"{module}.{'weight_scale' if order == 'N' else 'scales'}")
            scales = scales if order == "N" else scales.T
            zeros = np.full(scales.shape, 8)
            if module in ("zeros", "awq"):  # the zero points follow from the packed ones by shifts alone
                name = "weight_zero_point" if module == "zeros" else "qzeros"
                zeros = shifted(checkpoint.array(f"{module}.{name}"), module)
            codes = np.rint(values / np.repeat(scales.astype(np.float32), P.GROUP, axis=1)) + np.repeat(
                zeros, P.GROUP, axis=1
            )
            for name, tensor in pack(P.Quantized(codes.astype(int), scales, zeros)).items():
                np.testing.assert_array_equal(
                    tensor, checkpoint.array(f"{module}.{name}"), f"{module}.{name}"
                )


def shifted(packed: Any, module: str) -> Any:
    """Zero points [N, groups] of packed ones."""
    wide = packed.view(np.uint32).astype(np.int64)
    if module == "zeros":
        return np.stack([wide >> 4 * place & 15 for place in range(8)], axis=1).reshape(-1, wide.shape[1])
    columns = [wide >> 4 * P.AWQ_ORDER.index(column) & 15 for column in range(8)]
    return np.stack(columns, axis=-1).reshape(len(wide), -1).T


def test_answers_are_those_of_the_dequantised_weights(folders: tuple[Path, Path]) -> None:
    """Bit for bit, because the sums are the same."""
    packed, same = folders
    assert answers(packed) == answers(same)
    engine = build(RECIPE, packed, **FLAGS).engine
    layer = engine.runner.model.weights.layers[1]
    assert {layer.qkv.weight.dtype, layer.down.weight.dtype} == {uint8}
    assert layer.gate_up.scales.dtype == int32
    engine.close()


@pytest.mark.parametrize("folders", some("AWQ"), indirect=True)
def test_ranks_share_codes_and_words(folders: tuple[Path, Path]) -> None:
    packed, same = folders
    got, want = answers(packed, tensor_parallel_size=2), answers(same)
    assert [tokens for tokens, _ in got] == [tokens for tokens, _ in want]


@pytest.mark.parametrize("folders", some("W4A16_ASYM"), indirect=True)
def test_adapters_and_drafts_go_with_codes(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """On two ranks."""
    packed, same = folders
    with Checkpoint(same) as checkpoint:
        weights = {name: checkpoint.array(name) for name in checkpoint.names}
    write_adapter(weights, tmp_path / "one", 8, 16, ("q_proj", "o_proj", "up_proj", "down_proj"), 0)
    drafts = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}'
    found = []
    for folder, flags in ((packed, {"speculative_config": drafts, "tensor_parallel_size": 2}), (same, {})):
        lora = {"enable_lora": True, "lora_modules": [f"one={tmp_path / 'one'}"]}
        session = Session(build(RECIPE, folder, **FLAGS, **lora, **flags).engine)
        ids = [session.submit(range(9, 40), 16, ignore_eos=True, adapter=name) for name in ("", "one")]
        session.finish()
        session.engine.close()
        found.append([session.outcomes[one].tokens for one in ids])
    assert found[0] == found[1]
    assert found[0][0] != found[0][1]


@pytest.mark.parametrize("folders", ["AWQ"], indirect=True)
def test_zero_points_that_are_dropped_would_be_noticed(folders: tuple[Path, Path], tmp_path: Path) -> None:
    packed, same = folders
    with Checkpoint(packed) as checkpoint:
        tensors = {name: checkpoint.array(name) for name in checkpoint.names}
    (tmp_path / "config.json").write_text((packed / "config.json").read_text())
    eights = np.int32(-0x77777778)  # 0x88888888
    write(
        tmp_path / "model.safetensors",
        {name: np.full_like(t, eights) if name.endswith("qzeros") else t for name, t in tensors.items()},
    )
    assert answers(tmp_path) != answers(same)


@pytest.mark.parametrize("folders", ["AWQ"], indirect=True)
def test_the_control_of_scales_changes_answers(folders: tuple[Path, Path]) -> None:
    """So a gate on a GPU can see scales in another order."""
    built = build(RECIPE, folders[0], **FLAGS)
    model = built.engine.runner.model
    controls = {control.name: control.changes for control in built.blueprint.controls(model)}
    [(words, wrong)] = controls["scales of other rows in one layer"]
    found = []
    for values in (np.array(words.numpy()), wrong):
        words.copy_from(values)
        session = Session(built.engine)
        one = session.submit(range(9, 40), 16, ignore_eos=True, logprobs=0)
        session.finish()
        found.append([entry.logprob for entry in session.outcomes[one].logprobs if entry])
    built.engine.close()
    assert np.abs(np.subtract(*found)).max() > 0.01


def test_explain_names_the_columns_of_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(RECIPE.published()["4B-AWQ"]))
    assert main(["explain", str(tmp_path), "--max-num-seqs", "8", "--max-num-batched-tokens", "64"]) == 0
    text = capsys.readouterr().out
    assert "gate_up_silu 19456x2560" in text
    assert "linear_add 2560x9728" in text


@pytest.mark.parametrize("folders", ["GPTQ"], indirect=True)
def test_act_order_is_refused_by_name(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """Where config.json does not say that columns are in act-order, and with several ranks."""
    packed, _ = folders
    raw = json.loads((packed / "config.json").read_text())
    ordered = Config.parse({**raw, "quantization_config": {**raw["quantization_config"], "desc_act": True}})
    with pytest.raises(UnsupportedModel, match="INT4 in act-order weights are run on one rank"):
        ordered.of_rank(0, 2)
    with Checkpoint(packed) as checkpoint:
        tensors = {name: checkpoint.array(name) for name in checkpoint.names}
    name = "model.layers.0.mlp.down_proj.g_idx"
    (tmp_path / "config.json").write_text(json.dumps(raw))
    write(tmp_path / "model.safetensors", tensors | {name: np.ascontiguousarray(tensors[name][::-1])})
    with pytest.raises(ValueError, match=r"down_proj.* columns are ordered by activations"):
        build(RECIPE, tmp_path, **FLAGS)


@pytest.mark.parametrize(
    ("form", "change", "why"),
    [
        ("GPTQ", {"bits": 3}, "bits is 3; it must be 4 or 8"),
        ("GPTQ", {"sym": False}, "sym is False; it must be True"),
        ("GPTQ", {"group_size": -1}, "group_size is -1; it must be 32 or 64 or 128"),
        ("GPTQ", {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
        ("AWQ", {"version": "gemv"}, "version is 'gemv'"),
        ("AWQ", {"zero_point": False}, "zero_point is False"),
        ("W4A16", {"format": "marlin-24"}, "format is 'marlin-24'"),
    ],
)
def test_what_is_refused(form: str, change: dict[str, Any], why: str) -> None:
    said = P.FORMATS[form][2]
    with pytest.raises(UnsupportedModel, match=why):
        Config.parse(CONFIG | {"quantization_config": {**said, **change}})


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"actorder": "group", "symmetric": False}, "symmetric is False"),
        ({"strategy": "channel"}, "strategy is 'channel'"),
        ({"group_size": 16}, "group_size is 16"),
        ({"type": "float"}, "format is 'pack-quantized'; it must be 'nvfp4-pack-quantized'"),
    ],
)
def test_what_of_compressed_tensors_is_refused(change: dict[str, Any], why: str) -> None:
    said = P.FORMATS["W4A16"][2]
    weights = {**P.WEIGHTS, "symmetric": True, **change}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    with pytest.raises(UnsupportedModel, match=why):
        Config.parse(CONFIG | {"quantization_config": {**said, "config_groups": groups}})
    groups["group_0"] = {"weights": {**P.WEIGHTS, "symmetric": True}, "input_activations": {"num_bits": 8}}
    with pytest.raises(UnsupportedModel, match="input_activations is given"):
        Config.parse(CONFIG | {"quantization_config": {**said, "config_groups": groups}})


def test_parts_of_ranks_are_whole_groups() -> None:
    whole = Config.parse(CONFIG | {"quantization_config": P.FORMATS["AWQ"][2]})
    with pytest.raises(
        UnsupportedModel, match="queries of each of 8 ranks: 16; INT4 weights take multiples of 32"
    ):
        whole.of_rank(0, 8)


def test_int4_takes_about_a_third_of_the_memory() -> None:
    """A plan for a GPU; embeddings and head stay in BF16."""
    sizes, options = {}, RECIPE.options(max_num_seqs=8, max_num_batched_tokens=64)
    for name in ("8B", "8B-AWQ"):
        source = Source(RECIPE.published()[name])
        sizes[name] = Outline(RECIPE, source, options, H200).memory["weights"]
    assert 0.36 < sizes["8B-AWQ"] / sizes["8B"] < 0.40


TEXT = {
        "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2, "full_attention_interval": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4, "intermediate_size": 128, "max_position_embeddings": 512, "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
        "mtp_num_hidden_layers": 0, "eos_token_id": 511,
}  # fmt: skip
HYBRID = {"model_type": "qwen3_5", "tie_word_embeddings": True, "text_config": TEXT}


MIXTURE = {
    "model_type": "qwen3_5_moe", "tie_word_embeddings": True,
    "text_config": {
        **{key: value for key, value in TEXT.items() if key != "intermediate_size"}, "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64,
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "form"),
    [
        pytest.param(config, form, id=f"{kind}-{form}", marks=() if form in usual else pytest.mark.slow)
        for kind, config, usual in (("dense", HYBRID, ("AWQ",)), ("mixture", MIXTURE, ("GPTQ",)))
        for form in P.FORMATS
    ],
)
def test_hybrids_run_codes(config: Any, form: str, tmp_path: Path) -> None:
    """Qwen3.5. Small projections stay plain, as in published checkpoints; so they are a product of their own,
    whose sums have another order."""

    def packs(name: str) -> bool:
        small = name.endswith(("in_proj_a.weight", "in_proj_b.weight"))
        return name.endswith(("_proj.weight", "_proj_qkv.weight", "_proj_z.weight")) and not small

    packed, same = folders_of(tmp_path, HYBRID_RECIPE, config, form, packs)
    want = answers(same, recipe=HYBRID_RECIPE)
    for ranks in (1, 2):
        got = answers(packed, recipe=HYBRID_RECIPE, tensor_parallel_size=ranks)
        for (tokens, logprobs), (same_tokens, same_logprobs) in zip(got, want, strict=True):
            assert tokens == same_tokens
            np.testing.assert_allclose(logprobs, same_logprobs, atol=1e-4)
    engine = build(HYBRID_RECIPE, packed, **FLAGS).engine
    mixers = [layer.mixer for layer in engine.runner.model.weights.layers]
    assert {mixers[0].in_proj.weight.dtype, mixers[1].qkv.weight.dtype} == {uint8}
    assert mixers[0].ba.scales is None
    assert engine.runner.model.weights.layers[1].mlp.gate_up.weight.dtype == uint8
    engine.close()


def test_random_weights_are_refused_where_columns_have_an_order(tmp_path: Path) -> None:
    for form in ("GPTQ", "AWQ"):
        said = CONFIG | {"quantization_config": P.FORMATS[form][2]}
        (tmp_path / "config.json").write_text(json.dumps(said))
        if form == "GPTQ":
            with pytest.raises(SetupError, match=r"--load-format dummy: a GPTQ .* take a config.json of AWQ"):
                build(RECIPE, tmp_path, load_format="dummy", **FLAGS)
        else:
            build(RECIPE, tmp_path, load_format="dummy", **FLAGS).engine.close()
