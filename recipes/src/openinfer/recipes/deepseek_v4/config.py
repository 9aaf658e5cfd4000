"""How a DeepSeek-V4 config.json is read, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from openinfer.recipes.deepseek_v4.ops.common import PAGE

CSA, HCA = 4, 128
"""Tokens of a compressed entry: of compressed sparse attention (overlapping windows, an indexer), and of heavily
compressed attention. 0 is a layer of the sliding window alone."""

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
"""Keys that every published model has this value of."""

Floats = np.ndarray[Any, np.dtype[np.float32]]


class UnsupportedModel(ValueError):
    """The checkpoint asks for something that this recipe does not do; the message names it."""


@dataclass(frozen=True, slots=True)
class Config:
    """The model, by the symbols of its published description. `ratios[l]`: tokens of a compressed entry of layer l.
    `main_freq`, `compress_freq` float32 [rope_dim / 2]: of layers without and with compressed entries. `mtp`: there is
    a layer that predicts a further token. `rank` of `ranks` GPUs has the part of the heads, experts and rows of lm_head
    that `local_...` and `first_expert` say."""

    hidden_size: int
    ratios: tuple[int, ...]
    num_heads: int
    head_dim: int
    rope_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    index_heads: int
    index_dim: int
    index_topk: int
    sliding_window: int
    num_experts: int
    experts_per_token: int
    moe_intermediate_size: int
    num_hash_layers: int
    routed_scaling_factor: float
    swiglu_limit: float
    hc_mult: int
    hc_iters: int
    hc_eps: float
    vocab_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    main_freq: Floats
    compress_freq: Floats
    mtp: bool
    eos_token_ids: tuple[int, ...]
    ranks: int = 1
    rank: int = 0

    @property
    def num_layers(self) -> int:
        """Layers of the main model."""
        return len(self.ratios)

    def count(self, ratio: int) -> int:
        """Layers with entries of so many tokens."""
        return self.ratios.count(ratio)

    def of_rank(self, rank: int, ranks: int) -> Config:
        """The part of one GPU of several. Raises UnsupportedModel where the model cannot be shared evenly."""
        shared = {
            "o_groups": (self.o_groups, 1),
            "n_routed_experts": (self.num_experts, 1),
            "moe_intermediate_size": (self.moe_intermediate_size, 128),
            "vocab_size": (self.vocab_size, 16),
        }
        for key, (size, unit) in shared.items():
            if size % (ranks * unit):
                raise UnsupportedModel(
                    f"config.json: {key} is {size}; {ranks} ranks cannot share it in multiples of {unit}"
                )
        return dataclasses.replace(self, ranks=ranks, rank=rank)

    @property
    def local_heads(self) -> int:
        """Query heads of this rank."""
        return self.num_heads // self.ranks

    @property
    def local_groups(self) -> int:
        """Groups of heads whose outputs this rank projects."""
        return self.o_groups // self.ranks

    @property
    def local_experts(self) -> int:
        """Experts of this rank, from `first_expert` on."""
        return self.num_experts // self.ranks

    @property
    def first_expert(self) -> int:
        """The first expert of this rank."""
        return self.rank * self.local_experts

    @property
    def local_shared(self) -> int:
        """Columns of the shared expert's hidden layer that this rank has."""
        return self.moe_intermediate_size // self.ranks

    @property
    def local_vocab(self) -> int:
        """Rows of lm_head that this rank has."""
        return self.vocab_size // self.ranks

    def window_page_bytes(self, itemsize: int) -> int:
        """Bytes of a page of the window group: 128 raw vectors a layer, and the states of the compressors after the
        last of them."""
        raw = self.num_layers * PAGE * self.head_dim * itemsize
        csa, hca = 9 * (self.head_dim + self.index_dim), 3 * self.head_dim
        return raw + 4 * (self.count(CSA) * csa + self.count(HCA) * hca)

    def entry_page_bytes(self, itemsize: int) -> int:
        """Bytes of a page of the entries group: what 128 tokens are compressed to."""
        csa = PAGE // CSA * (self.head_dim + self.index_dim)
        return itemsize * (self.count(CSA) * csa + self.count(HCA) * PAGE // HCA * self.head_dim)

    @classmethod
    def load(cls, model_dir: Path) -> Config:
        """Read config.json (and the eos ids of generation_config.json, if there is one). Raises UnsupportedModel."""
        raw = _read_json(model_dir / "config.json")
        generation = model_dir / "generation_config.json"
        eos = (_read_json(generation) if generation.exists() else {}).get("eos_token_id")
        return cls.parse(raw, eos)

    @classmethod
    def parse(cls, raw: Mapping[str, Any], eos: int | list[int] | None) -> Config:
        """From the parsed config.json; eos None: that of config.json. Raises UnsupportedModel naming the key."""
        if raw.get("model_type") != "deepseek_v4":
            raise UnsupportedModel(
                f"config.json: model_type is {raw.get('model_type')!r}; this recipe runs 'deepseek_v4'"
            )
        _refuse(raw)
        vocab = _size(raw, "vocab_size")
        eos = raw.get("eos_token_id") if eos is None else eos
        eos_ids = tuple([eos] if isinstance(eos, int) else eos or [])
        if any(not isinstance(e, int) or not 0 <= e < vocab for e in eos_ids):
            raise UnsupportedModel(f"eos_token_id {eos!r}: ids must be in [0, {vocab})")
        rope_dim = _size(raw, "qk_rope_head_dim")
        config = cls(
            hidden_size=_size(raw, "hidden_size"),
            ratios=_ratios(raw),
            num_heads=_size(raw, "num_attention_heads"),
            head_dim=_size(raw, "head_dim"),
            rope_dim=rope_dim,
            q_lora_rank=_size(raw, "q_lora_rank"),
            o_groups=_size(raw, "o_groups"),
            o_lora_rank=_size(raw, "o_lora_rank"),
            index_heads=_size(raw, "index_n_heads"),
            index_dim=_size(raw, "index_head_dim"),
            index_topk=_size(raw, "index_topk"),
            sliding_window=_size(raw, "sliding_window"),
            num_experts=_size(raw, "n_routed_experts"),
            experts_per_token=_size(raw, "num_experts_per_tok"),
            moe_intermediate_size=_size(raw, "moe_intermediate_size"),
            num_hash_layers=int(raw.get("num_hash_layers", 0)),
            routed_scaling_factor=_positive(raw, "routed_scaling_factor"),
            swiglu_limit=_positive(raw, "swiglu_limit"),
            hc_mult=_size(raw, "hc_mult"),
            hc_iters=_size(raw, "hc_sinkhorn_iters"),
            hc_eps=_positive(raw, "hc_eps"),
            vocab_size=vocab,
            rms_norm_eps=_positive(raw, "rms_norm_eps"),
            max_position_embeddings=_size(raw, "max_position_embeddings"),
            main_freq=_frequencies(_positive(raw, "rope_theta"), rope_dim),
            compress_freq=_yarn(raw, rope_dim),
            mtp=bool(raw.get("num_nextn_predict_layers", 0)),
            eos_token_ids=eos_ids,
        )
        _check_sizes(config)
        return config


def rope_table(frequencies: Floats, num_positions: int) -> Floats:
    """Cosines and sines by position, float32 [num_positions, 2, rope_dim / 2]."""
    angles = np.arange(num_positions, dtype=np.float32)[:, None] * frequencies[None, :]
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


def _refuse(raw: Mapping[str, Any]) -> None:
    """What this recipe does not do, by name."""
    quantization = raw.get("quantization_config") or {}
    method, block = quantization.get("quant_method"), quantization.get("weight_block_size")
    if (
        method != "fp8"
        or list(block or ()) != [128, 128]
        or quantization.get("scale_fmt", "ue8m0") != "ue8m0"
    ):
        raise UnsupportedModel(
            f"config.json: quantization_config has quant_method {method!r}, weight_block_size {block} and scale_fmt "
            f"{quantization.get('scale_fmt')!r}; this recipe runs 'fp8' in blocks of [128, 128] with 'ue8m0' scales"
        )
    for key, value in WANTED.items():
        if raw.get(key, value) != value:
            raise UnsupportedModel(f"config.json: {key} is {raw[key]!r}; every published model has {value!r}")
    if raw.get("num_nextn_predict_layers", 0) not in (0, 1):
        raise UnsupportedModel(
            f"config.json: num_nextn_predict_layers is {raw['num_nextn_predict_layers']}; 0 and 1 are possible"
        )


def _size(raw: Mapping[str, Any], key: str) -> int:
    value = raw.get(key)
    if not isinstance(value, int) or value < 1:
        raise UnsupportedModel(f"config.json: {key} is {value!r}; it must be a positive integer")
    return value


def _positive(raw: Mapping[str, Any], key: str) -> float:
    value = raw.get(key)
    if not isinstance(value, int | float) or not value > 0:
        raise UnsupportedModel(f"config.json: {key} is {value!r}; it must be a positive number")
    return float(value)


def _ratios(raw: Mapping[str, Any]) -> tuple[int, ...]:
    """Of the main model's layers; the published list ends with that of the layer that predicts a further token."""
    layers, ratios = _size(raw, "num_hidden_layers"), raw.get("compress_ratios")
    further = int(raw.get("num_nextn_predict_layers", 0))
    if not isinstance(ratios, list) or len(ratios) not in (layers, layers + further):
        raise UnsupportedModel(
            f"config.json: compress_ratios must be a list of {layers + further} ratios, as published checkpoints "
            "have it (layer_types is a converted form: take the published config.json)"
        )
    if any(ratio not in (0, CSA, HCA) for ratio in ratios):
        raise UnsupportedModel(f"config.json: compress_ratios is {ratios}; 0, {CSA} and {HCA} are possible")
    if any(ratios[layers:]):
        raise UnsupportedModel(
            f"config.json: compress_ratios gives the last layer {ratios[-1]}; it must be 0 (MTP)"
        )
    return tuple(ratios[:layers])


def _frequencies(theta: float, dim: int) -> Floats:
    exponent = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    return (np.float32(1.0) / np.float32(theta) ** exponent).astype(np.float32)


def _yarn(raw: Mapping[str, Any], dim: int) -> Floats:
    """Of layers with compressed entries, at every position."""
    scaling = raw.get("rope_scaling") or {}
    if scaling.get("type") != "yarn":
        raise UnsupportedModel(
            f"config.json: rope_scaling has type {scaling.get('type')!r}; 'yarn' is possible"
        )
    theta, original = (
        _positive(raw, "compress_rope_theta"),
        _positive(scaling, "original_max_position_embeddings"),
    )

    def channel(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(channel(_positive(scaling, "beta_fast"))), 0)
    high = min(math.ceil(channel(_positive(scaling, "beta_slow"))), dim - 1)
    width = high - low if high != low else 0.001
    ramp = np.clip((np.arange(dim // 2, dtype=np.float32) - low) / np.float32(width), 0, 1)
    plain = _frequencies(theta, dim)
    slowed = plain / np.float32(_positive(scaling, "factor"))
    return np.asarray(plain * (1 - ramp) + slowed * ramp, np.float32)


def _check_sizes(c: Config) -> None:
    """What the ops need of sizes."""
    if c.sliding_window > PAGE:
        raise UnsupportedModel(
            f"config.json: sliding_window is {c.sliding_window}; pages of {PAGE} tokens hold at most so many"
        )
    if c.experts_per_token > c.num_experts:
        raise UnsupportedModel(
            f"config.json: num_experts_per_tok is {c.experts_per_token}; there are {c.num_experts} experts"
        )
    if c.num_heads % c.o_groups:
        raise UnsupportedModel(
            f"config.json: {c.num_heads} attention heads cannot be in {c.o_groups} o_groups of one size"
        )
    multiples = {
        "hidden_size": (c.hidden_size, 128),
        "q_lora_rank": (c.q_lora_rank, 128),
        "moe_intermediate_size": (c.moe_intermediate_size, 128),
        "o_groups * o_lora_rank": (c.o_groups * c.o_lora_rank, 128),
        "head_dim - qk_rope_head_dim": (c.head_dim - c.rope_dim, 64),
        "o_lora_rank": (c.o_lora_rank, 16),
        "qk_rope_head_dim": (c.rope_dim, 2),
        "index_n_heads": (c.index_heads, 16),
        "vocab_size": (c.vocab_size, 16),
    }
    for key, (size, unit) in multiples.items():
        if size < unit or size % unit:
            raise UnsupportedModel(f"config.json: {key} is {size}; it must be a multiple of {unit}")
    if c.index_dim & (c.index_dim - 1) or c.index_dim < max(32, c.rope_dim):
        raise UnsupportedModel(
            f"config.json: index_head_dim is {c.index_dim}; it must be a power of two from {max(32, c.rope_dim)}"
        )
