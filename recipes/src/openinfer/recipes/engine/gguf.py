"""A GGUF file as a checkpoint: its metadata as config.json and tokenizer files, its tensors under published names.

Which architectures and tokenizers are read is up to the recipes (`Recipe.gguf`); all tokenizers are byte-level BPE.
What the converter changed when it made the file is changed back.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from openinfer.recipes.engine.errors import UnsupportedModel
from openinfer.tensor import Checkpoint, GgufCheckpoint, GgufEntry, GgufFile

WEIGHTS = "model.gguf"
"""The link to the file, in the folder that `unpacked` makes."""
Array = np.ndarray[Any, Any]
Json = dict[str, Any]

ATTENTION = {"attn_q": "q_proj", "attn_k": "k_proj", "attn_v": "v_proj", "attn_output": "o_proj"}
MLP = {"ffn_gate": "gate_proj", "ffn_up": "up_proj", "ffn_down": "down_proj"}

WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""How most byte-level tokenizers cut text, but for numbers, which stand between the two."""
_ENDS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")
"""Tokens that end a turn or a text wherever a vocabulary has them as control tokens."""


class GgufMetadata:
    """A file's metadata, read field by field. Raises UnsupportedModel naming the file and the field."""

    def __init__(self, file: GgufFile) -> None:
        self._values, self.path = file.metadata, file.path
        self.architecture = self.get("general.architecture", str)

    def get(self, key: str, kind: type, default: Any = ...) -> Any:
        """A value of this type. `default`: where it is not there; an error without one."""
        value = self._values.get(key, default)
        if value is ... or (
            value is not default and type(value) is not kind and not (kind is float and type(value) is int)
        ):
            given = "is not there" if value is ... else f"is {str(value)[:60]!r}"
            raise self.wrong(key, f"{given}; it must be {kind.__name__}")
        return value

    def of(self, key: str, kind: type, default: Any = ...) -> Any:
        """A value of the architecture's own."""
        return self.get(f"{self.architecture}.{key}", kind, default)

    def under(self, prefix: str) -> dict[str, Any]:
        """All values whose keys begin so, by the rest of their keys."""
        return self._after(f"{self.architecture}.{prefix}")

    def templates(self) -> dict[str, str]:
        """Chat templates by name; the default one is ''."""
        return {name.lstrip("."): text for name, text in self._after("tokenizer.chat_template").items()}

    def _after(self, start: str) -> dict[str, Any]:
        return {
            key.removeprefix(start): value for key, value in self._values.items() if key.startswith(start)
        }

    def wrong(self, key: str, why: str) -> UnsupportedModel:
        return UnsupportedModel(f"{self.path}: {key} {why}")


Entries = Iterator[tuple[str, GgufEntry]]


class GgufFormat(NamedTuple):
    """How the files of an architecture are read.

    config: config.json of the metadata. entries: what each published tensor is made of. splits: how each
    `tokenizer.ggml.pre` cuts text before its merges, by a regular expression; None: as GPT-2 does.
    """

    config: Callable[[GgufMetadata, GgufFile], Json]
    entries: Callable[[GgufMetadata, Json], Entries]
    splits: Mapping[str, str | None]


Formats = Mapping[str, GgufFormat]
"""By `general.architecture`."""


def unpacked(path: Path, formats: Formats, base: Path) -> Path:
    """The folder of a GGUF file, as a checkpoint's: config.json, generation_config.json, tokenizer.json,
    tokenizer_config.json, and a link to the file. It lies in `base` under a name of the file's path, size
    and time, and its files are written at each call.

    path: a file, the first part of a split one, or a folder with one of them. Raises UnsupportedModel for what is not
    read, CheckpointError for a damaged file, OSError where the folder cannot be made.
    """
    path = _one_file(path) if path.is_dir() else path
    file = GgufFile(path)
    try:
        meta = GgufMetadata(file)
        if meta.architecture not in formats:
            known = ", ".join(formats)
            raise meta.wrong("general.architecture", f"is {meta.architecture!r}; these are read: {known}")
        form = formats[meta.architecture]
        config, files = form.config(meta, file), _tokenizer(meta, form.splits)
        files["config.json"] = config
        _checkpoint(form, meta, file, config)
    finally:
        file.close()
    stat = path.stat()
    key = f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns}"
    folder = base / hashlib.sha256(key.encode()).hexdigest()[:24] / path.stem
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name, content in files.items():
        partial = folder / f".{name}.{os.getpid()}"
        partial.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
        partial.replace(folder / name)
    link = folder / WEIGHTS
    if not link.is_symlink():
        link.symlink_to(path.resolve())
    return folder


def is_gguf(path: Path) -> bool:
    """Whether `unpacked` takes a path: a GGUF file, or a folder that has such files and no config.json."""
    if path.is_dir():
        return not (path / "config.json").exists() and any(path.glob("*.gguf"))
    return path.suffix == ".gguf" and path.exists()


