"""A checkpoint's JSON files, read field by field: every value has the right type and a size that a model can have;
and the division of a model among ranks. A config is always the whole model's; its Part says which part a rank has."""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import methodcaller
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from openinfer.recipes.engine.errors import UnsupportedModel

if TYPE_CHECKING:
    from openinfer.tensor import Checkpoint

MAX_JSON_BYTES = 64 << 20
FP8_BLOCK = 128
"""Rows and columns of an FP8 weight that share a scale."""
HEAD = "lm_head.weight"
COMPARED_BYTES = 16 << 20
LARGEST: Mapping[str, int] = {
    "head_dim": 1024,
    "max_position_embeddings": 1 << 24,
    "num_experts": 1 << 16,
    "num_hidden_layers": 1024,
    "original_max_position_embeddings": 1 << 24,
    "qk_rope_head_dim": 1024,
    "vocab_size": 1 << 22,
}
"""The largest values of sizes; all other sizes are at most MAX_SIZE. They are far above every published model. A larger
size would take minutes or all memory before the weights' headers could show that the file is wrong."""
MAX_SIZE = 1 << 20


class Fields:
    """An object of a JSON file. A field that is null counts as missing.

    values: the object, parsed. where: how messages name it, such as "config.json".
    Every method raises UnsupportedModel naming the field, its value and what it must be.
    """

    def __init__(self, values: Mapping[str, Any], where: str = "config.json") -> None:
        self._values, self.where = values, where

    def get(self, key: str, default: Any = None) -> Any:
        """The value, unchecked. The caller must check it."""
        value = self._values.get(key)
        return default if value is None else value

    def __contains__(self, key: str) -> bool:
        return self._values.get(key) is not None

    def __iter__(self) -> Iterator[str]:
        """The names of the fields that are there."""
        return (key for key in self._values if key in self)

    def size(self, key: str, *, default: int | None = None, unit: int = 1) -> int:
        """A multiple of `unit`, from 1 to the field's value in LARGEST."""
        value, most = self.get(key, default), LARGEST.get(key, MAX_SIZE)
        if type(value) is not int or not 1 <= value <= most:
            raise self.wrong(key, f"it must be a positive integer of at most {most}")
        if value % unit:
            raise self.wrong(key, f"it must be a multiple of {unit}")
        return value

    def count(self, key: str, *, default: int, most: int) -> int:
        """An integer from 0 to `most`."""
        value = self.get(key, default)
        if type(value) is not int or not 0 <= value <= most:
            raise self.wrong(key, f"it must be an integer from 0 to {most}")
        return value

    def number(self, key: str, *, default: float | None = None, above: float = 0.0, most: float) -> float:
        """A finite number above `above`, at most `most`."""
        value = self.get(key, default)
        # A boolean is no number, and NaN compares false.
        if type(value) not in (int, float) or not above < value <= most:
            raise self.wrong(key, f"it must be a number above {above:g}, at most {most:g}")
        return float(value)

    def flag(self, key: str, *, default: bool = False) -> bool:
        """true or false."""
        value = self.get(key, default)
        if type(value) is not bool:
            raise self.wrong(key, "it must be true or false")
        return value

    def fields(self, key: str) -> "Fields":
        """An object within this one; an empty one where it is not there."""
        value = self.get(key, {})
        if not isinstance(value, dict):
            raise self.wrong(key, "it must be an object")
        return Fields(value, f"{self.where}: {key}")

    def strings(self, key: str, allowed: Sequence[str], length: int) -> list[str] | None:
        """A list of `length` of the allowed strings; None where it is not there."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != length or any(one not in allowed for one in value):
            raise self.wrong(key, f"it must name {' or '.join(allowed)} for {length} layers")
        return value

    def is_all(self, wanted: Mapping[str, Any], why: str) -> None:
        """Check that every field that is there has its one possible value."""
        for key, value in wanted.items():
            found = self.get(key, value)
            if type(found) is not type(value) or found != value:
                raise self.wrong(key, f"{why} {value!r}")

    def wrong(self, key: str, allowed: str) -> UnsupportedModel:
        """The error for a field, to be raised."""
        return UnsupportedModel(f"{self.where}: {key} is {shown(self._values.get(key))}; {allowed}")


def shown(value: object) -> str:
    """A value in a message: short, and without what a terminal would obey."""
    if isinstance(value, list | dict):
        kind = "a list" if isinstance(value, list) else "an object"
        return f"{kind} of {len(value)}" if value else f"{value}"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def read_config(path: Path) -> dict[str, Any]:
    """A file that holds a JSON object. Raises UnsupportedModel naming the file."""
    if not path.exists():
        raise UnsupportedModel(f"{path} does not exist: give the folder of a published checkpoint")
    if not path.is_file() or path.stat().st_size > MAX_JSON_BYTES:  # a FIFO would be waited for
        raise UnsupportedModel(f"{path} is no regular file of at most {MAX_JSON_BYTES >> 20} MiB")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as e:
        raise UnsupportedModel(f"{path} is not JSON: {e}") from None
    if not isinstance(raw, dict):
        raise UnsupportedModel(f"{path} holds a {type(raw).__name__}, not an object")
    return raw


def load_config(model_dir: Path) -> tuple[dict[str, Any], Any]:
    """config.json, and the eos_token_id of generation_config.json where that has one. Older exports of modelopt say in
    hf_quant_config.json how weights are packed. Raises UnsupportedModel."""
    raw, generation = read_config(model_dir / "config.json"), model_dir / "generation_config.json"
    packed = model_dir / "hf_quant_config.json"
    if raw.get("quantization_config") is None and packed.exists():
        said = read_config(packed).get("quantization")
        raw["quantization_config"] = {"quant_method": "modelopt", **(said if isinstance(said, dict) else {})}
    return raw, read_config(generation).get("eos_token_id") if generation.exists() else None


def end_token(model_dir: Path) -> tuple[int, ...]:
    """The id of the eos_token of tokenizer_config.json, if it has one. It ends a turn whatever config.json says, as in
    vLLM: fine-tunes of base models name the end of a turn only there. Raises UnsupportedModel."""
    settings, vocabulary = model_dir / "tokenizer_config.json", model_dir / "tokenizer.json"
    said = Fields(read_config(settings) if settings.exists() else {}, str(settings))
    token = said.get("eos_token")
    token = token.get("content") if isinstance(token, dict) else token
    decoder = said.fields("added_tokens_decoder")
    ids: list[object] = [
        int(key) for key in decoder if key.isdecimal() and decoder.fields(key).get("content") == token
    ]
    if token is not None and not ids and vocabulary.exists():
        tokens = Fields(read_config(vocabulary), str(vocabulary))
        added = tokens.get("added_tokens")
        pairs = [one for one in added if isinstance(one, dict)] if isinstance(added, list) else []
        ids = [one.get("id") for one in pairs if one.get("content") == token]
        known = tokens.fields("model").get("vocab")
        ids += [known.get(token)] if isinstance(known, dict) and isinstance(token, str) else []
    return tuple(one for one in ids if type(one) is int)[:1]


def eos_ids(value: object, vocab_size: int) -> tuple[int, ...]:
    """The ids of an eos_token_id: one, a list, or none. Raises UnsupportedModel."""
    found = value if isinstance(value, list) else [] if value is None else [value]
    if len(found) > 64 or any(type(one) is not int or not 0 <= one < vocab_size for one in found):
        raise UnsupportedModel(
            f"eos_token_id is {shown(value)}; ids must be in [0, {vocab_size}), 64 at most"
        )
    return tuple(found)


def has_own_head(checkpoint: "Checkpoint | None", embedding: str) -> bool:
    """Whether a checkpoint has a head (lm_head.weight) that differs from the embedding of this name.

    Such a head was trained, so it is used even where config.json says tie_word_embeddings, as transformers 5 does. Many
    tied checkpoints have a copy of the embedding, which is not loaded.
    """
    if checkpoint is None or HEAD not in checkpoint or embedding not in checkpoint:
        return False
    one, other = checkpoint.info(HEAD), checkpoint.info(embedding)
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return True
    rows = max(1, COMPARED_BYTES * one.shape[0] // max(one.nbytes, 1)) if one.shape else 1
    for start in range(0, one.shape[0] if one.shape else 0, rows):
        part = (slice(start, start + rows),)
        # As bytes, because NaN differs from itself.
        if checkpoint.part(HEAD, part).tobytes() != checkpoint.part(embedding, part).tobytes():
            return True
    return False


def attention_heads(fields: Fields) -> tuple[int, int]:
    """Query heads and key-value heads, of which each serves as many queries. Raises UnsupportedModel."""
    heads, kv_heads = fields.size("num_attention_heads"), fields.size("num_key_value_heads")
    if heads % kv_heads:
        raise UnsupportedModel(
            f"{fields.where}: {heads} attention heads cannot share {kv_heads} key-value heads evenly"
        )
    return heads, kv_heads


@dataclass(frozen=True, slots=True)
class Part:
    """What one of several ranks has: an even share of all things of a kind. Where ranks are more than heads, groups of
    ranks have the same head. deals: ranks divide the tokens of steps with many, too."""

    rank: int = 0
    ranks: int = 1
    deals: bool = False

    def of(self, count: int) -> int:
        """How many of `count` things this rank has."""
        return max(1, count // self.ranks)

    def first(self, count: int) -> int:
        """The first of them."""
        return self.rank * count // self.ranks

    def deal(self, tokens: int) -> slice | None:
        """The tokens that this rank computes of a step of `tokens`, where ranks deal them; None: it computes all."""
        dealt = self.deals and tokens >= DEALT_TOKENS and tokens % (DEALT_UNIT * self.ranks) == 0
        return self.slice(tokens) if dealt else None

    def slice(self, count: int) -> slice:
        """All of them."""
        return slice(self.first(count), self.first(count) + self.of(count))

    def check(self, sizes: Mapping[str, tuple[int, int]], heads: Mapping[str, int] | None = None) -> None:
        """Raise UnsupportedModel unless ranks can share what these keys of config.json count, each with its unit: a
        rank's part is whole units. Units of FP8_BLOCK are blocks of a scale: a part begins with a block, or lies within
        one. heads: of which ranks have the same number each, or groups of ranks the same head."""
        for key, (size, unit) in sizes.items():
            part, rest = divmod(size, self.ranks)
            starts, fits = [rank * part % unit for rank in range(self.ranks)], part % unit == 0
            if unit == FP8_BLOCK:
                fits = part % 16 == 0 and all(start == 0 or start + part <= unit for start in starts)
            if rest or not part or not fits:
                raise UnsupportedModel(
                    f"config.json: {key} is {size}; {self.ranks} ranks cannot share it in multiples of {unit}"
                )
        for key, count in (heads or {}).items():
            if max(self.ranks, count) % min(self.ranks, count):
                raise UnsupportedModel(
                    f"config.json: {key} is {count}; {self.ranks} ranks cannot share or repeat them"
                )


WHOLE = Part()
"""A model on one rank."""


def size(key: str, **limits: int) -> Any:
    """A field of a ModelConfig: the size under this key of config.json (Fields.size)."""
    return dataclasses.field(metadata={"read": methodcaller("size", key, **limits)})


def number(key: str, **limits: float) -> Any:
    """A field of a ModelConfig: the number under this key of config.json (Fields.number)."""
    return dataclasses.field(metadata={"read": methodcaller("number", key, **limits)})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """What the config of every model has.

    max_position_embeddings: tokens of the longest sequence where no flag asks for more. max_positions: of the longest
    that the config allows, which YaRN makes longer. part: which part of the model a rank has; all other fields are the
    whole model's.
    """

    hidden_size: int = size("hidden_size")
    vocab_size: int = size("vocab_size")
    rms_norm_eps: float = number("rms_norm_eps", default=1e-6, most=1)
    max_position_embeddings: int = size("max_position_embeddings")
    max_positions: int
    eos_token_ids: tuple[int, ...]
    part: Part = WHOLE

    @classmethod
    def common(cls, fields: Fields, eos: object) -> dict[str, Any]:
        """The fields that say where they are in config.json, and eos_token_ids. eos None: the ids of config.json.
        Raises UnsupportedModel."""
        reads = {one.name: one.metadata["read"] for one in dataclasses.fields(cls) if "read" in one.metadata}
        found = {name: read(fields) for name, read in reads.items()}
        ids = eos_ids(fields.get("eos_token_id") if eos is None else eos, found["vocab_size"])
        return {**found, "eos_token_ids": ids}

    @property
    def whole(self) -> Self:
        """This model on one rank."""
        return dataclasses.replace(self, part=WHOLE)


DEALT_TOKENS = 1024
"""Tokens of a step from which on dividing them saves more than the exchanges cost."""
DEALT_UNIT = 16
"""Tokens of a part are a multiple, so that tensors of a part are aligned as whole ones are."""
