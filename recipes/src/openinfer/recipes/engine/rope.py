"""The settings of rotary embedding in a config.json: each key is honoured, or refused by name."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from openinfer.kernels import rope_frequencies, yarn_frequencies
from openinfer.recipes.engine.config_fields import LARGEST, Fields, shown
from openinfer.recipes.engine.errors import UnsupportedModel

Floats = np.ndarray[Any, np.dtype[np.float32]]
SECTIONS = ("rope_parameters", "rope_scaling")
"""The objects of config.json that hold the settings: the new style and the old one."""
ORIGINAL = "original_max_position_embeddings"
KEYS = {
    "default": (),
    "llama3": ("factor", ORIGINAL, "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", ORIGINAL, "beta_fast", "beta_slow", "truncate"),
}
"""The keys of each rope type, beside the type and the base."""
YARN_SCALES = ("attention_factor", "attn_factor", "mscale", "mscale_all_dim")


class Rope(NamedTuple):
    """How a model rotates queries and keys.

    inv_freq: float32 [rotary / 2]. rope_scale: the factor on cosines and sines. max_positions: tokens of the longest
    sequence, which YaRN makes longer than max_position_embeddings.
    """

    inv_freq: Floats
    rope_scale: float
    max_positions: int


def rope_of(
    fields: Fields, head_dim: int, *, base: str = "rope_theta", default: float | None = None,
    partial: float | None = None, layer_types: Iterable[str] = ("full_attention",), scaled: bool = True,
    without_effect: Sequence[str] = (),
) -> Rope:  # fmt: skip
    """The rotary embedding of heads of this size, from all places that config.json may have the settings in.

    base: the key of the base, and its default. partial: the default of partial_rotary_factor; None: heads are rotated
    whole. layer_types: the types in this model; settings by layer type must agree. scaled: YaRN multiplies cosines and
    sines. without_effect: keys that change nothing for text. Raises UnsupportedModel naming the key.
    """
    beside = [key for key in (base, "partial_rotary_factor", ORIGINAL) if key in fields]
    rope = _settings(fields, beside, sorted(set(layer_types)))
    kind = rope.get("rope_type", "default")
    if not isinstance(kind, str) or kind not in KEYS:
        raise rope.wrong("rope_type", f"{', '.join(KEYS)} are supported")
    yarn = YARN_SCALES if kind == "yarn" and scaled else ()
    known = (base, "partial_rotary_factor", "rope_type", *KEYS[kind], *yarn, *beside, *without_effect)
    for key in rope:
        if key not in known:
            raise UnsupportedModel(f"{rope.where}: rope type {kind!r} of this recipe has no key {shown(key)}")
    theta = rope.number(base, default=default, above=1, most=1e15)
    share = rope.number("partial_rotary_factor", default=partial or 1.0, most=1)
    dim = int(head_dim * share)
    if dim < 2 or dim % 2 or (partial is None and dim != head_dim):
        raise rope.wrong("partial_rotary_factor", f"it rotates {dim} of {head_dim} elements")
    # An EAGLE-3 head may leave this out, because it has the positions of its model.
    positions = fields.size("max_position_embeddings", default=1)
    if kind == "default":
        return Rope(rope_frequencies(theta, dim), 1.0, positions)
    original = rope.size(ORIGINAL)
    factor = rope.number("factor", default=positions / original, most=1e6)
    if kind == "llama3":
        return Rope(_llama3(rope, rope_frequencies(theta, dim), factor, original), 1.0, positions)
    fast = rope.number("beta_fast", default=32, most=1e6)
    slow = rope.number("beta_slow", default=1, most=1e6)
    if fast < slow:
        raise rope.wrong("beta_fast", f"it must be at least beta_slow, which is {slow:g}")
    inv_freq = yarn_frequencies(
        theta, dim, factor=factor, original=original, fast=fast, slow=slow,
        truncate=rope.flag("truncate", default=True),
    )  # fmt: skip
    longest = min(int(original * factor), LARGEST["max_position_embeddings"])
    return Rope(inv_freq, _yarn_scale(rope, factor) if scaled else 1.0, max(positions, longest))


def score_factor(fields: Fields) -> float:
    """The factor on attention's scores in models whose mscale_all_dim is of all elements of queries and keys, also of
    those that are not rotated: the square of its scale. rope_of has checked the settings."""
    rope = _settings(fields, [key for key in (ORIGINAL,) if key in fields], ["full_attention"])
    if rope.get("rope_type") != "yarn" or rope.get("mscale_all_dim") in (None, 0):
        return 1.0
    factor = rope.number(
        "factor", default=fields.size("max_position_embeddings") / rope.size(ORIGINAL), most=1e6
    )
    return _mscale(factor, rope.number("mscale_all_dim", most=1e3)) ** 2


def _mscale(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _settings(fields: Fields, beside: Sequence[str], layer_types: Sequence[str]) -> Fields:
    """All settings as one object. `beside`: those that stand beside the objects."""
    found = {key: ("config.json", fields.get(key)) for key in beside}
    for section in SECTIONS:
        for key, value in _of_layer_types(fields.fields(section), layer_types):
            name = "rope_type" if key == "type" else key
            before, other = found.get(name, (section, value))
            if other != value and not (name == "rope_type" and "default" in (other, value)):
                raise UnsupportedModel(
                    f"{fields.where}: {section} has {shown(key)} {shown(value)}, and {before} has {shown(other)}; they "
                    "must agree"
                )
            if (name, value) != ("rope_type", "default"):
                found[name] = section, value
    where = " and ".join(section for section in SECTIONS if section in fields) or "rotary embedding"
    return Fields({name: value for name, (_, value) in found.items()}, f"{fields.where}: {where}")


def _of_layer_types(section: Fields, layer_types: Sequence[str]) -> Iterable[tuple[str, Any]]:
    """Keys and values of a section. One that has an object for each layer type must have the same for all."""
    keys = list(section)
    if not keys or not all(isinstance(section.get(key), dict) for key in keys):
        return [(key, section.get(key)) for key in keys]
    if sorted(keys) != list(layer_types):
        raise UnsupportedModel(
            f"{section.where} is by layer type ({', '.join(map(shown, keys))}); this model has "
            f"{', '.join(layer_types)}"
        )
    if any(section.get(key) != section.get(keys[0]) for key in keys):
        raise UnsupportedModel(f"{section.where} differs by layer type; one rotation for all is supported")
    return [(key, value) for key, value in section.get(keys[0]).items() if value is not None]


def _llama3(rope: Fields, plain: Floats, factor: float, original: int) -> Floats:
    """The scaling `llama3`: long wavelengths are `factor` times as long, short ones stay."""
    low, high = (rope.number(f"{name}_freq_factor", most=1e6) for name in ("low", "high"))
    if not low < high:
        raise rope.wrong("low_freq_factor", f"it must be below high_freq_factor, which is {high:g}")
    turns = original * plain / (2 * math.pi)
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return np.asarray(plain * (smooth + (1 - smooth) / factor), np.float32)


def _yarn_scale(rope: Fields, factor: float) -> float:
    """The factor on cosines and sines. transformers does not read `attn_factor`. vLLM multiplies by it, and so does
    this: checkpoints that have it were trained with the product."""
    more = rope.number("attn_factor", default=1.0, most=1e3)
    if "attention_factor" in rope:
        if "attn_factor" in rope:
            raise rope.wrong("attn_factor", "it cannot be beside attention_factor")
        return rope.number("attention_factor", most=1e3)
    # 0 counts as missing, as in transformers.
    given = [key for key in ("mscale", "mscale_all_dim") if rope.get(key) not in (None, 0)]
    if len(given) == 1:
        raise rope.wrong(given[0], "mscale and mscale_all_dim must be given together")
    scales = [rope.number(key, most=1e3) for key in given] or [1.0, 0.0]
    above, below = (_mscale(factor, scale) for scale in scales)
    return above / below * more
