"""The DeepSeek-V3 recipe against what transformers makes of the golden checkpoints, and models that are wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from deepseek_v3_form import (
    CHECKPOINT,
    CHECKPOINTS,
    CONFIG,
    HEADS,
    LATENT,
    NAME,
    ROTARY,
    SPARSE,
    C,
    tensors,
    write_checkpoint,
)
from golden_rows import start_row
from int4_packers import compressed, quantized
from served_streams import check_greedy_tokens

from openinfer.cli import recipes
from openinfer.cli.selftest import gate
from openinfer.kernels import CpuPack
from openinfer.kernels.formats.linear import Linear
from openinfer.kernels.testing import of_the_day
from openinfer.recipes.deepseek_v3 import RECIPE
from openinfer.recipes.deepseek_v3.config import Config
from openinfer.recipes.deepseek_v3.published import config_json
from openinfer.recipes.deepseek_v3.weights import Mixture
from openinfer.recipes.engine import SetupError, Source
from openinfer.recipes.engine.startup import build
from openinfer.recipes.engine.testing import write_random_checkpoint
from openinfer.recipes.engine.testing.checkpoint import write_tensors
from openinfer.tensor import Checkpoint, Tensor, bfloat16

TOLERANCE = 1e-3
MTP = '{"method": "mtp", "num_speculative_tokens": 2}'
PUBLISHED = config_json("DeepSeek-V3")


def logits(place: Any, golden: Any, index: int, change: Any = lambda model: model) -> Any:
    model, prompt = change(place(RECIPE, CHECKPOINTS[golden.facts["name"]], [65])), golden.prompt(index)
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


@pytest.fixture(scope="module", params=SPARSE)
def sparse(request: Any, golden_of: Any) -> Any:
    return golden_of(request.param)


@pytest.mark.parametrize("index", range(2))
def test_logits_of_chosen_tokens(place: Any, sparse: Any, index: int) -> None:
    expected = sparse.numbers[f"p{index}.logits_fp32"][-1]
    np.testing.assert_allclose(logits(place, sparse, index), expected, atol=TOLERANCE, rtol=0)


def wrongly_chosen(model: Any, fault: str) -> Any:
    """The model with a fault of the choice of tokens."""
    c, layers = model.config, model.weights.layers
    match fault:
        case "one token less" | "all tokens":
            count = c.index.topk - 1 if fault == "one token less" else 512
            selected = Tensor.from_numpy(np.zeros((512, count), np.int32))
            return replace(model, buffers=replace(model.buffers, selected=selected))
        case "the other rotation":
            place = np.arange(c.index.dim)
            place[-c.rope_dim :] = place[-c.rope_dim :].reshape(2, -1).T.ravel()
            for own in [layer.attention.indexer for layer in layers if layer.attention.indexer]:
                own.norm.numpy()[:] = own.norm.numpy()[:, place]
    for own in [layer.attention.indexer for layer in layers if layer.attention.indexer]:
        if fault == "keys without a bias":
            own.norm.numpy()[1] = 0
        if fault == "heads of one weight":
            own.weights.weight.numpy()[:] = own.weights.weight.numpy()[:1]
    return model


@pytest.mark.parametrize(
    "fault",
    ["one token less", "all tokens", "the other rotation", "keys without a bias", "heads of one weight", *FAULTS],
)  # fmt: skip
def test_a_wrong_choice_of_tokens_is_noticed(place: Any, sparse: Any, fault: str) -> None:
    if sparse.facts["name"] == "glm_moe_dsa-tiny" and ("mscale" in fault or "groups" in fault):
        return  # it has none
    expected = sparse.numbers["p1.logits_fp32"][-1]
    wrong = logits(place, sparse, 1, lambda model: without(wrongly_chosen(model, fault), fault)) - expected
    assert np.abs(wrong).max() > 20 * TOLERANCE


WAYS: dict[str, dict[str, Any]] = {
    "2 ranks": {"tensor_parallel_size": 2},
    "chunks": {"max_num_batched_tokens": 16},
    "4 ranks": {"tensor_parallel_size": 4},
    "drafts": {"speculative_config": MTP},
}
FIRST, SECOND = SPARSE
OF_BOTH = [(FIRST, "2 ranks"), (SECOND, "chunks"), (SECOND, "4 ranks"), (FIRST, "drafts"),
           (SECOND, "2 ranks"), (FIRST, "chunks"), (FIRST, "4 ranks"), (SECOND, "drafts")]  # fmt: skip
"""Each day has ranks of one model and another way of the other."""


@pytest.mark.parametrize(("sparse", "way"), of_the_day(OF_BOTH, 2), indirect=["sparse"])
def test_greedy_tokens_of_chosen_tokens(session: Any, sparse: Any, way: str) -> None:
    """Ranks, cuts of a prompt, a cached prefix and drafts change no token."""
    asked = session(CHECKPOINTS[sparse.facts["name"]], max_model_len=352, **WAYS[way])
    for round in range(2):
        for index in (0, 1):
            expected = sparse.numbers[f"p{index}.greedy_ids"].tolist()[:16]
            one = asked.submit(sparse.prompt(index), len(expected), ignore_eos=True)
            asked.finish()
            assert asked.outcomes[one].tokens == expected
            assert (asked.outcomes[one].cached > 0) == (round == 1)


def in_fp8(folder: Path, more: dict[str, Any]) -> tuple[Path, Path]:
    """A checkpoint in FP8 blocks, as published, and one with the same values in float32."""
    sizes = {
        **more,
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


@pytest.mark.parametrize("name", of_the_day([NAME, "deepseek_v32-tiny"]))
def test_fp8_checkpoints_and_their_ranks(session: Any, tmp_path: Path, name: str) -> None:
    """The absorbed projections are made of codes and scales, and an indexer's rows are reordered: the tokens and
    log-probabilities of a plain twin."""
    found, prompt = [], [(7 * n * n + 11) % 512 for n in range(40)]
    more = {**SPARSE[name], "index_head_dim": 128} if name in SPARSE else {}
    source, twin = in_fp8(tmp_path, more)
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
    assert rounded.mean() < (0.5 if name == NAME else 2)  # other tokens are chosen, too


def normed(x: Any, weight: Any) -> Any:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + C["rms_norm_eps"]) * weight


def gated(x: Any, w: Any, at: str) -> Any:
    gate = x @ w[at + "gate_proj.weight"].T
    return (gate / (1 + np.exp(-gate)) * (x @ w[at + "up_proj.weight"].T)) @ w[at + "down_proj.weight"].T


def turned(x: Any) -> Any:
    """x [T, ..., r] rotated by its position, in pairs, at YaRN's frequencies and times its scale."""
    config = Config.parse(C)
    angle = np.arange(len(x))[:, None] * config.inv_freq.astype(np.float64)
    turn = np.exp(1j * angle).reshape(len(x), *(1,) * (x.ndim - 2), -1) * config.rope_scale
    pairs = (x[..., 0::2] + 1j * x[..., 1::2]) * turn
    return np.stack([pairs.real, pairs.imag], axis=-1).reshape(x.shape)


