"""A vocabulary that a checkpoint has as tokens by rank (`tiktoken.model`), without a tokenizer.json."""

import base64
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from openinfer.frontend.errors import ModelFilesError
from openinfer.frontend.model_files import read_json, read_text

MAX_BYTES = 8 << 20
"""Of the file; that of 163,584 tokens has 2.8 million."""
MAX_TOKENS, MAX_TOKEN_BYTES, MAX_MERGES = 1 << 18, 512, 1 << 20
RESERVED = 256
"""Ids behind the ranks, for special tokens."""
_UPPER, _LOWER = (
    rf"[{cases}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]" for cases in (r"\p{Lu}\p{Lt}", r"\p{Ll}")
)
_BEFORE, _AFTER = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
SPLITS = {
    "kimi_k2": "|".join(
        (
            r"[\p{Han}]+",
            f"{_BEFORE}{_UPPER}*{_LOWER}+{_AFTER}",
            f"{_BEFORE}{_UPPER}+{_LOWER}*{_AFTER}",
            r"\p{N}{1,3}",
            r" ?[^\s\p{L}\p{N}]+[\r\n]*",
            r"\s*[\r\n]+",
            r"\s+(?!\S)",
            r"\s+",
        )
    )
}
"""By model_type: how text is cut before it is merged. Checkpoints say it in code, which is never run."""


def load_tiktoken(path: Path, config: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer of a tiktoken.model; config.json beside it says whose it is. config: tokenizer_config.json, which
    has the special tokens. Raises ModelFilesError naming the file, and the line at fault."""
    kind = read_json(path.parent / "config.json").get("model_type")
    split = SPLITS.get(kind) if isinstance(kind, str) else None
    if split is None:
        raise ModelFilesError(
            f"{path}: how text of model_type {str(kind)[:80]!r} is split is not known, only that of "
            f"{', '.join(SPLITS)}; put a tokenizer.json beside it"
        )
    ranks = _ranks(path)
    letters = byte_letters()
    written = {token: token.decode("latin-1").translate(letters) for token in ranks}
    merges = [(written[left], written[right]) for left, right in islice(_merges(ranks), MAX_MERGES + 1)]
    if len(merges) > MAX_MERGES:
        raise ModelFilesError(f"{path}: more than {MAX_MERGES} pairs of its tokens make a token")
    vocabulary = {written[token]: rank for token, rank in ranks.items()}
    core = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
    words = pre_tokenizers.Split(Regex(split), "isolated")
    letters_of_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.pre_tokenizer = pre_tokenizers.Sequence([words, letters_of_bytes])
    core.decoder = decoders.ByteLevel()
    config_path = path.parent / "tokenizer_config.json"
    special = _special(config_path, config, len(ranks))
    core.add_tokens(special)
    if any(core.token_to_id(token.content) != token_id for token_id, token in enumerate(special, len(ranks))):
        raise ModelFilesError(f"{config_path}: a text of added_tokens_decoder is there twice")
    return core


def _ranks(path: Path) -> dict[bytes, int]:
    """The rank of each token: lines of its bytes in base64 and its rank, in any order."""
    lines = read_text(path, MAX_BYTES).removesuffix("\n").split("\n", MAX_TOKENS)
    if len(lines) > MAX_TOKENS:
        raise ModelFilesError(f"{path} has more than {MAX_TOKENS} lines, which are the most that are read")
    ranks: dict[bytes, int] = {}
    places: dict[int, int] = {}
    for number, line in enumerate(lines, 1):
        word, _, rank = line.strip().partition(" ")
        try:
            token = base64.b64decode(word, validate=True)
        except ValueError:
            raise ModelFilesError(f"{path}, line {number}: {word[:40]!r} is not base64") from None
        if not 0 < len(token) <= MAX_TOKEN_BYTES or token in ranks:
            why = f"that of line {places[ranks[token]]}" if token in ranks else f"of {len(token)} bytes"
            raise ModelFilesError(f"{path}, line {number}: the token {word[:40]!r} is {why}")
        place = int(rank) if len(rank) < 8 and rank.isascii() and rank.isdecimal() else len(lines)
        if place >= len(lines) or place in places:
            why = f"that of line {places[place]}" if place in places else f"none of 0 to {len(lines) - 1}"
            raise ModelFilesError(f"{path}, line {number}: the rank {rank[:40]!r} is {why}")
        ranks[token], places[place] = place, number
    for byte in range(256):
        if bytes([byte]) not in ranks:
            raise ModelFilesError(
                f"{path} has no token for the byte 0x{byte:02x}, so text could not be encoded"
            )
    return ranks


def _merges(ranks: Mapping[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """All pairs of tokens that make a token, by its rank, which says how early it is made. While bytes are merged, only
    one of the pairs of a token comes up, so their order does not count."""
    for token in sorted(ranks, key=ranks.__getitem__):
        for cut in range(1, len(token)):
            if token[:cut] in ranks and token[cut:] in ranks:
                yield token[:cut], token[cut:]


def byte_letters() -> dict[int, str]:
    """GPT-2's printable stand-in for each byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + i) for i, byte in enumerate(others)}


def _special(path: Path, config: Mapping[str, Any], first: int) -> list[AddedToken]:
    """The tokens of the ids from `first` on: as added_tokens_decoder names them, the others as reserved."""
    named = config.get("added_tokens_decoder", {})
    if not isinstance(named, dict):
        raise ModelFilesError(f"{path}: added_tokens_decoder must be an object of ids and tokens")
    found = {f"{first + i}": (f"<|reserved_token_{first + i}|>", True) for i in range(RESERVED)}
    for key, token in named.items():
        text = token.get("content") if isinstance(token, dict) else None
        if key not in found or not isinstance(text, str) or not text:
            raise ModelFilesError(
                f"{path}: added_tokens_decoder has {key[:40]!r}; ids from {first} to {first + RESERVED - 1} with a "
                "content are read"
            )
        found[key] = text, bool(token.get("special"))
    return [AddedToken(text, special=special, normalized=False) for text, special in found.values()]
