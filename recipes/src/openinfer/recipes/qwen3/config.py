"""How a Qwen3 config.json is read, and what is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np


class UnsupportedModel(ValueError):
    """The checkpoint asks for something that this recipe does not do; the message names it."""


@dataclass(frozen=True, slots=True)
class Config:
    """A dense Qwen3. `windows[l]` is layer l's sliding window in tokens, 0 for full attention; `rope_scale` multiplies
    cosines and sines (YaRN), and `inv_freq` float32 [head_dim / 2] are the rotation's frequencies."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    windows: tuple[int, ...]
    inv_freq: np.ndarray[Any, np.dtype[np.float32]]
    rope_scale: float
    eos_token_ids: tuple[int, ...]

    @property
    def qkv_size(self) -> int:
        """Rows of the fused q, k and v projections."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Bytes of keys and values of one token, all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * itemsize

    @classmethod
    def load(cls, model_dir: Path) -> Config:
        """Read config.json (and the eos ids of generation_config.json, if there is one). Raises UnsupportedModel."""
        raw = _read_json(model_dir / "config.json")
        generation = model_dir / "generation_config.json"
        eos = (_read_json(generation) if generation.exists() else {}).get(
            "eos_token_id", raw.get("eos_token_id")
        )
        return cls.parse(raw, eos)

    @classmethod
    def parse(cls, raw: Mapping[str, Any], eos: int | list[int] | None) -> Config:
        """From the parsed config.json. Raises UnsupportedModel naming the key."""
        _refuse(raw)
        heads = _size(raw, "num_attention_heads")
        head_dim = _size(raw, "head_dim") if raw.get("head_dim") else _size(raw, "hidden_size") // heads
        kv_heads = _size(raw, "num_key_value_heads")
        if heads % kv_heads:
            raise UnsupportedModel(
                f"config.json: {heads} attention heads cannot share {kv_heads} key-value heads evenly"
            )
        inv_freq, rope_scale = _rope(raw, head_dim)
        vocab = _size(raw, "vocab_size")
        eos_ids = tuple([eos] if isinstance(eos, int) else eos or [])
        if any(not isinstance(e, int) or not 0 <= e < vocab for e in eos_ids):
            raise UnsupportedModel(f"eos_token_id {eos!r}: ids must be in [0, {vocab})")
        return cls(
            hidden_size=_size(raw, "hidden_size"),
            num_layers=_size(raw, "num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            intermediate_size=_size(raw, "intermediate_size"),
            vocab_size=vocab,
            rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            max_position_embeddings=_size(raw, "max_position_embeddings"),
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            windows=_windows(raw),
            inv_freq=inv_freq,
            rope_scale=rope_scale,
            eos_token_ids=eos_ids,
        )

    def rope_table(self, num_positions: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Cosines and sines by position, float32 [num_positions, 2, head_dim / 2]."""
        angles = np.arange(num_positions, dtype=np.float32)[:, None] * self.inv_freq[None, :]
        return np.stack([np.cos(angles), np.sin(angles)], axis=1) * np.float32(self.rope_scale)


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


def _refuse(raw: Mapping[str, Any]) -> None:
    """What this recipe does not do, by name."""
    if raw.get("model_type") != "qwen3":
        raise UnsupportedModel(
            f"config.json: model_type is {raw.get('model_type')!r}; this recipe runs 'qwen3'"
        )
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method")
        raise UnsupportedModel(
            f"config.json: quantization_config ({method}) is not supported yet; use the BF16 checkpoint"
        )
    if raw.get("attention_bias"):
        raise UnsupportedModel(
            "config.json: attention_bias is true; no published Qwen3 has it and it is not supported"
        )
    if raw.get("hidden_act", "silu") != "silu":
        raise UnsupportedModel(f"config.json: hidden_act is {raw['hidden_act']!r}; Qwen3 uses 'silu'")


def _size(raw: Mapping[str, Any], key: str) -> int:
    value = raw.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UnsupportedModel(f"config.json: {key} is {value!r}; it must be a positive integer")
    return value


def _windows(raw: Mapping[str, Any]) -> tuple[int, ...]:
    """Sliding windows by layer: `layer_types` where given, else every layer from max_window_layers on."""
    layers, window = _size(raw, "num_hidden_layers"), raw.get("sliding_window") or 0
    types = raw.get("layer_types")
    if types is None:
        first = raw.get("max_window_layers", layers) if raw.get("use_sliding_window") and window else layers
        types = ["full_attention" if layer < first else "sliding_attention" for layer in range(layers)]
    if len(types) != layers or not set(types) <= {"full_attention", "sliding_attention"}:
        raise UnsupportedModel(
            f"config.json: layer_types must name full_attention or sliding_attention for {layers} layers"
        )
    if "sliding_attention" in types and not (isinstance(window, int) and window > 0):
        raise UnsupportedModel(
            f"config.json: layer_types has sliding_attention and sliding_window is {window!r}"
        )
    return tuple(window if t == "sliding_attention" else 0 for t in types)


def _rope(raw: Mapping[str, Any], dim: int) -> tuple[np.ndarray[Any, np.dtype[np.float32]], float]:
    """Frequencies and the factor on cosines and sines; plain RoPE or static YaRN, in old or new config style."""
    new = raw.get("rope_parameters") or {}
    scaling = new or raw.get("rope_scaling") or {}
    theta = float(new.get("rope_theta", raw.get("rope_theta", 10000.0)))
    exponent = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    inv_freq = (np.float32(1.0) / np.float32(theta) ** exponent).astype(np.float32)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return inv_freq, 1.0
    if kind != "yarn":
        raise UnsupportedModel(f"config.json: rope type {kind!r} is not supported; 'default' and 'yarn' are")
    factor = float(scaling["factor"])
    original = scaling.get("original_max_position_embeddings") or _size(raw, "max_position_embeddings")
    low, high = (
        dim * math.log(original / (2 * math.pi * beta)) / (2 * math.log(theta))
        for beta in (float(scaling.get("beta_fast") or 32), float(scaling.get("beta_slow") or 1))
    )
    low, high = max(math.floor(low), 0), min(math.ceil(high), dim - 1)
    ramp = np.clip((np.arange(dim // 2, dtype=np.float32) - low) / max(high - low, 0.001), 0, 1).astype(
        np.float32
    )
    scale = scaling.get("attention_factor") or 0.1 * math.log(factor) + 1.0
    return (inv_freq / np.float32(factor) * ramp + inv_freq * (1 - ramp)).astype(np.float32), float(scale)
