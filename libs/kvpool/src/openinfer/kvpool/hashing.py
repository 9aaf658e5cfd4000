"""The identity of a block: a hash chained over everything before it.

Two blocks are the same state exactly when their own tokens, all tokens before them and the salt are the same. So the
name of a block is sha256(name of the block before it, its tokens as little-endian u32). The chain starts from the salt
(a tenant's cache salt, a LoRA name, ...) and the block size. Names are equal everywhere.
"""

import hashlib
import struct
import sys
from array import array
from collections.abc import Sequence

from .errors import InvalidTokens

_ADAPTER = b"\0adapter\0"


class Chain:
    """The names of a sequence's blocks of `block_size` tokens, made only up to the last one that was asked for.

    names: the first names, if known; the list is kept, not copied. enabled=False: a chain that is never extended.
    """

    def __init__(
        self, block_size: int, salt: bytes = b"", names: list[bytes] | None = None, *, enabled: bool = True
    ) -> None:
        self.names = [] if names is None else names
        seed = b"openinfer.kvpool/1:" + struct.pack("<Q", block_size) + salt
        self.root = hashlib.sha256(seed).digest() if enabled else b""  # the parent of a first block
        self.enabled, self.salt = enabled, salt
        self._block_size = block_size

    def extend(self, tokens: Sequence[int], num_blocks: int) -> None:
        """Name the first `num_blocks` whole blocks of `tokens`, of which the first ones are as before."""
        names, block_size = self.names, self._block_size
        if len(names) >= num_blocks:
            return
        parent = names[-1] if names else self.root
        first, sha256, size = len(names) * block_size, hashlib.sha256, 4 * block_size
        data = _words(tokens[first : num_blocks * block_size], first)
        for start in range(0, len(data), size):
            parent = sha256(parent + data[start : start + size]).digest()
            names.append(parent)


def _words(tokens: Sequence[int], first: int) -> bytes:
    """Token ids as little-endian u32. first: the place of the first in its sequence."""
    try:
        words = array("I", tokens if isinstance(tokens, list) else list(tokens))  # bytes would be raw words
    except (TypeError, OverflowError) as error:
        raise InvalidTokens(
            f"token ids are integers in 0..2**32-1, given otherwise from {first} on: {error}"
        ) from None
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()


def adapter_salt(salt: bytes, name: str, digest: bytes) -> bytes:
    """The salt of a sequence with an adapter (LoRA): of its name, and of the digest (32 bytes) of its values. So a
    prefix is never found under another adapter, nor under another version of the same name."""
    return salt + _ADAPTER + digest + name.encode()


def split_salt(salt: bytes) -> tuple[bytes, str | None]:
    """The salt without the adapter's part, and the adapter's name; None: of no adapter."""
    own, mark, rest = salt.rpartition(_ADAPTER)
    return (own, rest[32:].decode("utf-8", "replace")) if mark else (salt, None)


def hash_blocks(tokens: Sequence[int], block_size: int, salt: bytes = b"") -> list[bytes]:
    """Names (32 bytes each) of all whole blocks of `tokens`; a rest shorter than a block has none.

    A frontend may compute them where it tokenizes and hand them to `Pool.acquire(..., hashes=...)`, with
    `block_size = pool.hash_block_size` and the salt that it gives to `acquire`. Raises InvalidTokens.
    """
    chain = Chain(block_size, salt)
    chain.extend(tokens, len(tokens) // block_size)
    return chain.names
