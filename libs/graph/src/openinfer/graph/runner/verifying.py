"""Drafts on the device: the fields that a verifying step reads, and what the host writes and reads of them.

Proposed tokens stand by position (`drafts`), not by step. So the host can propose before it has read the step before:
the device takes the tokens of the positions that it has come to.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from openinfer.graph.rows import Field, Rows
from openinfer.sampler.gpu import RowStatus, masks_after
from openinfer.scheduler import Seq, Step
from openinfer.tensor import Arena, Stream, Tensor, float32, int32

Array = np.ndarray[Any, Any]

MOST_KEPT = 32
"""Tokens of a sequence whose hidden states are kept for layers that draft: a power of two."""


@dataclass(frozen=True, slots=True)
class Proposals:
    """Buffers of layers that draft, for T tokens, R rows, S slots; see sampler.gpu.follow and propose."""

    next_ids: Tensor  # int32 [T]
    lens: Tensor  # int32 [S]
    ends: Tensor  # int32 [R + 1]
    spans: Tensor  # int32 [R + 1]
    alone: Tensor  # int32 [R + 1]: 0, 1, 2, ..., the q_starts of rows of one token
    states: Tensor  # [S, K, W]: hidden states of tokens that these layers have not seen (keep_states)
    ids: Tensor  # int32 [S, K]: these tokens

    @classmethod
    def allocate(
        cls, arena: Arena, stream: Stream, max_rows: int, max_tokens: int, *, width: int, dtype: np.dtype[Any]
    ) -> "Proposals":
        """The arena owns the memory. width, dtype: of what these layers read of a token."""
        sizes = (max_tokens, max_rows + 1, max_rows + 1, max_rows + 1, max_rows + 1)
        next_ids, lens, ends, spans, alone = (arena.alloc((size,), int32) for size in sizes)
        kept = (max_rows + 1, kept_tokens(max_tokens))
        states, ids = arena.alloc((*kept, width), dtype), arena.alloc(kept, int32)
        made = cls(next_ids, lens, ends, spans, alone, states, ids)
        made.lens.zero_(stream)
        # No step writes the ids of its padding tokens, and their embeddings are read.
        made.next_ids.zero_(stream)
        if arena.device.kind != "null":
            made.alone.copy_from(np.arange(max_rows + 1, dtype=np.int32), stream)
        return made


def kept_tokens(max_tokens: int) -> int:
    """Tokens of a sequence whose hidden states are kept, if a step has at most max_tokens."""
    return min(MOST_KEPT, 1 << max_tokens.bit_length() - 1)


def proposal_fields(max_rows: int, max_tokens: int, vocab_size: int) -> list[Field]:
    """The fields of layers that draft. following, by row: the token after a chunk that does not emit. draft_floor: the
    chance below which a draft is dropped, where these layers say how sure they are. By slot: reserved, the tokens that
    the sequence has blocks for; draft_masks, the tokens that a draft may be, where the row has a mask; kept_places, the
    positions of `Proposals.states`."""
    slots = max_rows + 1
    return [
        Field("following", (max_rows,)),
        Field("draft_floor", (1,), float32),
        Field("reserved", (slots,)),
        Field("draft_masks", (slots, -(-vocab_size // 32))),
        Field("kept_places", (slots, kept_tokens(max_tokens)), device_written=True),
    ]


def draft_fields(max_rows: int, max_drafts: int, vocab_size: int, proposes: bool) -> list[Field]:
    """The fields of drafts; none for an engine without. By slot: `drafts`, the token proposed for position p at p mod
    the width; `accepted`, the number of drafts that the row's last step in a shape with drafts accepted; and masks for
    rows with a grammar, one a draft. By row: its number of drafts, and its q_starts without drafts. `sampled_ends`: 1
    and the index of each token after which the step samples. proposes: layers of the model write `drafts` too."""
    if not max_drafts:
        return []
    words = -(-vocab_size // 32)
    width = 1 << (3 * max_drafts + 2).bit_length()  # a power of two above every position that is not decided
    return [
        Field("drafts", (max_rows + 1, width), device_written=proposes),
        *(Field(masks_after(place + 1), (max_rows + 1, words)) for place in range(max_drafts)),
        Field("accepted", (max_rows + 1,), device_written=True),
        Field("num_drafts", (max_rows,)),
        Field("sure_starts", (max_rows + 1,)),
        Field("sampled_ends", (max_rows * (1 + max_drafts) + 1,)),
    ]


def write_verified(rows: Rows, q_starts: Array, drafts: Array, max_drafts: int) -> None:
    """Write the rows of a step for `sampler.gpu.verify_rows`. q_starts int32 [R + 1]; drafts int32 [R]: the number of
    drafts of each row. max_drafts: of the step's shape; 0: no row has drafts."""
    sure = q_starts.copy()
    sure[1:] -= drafts.cumsum(dtype=np.int32)
    rows.write("num_drafts", 0, drafts)
    rows.write("sure_starts", 0, sure)
    if max_drafts:
        place = np.arange(1 + max_drafts, dtype=np.int32)[:, None]
        ends = np.where(place <= drafts, q_starts[1:] - drafts + place, 0)
        rows.write("sampled_ends", 1, ends.reshape(-1).astype(np.int32))


