"""Write a tiny Qwen3 checkpoint in the published format: `python scripts/tiny_checkpoint.py DIR`.

Random weights from a fixed seed: the same bytes every time. It answers with noise, and exercises everything else.
"""

from __future__ import annotations

import json
import math
import struct
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PLAIN_ADDED = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = (
    "{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}"
    "{%- if enable_thinking is defined and enable_thinking is false -%}"
    "{{- '<think>\\n\\n</think>\\n\\n' -}}{%- endif -%}{%- endif -%}"
)
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "bos_token_id": 256,
    "eos_token_id": 258,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 256,
    "intermediate_size": 512,
    "max_position_embeddings": 4096,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 272,
}


def main(folder: Path) -> None:
    """Write the checkpoint; config.json comes last, so that a folder that has one is complete."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", tokenizer_config(tokenizer))
    write_json(folder / "generation_config.json", generation_config())
    write_safetensors(folder / "model.safetensors", dict(make_weights()))
    write_json(folder / "config.json", CONFIG)


def make_weights() -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """Weights by their published names, each from its own seed, scaled so that logits deviate by about 2.5."""
    hidden, inter, dim = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["head_dim"]
    heads, kv_heads = CONFIG["num_attention_heads"], CONFIG["num_key_value_heads"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (CONFIG["vocab_size"], hidden)}
    for n in range(CONFIG["num_hidden_layers"]):
        at = f"model.layers.{n}."
        shapes |= {
            at + "input_layernorm.weight": (hidden,),
            at + "self_attn.q_proj.weight": (heads * dim, hidden),
            at + "self_attn.k_proj.weight": (kv_heads * dim, hidden),
            at + "self_attn.v_proj.weight": (kv_heads * dim, hidden),
            at + "self_attn.q_norm.weight": (dim,),
            at + "self_attn.k_norm.weight": (dim,),
            at + "self_attn.o_proj.weight": (hidden, heads * dim),
            at + "post_attention_layernorm.weight": (hidden,),
            at + "mlp.gate_proj.weight": (inter, hidden),
            at + "mlp.up_proj.weight": (inter, hidden),
            at + "mlp.down_proj.weight": (hidden, inter),
        }
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (CONFIG["vocab_size"], hidden)}
    for name, shape in shapes.items():
        noise = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape, np.float32)
        if len(shape) == 1:
            weight = 1 + 0.1 * noise
        else:
            weight = noise * (2.5 if name == "lm_head.weight" else 1.0) / math.sqrt(shape[1])
        yield name, weight.astype(ml_dtypes.bfloat16)


def write_safetensors(path: Path, tensors: dict[str, np.ndarray[Any, Any]]) -> None:
    """The format: 8 bytes of header length, a JSON header padded to 8 bytes, the data. All tensors are BF16."""
    header, end = {}, 0
    for name, array in tensors.items():
        header[name] = {"dtype": "BF16", "shape": array.shape, "data_offsets": [end, end + array.nbytes]}
        end += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for array in tensors.values():
            file.write(array.tobytes())


def make_tokenizer() -> Tokenizer:
    """Byte-level BPE without merges: a token a byte (ids 0 to 255), then the added tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: n for n, char in enumerate(alphabet)}, merges=[]))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in PLAIN_ADDED])
    return tokenizer


def tokenizer_config(tokenizer: Tokenizer) -> dict[str, Any]:
    """tokenizer_config.json, with the chat template."""
    added = {
        str(tokenizer.token_to_id(text)): {
            "content": text, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False,
            "special": text in SPECIAL,
        }
        for text in (*SPECIAL, *PLAIN_ADDED)
    }  # fmt: skip
    return {
        "added_tokens_decoder": added,
        "bos_token": None,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "model_max_length": CONFIG["max_position_embeddings"],
        "pad_token": "<|endoftext|>",
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }


def generation_config() -> dict[str, Any]:
    """generation_config.json, with Qwen3's published sampling defaults."""
    return {
        "bos_token_id": 256,
        "do_sample": True,
        "eos_token_id": [258, 256],
        "pad_token_id": 256,
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
    }


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Indented, as published ones are."""
    path.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python scripts/tiny_checkpoint.py DIR")
    main(Path(sys.argv[1]))