def layer_of(w: Any, n: int, x: Any) -> Any:
    """A layer by its definition in the README of the recipe, with keys and values made of latents, in float64."""
    at, count, plain = f"model.layers.{n}.", len(x), C["qk_nope_head_dim"]
    attention = at + "self_attn."
    h = normed(x, w[at + "input_layernorm.weight"])
    q = normed(h @ w[attention + "q_a_proj.weight"].T, w[attention + "q_a_layernorm.weight"])
    q = (q @ w[attention + "q_b_proj.weight"].T).reshape(count, HEADS, -1)
    both = h @ w[attention + "kv_a_proj_with_mqa.weight"].T
    latent = normed(both[:, :LATENT], w[attention + "kv_a_layernorm.weight"])
    kv = (latent @ w[attention + "kv_b_proj.weight"].T).reshape(count, HEADS, -1)
    scores = np.einsum("thk,shk->hts", q[:, :, :plain], kv[:, :, :plain])
    scores += np.einsum("thr,sr->hts", turned(q[:, :, plain:]), turned(both[:, LATENT:]))
    scores *= (plain + ROTARY) ** -0.5 * (0.1 * np.log(8.0) + 1) ** 2
    scores[:, *np.triu_indices(count, 1)] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    values = np.einsum("hts,shv->thv", weights, kv[:, :, plain:]).reshape(count, -1)
    x = x + values @ w[attention + "o_proj.weight"].T
    h = normed(x, w[at + "post_attention_layernorm.weight"])
    if at + "mlp.gate_proj.weight" in w:
        return x + gated(h, w, at + "mlp.")
    s = 1 / (1 + np.exp(-h @ w[at + "mlp.gate.weight"].T))
    left = s + w[at + "mlp.gate.e_score_correction_bias"]
    groups = left.reshape(count, C["n_group"], -1)
    best = np.argsort(-np.sort(groups, axis=2)[:, :, -2:].sum(axis=2), axis=1)[:, : C["topk_group"]]
    kept = np.zeros(groups.shape[:2], bool)
    np.put_along_axis(kept, best, True, 1)
    left = np.where(np.repeat(kept, groups.shape[2], axis=1), left, -np.inf)
    out = gated(h, w, at + "mlp.shared_experts.")
    for t, chosen in enumerate(np.argsort(-left, axis=1)[:, : C["num_experts_per_tok"]]):
        for e in chosen:
            share = s[t, e] / s[t, chosen].sum() * C["routed_scaling_factor"]
            out[t] += share * gated(h[t], w, f"{at}mlp.experts.{e}.")
    return x + out


