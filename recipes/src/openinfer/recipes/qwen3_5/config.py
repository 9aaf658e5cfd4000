"""Reading a Qwen3.5 config.json, and the settings that are refused."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from openinfer.kernels.authoring import AnyPacking
from openinfer.recipes.engine.config_fields import Fields, ModelConfig, Part, attention_heads, size
from openinfer.recipes.engine.errors import UnsupportedModel
from openinfer.recipes.engine.rope import SECTIONS, Floats, Rope, rope_of
from openinfer.recipes.engine.weights import Experts, for_ranks, packing
from openinfer.recipes.qwen3_5.published import MODEL_TYPES, STATE_DTYPES
from openinfer.tensor import Checkpoint, dtypes


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(ModelConfig):
    """The text model.

    full: full[l] is True where layer l is full attention, False where it is a gated delta net.
    experts: None for a dense model, whose MLP is `intermediate_size` wide (0 with experts).
    tie_word_embeddings: None where the file contradicts itself.
    inv_freq, rope_scale: see Rope. Part of a head is rotated.
    mtp: the checkpoint has an MTP head, which predicts one more token.
    packing: how packed weights are.
    state_dtype: of recurrent states between steps.
    by_key_head: inputs of a delta net are one projection, by key head, and experts are tensors of their own.
    text_only: there is no vision tower, and tensors have other names.
    """

    full: tuple[bool, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int = size("head_dim")
    key_heads: int = size("linear_num_key_heads")
    value_heads: int = size("linear_num_value_heads")
    key_dim: int = size("linear_key_head_dim")
    value_dim: int = size("linear_value_head_dim")
    conv_kernel: int = size("linear_conv_kernel_dim")
    intermediate_size: int
    experts: Experts | None
    tie_word_embeddings: bool | None
    inv_freq: Floats
    rope_scale: float
    mtp: bool
    packing: AnyPacking | None
    state_dtype: np.dtype[Any]
    by_key_head: bool
    text_only: bool

    def of_rank(self, rank: int, ranks: int) -> "Config":
        """This model with the part of one of several ranks: its query and value heads, columns of MLPs, experts, and
        rows of the vocabulary. Raises UnsupportedModel where the model cannot be shared evenly."""
        if ranks == 1:
            return self
        for_ranks(self.packing)
        block, experts = self.packing.block if self.packing else 16, self.experts
        sizes = {
            "num_attention_heads": (self.num_heads, 1),
            "linear_num_value_heads": (self.value_heads, 1),
            "vocab_size": (self.vocab_size, 16),
        }
        if experts:
            sizes["num_experts"] = (experts.count, 1)
            sizes["shared_expert_intermediate_size"] = (experts.shared_size, block)
        else:
            sizes["intermediate_size"] = (self.intermediate_size, block)
        part = Part(rank, ranks)
        part.check(sizes, {"num_key_value_heads": self.num_kv_heads, "linear_num_key_heads": self.key_heads})
        return dataclasses.replace(self, part=part)

    @property
    def num_full(self) -> int:
        """Layers of full attention: those that keep keys and values."""
        return sum(self.full)

    @property
    def num_linear(self) -> int:
        """Layers of gated delta net: those that keep a state."""
        return len(self.full) - sum(self.full)

    @property
    def conv_size(self) -> int:
        """This rank's channels of a linear layer's convolution: queries, keys and values."""
        return 2 * self.part.of(self.key_heads) * self.key_dim + self.z_size

    @property
    def z_size(self) -> int:
        """This rank's columns of a linear layer's values, and of its output gate."""
        return self.part.of(self.value_heads) * self.value_dim

    def state_bytes(self, itemsize: int) -> int:
        """Bytes of one sequence's recurrent and convolution states on this rank, all layers."""
        recurrent = self.state_dtype.itemsize * self.key_dim * self.z_size
        return self.num_linear * (recurrent + self.conv_kernel * self.conv_size * itemsize)

    @classmethod
    def parse(
        cls, raw: Mapping[str, Any], eos: object = None, quantization: str | None = None, coded: bool = True,
        checkpoint: Checkpoint | None = None,
    ) -> "Config":  # fmt: skip
        """From the parsed config.json, nested or flat; eos None: those of config.json. quantization: the flag. coded:
        whether activations may be quantised. checkpoint: tells packed modules and MTP. Raises UnsupportedModel."""
        whole, model_type = Fields(raw), raw.get("model_type")
        if model_type not in MODEL_TYPES:
            raise whole.wrong("model_type", f"this recipe runs {', '.join(map(repr, MODEL_TYPES))}")
        text = whole.fields("text_config") if "text_config" in whole else whole
        _refuse(text)
        eos = text.get("eos_token_id", whole.get("eos_token_id")) if eos is None else eos
        following = model_type == "qwen3_next"
        experts = Experts.of(text, shared=True) if "_moe" in model_type or following else None
        layers_of_mtp = "num_nextn_predict_layers" if following else "mtp_num_hidden_layers"
        parts = [part for part in (whole, text) if "tie_word_embeddings" in part]
        tied = {part.flag("tie_word_embeddings") for part in parts}
        said, (heads, kv_heads) = cls.common(text, eos), attention_heads(text)
        key_heads, value_heads = said["key_heads"], said["value_heads"]
        if value_heads % key_heads:
            raise UnsupportedModel(
                f"config.json: linear_num_value_heads {value_heads} is no multiple of linear_num_key_heads {key_heads}"
            )
        return cls(
            **said,
            full=_full(text),
            num_heads=heads,
            num_kv_heads=kv_heads,
            intermediate_size=0 if experts else text.size("intermediate_size"),
            experts=experts,
            tie_word_embeddings=None if len(tied) == 2 else tied == {True},
            **_rope(whole, text, said["head_dim"])._asdict(),
            mtp=text.count(layers_of_mtp, default=int(following), most=1) == 1
            and (checkpoint is None or "mtp.fc.weight" in checkpoint),
            packing=packing(whole, quantization, coded, checkpoint),
            state_dtype=dtypes.of(text.get("mamba_ssm_dtype", "float32")),
            by_key_head=following,
            text_only=text is whole,
        )


