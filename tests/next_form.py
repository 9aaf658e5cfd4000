"""A mixture of Qwen3.5 as Qwen3-Next spells the same model: a flat config, experts apart, inputs of a delta net in two
projections whose rows are by key head."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from openinfer.recipes.engine.testing.checkpoint import write_tensors
from openinfer.tensor import Checkpoint

Array = np.ndarray[Any, Any]
DROPPED = ("layer_types", "mamba_ssm_dtype", "attn_output_gate", "mtp_num_hidden_layers",
           "mtp_use_dedicated_embeddings", "rope_parameters")  # fmt: skip
"""Keys of Qwen3.5 that published configs of Qwen3-Next do not have."""


def as_next(source: Path, folder: Path, **changes: Any) -> Path:
    """The checkpoint `source` in `folder`. changes: of config.json."""
    raw = json.loads((source / "config.json").read_text())
    text = raw.get("text_config", raw)
    rope = text["rope_parameters"]
    config = {key: value for key, value in text.items() if key not in DROPPED} | {
        "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "decoder_sparse_step": 1,
        "norm_topk_prob": True, "intermediate_size": 5120, "rope_scaling": None, "rope_theta": rope["rope_theta"],
        "partial_rotary_factor": rope["partial_rotary_factor"], "tie_word_embeddings": raw["tie_word_embeddings"],
        **{key: raw[key] for key in ("quantization_config",) if key in raw}, **changes,
    }  # fmt: skip
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    (folder / "config.json").write_text(json.dumps(config))
    with Checkpoint(source) as checkpoint:
        tensors = {name: np.array(checkpoint.array(name)) for name in checkpoint.names}
    write_tensors(folder / "model.safetensors", dict(spelled(tensors, text)))
    return folder


def spelled(tensors: dict[str, Array], text: dict[str, Any]) -> Iterator[tuple[str, Array]]:
    """Tensors under their names in Qwen3-Next; a vision tower is left out. text: the text model's config."""
    heads = text["linear_num_key_heads"]
    keys = heads * text["linear_key_head_dim"]
    for name, array in tensors.items():
        to = name.replace("model.language_model.", "model.")
        if ".visual." in name or name.endswith("weight_shape"):
            continue
        if "in_proj_qkv." in name:
            turned = name.endswith(("qweight", "qzeros", "scales"))  # AWQ stores columns first
            z = tensors[name.replace("in_proj_qkv", "in_proj_z")]
            both = [array.T, z.T] if turned else [array, z]
            rows = (
                keys
                * len(both[0])
                // (2 * keys + text["linear_num_value_heads"] * text["linear_value_head_dim"])
            )
            made = by_key_head([*np.split(both[0], [rows, 2 * rows]), both[1]], heads)
            yield to.replace("qkv", "qkvz"), np.ascontiguousarray(made.T) if turned else made
        elif "in_proj_b." in name:
            a = tensors[name.replace("in_proj_b", "in_proj_a")]
            yield to.replace("in_proj_b", "in_proj_ba"), by_key_head([array, a], heads)
        elif name.endswith("experts.gate_up_proj"):
            for expert, both in enumerate(array):
                for half, weight in zip(("gate", "up"), np.split(both, 2), strict=True):
                    yield to.replace("gate_up_proj", f"{expert}.{half}_proj.weight"), weight
        elif name.endswith("experts.down_proj"):
            for expert, weight in enumerate(array):
                yield to.replace("down_proj", f"{expert}.down_proj.weight"), weight
        elif "in_proj_z." not in name and "in_proj_a." not in name:
            yield to, array


def by_key_head(parts: list[Array], heads: int) -> Array:
    """Rows of several projections (or of their scales), each in the order of heads, for one head after the other."""
    by_head = zip(*(np.split(one, heads) for one in parts), strict=True)
    return np.concatenate([part for head in by_head for part in head])