def test_the_definition_agrees_and_the_layer_that_drafts_is_it(place: Any, golden: Any) -> None:
    """Main logits, and those of the token after next, at all positions and by both rounds of the drafting layer."""
    w = {name: array.astype(np.float64) for name, array in tensors().items()}
    prompt, last = golden.prompt(2), f"model.layers.{C['num_hidden_layers']}."
    count, embeds = len(prompt) - 1, w["model.embed_tokens.weight"]
    x = embeds[prompt[:-1]]
    for n in range(C["num_hidden_layers"]):
        x = layer_of(w, n, x)
    model, pack = place(RECIPE, CHECKPOINT, [65], speculative_config=MTP), CpuPack()
    start_row(model, prompt[:-1])
    model.forward(pack, count, 1, count)
    near = {"atol": TOLERANCE, "rtol": 0}
    hidden = normed(x, w["model.norm.weight"])
    head = w["lm_head.weight"].T
    np.testing.assert_allclose(model.batch.logits.numpy()[0], hidden[-1] @ head, **near)
    following = Tensor.from_numpy(np.array(prompt[1:], np.int32))
    for first in (True, False):
        model.further(pack, following, model.batch.step(count, 1), count, first=first)
        parts = normed(embeds[prompt[1:]], w[last + "enorm.weight"]), normed(hidden, w[last + "hnorm.weight"])
        hidden = layer_of(
            w, C["num_hidden_layers"], np.concatenate(parts, axis=1) @ w[last + "eh_proj.weight"].T
        )
        np.testing.assert_allclose(model.buffers.x.numpy()[:count], hidden, **near)
    model.batch.last.numpy()[:1] = model.buffers.x.numpy()[count - 1]
    model.draft_head(pack, 1, 0)
    logits = normed(hidden[-1], w[last + "shared_head.norm.weight"]) @ head
    np.testing.assert_allclose(model.batch.logits.numpy()[0], logits, **near)
    assert np.abs(logits - normed(hidden[-1], w["model.norm.weight"]) @ head).max() > 0.1


def test_a_checkpoint_without_the_layer_that_drafts_is_refused(tmp_path: Path) -> None:
    """By config.json, and where transformers has left the layer out."""
    config, options = {**CONFIG, "num_nextn_predict_layers": 0}, RECIPE.options(speculative_config=MTP)
    with pytest.raises(SetupError, match="this checkpoint has no MTP layer; use method ngram"):
        RECIPE.blueprint(Source(config), options)
    write_checkpoint(tmp_path)
    few = {name: one for name, one in tensors().items() if not name.startswith("model.layers.3.")}
    write_tensors(tmp_path / "model.safetensors", few)
    with Checkpoint(tmp_path) as checkpoint:
        with pytest.raises(SetupError, match="this checkpoint has no MTP layer"):
            RECIPE.blueprint(Source(CONFIG, checkpoint=checkpoint), options)
        assert RECIPE.blueprint(Source(CONFIG, checkpoint=checkpoint), RECIPE.options()) is not None


