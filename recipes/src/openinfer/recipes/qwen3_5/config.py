"""How a Qwen3.5 config.json is read, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

MODEL_TYPES = ("qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text")
"""Checkpoints with a vision tower (which is not loaded), and those of the text model alone."""


class UnsupportedModel(ValueError):
    """The checkpoint asks for something that this recipe does not do; the message names it."""


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts: so many, so many of them a token, and the widths of one and of the shared expert."""

    count: int
    chosen: int
    intermediate_size: int
    shared_size: int


@dataclass(frozen=True, slots=True)
class Config:
    """The text model. `full[l]`: layer l is full attention, else it is gated delta net. `experts` is None for a dense
    model, whose MLP is `intermediate_size` wide (0 with experts). `tie_word_embeddings` is None where the file
    contradicts itself. `inv_freq` float32 [rotary_dim / 2]. `mtp`: there is a head that predicts a further token;
    `fp8`: weights are block-scaled; `text_only`: there is no vision tower, and tensors have other names."""

    hidden_size: int
    full: tuple[bool, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int
    intermediate_size: int
    experts: Experts | None
    vocab_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool | None
    inv_freq: np.ndarray[Any, np.dtype[np.float32]]
    mtp: bool
    fp8: bool
    text_only: bool
    eos_token_ids: tuple[int, ...]

    @property
    def num_layers(self) -> int:
        """Decoder layers, of both kinds."""
        return len(self.full)

    @property
    def num_full(self) -> int:
        """Layers of full attention: those that keep keys and values."""
        return sum(self.full)

    @property
    def num_linear(self) -> int:
        """Layers of gated delta net: those that keep a state."""
        return len(self.full) - sum(self.full)

    @property
    def qkv_size(self) -> int:
        """Rows of a full layer's fused projections: each query head with its gate, then keys, then values."""
        return 2 * (self.num_heads + self.num_kv_heads) * self.head_dim

    @property
    def conv_size(self) -> int:
        """Channels of a linear layer's convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.z_size

    @property
    def z_size(self) -> int:
        """Columns of a linear layer's values, and of its output gate."""
        return self.value_heads * self.value_dim

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Bytes of keys and values of one token, all layers."""
        return 2 * self.num_full * self.num_kv_heads * self.head_dim * itemsize

    def state_bytes(self, itemsize: int) -> int:
        """Bytes of one sequence's recurrent and convolution states, all layers."""
        recurrent = 4 * self.value_heads * self.key_dim * self.value_dim
        return self.num_linear * (recurrent + self.conv_kernel * self.conv_size * itemsize)

    @classmethod
    def load(cls, model_dir: Path) -> Config:
        """Read config.json (and the eos ids of generation_config.json, if there is one). Raises UnsupportedModel."""
        raw = _read_json(model_dir / "config.json")
        generation = model_dir / "generation_config.json"
        eos = (_read_json(generation) if generation.exists() else {}).get("eos_token_id")
        return cls.parse(raw, eos)

    @classmethod
    def parse(cls, raw: Mapping[str, Any], eos: int | list[int] | None) -> Config:
        """From the parsed config.json, nested or flat; eos None: those of config.json. Raises UnsupportedModel naming
        the key."""
        model_type = raw.get("model_type")
        if model_type not in MODEL_TYPES:
            allowed = ", ".join(map(repr, MODEL_TYPES))
            raise UnsupportedModel(f"config.json: model_type is {model_type!r}; this recipe runs {allowed}")
        text = raw.get("text_config", raw)
        if not isinstance(text, dict) and text is not raw:
            raise UnsupportedModel("config.json: text_config is not an object")
        _refuse(raw, text)
        vocab = _size(text, "vocab_size")
        eos = text.get("eos_token_id", raw.get("eos_token_id")) if eos is None else eos
        eos_ids = tuple([eos] if isinstance(eos, int) else eos or [])
        if any(not isinstance(e, int) or not 0 <= e < vocab for e in eos_ids):
            raise UnsupportedModel(f"eos_token_id {eos!r}: ids must be in [0, {vocab})")
        experts = _experts(text) if "_moe" in model_type else None
        head_dim = _size(text, "head_dim")
        return cls(
            hidden_size=_size(text, "hidden_size"),
            full=_full(text),
            **_heads(text),
            head_dim=head_dim,
            key_dim=_size(text, "linear_key_head_dim"),
            value_dim=_size(text, "linear_value_head_dim"),
            conv_kernel=_size(text, "linear_conv_kernel_dim"),
            intermediate_size=0 if experts else _size(text, "intermediate_size"),
            experts=experts,
            vocab_size=vocab,
            rms_norm_eps=float(text.get("rms_norm_eps", 1e-6)),
            max_position_embeddings=_size(text, "max_position_embeddings"),
            tie_word_embeddings=_tied(raw, text),
            inv_freq=_rope(text, head_dim),
            mtp=bool(text.get("mtp_num_hidden_layers", 0)),
            fp8=bool(raw.get("quantization_config")),
            text_only=text is raw,
            eos_token_ids=eos_ids,
        )

    def rope_table(self, num_positions: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Cosines and sines by position, float32 [num_positions, 2, rotary_dim / 2]."""
        angles = np.arange(num_positions, dtype=np.float32)[:, None] * self.inv_freq[None, :]
        return np.stack([np.cos(angles), np.sin(angles)], axis=1)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text())
    except FileNotFoundError:
        raise UnsupportedModel(
            f"{path} does not exist: MODEL_DIR must hold a checkpoint in the published format"
        ) from None
    except ValueError as e:
        raise UnsupportedModel(f"{path} is not JSON: {e}") from None
    if not isinstance(raw, dict):
        raise UnsupportedModel(f"{path} holds a {type(raw).__name__}, not an object")
    return raw


def _refuse(raw: Mapping[str, Any], text: Mapping[str, Any]) -> None:
    """What this recipe does not do, by name."""
    quantization = raw.get("quantization_config")
    if quantization:
        method, block = quantization.get("quant_method"), quantization.get("weight_block_size")
        if method != "fp8" or list(block or ()) != [128, 128]:
            raise UnsupportedModel(
                f"config.json: quantization_config has quant_method {method!r} and weight_block_size {block}; "
                "this recipe runs BF16 checkpoints and those of 'fp8' in blocks of [128, 128]"
            )
    wanted = {
        "hidden_act": "silu",
        "attention_bias": False,
        "output_gate_type": "swish",
        "attn_output_gate": True,
    }
    for key, value in wanted.items():
        if text.get(key, value) != value:
            raise UnsupportedModel(
                f"config.json: {key} is {text[key]!r}; every published model has {value!r}"
            )
    if text.get("mamba_ssm_dtype", "float32") != "float32":
        raise UnsupportedModel(
            f"config.json: mamba_ssm_dtype is {text['mamba_ssm_dtype']!r}; states are kept in 'float32' only"
        )
    if text.get("mlp_only_layers"):
        raise UnsupportedModel(
            "config.json: mlp_only_layers is not empty; no published model has such layers"
        )
    if text.get("mtp_num_hidden_layers", 0) not in (0, 1) or text.get("mtp_use_dedicated_embeddings"):
        raise UnsupportedModel(
            "config.json: mtp_num_hidden_layers must be 0 or 1, and mtp_use_dedicated_embeddings false"
        )


def _size(raw: Mapping[str, Any], key: str) -> int:
    value = raw.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UnsupportedModel(f"config.json: {key} is {value!r}; it must be a positive integer")
    return value


def _tied(raw: Mapping[str, Any], text: Mapping[str, Any]) -> bool | None:
    said = {bool(part["tie_word_embeddings"]) for part in (raw, text) if "tie_word_embeddings" in part}
    return None if len(said) == 2 else said == {True}


def _heads(text: Mapping[str, Any]) -> dict[str, int]:
    heads, kv_heads = _size(text, "num_attention_heads"), _size(text, "num_key_value_heads")
    key_heads, value_heads = _size(text, "linear_num_key_heads"), _size(text, "linear_num_value_heads")
    if heads % kv_heads:
        raise UnsupportedModel(
            f"config.json: {heads} attention heads cannot share {kv_heads} key-value heads evenly"
        )
    if value_heads % key_heads:
        raise UnsupportedModel(
            f"config.json: linear_num_value_heads {value_heads} is no multiple of linear_num_key_heads {key_heads}"
        )
    return {"num_heads": heads, "num_kv_heads": kv_heads, "key_heads": key_heads, "value_heads": value_heads}


def _experts(text: Mapping[str, Any]) -> Experts:
    count, chosen = _size(text, "num_experts"), _size(text, "num_experts_per_tok")
    if chosen > count:
        raise UnsupportedModel(f"config.json: num_experts_per_tok is {chosen}; there are {count} experts")
    return Experts(
        count, chosen, _size(text, "moe_intermediate_size"), _size(text, "shared_expert_intermediate_size")
    )


def _full(text: Mapping[str, Any]) -> tuple[bool, ...]:
    """Which layers are full attention: by `layer_types`, or every `full_attention_interval`th."""
    layers, types = _size(text, "num_hidden_layers"), text.get("layer_types")
    if types is None:
        every = _size(text, "full_attention_interval")
        return tuple((layer + 1) % every == 0 for layer in range(layers))
    if len(types) != layers or not set(types) <= {"full_attention", "linear_attention"}:
        raise UnsupportedModel(
            f"config.json: layer_types must name full_attention or linear_attention for {layers} layers"
        )
    if len(set(types)) != 2:
        raise UnsupportedModel("config.json: layer_types must have layers of both kinds")
    return tuple(kind == "full_attention" for kind in types)


def _rope(text: Mapping[str, Any], head_dim: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Frequencies of the rotated part of a head. For text the three streams of positions are one."""
    rope = text.get("rope_parameters") or {}
    kind = rope.get("rope_type", "default")
    if kind != "default" or text.get("rope_scaling"):
        raise UnsupportedModel(
            f"config.json: rope type {kind!r} or rope_scaling is not supported; 'default' is"
        )
    theta = float(rope.get("rope_theta", text.get("rope_theta", 1e7)))
    factor = float(rope.get("partial_rotary_factor", text.get("partial_rotary_factor", 0.25)))
    dim = int(head_dim * factor)
    if dim < 2 or dim % 2 or dim > head_dim:
        raise UnsupportedModel(
            f"config.json: partial_rotary_factor {factor} rotates {dim} of {head_dim} elements"
        )
    exponent = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    return (np.float32(1.0) / np.float32(theta) ** exponent).astype(np.float32)
