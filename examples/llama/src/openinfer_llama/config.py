"""How config.json is read, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from openinfer.recipes.engine.config_fields import Fields, ModelConfig, has_own_head
from openinfer.recipes.engine.errors import UnsupportedModel
from openinfer.recipes.engine.rope import Floats, rope_of
from openinfer.tensor import Checkpoint


@dataclass(frozen=True, slots=True)
class Config(ModelConfig):
    """A Llama, Mistral or Qwen2. `window`: tokens of the sliding window, 0 for full attention."""

    num_layers: int
    q_size: int  # of all query heads
    kv_size: int  # of all key heads
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    tied: bool
    window: int
    biased: bool  # queries, keys and values
    inv_freq: Floats  # this and the next: see Rope
    rope_scale: float

    @classmethod
    def parse(
        cls, raw: Mapping[str, Any], eos: object = None, checkpoint: Checkpoint | None = None
    ) -> Config:
        """From the parsed config.json. eos None: as config.json says. checkpoint: it may have a head of its own.
        Raises UnsupportedModel naming the field."""
        fields = Fields(raw)
        if "quantization_config" in fields:
            raise UnsupportedModel("config.json: quantization_config: use the BF16 checkpoint instead")
        biased = fields.get("model_type") == "qwen2"  # always there: config.json need not say so
        fields.is_all({"attention_bias": biased, "mlp_bias": False, "hidden_act": "silu"}, "this recipe runs")
        fields.is_all({"use_sliding_window": False, "dual_chunk_attention_config": None}, "this recipe runs")
        hidden, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
        kv_heads = fields.size("num_key_value_heads", default=heads)
        if heads % kv_heads:
            raise UnsupportedModel(f"config.json: {heads} attention heads cannot share {kv_heads} evenly")
        head_dim = fields.size("head_dim", default=hidden // heads)
        tied = fields.flag("tie_word_embeddings") and not has_own_head(
            checkpoint, "model.embed_tokens.weight"
        )
        windowed = fields.get("model_type") == "mistral" and "sliding_window" in fields
        kind, layers = ("full_attention", "sliding_attention")[windowed], fields.size("num_hidden_layers")
        fields.strings("layer_types", (kind,), layers)
        return cls(
            layers, heads * head_dim, kv_heads * head_dim, kv_heads, head_dim, fields.size("intermediate_size"), tied,
            fields.size("sliding_window") if windowed else 0, biased, **cls.common(fields, eos),
            **rope_of(fields, head_dim, default=1e4, layer_types=[kind])._asdict(),
        )  # fmt: skip
