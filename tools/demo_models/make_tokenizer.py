"""Train a family's tokenizer on its own text: `python tools/demo_models/make_tokenizer.py FAMILY DIR`.

Byte-level BPE, 4,096 entries in all with the family's special tokens. The same bytes every time.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from corpus import texts
from families import FAMILIES, POSITIONS, VOCAB, Family
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

CHATS = 40_000
SEED = 7


def make(family: Family) -> Tokenizer:
    """The trained tokenizer. Special tokens come first, the plain added ones last."""
    tokenizer = Tokenizer(models.BPE())
    if family.name != "deepseek_v4":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(family.split), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    special = [AddedToken(text, special=True, normalized=False) for text in family.special]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - len(family.added),
        special_tokens=special,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    marks = (*family.special, *family.added)
    tokenizer.train_from_iterator(
        (_without(text, marks) for text in texts(family.name, SEED, CHATS)), trainer
    )
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in family.added])
    if tokenizer.get_vocab_size() != VOCAB:
        raise ValueError(f"{family.name}: {tokenizer.get_vocab_size()} entries, {VOCAB} are needed")
    return tokenizer


def _without(text: str, marks: tuple[str, ...]) -> str:
    for mark in marks:
        text = text.replace(mark, "\n")
    return text


def config(family: Family, tokenizer: Tokenizer) -> dict[str, Any]:
    """tokenizer_config.json, with the chat template where the family has one."""
    added = {
        str(tokenizer.token_to_id(text)): {
            "content": text, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False,
            "special": text in family.special,
        }
        for text in (*family.special, *family.added)
    }  # fmt: skip
    deepseek = family.template is None
    return {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": added,
        "bos_token": family.special[0] if deepseek else None,
        **({} if deepseek else {"chat_template": family.template}),
        "clean_up_tokenization_spaces": False,
        "eos_token": family.special[1] if deepseek else "<|im_end|>",
        "model_max_length": POSITIONS,
        "pad_token": family.special[1] if deepseek else "<|endoftext|>",
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }


def main() -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    family, folder = FAMILIES[sys.argv[1]], Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make(family)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    text = json.dumps(config(family, tokenizer), indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in FAMILIES:
        sys.exit(f"usage: python tools/demo_models/make_tokenizer.py {{{','.join(FAMILIES)}}} DIR")
    main()
