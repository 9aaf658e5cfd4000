"""Reading the config.json of a DeepSeek-V3 or of its kin, and the settings that are refused."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from openinfer.kernels.authoring import AnyPacking
from openinfer.recipes.deepseek_v3.published import MODEL_TYPES, SPARSE_TYPES
from openinfer.recipes.engine.config_fields import FP8_BLOCK, Fields, ModelConfig, Part, number, size
from openinfer.recipes.engine.errors import UnsupportedModel
from openinfer.recipes.engine.rope import Floats, rope_of, score_factor
from openinfer.recipes.engine.weights import Experts, for_ranks, packing
from openinfer.tensor import Checkpoint

WANTED: Mapping[str, Any] = {
    "hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False, "scoring_func": "sigmoid",
    "topk_method": "noaux_tc", "norm_topk_prob": True, "moe_layer_freq": 1, "rope_interleave": True, "mlp_bias": False,
    "sliding_window": None,
}  # fmt: skip
"""Keys that have this value, or are missing, in every published model."""


@dataclass(frozen=True, slots=True)
class Indexing:
    """How tokens are chosen for attention: a token sees the `topk` whose keys have the largest scores, by `heads` heads
    of `dim` numbers, the first of which rotate: in pairs (2i, 2i + 1), or of both halves. layers: which layers choose;
    others take the choice of the last one that did."""

    heads: int
    dim: int
    topk: int
    pairs: bool
    layers: tuple[bool, ...]

    def chooses(self, layer: int) -> bool:
        """Whether a layer has an indexer; the layer that drafts, which comes after all, has."""
        return layer == len(self.layers) or self.layers[layer]


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(ModelConfig):
    """A DeepSeek-V3.

    dense_layers: the first layers, which have an MLP in place of experts. nope_dim, rope_dim: elements of a head's
    query that are not rotated, and that are. groups, top_groups: of experts, and how many of them a token chooses from.
    scale: the factor on attention's scores. inv_freq, rope_scale: see Rope. mtp: there is a layer that drafts. index:
    None: a token sees all before it. packing: how projections are packed.
    """

    hidden_size: int = size("hidden_size", unit=16)
    vocab_size: int = size("vocab_size", unit=16)
    num_layers: int = size("num_hidden_layers")
    dense_layers: int
    num_heads: int = size("num_attention_heads")
    q_lora_rank: int = size("q_lora_rank", unit=16)
    kv_lora_rank: int = size("kv_lora_rank", unit=16)
    nope_dim: int = size("qk_nope_head_dim", unit=16)
    rope_dim: int = size("qk_rope_head_dim", unit=16)
    value_dim: int = size("v_head_dim", unit=16)
    intermediate_size: int = size("intermediate_size", unit=16)
    experts: Experts
    groups: int = size("n_group", default=1)
    top_groups: int = size("topk_group", default=1)
    routed_scaling_factor: float = number("routed_scaling_factor", default=1.0, most=1e6)
    scale: float
    inv_freq: Floats
    rope_scale: float
    mtp: bool
    index: Indexing | None = None
    unfused_experts: bool = True
    packing: AnyPacking | None = None

    @property
    def latent_size(self) -> int:
        """Numbers that a layer's cache has of a token."""
        return self.kv_lora_rank + self.rope_dim

    def of_rank(self, rank: int, ranks: int) -> "Config":
        """This model with the part of one of several ranks: its heads, its experts, its columns of MLPs, its rows of
        lm_head. Raises UnsupportedModel where the model cannot be shared evenly."""
        if ranks > 1:
            for_ranks(self.packing)
        part, heads = Part(rank, ranks), self.num_heads
        block = FP8_BLOCK if self.packing is not None and self.packing.block == FP8_BLOCK else 16
        part.check({
            "num_attention_heads": (heads, 1), "n_routed_experts": (self.experts.count, 1),
            "vocab_size": (self.vocab_size, 16),
            "num_attention_heads * v_head_dim": (heads * self.value_dim, block),
            "num_attention_heads * (qk_nope_head_dim + qk_rope_head_dim)": (
                heads * (self.nope_dim + self.rope_dim), block
            ),
            "num_attention_heads * (qk_nope_head_dim + v_head_dim)": (heads * (self.nope_dim + self.value_dim), block),
            "intermediate_size": (self.intermediate_size, block),
            "n_shared_experts * moe_intermediate_size": (self.experts.shared_size, block),
        })  # fmt: skip
        return dataclasses.replace(self, part=part)

    @classmethod
    def parse(
        cls, raw: Mapping[str, Any], eos: object = None, quantization: str | None = None, coded: bool = True,
        checkpoint: Checkpoint | None = None,
    ) -> "Config":  # fmt: skip
        """From the parsed config.json; eos None: those of config.json. quantization: the flag. coded: whether
        activations may be quantised. checkpoint: which modules are packed. Raises UnsupportedModel naming the key."""
        fields = Fields(raw)
        _refuse(fields)
        said = cls.common(fields, eos)
        layers, nope_dim, rope_dim = said["num_layers"], said["nope_dim"], said["rope_dim"]
        count, width = fields.size("n_routed_experts"), fields.size("moe_intermediate_size", unit=16)
        shared = fields.size("n_shared_experts")
        dense = fields.count("first_k_dense_replace", default=0, most=layers)
        kinds = ["dense"] * dense + ["sparse"] * (layers - dense)
        if fields.strings("mlp_layer_types", ("dense", "sparse"), layers) not in (None, kinds):
            allowed = f"first_k_dense_replace says that the first {dense} are dense"
            raise fields.wrong("mlp_layer_types", allowed)
        config = cls(
            **said,
            dense_layers=dense,
            experts=Experts(count, fields.size("num_experts_per_tok"), width, shared * width),
            scale=(nope_dim + rope_dim) ** -0.5 * score_factor(fields),
            **rope_of(fields, rope_dim, default=1e4)._asdict(),
            mtp=fields.count("num_nextn_predict_layers", default=0, most=1) == 1,
            index=_index(fields, layers),
            unfused_experts=checkpoint is None or not any(".mlp.experts.gate_up_proj" in name for name in checkpoint),
            packing=packing(fields, quantization, coded, checkpoint),
        )  # fmt: skip
        _check_sizes(fields, config)
        return config


