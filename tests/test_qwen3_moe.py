"""Mixtures of experts of Qwen3: the forward pass by its definition, in every form that checkpoints have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_qwen3_fp8 as fp8
from test_fp8_while_loading import in_blocks

from openinfer.kernels.formats.linear import Linear
from openinfer.recipes.engine import UnsupportedModel
from openinfer.recipes.engine.startup import build
from openinfer.recipes.engine.testing import EngineConformance, Session, write_random_checkpoint
from openinfer.recipes.engine.testing.checkpoint import write_tensors
from openinfer.recipes.qwen3 import RECIPE
from openinfer.recipes.qwen3.config import Config
from openinfer.tensor import Checkpoint, float8_e4m3fn

E, K, EPS, THETA, HEADS, KV, D = 8, 3, 1e-6, 1e4, 4, 2, 64
CONFIG = {
    "model_type": "qwen3_moe", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": HEADS,
    "num_key_value_heads": KV, "head_dim": D, "vocab_size": 256, "max_position_embeddings": 512,
    "tie_word_embeddings": False, "num_experts": E, "num_experts_per_tok": K, "moe_intermediate_size": 32,
    "norm_topk_prob": True, "rope_theta": THETA, "rms_norm_eps": EPS,
}  # fmt: skip
PROMPT = [(7 * n * n + 11) % 256 for n in range(40)]


@pytest.fixture(scope="module")
def tensors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A random checkpoint's tensors in float32, the router's so large that its choices matter."""
    folder = write_random_checkpoint(RECIPE, tmp_path_factory.mktemp("moe"), CONFIG)
    with Checkpoint(folder) as checkpoint:
        found = {name: np.array(checkpoint.array(name)).astype(np.float32) for name in checkpoint}
    return {name: 4 * one if name.endswith("mlp.gate.weight") else one for name, one in found.items()}


def normed(x: Any, weight: Any) -> Any:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + EPS) * weight


def silu(x: Any) -> Any:
    return x / (1 + np.exp(-x))


