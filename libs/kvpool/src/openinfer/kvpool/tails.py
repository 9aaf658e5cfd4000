"""Tails: finds a block that shares its first tokens with the next tokens of a sequence, as source of a
copy-on-write."""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Sequence
from itertools import islice

MAX_CANDIDATES = 8
"""Number of blocks after one prefix that a look-up compares, the newest first."""


def tail_name(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The name of a block that holds these tokens only. It differs from every whole block's, which hashes more
    tokens."""
    return hashlib.sha256(parent + struct.pack(f"<{len(tokens)}I", *tokens)).digest()


class Tails:
    """The registered blocks of a group, by the name of the block before them or the root of their salt."""

    def __init__(self, block_size: int, min_tokens: int) -> None:
        self.min_tokens = min_tokens
        self._block_size = block_size
        self._after: dict[bytes, dict[bytes, array[int]]] = {}  # prefix -> name -> tokens
        self._prefix: dict[bytes, bytes] = {}  # by name

    def add(self, prefix: bytes, name: bytes, tokens: Sequence[int]) -> None:
        """A whole or partial block became findable. A block that is known already becomes the newest."""
        siblings = self._after.setdefault(prefix, {})
        siblings.pop(name, None)
        siblings[name] = array("I", tokens)
        self._prefix[name] = prefix

    def remove(self, names: Sequence[bytes]) -> list[bytes]:
        """Blocks are no longer findable. Returns the names of the whole blocks."""
        whole = []
        for name in names:
            prefix = self._prefix.pop(name)
            siblings = self._after[prefix]
            if len(siblings.pop(name)) == self._block_size:
                whole.append(name)
            if not siblings:
                del self._after[prefix]
        return whole

    def find(self, prefix: bytes, tokens: Sequence[int]) -> tuple[bytes | None, int]:
        """The block after `prefix` that shares the most first tokens with `tokens`, and their number. (None, 0) if no
        block shares min_tokens tokens."""
        best: tuple[bytes | None, int] = (None, self.min_tokens - 1)
        siblings = self._after.get(prefix, {})
        for name in islice(reversed(siblings), MAX_CANDIDATES):
            shared = 0
            for ours, theirs in zip(tokens, siblings[name], strict=False):
                if ours != theirs:
                    break
                shared += 1
            if shared > best[1]:
                best = name, shared
        return best if best[0] is not None else (None, 0)
