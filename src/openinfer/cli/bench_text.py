"""Random text of a wanted number of tokens."""

from __future__ import annotations

import random
from pathlib import Path

from openinfer.frontend.errors import FlagError


class Text:
    """Draws text with a checkpoint's tokenizer. Raises FlagError without a tokenizer.json."""

    def __init__(self, model_dir: Path | None) -> None:
        path = None if model_dir is None else model_dir / "tokenizer.json"
        if path is None or not path.is_file():
            raise FlagError(f"--text needs MODEL_DIR with a tokenizer.json; found no such file at {path}")
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(path))
        self._vocab_size = self._tokenizer.get_vocab_size(with_added_tokens=False)

    def draw(self, length: int, rng: random.Random) -> str:
        """Text of `length` tokens, or as near as ten tries come: text that is decoded from random ids may encode to
        other ids, so it is cut or prolonged."""
        ids: list[int] = []
        text = ""
        for _ in range(10):
            ids = ids[:length] + [rng.randrange(self._vocab_size) for _ in range(length - len(ids))]
            text = self._tokenizer.decode(ids)
            ids = self._tokenizer.encode(text, add_special_tokens=False).ids
            if len(ids) == length:
                break
        return text
