"""The identity of a block: a hash chained over everything before it.

Two blocks are the same state exactly when their own tokens, all tokens before them and the salt are the same,
so a block is named by sha256(name of the block before it, its tokens as little-endian u32). The chain starts
from the salt (a tenant's cache salt, a LoRA name, ...) and the block size. Names are equal in every process
and on every machine.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence
from functools import lru_cache

from .errors import InvalidTokens


@lru_cache
def _packer(block_size: int) -> Callable[..., bytes]:
    return struct.Struct(f"<{block_size}I").pack


def root_hash(block_size: int, salt: bytes = b"") -> bytes:
    """The parent of a first block (32 bytes)."""
    return hashlib.sha256(b"openinfer.kvpool/1:" + struct.pack("<Q", block_size) + salt).digest()


def extend_hashes(
    hashes: list[bytes], root: bytes, tokens: Sequence[int], num_blocks: int, block_size: int
) -> None:
    """Append to `hashes` until it names the first `num_blocks` whole blocks of `tokens`."""
    parent = hashes[-1] if hashes else root
    pack = _packer(block_size)
    for start in range(len(hashes) * block_size, num_blocks * block_size, block_size):
        try:
            data = pack(*tokens[start : start + block_size])
        except struct.error as error:
            raise InvalidTokens(
                f"token ids are integers in 0..2**32-1, given otherwise near {start}: {error}"
            ) from None
        parent = hashlib.sha256(parent + data).digest()
        hashes.append(parent)


def hash_blocks(tokens: Sequence[int], block_size: int, salt: bytes = b"") -> list[bytes]:
    """Names (32 bytes each) of all whole blocks of `tokens`; a rest shorter than a block has none.

    A frontend may compute them where it tokenizes and hand them to `Pool.acquire(..., hashes=...)`, with
    `block_size = pool.hash_block_size` and the salt that it gives to `acquire`. Raises InvalidTokens.
    """
    hashes: list[bytes] = []
    extend_hashes(hashes, root_hash(block_size, salt), tokens, len(tokens) // block_size, block_size)
    return hashes
