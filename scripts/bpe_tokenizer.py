"""Write a byte-level BPE tokenizer of any vocabulary size, made of seeded random merges.

    python scripts/bpe_tokenizer.py DIR [--vocab-size 151936] [--seed 0]

For benchmarks and tests that need a tokenizer of the published size without a published one. Every entry but the
bytes themselves is printable ASCII, and text of any kind encodes and decodes. The Qwen special tokens come last.
"""

from __future__ import annotations

import argparse
import json
import random
import string
from pathlib import Path

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEMPLATE = (
    "{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)


def byte_alphabet() -> list[str]:
    """The 256 characters that stand for bytes in byte-level BPE: printable ones for themselves."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    table = {b: chr(b) for b in printable} | {b: chr(256 + n) for n, b in enumerate(others)}
    return [table[b] for b in range(256)]


def random_merges(count: int, seed: int) -> list[tuple[str, str]]:
    """Merges that make words of at most 9 letters, each a known word and a letter; some begin with a space (Ġ)."""
    rng = random.Random(seed)
    words = [*string.ascii_lowercase, "Ġ"]
    known, merges = set(words), []
    while len(merges) < count:
        left, letter = rng.choice(words), rng.choice(string.ascii_lowercase)
        if len(left) < 9 and left + letter not in known:
            known.add(left + letter)
            words.append(left + letter)
            merges.append((left, letter))
    return merges


def write(out: Path, vocab_size: int, seed: int) -> None:
    """tokenizer.json and tokenizer_config.json."""
    alphabet = byte_alphabet()
    merges = random_merges(vocab_size - len(alphabet) - len(SPECIAL), seed)
    entries = [*alphabet, *(a + b for a, b in merges)]
    specials = [
        {
            "id": len(entries) + n,
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for n, text in enumerate(SPECIAL)
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": PATTERN}, "behavior": "Isolated", "invert": False}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": specials,
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {entry: n for n, entry in enumerate(entries)},
            "merges": [[a, b] for a, b in merges],
        },
    }
    (out / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": TEMPLATE,
        "added_tokens_decoder": {
            str(s["id"]): {k: v for k, v in s.items() if k != "id"} for s in specials
        },
    }  # fmt: skip
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--vocab-size", type=int, default=151936)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    write(args.out, args.vocab_size, args.seed)


if __name__ == "__main__":
    main()