def turned(x: Any) -> Any:
    """x [T, heads, D] rotated by its position."""
    angles = np.arange(len(x))[:, None] * THETA ** (-np.arange(0, D, 2) / D)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    a, b = x[..., : D // 2], x[..., D // 2 :]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def log_probabilities(tensors: dict[str, Any], prompt: list[int]) -> Any:
    """By the definition of the model, in float64."""
    w = {name: one.astype(np.float64) for name, one in tensors.items()}
    x, count = w["model.embed_tokens.weight"][prompt], len(prompt)
    for n in range(CONFIG["num_hidden_layers"]):
        at = f"model.layers.{n}."
        h = normed(x, w[at + "input_layernorm.weight"])
        q, k, v = (
            (h @ w[f"{at}self_attn.{name}_proj.weight"].T).reshape(count, -1, D) for name in ("q", "k", "v")
        )
        q = turned(normed(q, w[at + "self_attn.q_norm.weight"]))
        k = turned(normed(k, w[at + "self_attn.k_norm.weight"]))
        k, v = (np.repeat(one, HEADS // KV, axis=1) for one in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(D)
        scores[:, np.triu_indices(count, 1)[0], np.triu_indices(count, 1)[1]] = -np.inf
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        x = x + np.einsum("hqk,khd->qhd", weights, v).reshape(count, -1) @ w[at + "self_attn.o_proj.weight"].T
        h = normed(x, w[at + "post_attention_layernorm.weight"])
        logits = h @ w[at + "mlp.gate.weight"].T
        p = np.exp(logits - logits.max(axis=1, keepdims=True))
        p /= p.sum(axis=1, keepdims=True)
        for t in range(count):
            chosen = np.argsort(-p[t], kind="stable")[:K]
            for e in chosen:
                gate, up, down = (
                    w[f"{at}mlp.experts.{e}.{name}_proj.weight"] for name in ("gate", "up", "down")
                )
                x[t] += p[t, e] / p[t, chosen].sum() * (down @ (silu(gate @ h[t]) * (up @ h[t])))
    logits = normed(x, w["model.norm.weight"]) @ w["lm_head.weight"].T
    logits -= logits.max(axis=1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def fused(tensors: dict[str, Any]) -> dict[str, Any]:
    """As transformers saves experts."""
    found = {name: one for name, one in tensors.items() if ".experts." not in name}
    for n in range(CONFIG["num_hidden_layers"]):
        at = f"model.layers.{n}.mlp.experts."
        gate, up, down = (
            np.stack([tensors[f"{at}{e}.{name}_proj.weight"] for e in range(E)])
            for name in ("gate", "up", "down")
        )
        found |= {at + "gate_up_proj": np.concatenate([gate, up], axis=1), at + "down_proj": down}
    return found


def saved(folder: Path, tensors: dict[str, Any], **changes: Any) -> Path:
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    write_tensors(folder / "model.safetensors", tensors)
    return folder


def found_in(folder: Path, **flags: Any) -> Any:
    """Log-probabilities of the prompt's tokens but the first."""
    engine = build(RECIPE, folder, **{**fp8.FLAGS, **flags}).engine
    try:
        session = Session(engine)
        one = session.submit(PROMPT, 1, prompt_logprobs=0)
        session.finish()
        return np.array([entry.logprob for entry in session.outcomes[one].prompt_logprobs])
    finally:
        engine.close()


def expected(tensors: dict[str, Any]) -> Any:
    return log_probabilities(tensors, PROMPT)[np.arange(len(PROMPT) - 1), PROMPT[1:]]


@pytest.mark.parametrize(
    ("form", "ranks"),
    [
        (dict, 1),
        (fused, 4),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((dict, 2), (dict, 4), (fused, 1), (fused, 2))
        ),
    ],
    ids=["unfused-1", "fused-4", "unfused-2", "unfused-4", "fused-1", "fused-2"],
)
def test_experts_are_those_of_the_definition(form: Any, ranks: int, tensors: Any, tmp_path: Path) -> None:
    """On 4 ranks pairs have the same key-value head."""
    folder = saved(tmp_path, form(tensors))
    found = found_in(folder, tensor_parallel_size=ranks)
    np.testing.assert_allclose(found, expected(tensors), atol=2e-4)
    flat = {name: one * 0 if name.endswith("mlp.gate.weight") else one for name, one in tensors.items()}
    assert np.abs(found - expected(flat)).max() > 0.05  # another choice shows


def test_experts_of_fp8_checkpoints(tensors: Any, tmp_path: Path) -> None:
    """Published in blocks, with a plain router; made while they load, the same from both forms."""
    packed, values = {}, dict(tensors)
    for name, weight in tensors.items():
        packed[name] = weight
        if "_proj.weight" in name:
            packed[name], scales = fp8.quantized(weight)
            packed[name + "_scale_inv"] = scales
            values[name] = Linear(packed[name], scales.astype(np.float32)).values()
    (tmp_path / "published").mkdir()
    folder = saved(tmp_path / "published", packed, quantization_config=fp8.QUANTIZED)
    found = found_in(folder, activation_quantization="off")
    np.testing.assert_allclose(found, expected(values), atol=2e-4)
    made = []
    for name, form in (("unfused", dict), ("fused", fused)):
        (tmp_path / name).mkdir()
        folder = saved(tmp_path / name, form(tensors))
        made.append(found_in(folder, quantization="fp8", activation_quantization="off"))
    np.testing.assert_array_equal(*made)
    for name, weight in tensors.items():
        if ".experts." in name:
            values[name] = in_blocks(weight)
        elif "_proj.weight" in name:
            scales = np.abs(weight).max(axis=1, keepdims=True) / np.float32(448)
            values[name] = (weight / scales).astype(float8_e4m3fn).astype(np.float32) * scales
    np.testing.assert_allclose(made[0], expected(values), atol=2e-4)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"norm_topk_prob": False}, "norm_topk_prob is False; every published mixture has True"),
        ({"norm_topk_prob": None}, "norm_topk_prob is None"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step is 2"),
        ({"mlp_only_layers": [0]}, "mlp_only_layers is a list of 1"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9; there are 8 experts"),
        ({"dual_chunk_attention_config": {"chunk_size": 1}}, "dual_chunk_attention_config is an object of 1"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"num_experts": None}, "num_local_experts is None"),
    ],
)
def test_what_is_refused(change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UnsupportedModel, match=complaint):
        Config.parse({**CONFIG, **change})
    assert Config.parse({**CONFIG, "num_experts": None, "num_local_experts": 8}) is not None


def test_ranks_that_cannot_share_experts_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="num_experts is 6; 4 ranks cannot share it"):
        Config.parse({**CONFIG, "num_experts": 6}).of_rank(0, 4)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [{}, {"tensor_parallel_size": 2}], ids=["alone", "two ranks"])
def test_the_suite_of_engines(flags: dict[str, Any], tensors: Any, tmp_path: Path) -> None:
    class Suite(EngineConformance):
        recipe, checkpoint = RECIPE, saved(tmp_path, tensors)

    Suite.flags = flags
    Suite.setup_class()
    for name in dir(Suite):
        if name.startswith("test_"):
            getattr(Suite(), name)()
    Suite.teardown_class()
