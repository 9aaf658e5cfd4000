"""Reading a Qwen3 config.json, and the settings that are refused."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from openinfer.kernels.authoring import AnyPacking
from openinfer.recipes.eagle3 import TargetConfig
from openinfer.recipes.engine.config_fields import Fields, Part, attention_heads, has_own_head
from openinfer.recipes.engine.errors import UnsupportedModel
from openinfer.recipes.engine.rope import Floats, rope_of
from openinfer.recipes.engine.weights import Experts, for_ranks, packing
from openinfer.recipes.qwen3.published import MODEL_TYPES
from openinfer.tensor import Checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(TargetConfig):
    """A Qwen3.

    intermediate_size: width of the MLP; 0 with experts. experts: None for a dense model. windows: windows[l] is layer
    l's sliding window in tokens, 0 for full attention. inv_freq, rope_scale: see Rope. unfused_experts: the checkpoint
    has tensors for each expert. packing: how projections are packed.
    """

    num_heads: int
    intermediate_size: int
    tie_word_embeddings: bool
    windows: tuple[int, ...]
    inv_freq: Floats
    rope_scale: float
    experts: Experts | None = None
    unfused_experts: bool = True
    packing: AnyPacking | None = None

    def of_rank(self, rank: int, ranks: int) -> "Config":
        """This model with the part of one of several ranks: its query heads, its columns of the MLP, its rows of the
        vocabulary. Raises UnsupportedModel where the model cannot be shared evenly."""
        if ranks > 1:
            for_ranks(self.packing)
        part, dim = Part(rank, ranks), self.head_dim
        mlp = self.experts.count if self.experts else self.intermediate_size
        sizes = {
            "num_attention_heads": (self.num_heads, 1),
            "num_experts" if self.experts else "intermediate_size": (mlp, 1 if self.experts else 16),
            "vocab_size": (self.vocab_size, 16),
        }
        part.check(sizes, {"num_key_value_heads": self.num_kv_heads})
        parts = {"queries": part.of(self.num_heads) * dim, "keys": part.of(self.num_kv_heads) * dim}
        if not self.experts:
            parts["intermediate_size"] = part.of(self.intermediate_size)
        for what, size in parts.items():
            if self.packing is not None and size % self.packing.block:
                raise UnsupportedModel(
                    f"config.json: {what} of each of {ranks} ranks: {size}; {self.packing.kind} weights take "
                    f"multiples of {self.packing.block}"
                )
        return dataclasses.replace(self, part=part)

    @classmethod
    def parse(
        cls, raw: Mapping[str, Any], eos: object = None, quantization: str | None = None, coded: bool = True,
        checkpoint: Checkpoint | None = None,
    ) -> "Config":  # fmt: skip
        """From the parsed config.json; eos None: those of config.json. quantization: the flag. coded: whether
        activations may be quantised. checkpoint: which modules are packed, and whether it has a head of its own.
        Raises UnsupportedModel naming the key."""
        fields = Fields(raw)
        _refuse(fields)
        heads, kv_heads = attention_heads(fields)
        head_dim = fields.size("head_dim", default=fields.size("hidden_size") // heads)
        experts = Experts.of(fields, shared=False) if fields.get("model_type") == MODEL_TYPES[1] else None
        tied = fields.flag("tie_word_embeddings") and not has_own_head(
            checkpoint, "model.embed_tokens.weight"
        )
        windows = _windows(fields)
        types = {"sliding_attention" if window else "full_attention" for window in windows}
        return cls(
            **cls.common(fields, eos),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            intermediate_size=0 if experts else fields.size("intermediate_size"),
            tie_word_embeddings=tied,
            windows=windows,
            **rope_of(fields, head_dim, default=1e4, layer_types=types)._asdict(),
            experts=experts,
            unfused_experts=checkpoint is None or "model.layers.0.mlp.experts.gate_up_proj" not in checkpoint,
            packing=packing(fields, quantization, coded, checkpoint),
        )


def _refuse(fields: Fields) -> None:
    if fields.get("model_type") not in MODEL_TYPES:
        raise fields.wrong("model_type", f"this recipe runs {' and '.join(map(repr, MODEL_TYPES))}")
    wanted = {"attention_bias": False, "hidden_act": "silu", "dual_chunk_attention_config": None}
    fields.is_all(wanted, "every published Qwen3 has")
    if fields.get("model_type") == "qwen3_moe":
        if fields.flag("norm_topk_prob") is not True:
            raise fields.wrong("norm_topk_prob", "every published mixture has True")
        fields.is_all({"decoder_sparse_step": 1, "mlp_only_layers": []}, "every published mixture has")


def _windows(fields: Fields) -> tuple[int, ...]:
    """Sliding windows by layer: `layer_types` where given, else every layer from max_window_layers on."""
    layers = fields.size("num_hidden_layers")
    types = fields.strings("layer_types", ("full_attention", "sliding_attention"), layers)
    if types is None:
        first = layers
        if fields.flag("use_sliding_window") and "sliding_window" in fields:
            first = fields.count("max_window_layers", default=layers, most=layers)
        types = ["full_attention" if layer < first else "sliding_attention" for layer in range(layers)]
    if "sliding_attention" not in types:
        return (0,) * layers
    window = fields.size("sliding_window")
    return tuple(window if kind == "sliding_attention" else 0 for kind in types)