def _refuse(text: Fields) -> None:
    wanted = {
        "hidden_act": "silu",
        "attention_bias": False,
        "output_gate_type": "swish",
        "attn_output_gate": True,
        "mlp_only_layers": [],
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
        "use_sliding_window": False,
        "mtp_use_dedicated_embeddings": False,
    }
    text.is_all(wanted, "every published model has")
    if text.get("mamba_ssm_dtype", "float32") not in STATE_DTYPES:
        raise text.wrong("mamba_ssm_dtype", f"states are kept in {' or '.join(map(repr, STATE_DTYPES))}")


def _full(text: Fields) -> tuple[bool, ...]:
    """Which layers are full attention: by `layer_types`, or every `full_attention_interval`th."""
    layers = text.size("num_hidden_layers")
    types = text.strings("layer_types", ("full_attention", "linear_attention"), layers)
    key, every = "layer_types", 1
    if types is None:
        key, every = "full_attention_interval", text.size("full_attention_interval")
    full = [types[n] == "full_attention" if types else (n + 1) % every == 0 for n in range(layers)]
    if len(set(full)) != 2:
        raise text.wrong(key, f"the {layers} layers must be of both kinds")
    return tuple(full)


def _rope(whole: Fields, text: Fields, head_dim: int) -> Rope:
    """For text the three streams of positions are one; Qwen3-Next has one."""
    if whole.get("model_type") == "qwen3_next":
        return rope_of(text, head_dim, partial=0.25)
    for key in (*SECTIONS, "rope_theta"):
        if whole is not text and key in whole:
            raise whole.wrong(key, "it belongs into text_config, where other programs read it too")
    streams = ("mrope_interleaved", "mrope_section")
    return rope_of(text, head_dim, default=1e7, partial=0.25, without_effect=streams)