def write_following(rows: Rows, num_rows: int, step: Step[Any]) -> None:
    """Write the prompt's next token behind each chunk of a step that does not emit."""
    following = np.zeros(num_rows, np.int32)
    for at, row in enumerate(step.rows[step.num_decode :], start=step.num_decode):
        if row.start is not None and row.start + row.num_tokens < len(row.seq.tokens):
            following[at] = row.seq.tokens[row.start + row.num_tokens]
    rows.write("following", 0, following)


def write_drafts(rows: Rows, proposals: Sequence[tuple[int, int, Sequence[int]]]) -> None:
    """Propose tokens: for each (slot, position, tokens), those of the slot's positions from `position` on. There are
    fewer of them than the field is wide."""
    if proposals:
        width = rows.width("drafts")
        places = [
            slot * width + (position + n) % width
            for slot, position, tokens in proposals
            for n in range(len(tokens))
        ]
        rows.scatter("drafts", places, [token for _, _, tokens in proposals for token in tokens])


@dataclass(slots=True)
class DraftCounts:
    """Drafts since the start, as vLLM counts them. drafts: rows of steps that had any. by_position[n]: how often draft
    number n + 1 of a row was accepted."""

    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    by_position: list[int] = field(default_factory=list)

    def add(self, num_drafts: int, accepted: int, rows: int = 1) -> None:
        self.drafts += rows
        self.draft_tokens += rows * num_drafts
        self.accepted_tokens += rows * accepted
        self.by_position += [0] * (num_drafts - len(self.by_position))
        for place in range(accepted):
            self.by_position[place] += rows


def read_verified(step: Step[Any], result: Array) -> Iterator[tuple[Seq[Any], int, int, int, int]]:
    """The rows with drafts that were alive: (sequence, places for drafts, drafts, tokens that the step brought, right
    drafts). A right draft that ends its row brings no token, because the row ends without it too; nor does a position
    where the row fails. result int32 [1 + D, R, 3]."""
    statuses = result[:, :, 1]
    counts = (statuses != RowStatus.IDLE).sum(axis=0).tolist()
    ended = (statuses == RowStatus.DRAFTED_STOP).any(axis=0).tolist()
    failed = (statuses == RowStatus.FAILED).any(axis=0).tolist()
    untried = (statuses == RowStatus.UNTRIED).any(axis=0).tolist()
    of_rows = zip(step.rows[: step.num_decode], counts, ended, failed, untried, strict=False)
    for row, count, right, fails, cut in of_rows:
        if (places := row.num_tokens - 1) and count:
            yield row.seq, places, count - 1 if cut else places, count - fails, count - 1 + right