def opened(folder: Path, formats: Formats) -> Checkpoint:
    """The tensors of a folder, a checkpoint's or one that `unpacked` made. Raises CheckpointError, UnsupportedModel."""
    link = folder / WEIGHTS
    if not link.is_symlink():
        return Checkpoint(folder)
    file = GgufFile(link.resolve())
    meta = GgufMetadata(file)
    form = formats[meta.architecture]
    return _checkpoint(form, meta, file, form.config(meta, file))


def _checkpoint(form: GgufFormat, meta: GgufMetadata, file: GgufFile, config: Json) -> GgufCheckpoint:
    entries = dict(form.entries(meta, config))
    ignored = [name for name in file.tensors if ".nextn." in name or name == "rope_freqs.weight"]
    return GgufCheckpoint(file, entries, ignored)


def _one_file(folder: Path) -> Path:
    found = sorted(one for one in folder.glob("*.gguf") if not one.name.startswith("mmproj"))
    first = [one for one in found if "-of-" not in one.name or "-00001-of-" in one.name]
    if len(first) != 1:
        names = ", ".join(one.name for one in first[:6]) or "none"
        raise UnsupportedModel(f"{folder} must have one GGUF model, it has {names}: give the file itself")
    return first[0]


def common(meta: GgufMetadata, file: GgufFile) -> Json:
    """Fields that all architectures have in config.json."""
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise meta.wrong("token_embd.weight", "must be a tensor of two dimensions")
    heads = meta.of("attention.head_count", int)
    config: Json = {
        "hidden_size": meta.of("embedding_length", int),
        "num_hidden_layers": meta.of("block_count", int),
        "num_attention_heads": heads,
        "num_key_value_heads": meta.of("attention.head_count_kv", int, heads),
        "vocab_size": embedding.shape[0],
        "max_position_embeddings": meta.of("context_length", int),
        "rms_norm_eps": meta.of("attention.layer_norm_rms_epsilon", float),
        "rope_theta": meta.of("rope.freq_base", float, 10000.0),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "hidden_act": "silu",
        "attention_bias": False,
        "torch_dtype": "bfloat16",
    }
    if scaling := meta.under("rope.scaling."):
        config["rope_scaling"] = _rope_scaling(meta, scaling)
    return config


def _rope_scaling(meta: GgufMetadata, given: Mapping[str, Any]) -> Json | None:
    kind = given.get("type", "linear")
    if kind == "none":
        return None
    known = {"type", "factor", "original_context_length", "finetuned", "attn_factor", "yarn_log_multiplier"}
    more = given.get("yarn_log_multiplier") or given.get("attn_factor", 1.0) != 1.0
    if kind != "yarn" or set(given) - known or more:
        why = f"is {dict(given)}; YaRN without further factors is read"
        raise meta.wrong(f"{meta.architecture}.rope.scaling", why)
    scaling: Json = {"rope_type": "yarn", "factor": given.get("factor")}
    if "original_context_length" in given:
        scaling["original_max_position_embeddings"] = given["original_context_length"]
    return scaling


