"""Packed checkpoints as publishers spell them: modules that stay plain, scales of a cache, heads, quant_methods."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import int4_packers as P
import number_packers as packers
import numpy as np
import pytest
import test_int4 as int4
import test_qwen3_fp8 as fp8

from openinfer.cli.explain.segments import Outline
from openinfer.kernels import H200
from openinfer.kernels.authoring import Linear
from openinfer.recipes.engine import Source, UnsupportedModel
from openinfer.recipes.engine.startup import build
from openinfer.recipes.engine.testing import Session, write_random_checkpoint
from openinfer.recipes.qwen3 import RECIPE
from openinfer.recipes.qwen3_5 import RECIPE as HYBRID_RECIPE
from openinfer.tensor import Checkpoint, bfloat16, float8_e4m3fn, uint8

Tensors = dict[str, Any]
CONFIG = fp8.CONFIG | {"num_hidden_layers": 2}
PLAIN, HELD = "model.layers.1.mlp.down_proj", "model.layers.0.mlp.down_proj"
STATIC = {"quant_method": "fp8", "activation_scheme": "static"}
MODELOPT = {
    "quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"], "kv_cache_scheme": {"num_bits": 8},
    "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float"}, "targets": ["Linear"]}},
}  # fmt: skip


@pytest.fixture(scope="module")
def plain(tmp_path_factory: Any) -> Tensors:
    return tensors_of(write_random_checkpoint(RECIPE, tmp_path_factory.mktemp("plain") / "source", CONFIG))


def tensors_of(folder: Path) -> Tensors:
    with Checkpoint(folder) as checkpoint:
        return {name: checkpoint.array(name).astype(np.float32) for name in checkpoint.names}


def save(folder: Path, tensors: Tensors, quantization: Any = None) -> Path:
    folder.mkdir(exist_ok=True)
    said = {} if quantization is None else {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(CONFIG | said))
    fp8.write(folder / "model.safetensors", tensors)
    return folder


def answer(folder: Path, **flags: Any) -> Any:
    """Tokens and log-probabilities."""
    session = Session(build(RECIPE, folder, **fp8.FLAGS, **flags).engine)
    one = session.submit(range(9, 29), 6, ignore_eos=True, logprobs=0)
    session.finish()
    session.engine.close()
    found = session.outcomes[one]
    return found.tokens, [entry.logprob for entry in found.logprobs if entry]


def packed(
    plain: Tensors, pack: Callable[..., tuple[Tensors, Any]], *, heads: bool = False, named: bool = False
) -> tuple[Tensors, Tensors]:
    """All projections but PLAIN packed; and the values that the codes mean. pack: tensors of a module by their last
    names, and those values. heads: the head and the embedding too. named: pack gets the module's name."""
    found, same = dict(plain), dict(plain)
    for name, weight in plain.items():
        module = name.removesuffix(".weight")
        ends = ("_proj", "lm_head", "embed_tokens") if heads else ("_proj",)
        if module.endswith(ends) and module != PLAIN:
            del found[name]
            tensors, same[name] = pack(weight, module) if named else pack(weight)
            found |= {f"{module}.{key}": value for key, value in tensors.items()}
    return found, same


def by_tensor(weight: Any) -> tuple[Tensors, Any]:
    scale = np.float32(np.abs(weight).max() / 448)
    codes = (weight / scale).astype(float8_e4m3fn)
    scales = {"weight_scale": np.array(scale), "input_scale": np.array(0.05, np.float32)}
    return {"weight": codes, **scales}, codes.astype(np.float32) * scale


def by_row(weight: Any) -> tuple[Tensors, Any]:
    scales = (np.abs(weight).max(1, keepdims=True) / 448).astype(bfloat16)
    codes = (weight / scales.astype(np.float32)).astype(float8_e4m3fn)
    return {"weight": codes, "weight_scale": scales}, codes.astype(np.float32) * scales.astype(np.float32)


def by_block(weight: Any) -> tuple[Tensors, Any]:
    codes, scales = fp8.quantized(weight)
    meant = Linear(codes, scales.astype(np.float32)).values()
    return {"weight": codes, "weight_scale_inv": scales}, meant


WAYS: dict[str, tuple[Any, Any]] = {
    "blocks": (fp8.QUANTIZED | {"modules_to_not_convert": [PLAIN]}, by_block),
    "tensor": (STATIC, by_tensor),
    "rows": (fp8.BY_ROW, by_row),
    "W4A16": (P.FORMATS["W4A16"][2], lambda weight: P.packed("W4A16", weight)),
    "AWQ": (P.FORMATS["AWQ"][2], lambda weight: P.packed("AWQ", weight)),
    **packers.WAYS,
}


@pytest.mark.parametrize(
    "way",
    [*(pytest.param(w, marks=[pytest.mark.slow] if w in ("tensor", "rows", "W4A16") else []) for w in WAYS)],
)
def test_a_module_may_stay_plain(way: str, plain: Tensors, tmp_path: Path) -> None:
    said, pack = WAYS[way]
    found, same = packed(plain, pack)
    got = answer(save(tmp_path / "packed", found, said), activation_quantization="off")
    assert got == answer(save(tmp_path / "same", same))