@pytest.mark.parametrize("ranks", of_the_day([1, 2]))
def test_the_accuracy_gate(monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    """Every path passes, and every control fails."""
    monkeypatch.setattr(gate, "FORCED", 6)  # tokens after each prompt
    wanted = gate.references(RECIPE, CHECKPOINT)
    sizes = {"max_num_seqs": 8, "max_num_batched_tokens": 512, "max_model_len": 512}
    made = build(
        RECIPE, CHECKPOINT, device="cpu", tensor_parallel_size=ranks, kv_cache_memory_bytes=64 << 20, **sizes
    )
    assert [str(one) for one in gate.run(made, wanted) if not one.passed] == []
    controls = list(gate.negative_controls(made, wanted))
    assert len(controls) == (5 if ranks == 1 else 8)
    assert [str(one) for one in controls if one.passed] == []
    made.engine.close()


def definition(w: dict[str, Any], prompt: list[int]) -> Any:
    """Logits after the prompt, by the definition."""
    x = w["model.embed_tokens.weight"][prompt]
    for n in range(C["num_hidden_layers"]):
        x = layer_of(w, n, x)
    return normed(x[-1], w["model.norm.weight"]) @ w["lm_head.weight"].T


KIMI = {
    "model_type": "kimi_k2", "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827, "first_k_dense_replace": 2,
    "num_nextn_predict_layers": 0, "rope_theta": 50000.0,
    "rope_scaling": {**C["rope_scaling"], "beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0},
}  # fmt: skip
WEIGHTS = {
    "num_bits": 4,
    "type": "int",
    "strategy": "group",
    "group_size": 32,
    "symmetric": True,
    "dynamic": False,
}
THINKING = {
    "quant_method": "compressed-tensors", "format": "pack-quantized", "kv_cache_scheme": None,
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": None}},
    "ignore": [
        "lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
    ],
}  # fmt: skip
"""As config.json of Kimi-K2-Thinking says: INT4 experts in groups of 32, and nothing else packed."""


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "INT4 experts"])
def test_kimi_k2_by_its_definition(
    place: Any, golden: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, packed: bool
) -> None:
    for key, value in KIMI.items():
        monkeypatch.setitem(C, key, value)
    arrays = {
        name: one for name, one in tensors().items() if f".layers.{C['num_hidden_layers']}." not in name
    }
    w = {name: one.astype(np.float64) for name, one in arrays.items()}
    for name in [name for name in arrays if packed and ".experts." in name]:
        own = quantized(arrays.pop(name).astype(np.float32), True, bfloat16)
        w[name] = own.values.astype(np.float64)
        arrays |= {name.removesuffix("weight") + key: one for key, one in compressed(own, True).items()}
    write_checkpoint(tmp_path, **({"quantization_config": THINKING} if packed else {}))
    write_tensors(tmp_path / "model.safetensors", arrays)
    model, prompt = place(RECIPE, tmp_path, [65]), golden.prompt(2)
    start_row(model, prompt)
    model.forward(CpuPack(), len(prompt), 1, len(prompt))
    found = model.batch.logits.numpy()[0]
    np.testing.assert_allclose(found, definition(w, prompt), atol=TOLERANCE, rtol=0)
    monkeypatch.setitem(C, "routed_scaling_factor", 2.5)
    assert np.abs(found - definition(w, prompt)).max() > 100 * TOLERANCE


@pytest.mark.parametrize("packed", ["indexer.w", "_a_proj", "_a_proj, indexer.w"])
def test_an_indexer_whose_packing_is_its_own(place: Any, sparse: Any, tmp_path: Path, packed: str) -> None:
    """In INT4 beside plain projections, plain beside those, and as they are: the logits of a plain twin."""
    name, kinds = sparse.facts["name"], packed.split(", ")
    arrays = tensors(name=name)
    plain = {**arrays}
    chosen = [one for one in arrays if any(kind in one for kind in kinds) and "weights_proj" not in one]
    for one in chosen:
        own = quantized(arrays.pop(one).astype(np.float32), True, bfloat16)
        plain[one] = own.values.astype(np.float32)
        arrays |= {one.removesuffix("weight") + key: part for key, part in compressed(own, True).items()}
    group = {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": None}
    ignored = [key.removesuffix(".weight") for key in arrays if key.endswith(".weight")]
    scheme = {**THINKING, "config_groups": {"group_0": group}, "ignore": ignored}
    found = []
    for folder, tensors_of, more in (
        ("packed", arrays, {"quantization_config": scheme}),
        ("plain", plain, {}),
    ):
        path = write_checkpoint(tmp_path / folder, name, **more)
        write_tensors(path / "model.safetensors", tensors_of)
        model, prompt = place(RECIPE, path, [65]), sparse.prompt(0)
        start_row(model, prompt)
        model.forward(CpuPack(), len(prompt), 1, len(prompt))
        found.append(model.batch.logits.numpy()[0])
    np.testing.assert_allclose(found[0], found[1], atol=TOLERANCE, rtol=0)


def test_greedy_tokens_over_http(golden: Any, start: Any) -> None:
    check_greedy_tokens(start(CHECKPOINT, "-tp", "2", "--max-model-len", "352").url, golden)


def test_published_names() -> None:
    for name in ("deepseek-ai/DeepSeek-V3", "DeepSeek-V3.1", "deepseek-r1", "moonshotai/Kimi-K2-Instruct"):
        recipe, config = recipes.published(name)
        assert recipe.name == "deepseek_v3"
        assert (config["model_type"] == "kimi_k2") == ("Kimi" in name)
    assert recipes.published("DeepSeek-V4-Flash")[0].name == "deepseek_v4"