def dense(
    fields: Json, splits: Mapping[str, str | None], *, head_norms: bool = False, interleaved: bool = False
) -> GgufFormat:
    """The format of a dense model. fields: of its config.json besides the sizes; by `attention_bias` queries, keys and
    values have biases. head_norms: queries and keys have norms. interleaved: rows of a head are stored in the order of
    rotary pairs."""

    def config(meta: GgufMetadata, file: GgufFile) -> Json:
        found = common(meta, file) | fields
        heads, hidden = found["num_attention_heads"], found["hidden_size"]
        found["intermediate_size"] = meta.of("feed_forward_length", int)
        found["head_dim"] = meta.of("attention.key_length", int, hidden // max(heads, 1))
        if meta.of("attention.value_length", int, found["head_dim"]) != found["head_dim"]:
            raise meta.wrong(f"{meta.architecture}.attention.value_length", "must be the length of keys")
        if meta.of("rope.dimension_count", int, found["head_dim"]) != found["head_dim"]:
            raise meta.wrong(f"{meta.architecture}.rope.dimension_count", "must be the whole head")
        if "rope_freqs.weight" in file.tensors:
            raise meta.wrong("rope_freqs.weight", "(rotary factors) is not read from GGUF")
        return found

    def entries(meta: GgufMetadata, config: Json) -> Entries:
        yield from outer("model.", config["tie_word_embeddings"])
        turned = {}
        if interleaved:
            for name, heads in (("attn_q", "num_attention_heads"), ("attn_k", "num_key_value_heads")):
                rows = np.arange(config[heads] * config["head_dim"]).reshape(config[heads], -1, 2)
                turned[name] = rows.swapaxes(1, 2).reshape(-1)
        names = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
        if head_norms:
            names |= {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
        names |= {stored: f"self_attn.{published}" for stored, published in ATTENTION.items()}
        names |= {stored: f"mlp.{published}" for stored, published in MLP.items()}
        for layer in range(config["num_hidden_layers"]):
            for stored, published in names.items():
                entry = GgufEntry(f"blk.{layer}.{stored}.weight", turned.get(stored))
                yield f"model.layers.{layer}.{published}.weight", entry
            for one in "qkv" if config["attention_bias"] else "":
                bias = GgufEntry(f"blk.{layer}.attn_{one}.bias")
                yield f"model.layers.{layer}.self_attn.{one}_proj.bias", bias

    return GgufFormat(config, entries, splits)


def outer(prefix: str, tied: bool, change: Callable[[Array], Array] | None = None) -> Entries:
    yield f"{prefix}embed_tokens.weight", GgufEntry("token_embd.weight")
    yield f"{prefix}norm.weight", GgufEntry("output_norm.weight", change=change)
    if not tied:
        yield "lm_head.weight", GgufEntry("output.weight")


def _tokenizer(meta: GgufMetadata, splits: Mapping[str, str | None]) -> dict[str, Json]:
    model, pre = meta.get("tokenizer.ggml.model", str), meta.get("tokenizer.ggml.pre", str, "gpt-2")
    if model != "gpt2":
        raise meta.wrong("tokenizer.ggml.model", f"is {model!r}; 'gpt2' (byte-level BPE) is read")
    if pre not in splits:
        raise meta.wrong("tokenizer.ggml.pre", f"is {pre!r}; these are read: {', '.join(splits)}")
    tokens, merges = meta.get("tokenizer.ggml.tokens", list), meta.get("tokenizer.ggml.merges", list)
    types = meta.get("tokenizer.ggml.token_type", list, [1] * len(tokens))
    vocabulary = {token: i for i, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens) or len(types) != len(tokens):
        raise meta.wrong("tokenizer.ggml.tokens", "has a token twice, or not one type for each token")
    for merge in merges:
        left, _, right = str(merge).partition(" ")
        if not {left, right, left + right} <= vocabulary.keys():
            raise meta.wrong("tokenizer.ggml.merges", f"has {str(merge)[:40]!r}, whose parts are no tokens")

    def special(name: str) -> int | None:
        found: int | None = meta.get(f"tokenizer.ggml.{name}_token_id", int, None)
        if found is not None and not 0 <= found < len(tokens):
            raise meta.wrong(f"tokenizer.ggml.{name}_token_id", f"is {found}; there are {len(tokens)} tokens")
        return found

    added = [
        {"id": i, "content": tokens[i], "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": types[i] == 3}
        for i in range(len(tokens)) if types[i] in (3, 4)
    ]  # fmt: skip
    split, bos = splits[pre], special("bos")
    whole = split is not None and r"\p{N}{1,3}" in split  # such vocabularies take whole words before merges
    begins = meta.get("tokenizer.ggml.add_bos_token", bool, whole)
    start = [tokens[bos]] if begins and bos is not None else []
    decoder = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    levels = {**decoder, "add_prefix_space": False, "use_regex": split is None}
    cuts: list[Json] = [{"type": "Digits", "individual_digits": True}] if pre == "smollm" else []
    if split:
        cuts = [{"type": "Split", "pattern": {"Regex": split}, "behavior": "Isolated", "invert": False}]
    first: list[Json] = [{"SpecialToken": {"id": token, "type_id": 0}} for token in start]
    tokenizer: Json = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
        "normalizer": None if split is None or whole else {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*cuts, levels]},
        "post_processor": {
            "type": "TemplateProcessing", "single": [*first, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [*first, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {token: {"id": token, "ids": [bos], "tokens": [token]} for token in start},
        },
        "decoder": decoder,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
            "ignore_merges": whole, "vocab": vocabulary, "merges": merges,
        },
    }  # fmt: skip
    named = {"bos_token": bos, "eos_token": special("eos"), "pad_token": special("padding")}
    settings: Json = {name: tokens[i] for name, i in named.items() if i is not None}
    templates = meta.templates()
    if set(templates) == {""}:
        settings["chat_template"] = templates[""]
    elif templates:
        settings["chat_template"] = [
            {"name": name or "default", "template": text} for name, text in templates.items()
        ]
    ends = (vocabulary.get(end) for end in _ENDS if types[vocabulary.get(end, 0)] == 3)
    stops = list(dict.fromkeys(i for i in (special("eos"), special("eot"), *ends) if i is not None))
    return {
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": settings,
        "generation_config.json": {"bos_token_id": bos, "eos_token_id": stops},
    }
