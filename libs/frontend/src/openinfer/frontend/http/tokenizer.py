"""Text to ids and back: a thin hold on `tokenizers.Tokenizer`, with the pieces a server needs beside it."""

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers.decoders import ByteLevel

from openinfer.frontend.contract import TokenTable
from openinfer.frontend.errors import APIError, ModelFilesError, one_line
from openinfer.frontend.http.text.detokenizer import ByteDetokenizer, Detokenizer, TextDetokenizer
from openinfer.frontend.http.tiktoken import byte_letters, load_tiktoken
from openinfer.frontend.model_files import read_json

LONG_TEXT_CHARS = 8192
"""Longer texts are encoded in a worker thread: a millisecond is what the event loop can spare."""
MAX_DEFINITION = 64 << 20
"""Characters of a tokenizer that engines are sent; those of 250,000 tokens have 20 million."""


class Tokenizer:
    """The tokenizer of a checkpoint directory.

    config: the contents of tokenizer_config.json (special tokens, chat template), {} without the file.
    vocab_size: number of ids the model may produce; ids that the tokenizer does not know decode to "".
    """

    def __init__(self, core: tokenizers.Tokenizer, config: dict[str, Any], vocab_size: int = 0) -> None:
        core.no_truncation()
        core.no_padding()
        self._core = core
        self.config = config
        added = core.get_added_tokens_decoder()
        self._special_ids = {token_id for token_id, token in added.items() if token.special}
        self._special_texts = {token.content for token in added.values() if token.special}
        self._tables: tuple[list[bytes], list[bytes]] | None = None
        if isinstance(core.decoder, ByteLevel):
            self._tables = self._byte_tables(max(vocab_size, core.get_vocab_size()))

    @classmethod
    def load(cls, model_dir: Path, vocab_size: int = 0) -> "Tokenizer":
        """Read tokenizer.json, else tiktoken.model, and tokenizer_config.json. Raises ModelFilesError."""
        path, config_path = model_dir / "tokenizer.json", model_dir / "tokenizer_config.json"
        config = read_json(config_path) if config_path.exists() else {}
        if not path.exists() and (model_dir / "tiktoken.model").exists():
            return cls(load_tiktoken(model_dir / "tiktoken.model", config), config, vocab_size)
        if not path.is_file():
            raise ModelFilesError(
                f"{path} does not exist: put the checkpoint's tokenizer.json there, "
                "or serve token ids only with --skip-tokenizer-init"
            )
        try:
            core = tokenizers.Tokenizer.from_file(str(path))
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            # The Rust side raises plain Exceptions; a panic is only a BaseException.
            raise ModelFilesError(f"{path} is not a tokenizer: {error}") from error
        return cls(core, config, vocab_size)

    @property
    def special_tokens(self) -> dict[str, str]:
        """The special tokens named in tokenizer_config.json: {"eos_token": "<|im_end|>", ...}."""
        found = {}
        for name, value in self.config.items():
            content = value.get("content") if isinstance(value, dict) else value
            if name.endswith("_token") and isinstance(content, str):
                found[name] = content
        return found

    def token_id(self, text: str) -> int | None:
        """The id of the one token that is this text; None if no token is."""
        return self._core.token_to_id(text)

    def has_special_in(self, text: str) -> bool:
        """Whether one of the special tokens, which decoding usually skips, is written in text."""
        return any(content in text for content in self._special_texts)

    def special_texts(self, *, added: bool) -> set[str]:
        """The texts of the special tokens. added: and of all others that stand beside the vocabulary."""
        others = {token.content for token in self._core.get_added_tokens_decoder().values()}
        return others if added else self._special_texts

    async def encode(self, *parts: str, add_special_tokens: bool) -> list[int]:
        """Ids of a text, each part encoded by itself; long ones in a thread without the interpreter lock. Raises
        APIError (400) for a text that the tokenizer cannot read."""
        if len(parts) == 1 and len(parts[0]) <= LONG_TEXT_CHARS:
            return self.encode_short(parts[0], add_special_tokens)
        encode = self._core.encode_batch_fast
        encoded = await asyncio.to_thread(_kept, 400, encode, parts, add_special_tokens=add_special_tokens)
        return [token_id for part in encoded for token_id in part.ids]

    def count(self, text: str) -> int:
        """Tokens of a text, without special ones. Leaves the interpreter lock alone. Raises APIError as encode does."""
        return len(_kept(400, self._core.encode_batch_fast, [text], add_special_tokens=False)[0])

    @property
    def most_chars_a_token(self) -> int | None:
        """No text has more characters than this for each of its tokens; None where that is not known."""
        if self._tables is None:
            return None
        longest = max(map(len, self._tables[0]))
        normalizer = self._core.normalizer
        if normalizer is None:
            return longest
        # Composed characters are fewer than those that they are made of, 4 at most.
        return 4 * longest if type(normalizer).__name__ in ("NFC", "NFKC") else None

    def encode_short(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Ids of a word or so, at once. Raises APIError as encode does."""
        ids: list[int] = _kept(400, self._core.encode, text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        """Text of a whole sequence. Raises APIError (500) where the tokenizer fails."""
        text: str = _kept(500, self._core.decode, token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def detokenizer(self, skip_special_tokens: bool) -> Detokenizer:
        """A new incremental decoder for one sequence."""
        if self._tables is not None:
            return ByteDetokenizer(self._tables[skip_special_tokens])
        return TextDetokenizer(partial(self.decode, skip_special_tokens=skip_special_tokens))

    def token_text(self, token_id: int) -> str:
        """One token by itself, as log-probabilities show it; U+FFFD where it is no whole character."""
        return self.decode([token_id], skip_special_tokens=False)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for."""
        if self._tables is not None and token_id < len(self._tables[0]):
            return self._tables[0][token_id]
        return self.token_text(token_id).encode()

    @property
    def is_bytes(self) -> bool:
        """Whether a token is always the same bytes, whatever stands beside it."""
        return self._tables is not None

    def token_table(self, markers: str) -> TokenTable | None:
        """The table that an engine needs for grammars; None where a token's bytes depend on its neighbours. `markers`:
        special tokens that occur in this text are text to a grammar, and to the parsers."""
        if self._tables is None:
            return None
        added = self._core.get_added_tokens_decoder()
        special = sorted(token_id for token_id in self._special_ids if added[token_id].content not in markers)
        definition = self._core.to_str()
        return TokenTable(self._tables[0], special, definition if len(definition) <= MAX_DEFINITION else "")

    def _byte_tables(self, size: int) -> tuple[list[bytes], list[bytes]]:
        """id -> bytes; with the special tokens, and without them (indexed by skip_special_tokens)."""
        # For str.translate: stand-ins for bytes to chr(byte), all else to a character latin-1 lacks.
        alphabet = dict.fromkeys(range(0x100), "\uffff")
        alphabet |= {ord(letter): chr(byte) for byte, letter in byte_letters().items()}
        everything = [b""] * size
        for token, token_id in self._core.get_vocab(with_added_tokens=True).items():
            if token_id < size:
                everything[token_id] = _token_bytes(token, alphabet)
        plain = [b"" if place in self._special_ids else token for place, token in enumerate(everything)]
        return everything, plain


def _kept(status: int, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The result of a call of the Rust side. Raises APIError for what it raises: a panic, such as of a regular
    expression that backtracks, is a BaseException, which no handler of a request expects."""
    try:
        return call(*args, **kwargs)
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise APIError(f"the tokenizer fails on this input: {one_line(error)}", status=status) from error
        raise


def _token_bytes(token: str, alphabet: dict[int, str]) -> bytes:
    try:
        return token.translate(alphabet).encode("latin-1")
    except UnicodeEncodeError:  # an added token, written in plain text
        return token.encode()
