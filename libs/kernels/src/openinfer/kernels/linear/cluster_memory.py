"""The shared memory of a block of a cluster, by tokens and columns. The kernels have these numbers too."""

from __future__ import annotations

CLUSTER_TOKENS = 64
"""The most tokens of any product by clusters. More are for products whose weight is large beside their tokens."""
MOST_CLUSTER_TOKENS = 128
FEW_CLUSTER_TOKENS = 16
"""Tokens up to which clusters copy no more than these rows of x, and send each other their sums."""
ROW_BYTES = 128
"""Bytes of a row of a stage of the ring: 64 columns of K in bf16, 128 in float8."""


def copied_tokens(m: int) -> int:
    """The rows of x that clusters copy for m tokens. A warpgroup multiplies 64."""
    return next(n for n in (FEW_CLUSTER_TOKENS, CLUSTER_TOKENS, MOST_CLUSTER_TOKENS) if m <= n)


def sent_bytes(tokens: int, columns: int, split: int, parts: int) -> int:
    """Bytes for the sums of its tokens that a block gets, in `parts` from each of the cluster's `split` blocks. tokens:
    of all blocks. Sums of many tokens are not sent."""
    few = split > 1 and tokens <= FEW_CLUSTER_TOKENS
    return split * parts * -(-tokens // split) * columns * 4 if few else 0


def adapters_bytes(bm: int, tokens: int, rank: int) -> int:
    """Bytes for adapters: three lists of tokens, each token's adapter, and what A makes of the tokens, of two
    projections."""
    return 4 * bm + tokens * 2 * rank * 2 + 16