@pytest.mark.parametrize("way", ["blocks", "rows", "tensor", "AWQ", "NVFP4 (modelopt)", "INT8"])
def test_the_head_and_the_embedding_may_be_packed(way: str, plain: Tensors, tmp_path: Path) -> None:
    said, pack = WAYS[way]
    found, same = packed(plain, pack, heads=True)
    said = {key: value for key, value in said.items() if key != "ignore"}
    got = answer(save(tmp_path / "packed", found, said), activation_quantization="off")
    assert got == answer(save(tmp_path / "same", same))


def test_modules_may_have_formats_of_their_own(plain: Tensors, tmp_path: Path) -> None:
    """compressed-tensors by expressions, after which comes the class of all linear layers; modelopt by names, of which
    the longest counts."""
    int8, nvfp4 = (packers.WAYS[way][0]["config_groups"]["group_0"] for way in ("INT8", "NVFP4"))
    groups = {"rest": nvfp4, "attention": int8 | {"targets": ["re:.*self_attn.*"]}}
    ways = {"mlp": packers.WAYS["NVFP4"][1], "self_attn": packers.WAYS["INT8"][1]}
    said = {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": groups}

    def pack(weight: Any, module: str) -> Any:
        return ways[module.split(".")[-2]](weight)

    found, same = packed(plain, pack, named=True)
    want = answer(save(tmp_path / "same", same))
    assert answer(save(tmp_path / "packed", found, said), activation_quantization="off") == want
    for odd, why in (
        ({"attention": int8 | {"targets": ["re:("]}}, r"targets: '\(': missing"),
        ({"attention": int8 | {"targets": ["re:(.+)+$"]}}, "repeats too much"),
        ({"attention": int8 | {"targets": ["re:" + 5 * ".*"]}}, "repeats too much"),
        (
            {"attention": int8 | {"targets": [HELD.replace("down", "gate")]}},
            "gate_proj is INT8 by config.json, and has no",
        ),
    ):
        with pytest.raises(UnsupportedModel, match=why):
            build(RECIPE, save(tmp_path / "odd", found, said | {"config_groups": groups | odd}), **fp8.FLAGS)
    layers = {"model.layers.0": {"quant_algo": "NVFP4"}, "model.layers.0.self_attn": {"quant_algo": "fp8"}}
    layers |= {name.replace("s.0", "s.1"): value for name, value in layers.items()}
    mixed = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    ways = {"mlp": packers.WAYS["NVFP4 (modelopt)"][1], "self_attn": by_tensor}
    found, same = packed(plain, pack, named=True)
    want = answer(save(tmp_path / "same", same))
    assert answer(save(tmp_path / "packed", found, mixed), activation_quantization="off") == want
    (tmp_path / "packed" / "config.json").write_text(
        json.dumps(CONFIG)
    )  # older exports have a file of their own
    (tmp_path / "packed" / "hf_quant_config.json").write_text(json.dumps({"quantization": mixed}))
    assert answer(tmp_path / "packed", activation_quantization="off") == want


@pytest.mark.parametrize(("way", "coding"), [("INT8", "int8 token"), ("INT8 by tensor", "int8 tensor")])
def test_activations_of_int8_are_rounded(way: str, coding: Any, plain: Tensors, tmp_path: Path) -> None:
    said, pack = WAYS[way]
    found, _ = packed(plain, pack)
    engine = build(RECIPE, save(tmp_path / "packed", found, said), **fp8.FLAGS).engine
    layers = engine.runner.model.weights.layers
    assert {layer.qkv.coding for layer in layers} == {coding}
    engine.close()
    rounded, exact = (answer(tmp_path / "packed", activation_quantization=mode) for mode in ("on", "off"))
    assert rounded != exact


@pytest.mark.parametrize(
    ("way", "ending", "value", "why"),
    [
        ("NVFP4 (modelopt)", "weight_scale_2", 0.0, "the scale of the tensor is 0.0; it must be above zero"),
        ("NVFP4", "weight_global_scale", 0.0, "a scale is not finite"),
        ("NVFP4 (modelopt)", "weight_scale_2", np.nan, "a scale is not finite"),
        ("NVFP4", "weight_scale", np.nan, "a scale is not finite"),
        ("NVFP4", "weight_scale", -1.0, "a scale is negative"),
        ("MXFP4", "weight_scale", 255, "a scale is not finite"),
        ("INT8", "weight_scale", np.inf, "a scale is not finite"),
        ("GPTQ 8 bits", "qzeros", 0, "a zero point is not 128"),
        ("GPTQ act-order", "g_idx", 99, "g_idx names groups 0 to 99; there are"),
    ],
)
def test_damage_is_named(way: str, ending: str, value: Any, why: str, plain: Tensors, tmp_path: Path) -> None:
    said, pack = WAYS[way]
    found, _ = packed(plain, pack)
    name = f"{HELD}.{ending}"
    found[name] = found[name].copy()
    found[name].reshape(-1)[:1] = value
    with pytest.raises(ValueError, match=rf"down_proj.*{why}") as caught:
        build(RECIPE, save(tmp_path / "packed", found, said), **fp8.FLAGS)
    assert "\n" not in str(caught.value)


HYBRID = int4.HYBRID | {"text_config": int4.TEXT | {"num_hidden_layers": 4}}


@pytest.mark.parametrize(
    ("recipe", "config"), [(RECIPE, int4.CONFIG | {"num_hidden_layers": 3}), (HYBRID_RECIPE, HYBRID)]
)
def test_a_plan_has_the_kernels_of_plain_and_packed_layers(recipe: Any, config: Any, tmp_path: Path) -> None:
    """On a GPU all kernels are compiled before the first step."""

    def packs(name: str) -> bool:
        return name.endswith("_proj.weight") and not any(f"layers.{layer}." in name for layer in (2, 3))

    folder, _ = int4.folders_of(tmp_path, recipe, config, "AWQ", packs)
    with Checkpoint(folder) as checkpoint:
        source = dataclasses.replace(Source.read(folder), checkpoint=checkpoint)
        outline = Outline(recipe, source, recipe.options(max_model_len=128), H200)
    calls = [call for calls in outline.steps.values() for call in calls if call.op.name == "gate_up_silu"]
    assert {call.args.weight.weight.dtype for call in calls} == {uint8, bfloat16}


def test_scales_of_one_value_and_of_a_cache(plain: Tensors, tmp_path: Path) -> None:
    """[] and [1] are the same, and so are three ways to say FP8 by tensor. Scales of a cache are not needed."""
    found, _ = packed(plain, by_tensor)
    shaped = {name: value.reshape(1) if value.ndim == 0 else value for name, value in found.items()}
    cache = {
        f"model.layers.{layer}.self_attn.{name}": np.ones(shape, np.float32)
        for layer in range(2)
        for name, shape in (("k_scale", 1), ("v_proj.v_scale", ()))
    }
    activations = {**fp8.FLOAT8, "strategy": "tensor", "dynamic": False}
    weights = {**fp8.FLOAT8, "strategy": "tensor", "dynamic": False}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    compressed = {**fp8.BY_ROW, "config_groups": {"a": group}, "kv_cache_scheme": fp8.FLOAT8}
    want = answer(save(tmp_path / "a", found, STATIC))
    assert answer(save(tmp_path / "b", shaped | cache, compressed)) == want
    assert answer(save(tmp_path / "c", found | cache, MODELOPT)) == want


def test_gptq_of_auto_round_has_no_index(plain: Tensors, tmp_path: Path) -> None:
    found, _ = packed(plain, lambda weight: P.packed("GPTQ", weight))
    said = {"quant_method": "auto-round", "bits": 4, "group_size": P.GROUP, "sym": True, "data_type": "int"}
    want = answer(save(tmp_path / "gptq", found, P.FORMATS["GPTQ"][2]))
    less = {name: value for name, value in found.items() if not name.endswith("g_idx")}
    form = {"packing_format": "auto_round:auto_gptq"}
    assert answer(save(tmp_path / "auto", less, said | form)) == want
    for change, why in (({"sym": False}, "sym is False"), ({"packing_format": "x"}, "packing_format is 'x'")):
        with pytest.raises(UnsupportedModel, match=f"quant_method 'auto-round': {why}"):
            build(RECIPE, save(tmp_path / "bad", less, said | change), **fp8.FLAGS)


@pytest.mark.parametrize(
    ("change", "said", "why"),
    [
        ({}, fp8.QUANTIZED | {"ignore": [HELD]}, f"ignore names {HELD}, which is packed in the checkpoint"),
        ({}, None, r"the key is missing, and the checkpoint has .*\.weight_scale_inv; take the publisher's"),
        (
            {"model.layers.0.self_attn.q_proj": None},
            fp8.QUANTIZED,
            r"q_proj, .* some are FP8 and some are not",
        ),
        ({}, MODELOPT | {"quant_algo": "W4A8_AWQ"}, "quant_algo is 'W4A8_AWQ'; it must be 'FP8' or 'NVFP4'"),
        ({}, {"quant_method": "fp8"}, "activation_scheme is None; it must be 'dynamic' or 'static'"),
        ({}, {"quant_method": "bitsandbytes"}, "quant_method is 'bitsandbytes'"),
    ],
)
def test_what_is_refused_by_name(change: Any, said: Any, why: str, plain: Tensors, tmp_path: Path) -> None:
    found, _ = packed(plain, by_block)
    for module, scales in change.items():
        found[module + ".weight"] = plain[module + ".weight"]
        found.pop(module + ".weight_scale_inv", None)
        if scales is not None:
            found |= {
                f"{module}.{key}": value for key, value in by_block(plain[module + ".weight"])[0].items()
            }
    with pytest.raises(ValueError, match=why) as caught:
        build(RECIPE, save(tmp_path / "packed", found, said), **fp8.FLAGS)
    assert "\n" not in str(caught.value)
    assert caught.value.user_can_mend  # type: ignore[attr-defined]
