"""Finding a block that begins as a sequence goes on, where none is equal: the source of a copy-on-write."""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Sequence
from itertools import islice

MAX_CANDIDATES = 8
"""Of the blocks that follow one prefix, so many are compared: the newest."""


def tail_name(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The name of a block that holds these tokens only. No whole block has it: those hash more tokens."""
    return hashlib.sha256(parent + struct.pack(f"<{len(tokens)}I", *tokens)).digest()


class Tails:
    """The registered blocks of a group by what comes before them (a name, or the root of a salt)."""

    def __init__(self, block_size: int, min_tokens: int) -> None:
        self.min_tokens = min_tokens
        self._block_size = block_size
        self._after: dict[bytes, dict[bytes, array[int]]] = {}  # prefix -> name -> tokens
        self._prefix: dict[bytes, bytes] = {}  # by name

    def add(self, prefix: bytes, name: bytes, tokens: Sequence[int]) -> None:
        """A block, whole or not, became findable. Known already: the newest again."""
        siblings = self._after.setdefault(prefix, {})
        siblings.pop(name, None)
        siblings[name] = array("I", tokens)
        self._prefix[name] = prefix

    def remove(self, names: Sequence[bytes]) -> list[bytes]:
        """Blocks are findable no more. Returns the names of the whole ones."""
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
        """Of the blocks after `prefix`, the one that shares most of its first tokens with `tokens`, and how many:
        min_tokens at least, or none."""
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
