"""Reading a DeepSeek-V4 config.json, and the settings that are refused."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from openinfer.kernels import rope_frequencies
from openinfer.recipes.deepseek_v4.ops import PAGE
from openinfer.recipes.engine.config_fields import FP8_BLOCK, Fields, ModelConfig, Part, number, shown, size
from openinfer.recipes.engine.errors import UnsupportedModel
from openinfer.recipes.engine.rope import Floats, rope_of

if TYPE_CHECKING:
    from openinfer.tensor import Checkpoint

CSA, HCA = 4, 128
"""Tokens of a compressed entry. CSA is compressed sparse attention (overlapping windows, an indexer), HCA is heavily
compressed attention. A ratio of 0 is a layer of the sliding window alone."""

WANTED: Mapping[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "num_key_value_heads": 1,
    "n_shared_experts": 1,
    "hc_mult": 4,
}
"""Keys that have this value in every published model."""


DSPARK_HAS = ("enable_confidence_head", "confidence_head_with_markov", "sample_from_anchor")
MOST_BLOCK = 64
"""Tokens of a block of drafts, at most."""

DEALT_BYTES = 6 << 30
"""Bytes of attention that a rank may hold to compute tokens of its own: Flash has 4.3 GB, and Pro's 17.4 GB would leave
eight GPUs little room for a cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(ModelConfig):
    """The model, by the symbols of its published description.

    ratios: ratios[l] is the number of tokens of a compressed entry of layer l.
    main_freq, compress_freq: float32 [rope_dim / 2], for layers without and with compressed entries.
    mtp: there is an MTP layer, which predicts one more token. dspark: there is a drafter of other layers instead.
    """

    hidden_size: int = size("hidden_size", unit=128)
    vocab_size: int = size("vocab_size", unit=16)
    ratios: tuple[int, ...]
    num_heads: int = size("num_attention_heads")
    head_dim: int = size("head_dim")
    rope_dim: int = size("qk_rope_head_dim", unit=2)
    q_lora_rank: int = size("q_lora_rank", unit=128)
    o_groups: int = size("o_groups")
    o_lora_rank: int = size("o_lora_rank", unit=16)
    index_heads: int = size("index_n_heads", unit=16)
    index_dim: int = size("index_head_dim")
    index_topk: int = size("index_topk")
    sliding_window: int = size("sliding_window")
    num_experts: int = size("n_routed_experts")
    experts_per_token: int = size("num_experts_per_tok")
    moe_intermediate_size: int = size("moe_intermediate_size", unit=128)
    num_hash_layers: int
    routed_scaling_factor: float = number("routed_scaling_factor", most=1e6)
    swiglu_limit: float = number("swiglu_limit", most=1e6)
    hc_mult: int = size("hc_mult")
    hc_iters: int = size("hc_sinkhorn_iters")
    hc_eps: float = number("hc_eps", most=1e6)
    main_freq: Floats
    compress_freq: Floats
    mtp: bool
    dspark: bool

    @property
    def num_layers(self) -> int:
        """Layers of the main model."""
        return len(self.ratios)

    def count(self, ratio: int) -> int:
        """The number of layers whose entries have `ratio` tokens each."""
        return self.ratios.count(ratio)

    def of_rank(self, rank: int, ranks: int, *, deals: bool = False) -> "Config":
        """This model with the part of one of several ranks. deals: ranks divide the tokens of long steps where all
        weights of attention fit beside a rank's. Raises UnsupportedModel where it cannot be shared."""
        sizes = {
            "o_groups": (self.o_groups, 1),
            "o_groups * o_lora_rank": (self.o_groups * self.o_lora_rank, FP8_BLOCK),
            "n_routed_experts": (self.num_experts, 1),
            "moe_intermediate_size": (self.moe_intermediate_size, FP8_BLOCK),
            "vocab_size": (self.vocab_size, 16),
        }
        width = self.num_heads * self.head_dim
        out = self.o_lora_rank * width + self.o_groups * self.o_lora_rank * self.hidden_size
        # Bytes of what ranks share of attention, in FP8.
        attention = self.num_layers * (width * self.q_lora_rank + out)
        part = Part(rank, ranks, deals=deals and ranks > 1 and attention <= DEALT_BYTES)
        part.check(sizes)
        return dataclasses.replace(self, part=part)

    @classmethod
    def parse(cls, raw: Mapping[str, Any], eos: object = None) -> "Config":
        """From the parsed config.json; eos None: that of config.json. Raises UnsupportedModel naming the key."""
        fields = Fields(raw)
        fields.is_all({"model_type": "deepseek_v4"}, "this recipe runs")
        _refuse(fields)
        said = cls.common(fields, eos)
        rope_dim = said["rope_dim"]
        dspark = bool(fields.get("dspark_block_size") and fields.get("dspark_target_layer_ids"))
        compressed = rope_of(fields, rope_dim, base="compress_rope_theta", scaled=False)
        config = cls(
            **said,
            ratios=_ratios(fields),
            num_hash_layers=fields.count("num_hash_layers", default=0, most=1024),
            max_positions=compressed.max_positions,
            main_freq=rope_frequencies(fields.number("rope_theta", above=1, most=1e15), rope_dim),
            compress_freq=compressed.inv_freq,
            mtp=not dspark and fields.count("num_nextn_predict_layers", default=0, most=64) == 1,
            dspark=dspark,
        )
        _check_sizes(fields, config)
        return config