def _refuse(fields: Fields) -> None:
    if fields.get("model_type") not in MODEL_TYPES:
        raise fields.wrong("model_type", f"this recipe runs {' and '.join(map(repr, MODEL_TYPES))}")
    fields.is_all(WANTED, "every published model has")
    heads, plain, rotary = map(fields.size, ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim"))
    fields.is_all({"num_key_value_heads": heads}, "latents are of all heads, so it is num_attention_heads,")
    whole = "where it is given it is qk_nope_head_dim + qk_rope_head_dim,"
    fields.is_all({"qk_head_dim": plain + rotary}, whole)
    if fields.get("model_type") != "glm_moe_dsa" or fields.get("head_dim") != plain:  # as GLM-5.2's is
        fields.is_all({"head_dim": rotary}, "where it is given it is qk_rope_head_dim,")
    quantization = fields.fields("quantization_config")
    if quantization.get("scale_fmt") not in (None, "float", "ue8m0"):
        raise quantization.wrong("scale_fmt", "'float' and 'ue8m0' are possible")


def _index(fields: Fields, layers: int) -> Indexing | None:
    """The indexer of a model whose attention is sparse."""
    kind = fields.get("model_type")
    if kind not in SPARSE_TYPES:
        fields.is_all({"index_topk": None}, "every published model of this type has")
        return None
    fields.strings("layer_types", ("indexed_attention",), layers)
    types, key = fields.strings("indexer_types", ("full", "shared"), layers), "index_topk_pattern"
    pattern = fields.get(key)
    if types is None and pattern is not None:
        letters = {"F": "full", "S": "shared"}
        spelt = [letters.get(one, one) for one in pattern] if isinstance(pattern, str | list) else pattern
        types = Fields({key: spelt}).strings(key, ("full", "shared"), layers)
    if types is None:
        every = fields.size("index_topk_freq", default=1)
        first = fields.count("index_skip_topk_offset", default=2, most=layers) - 1
        types = ["shared" if max(n - first, 0) % every else "full" for n in range(layers)]
    if types[0] == "shared":
        raise UnsupportedModel(
            "config.json: the first layer shares the choice of the layer before; there is none"
        )
    return Indexing(
        heads=fields.size("index_n_heads"), dim=fields.size("index_head_dim"), topk=fields.size("index_topk"),
        pairs=fields.flag("indexer_rope_interleave", default=kind == "glm_moe_dsa"),
        layers=tuple(one == "full" for one in types),
    )  # fmt: skip


def _check_sizes(fields: Fields, c: Config) -> None:
    chosen, count = c.experts.chosen, c.experts.count
    size, rest = divmod(count, c.groups)
    if c.top_groups > c.groups or rest or (c.groups > 1 and size < 2) or chosen > c.top_groups * size:
        raise UnsupportedModel(
            f"config.json: num_experts_per_tok is {chosen}, of {count} n_routed_experts in topk_group {c.top_groups} "
            f"of n_group {c.groups}; groups have two experts or more, as many each, and all that a token takes"
        )
    if c.index is not None and (c.index.dim & (c.index.dim - 1) or c.index.dim < max(32, c.rope_dim)):
        raise fields.wrong("index_head_dim", "it must be a power of two from 32 and qk_rope_head_dim")
