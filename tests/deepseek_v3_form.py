"""The golden DeepSeek-V3, V3.2 and GLM-5: their checkpoints, whose weights are made of a seed, because tracked files
are to stay small.

tests/goldens has folders of their names with what transformers makes of them (scripts/reference/deepseek_v3_tiny.py).
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from openinfer.recipes.engine.testing.checkpoint import write_tensors
from openinfer.tensor import bfloat16

Array = np.ndarray[Any, Any]
GOLDENS = Path(__file__).parent / "goldens"
NAME = "deepseek_v3-tiny"
CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 64,
    "num_hidden_layers": 3, "first_k_dense_replace": 1, "moe_layer_freq": 1, "num_attention_heads": 4,
    "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 64, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16,
    "v_head_dim": 16, "intermediate_size": 128, "moe_intermediate_size": 64, "n_routed_experts": 8,
    "n_shared_experts": 1, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "topk_method": "noaux_tc",
    "scoring_func": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 2.5, "num_nextn_predict_layers": 1,
    "vocab_size": 512, "rms_norm_eps": 1e-6, "max_position_embeddings": 512, "hidden_act": "silu",
    "attention_bias": False, "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 2, "rope_theta": 10000.0,
    "rope_scaling": {
        "type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1,
        "mscale": 0.8, "mscale_all_dim": 1.0,
    },
    "torch_dtype": "bfloat16",
}  # fmt: skip
C = CONFIG
INDEX = {"index_topk": 16, "index_n_heads": 16, "index_head_dim": 32}
SPARSE: dict[str, dict[str, Any]] = {
    "deepseek_v32-tiny": {"architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", **INDEX},
    "glm_moe_dsa-tiny": {
        "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "n_group": 1, "topk_group": 1,
        "rope_theta": 1e6, "rope_scaling": None, "index_topk_freq": 2, "index_skip_topk_offset": 1, **INDEX,
    },
}  # fmt: skip
"""What models whose tokens choose what they see say otherwise. The second layer of GLM's shares the choice of the
first."""
HIDDEN, HEADS, LATENT, ROTARY = (
    C["hidden_size"],
    C["num_attention_heads"],
    C["kv_lora_rank"],
    C["qk_rope_head_dim"],
)


class Numbers:
    """Numbers of a seed that are the same with every numpy: of a bit generator's own output."""

    def __init__(self, seed: int) -> None:
        self.bits = np.random.PCG64(seed)

    def __call__(self, *shape: int, std: float) -> Array:
        """Even ones around zero."""
        raw = self.bits.random_raw(int(np.prod(shape))) >> np.uint64(40)
        return ((raw / 2.0**24 - 0.5) * (12**0.5 * std)).astype(np.float32).reshape(shape)

    def matrix(self, rows: int, columns: int, gain: float = 1.0) -> Array:
        return self(rows, columns, std=gain / columns**0.5).astype(bfloat16)

    def norm(self, size: int) -> Array:
        return (1 + self(size, std=0.1)).astype(bfloat16)


def indexer(make: Numbers, at: str) -> dict[str, Array]:
    heads, dim = INDEX["index_n_heads"], INDEX["index_head_dim"]
    return {
        at + "wq_b.weight": make.matrix(heads * dim, C["q_lora_rank"], 1.5),
        at + "wk.weight": make.matrix(dim, HIDDEN),
        at + "k_norm.weight": make.norm(dim),
        at + "k_norm.bias": make(dim, std=0.2).astype(bfloat16),
        at + "weights_proj.weight": make.matrix(heads, HIDDEN),
    }


def tensors(seed: int = 0, name: str = NAME) -> dict[str, Array]:
    """All tensors of a checkpoint, those of the MTP layer last."""
    make, vocab, layers = Numbers(seed), C["vocab_size"], C["num_hidden_layers"]
    found = {
        "model.embed_tokens.weight": make(vocab, HIDDEN, std=1.0).astype(bfloat16),
        "model.norm.weight": make.norm(HIDDEN),
        "lm_head.weight": make.matrix(vocab, HIDDEN, 2.5),
    }
    for n in range(layers + 1):
        at = f"model.layers.{n}."
        attention = at + "self_attn."
        found |= {
            at + "input_layernorm.weight": make.norm(HIDDEN),
            at + "post_attention_layernorm.weight": make.norm(HIDDEN),
            attention + "q_a_proj.weight": make.matrix(C["q_lora_rank"], HIDDEN),
            attention + "q_a_layernorm.weight": make.norm(C["q_lora_rank"]),
            attention + "q_b_proj.weight": make.matrix(
                HEADS * (C["qk_nope_head_dim"] + ROTARY), C["q_lora_rank"], 1.5
            ),
            attention + "kv_a_proj_with_mqa.weight": make.matrix(LATENT + ROTARY, HIDDEN, 1.5),
            attention + "kv_a_layernorm.weight": make.norm(LATENT),
            attention + "kv_b_proj.weight": make.matrix(
                HEADS * (C["qk_nope_head_dim"] + C["v_head_dim"]), LATENT
            ),
            attention + "o_proj.weight": make.matrix(HIDDEN, HEADS * C["v_head_dim"], 2.0),
        }
        if n < C["first_k_dense_replace"]:
            found |= mlp(make, at + "mlp.", C["intermediate_size"])
            continue
        experts, width = C["n_routed_experts"], C["moe_intermediate_size"]
        found[at + "mlp.gate.weight"] = make.matrix(experts, HIDDEN)
        found[at + "mlp.gate.e_score_correction_bias"] = make(experts, std=0.2)
        found |= mlp(make, at + "mlp.shared_experts.", width * C["n_shared_experts"])
        for expert in range(experts):
            found |= mlp(make, f"{at}mlp.experts.{expert}.", width)
    for n in range(layers + 1) if name in SPARSE else ():
        if name != "glm_moe_dsa-tiny" or n != 1:
            found |= indexer(make, f"model.layers.{n}.self_attn.indexer.")
    at = f"model.layers.{layers}."
    return found | {
        at + "eh_proj.weight": make.matrix(HIDDEN, 2 * HIDDEN),
        at + "enorm.weight": make.norm(HIDDEN),
        at + "hnorm.weight": make.norm(HIDDEN),
        at + "embed_tokens.weight": found["model.embed_tokens.weight"],
        at + "shared_head.norm.weight": make.norm(HIDDEN),
        at + "shared_head.head.weight": found["lm_head.weight"],
    }


def mlp(make: Numbers, at: str, width: int) -> dict[str, Array]:
    return {
        at + "gate_proj.weight": make.matrix(width, HIDDEN, 1.5),
        at + "up_proj.weight": make.matrix(width, HIDDEN, 1.5),
        at + "down_proj.weight": make.matrix(HIDDEN, width, 1.5),
    }


def write_checkpoint(folder: Path, name: str = NAME, **changes: Any) -> Path:
    """A checkpoint, with other values of these keys of config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **SPARSE.get(name, {}), **changes}))
    write_tensors(folder / "model.safetensors", tensors(name=name))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(GOLDENS / "qwen3-tiny" / file, folder / file)
    return folder


FOLDER = tempfile.TemporaryDirectory(prefix="openinfer-v3-")
CHECKPOINT = Path(FOLDER.name) / NAME
CHECKPOINTS = {name: write_checkpoint(Path(FOLDER.name) / name, name) for name in (NAME, *SPARSE)}
