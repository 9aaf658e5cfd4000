"""How config.json is read, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from openinfer.kernels import rope_frequencies
from openinfer.recipes.engine.config_fields import Fields, eos_ids, shown
from openinfer.recipes.engine.errors import UnsupportedModel

Floats = np.ndarray[Any, np.dtype[np.float32]]


@dataclass(frozen=True, slots=True)
class Config:
    """A Llama or Mistral. `window`: tokens of the sliding window, 0 for full attention. `inv_freq` float32 [d / 2]."""

    hidden_size: int
    num_layers: int
    q_size: int  # of all query heads
    kv_size: int  # of all key heads
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    tied: bool
    window: int
    inv_freq: Floats
    eos_token_ids: tuple[int, ...]

    @classmethod
    def parse(cls, raw: Mapping[str, Any], eos: object = None) -> Config:
        """From the parsed config.json. eos None: as config.json says. Raises UnsupportedModel naming the field."""
        fields = Fields(raw)
        if "quantization_config" in fields:
            raise UnsupportedModel("config.json: quantization_config: use the BF16 checkpoint instead")
        fields.is_all({"attention_bias": False, "mlp_bias": False, "hidden_act": "silu"}, "this recipe runs")
        hidden, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
        kv_heads = fields.size("num_key_value_heads", default=heads)
        if heads % kv_heads:
            raise UnsupportedModel(f"config.json: {heads} attention heads cannot share {kv_heads} evenly")
        head_dim, vocab = fields.size("head_dim", default=hidden // heads), fields.size("vocab_size")
        windowed = raw.get("model_type") == "mistral" and "sliding_window" in fields
        return cls(
            hidden, fields.size("num_hidden_layers"), heads * head_dim, kv_heads * head_dim, kv_heads, head_dim,
            fields.size("intermediate_size"), vocab, fields.number("rms_norm_eps", default=1e-6, most=1),
            fields.size("max_position_embeddings"), fields.flag("tie_word_embeddings"),
            fields.size("sliding_window") if windowed else 0, _frequencies(fields, head_dim),
            eos_ids(fields.get("eos_token_id") if eos is None else eos, vocab),
        )  # fmt: skip


def _frequencies(fields: Fields, dim: int) -> Floats:
    """Frequencies of plain RoPE, or of Llama 3.1's scaling: long wavelengths by `factor`, short ones not at all."""
    rope = fields.fields("rope_parameters" if "rope_parameters" in fields else "rope_scaling")
    theta = (rope if "rope_theta" in rope else fields).number("rope_theta", default=1e4, above=1, most=1e15)
    plain = rope_frequencies(theta, dim)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return plain
    if kind != "llama3":
        raise UnsupportedModel(f"config.json: rope type {shown(kind)}: 'default' and 'llama3' are supported")
    names = ("factor", "low_freq_factor", "high_freq_factor")
    factor, low, high = (rope.number(name, most=1e6) for name in names)
    if not low < high:
        raise UnsupportedModel(f"config.json: low_freq_factor {low:g} must be below {high:g}")
    turns = rope.size("original_max_position_embeddings") * plain / (2 * math.pi)
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return np.asarray(plain * (smooth + (1 - smooth) / factor), np.float32)
