"""Log-probabilities of prompts: the tokens of a step's chunks that are scored, and the scores that were read back.

The hidden states of a chunk are still there when its step has sampled. The state before each token that a request asks
about goes through lm_head again, in slices as large as the buffer of logits. So scoring needs no memory of its own.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from openinfer.graph.rows import Field, Rows
from openinfer.scheduler import Row, Seq

Array = np.ndarray[Any, Any]


@dataclass(slots=True)
class PromptScore:
    """A sequence's request for scores: `tops` alternatives of each prompt token beside its own log-probability.

    `done`: positions whose next token has been scored; none is scored again after a preemption.
    """

    tops: int
    done: int = 0


class Share(NamedTuple):
    """`size` scores of a step belong to `seq`, each with `tops` alternatives."""

    seq: Seq[Any]
    size: int
    tops: int


class Scores(NamedTuple):
    """The scores of consecutive prompt tokens of `seq`: logprobs float32 [n], ranks int32 [n], and the alternatives,
    top_ids int32 and top_logprobs float32 [n, tops]."""

    seq: Seq[Any]
    logprobs: Array
    ranks: Array
    top_ids: Array
    top_logprobs: Array


def padded(max_tokens: int, size: int) -> int:
    """Tokens of a step, filled up to whole slices of `size` rows of logits."""
    return -(-max_tokens // size) * size


def score_fields(logits: int, max_tokens: int) -> list[Field]:
    """The fields by scored token: the row of the hidden states before it, its id, and the number of alternatives.

    The first row is 1; index 0 is not used. score_rows: 0, 1, 2, ... `logits`: rows of the buffer of logits."""
    size = padded(max_tokens, logits)
    return [
        Field("score_after", (size + 1,)),
        Field("score_targets", (size,)),
        Field("score_tops", (size,)),
        Field("score_rows", (logits,)),
    ]


def write_scores(
    rows: Rows, slice_rows: int, asked: Iterable[tuple[Row[Any], int, PromptScore]]
) -> list[Share]:
    """Write the scored tokens of a step. A chunk is (row, index of its first token in the step, request for scores)."""
    shares: list[Share] = []
    after: list[int] = []
    targets: list[int] = []
    tops: list[int] = []
    for row, start, wish in asked:
        if row.start is None:
            continue
        first = max(row.start, wish.done)
        last = min(row.start + row.num_tokens, row.seq.prompt_len - 1)
        if first >= last:
            continue
        after += range(start + first - row.start + 1, start + last - row.start + 1)
        targets += row.seq.tokens[first + 1 : last + 1]
        tops += [wish.tops] * (last - first)
        wish.done = last
        shares.append(Share(row.seq, last - first, wish.tops))
    if shares:
        rest = padded(len(targets), slice_rows) - len(targets)
        rows.write("score_rows", 0, np.arange(slice_rows, dtype=np.int32))
        rows.write("score_after", 1, after)
        rows.write("score_targets", 0, targets + [-1] * rest)
        rows.write("score_tops", 0, tops + [0] * rest)
    return shares


def read_scores(shares: Sequence[Share], arrays: Sequence[Array]) -> Iterator[Scores]:
    """The scores of a step's shares, from its logprobs, ranks, top_ids and top_logprobs."""
    start = 0
    for seq, size, tops in shares:
        logprobs, ranks, top_ids, top_logprobs = (array[start : start + size] for array in arrays)
        yield Scores(seq, logprobs, ranks, top_ids[:, :tops], top_logprobs[:, :tops])
        start += size