@dataclass(frozen=True, slots=True)
class Dspark:
    """A DSpark drafter: layers that read a block of tokens at once, the one that was sampled last and noise behind it.

    stages: its layers. block: tokens of a block, each of which gives a draft. noise: the id of all but the first.
    targets: the layers of the model whose output it reads. rank: of its Markov head.
    """

    stages: int
    block: int
    noise: int
    targets: tuple[int, ...]
    rank: int

    @classmethod
    def parse(cls, raw: Mapping[str, Any], config: Config, checkpoint: "Checkpoint | None") -> "Dspark":
        """From the parsed config.json and the names in the checkpoint. None: as config.json says. Raises
        UnsupportedModel naming the key or the tensors."""
        fields, vocab, layers = Fields(raw), config.vocab_size, config.num_layers
        fields.is_all({"draft_vocab_size": vocab, **dict.fromkeys(DSPARK_HAS, True)}, "a DSpark drafter has")
        targets = fields.get("dspark_target_layer_ids")
        good = isinstance(targets, list) and all(type(one) is int and 0 <= one < layers for one in targets)
        if not good or targets != sorted(set(targets)):
            raise UnsupportedModel(
                f"config.json: dspark_target_layer_ids is {repr(targets)[:80]}; it must name layers in 0 to "
                f"{layers - 1}, rising"
            )
        block = fields.size("dspark_block_size")
        if block > MOST_BLOCK:
            raise fields.wrong("dspark_block_size", f"it must be from 1 to {MOST_BLOCK}")
        tail = len(fields.get("compress_ratios")) - layers
        stages = tail or len(targets)
        if checkpoint is not None:
            found = {name.split(".")[1] for name in checkpoint.names if name.startswith("mtp.")}
            stages = len(found)
            if not found or found != {str(n) for n in range(stages)}:
                raise UnsupportedModel(
                    f"the checkpoint has tensors mtp.N of N {', '.join(sorted(found)[:8]) or '(none)'}; a DSpark "
                    "drafter has them of 0, 1, ..."
                )
        fields.is_all({"n_mtp_layers": stages}, "by the checkpoint's tensors it is")
        if tail not in (0, fields.get("num_nextn_predict_layers"), stages):
            raise UnsupportedModel(
                f"config.json: compress_ratios has {tail} ratios more than layers; the drafter has {stages} layers"
            )
        noise = fields.count("dspark_noise_token_id", default=-1, most=vocab - 1)
        return cls(stages, block, noise, tuple(targets), fields.size("dspark_markov_rank"))


def _refuse(fields: Fields) -> None:
    quantization = fields.fields("quantization_config")
    method, block = quantization.get("quant_method"), quantization.get("weight_block_size")
    scales = quantization.get("scale_fmt", "ue8m0")
    if method != "fp8" or block not in ([128, 128], (128, 128)) or scales != "ue8m0":
        raise UnsupportedModel(
            f"config.json: quantization_config has quant_method {shown(method)}, weight_block_size {repr(block)[:80]} "
            f"and scale_fmt {shown(scales)}; this recipe runs 'fp8' in blocks of [128, 128] with 'ue8m0' scales"
        )
    experts = "experts are run in FP4 with E8M0 scales and in FP8, which have"
    quantization.is_all({"moe_quant_algo": None}, experts)
    fields.is_all(WANTED, "every published model has")


def _ratios(fields: Fields) -> tuple[int, ...]:
    """The compression ratios of the main model's layers. Published lists go on with a 0 for each layer that drafts."""
    layers, ratios = fields.size("num_hidden_layers"), fields.get("compress_ratios")
    if ratios is None and "layer_types" in fields:
        raise UnsupportedModel(
            "config.json: layer_types without compress_ratios is a converted form; take the published config.json"
        )
    if not isinstance(ratios, list) or len(ratios) < layers:
        raise fields.wrong("compress_ratios", f"it must be a list of a ratio for each of {layers} layers")
    if any(ratio not in (0, CSA, HCA) for ratio in ratios[:layers]):
        raise UnsupportedModel(
            f"config.json: compress_ratios is {repr(ratios)[:80]}; 0, {CSA} and {HCA} are possible"
        )
    if any(type(ratio) is not int or ratio for ratio in ratios[layers:]):
        raise UnsupportedModel(
            f"config.json: compress_ratios goes on with {repr(ratios[layers:])[:80]} after {layers} layers; layers "
            "that draft have 0"
        )
    return tuple(ratios[:layers])


def _check_sizes(fields: Fields, c: Config) -> None:
    if c.sliding_window > PAGE:
        raise fields.wrong("sliding_window", f"a page holds at most {PAGE} tokens")
    if c.experts_per_token > c.num_experts:
        raise fields.wrong("num_experts_per_tok", f"there are {c.num_experts} experts")
    if c.num_heads % c.o_groups:
        raise UnsupportedModel(
            f"config.json: {c.num_heads} attention heads cannot be in {c.o_groups} o_groups of one size"
        )
    multiples = {
        "o_groups * o_lora_rank": (c.o_groups * c.o_lora_rank, 128),
        "head_dim - qk_rope_head_dim": (c.head_dim - c.rope_dim, 64),
    }
    for key, (found, unit) in multiples.items():
        if found < unit or found % unit:
            raise UnsupportedModel(f"config.json: {key} is {found}; it must be a multiple of {unit}")
    if c.index_dim & (c.index_dim - 1) or c.index_dim < max(32, c.rope_dim):
        raise fields.wrong("index_head_dim", f"it must be a power of two from {max(32, c.rope_dim)}")
