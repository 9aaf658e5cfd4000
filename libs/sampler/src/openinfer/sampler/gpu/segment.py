"""The end of a step, whatever the model: logits to tokens, rows that end, and scores of prompts.

Names of fields by slot are `fields`'; a step's rows are `slots` int32 [R], `q_starts` int32 [R + 1] and `emits`
int32 [R]; `alive`, `seq_lens` and `last_tokens` are int32 by slot.

A row with drafts samples a token at several positions. They come one after the other, each as a step of one token
would: so penalties, masks, stop rules and noise have their meaning at each position. The next position counts only
where the token sampled before it is the row's draft.
"""

from dataclasses import dataclass
from typing import Protocol

from openinfer.kernels import Pack
from openinfer.sampler.gpu.ops.advance import accept, advance
from openinfer.sampler.gpu.ops.sample import greedy, sample
from openinfer.sampler.gpu.ops.state import ADVANCE_FIELDS, GREEDY_FIELDS, SAMPLE_FIELDS
from openinfer.sampler.gpu.ops.top_logprobs import score, top_logprobs
from openinfer.sampler.params import MAX_LOGPROBS
from openinfer.tensor import Arena, Tensor, float32, int32


class RowFields(Protocol):
    """The batch on the device, by name of field; openinfer.graph.Rows is one, a dict of tensors another."""

    def __getitem__(self, name: str) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class SampleBuffers:
    """The buffers of the segments, for at most R rows and P scored prompt tokens. K is MAX_LOGPROBS. N is R, or
    R * (1 + D) where rows have up to D drafts: position by position, the rows of a step next to each other."""

    logits: Tensor  # float32 [N, V]
    tokens: Tensor  # int32 [N]
    logprobs: Tensor  # float32 [N]
    result: Tensor  # int32 [N, 3]: token, RowStatus, bits of the logprob
    top_ids: Tensor  # int32 [N, K]
    top_values: Tensor  # float32 [N, K]
    follows: Tensor  # int32 [R]: the rows that go on to the next draft, and the running sums of these
    starts: Tensor  # int32 [R + 1]
    score_logprobs: Tensor  # float32 [P]
    score_ranks: Tensor  # int32 [P]
    score_top_ids: Tensor  # int32 [P, K]
    score_top_values: Tensor  # float32 [P, K]

    @classmethod
    def allocate(
        cls, arena: Arena, max_rows: int, max_scored: int, vocabulary: int, max_drafts: int = 0
    ) -> "SampleBuffers":
        """Uninitialised. The arena owns the memory."""
        sampled = max_rows * (1 + max_drafts)
        return cls(
            logits=arena.alloc((sampled, vocabulary), float32, "logits"),
            tokens=arena.alloc((sampled,), int32),
            logprobs=arena.alloc((sampled,), float32),
            result=arena.alloc((sampled, 3), int32),
            top_ids=arena.alloc((sampled, MAX_LOGPROBS), int32),
            top_values=arena.alloc((sampled, MAX_LOGPROBS), float32),
            follows=arena.alloc((max_rows,), int32),
            starts=arena.alloc((max_rows + 1,), int32),
            score_logprobs=arena.alloc((max_scored,), float32),
            score_ranks=arena.alloc((max_scored,), int32),
            score_top_ids=arena.alloc((max_scored, MAX_LOGPROBS), int32),
            score_top_values=arena.alloc((max_scored, MAX_LOGPROBS), float32),
        )


def masks_after(place: int) -> str:
    """The field with the masks of allowed tokens after draft number `place`; 0: after a row's certain tokens."""
    return f"allowed_masks_{place}" if place else "allowed_masks"


def sample_rows(pack: Pack, rows: RowFields, buffers: SampleBuffers, num_rows: int) -> None:
    """Choose the next token of the first `num_rows` rows from their logits, and end rows that are over. Then advance
    the state of live rows past the step. A step has one such call, after its forward pass."""
    _sample(pack, rows, buffers, slice(num_rows), rows["emits"], rows["q_starts"], masks_after(0))


def greedy_rows(pack: Pack, rows: RowFields, buffers: SampleBuffers, num_rows: int) -> None:
    """`sample_rows` of rows that are greedy, adjust nothing and ask for no logprobs, which are NaN."""
    _sample(pack, rows, buffers, slice(num_rows), rows["emits"], rows["q_starts"], masks=None)


def verify_rows(
    pack: Pack,
    rows: RowFields,
    buffers: SampleBuffers,
    num_rows: int,
    num_drafts: int,
    *,
    all_greedy: bool = False,
) -> None:
    """`sample_rows` of a step whose rows have up to `num_drafts` drafts, 1 or more: choose the tokens up to the first
    that is not the row's draft. all_greedy: as `greedy_rows`.

    Logits, and all results, of the position after draft d of row r stand at d * num_rows + r; d = 0 is the position
    after the row's last certain token. A result without a token is IDLE. By row, int32 [R]: `num_drafts`, and
    `sure_starts` [R + 1], the row's q_starts without drafts. By slot, int32: `drafts` and `accepted` (`accept`).
    Rows with a grammar have a mask at each position, in the fields that `masks_after` names.
    """
    b, r = buffers, num_rows
    emits, starts = rows["emits"], rows["sure_starts"]
    step = {"slots": rows["slots"][:r], "num_drafts": rows["num_drafts"][:r]}
    state = {name: rows[name] for name in ("accepted", "drafts", "seq_lens", "last_tokens", "alive")}
    for place in range(num_drafts + 1):
        if place:
            accept(
                pack,
                follows=b.follows[:r],
                starts=b.starts[: r + 1],
                result=b.result[(place - 1) * r : place * r],
                emits=emits[:r],
                place=place,
                **step,
                **state,
            )
            emits, starts = b.follows, b.starts
        masks = None if all_greedy else masks_after(place)
        _sample(pack, rows, b, slice(place * r, (place + 1) * r), emits, starts, masks)


def draw_drafts(
    pack: Pack, rows: RowFields, buffers: SampleBuffers, spans: Tensor, allowed_masks: Tensor, first: int = 0
) -> Tensor:
    """Draw a draft for each row that sampled in a step which is over, from the logits of a layer that drafts. Returns
    the tokens, int32 [R], -1 = none. They come with the noise, filters and penalties that the row's own token will have
    at that position. spans int32 [R + 1]: 0, n, 2 n, ... for draft number n. allowed_masks: in place of the rows' own,
    because a grammar's mask at that position is not known yet. first: where the rows' logits begin."""
    b, r = buffers, spans.shape[0] - 1
    step = {"slots": rows["slots"][:r], "emits": rows["emits"][:r], "alive": rows["alive"]}
    state = {name: rows[name] for name in SAMPLE_FIELDS} | {"allowed_masks": allowed_masks}
    drawn = {"tokens": b.tokens[:r], "logprobs": b.logprobs[:r], "logits": b.logits[first : first + r]}
    sample(pack, **drawn, **step, q_starts=spans, seq_lens=rows["seq_lens"], **state)
    return b.tokens[:r]


def _sample(
    pack: Pack,
    rows: RowFields,
    buffers: SampleBuffers,
    part: slice,
    emits: Tensor,
    starts: Tensor,
    masks: str | None,
) -> None:
    """One position of each row. part: the place of its logits and results; starts: as q_starts; masks: the field; None:
    all rows are as `greedy_rows` wants them."""
    b = buffers
    logits, chosen = b.logits[part], {"tokens": b.tokens[part], "logprobs": b.logprobs[part]}
    r = logits.shape[0]
    step = {"slots": rows["slots"][:r], "emits": emits[:r], "alive": rows["alive"]}
    lengths = {"q_starts": starts[: r + 1], "seq_lens": rows["seq_lens"]}
    if masks is None:
        greedy(pack, logits=logits, **chosen, **step, **lengths, **{n: rows[n] for n in GREEDY_FIELDS})
    else:
        state = {n: rows[n] for n in SAMPLE_FIELDS} | {"allowed_masks": rows[masks]}
        sample(pack, logits=logits, **chosen, **step, **lengths, **state)
        tops = {"ids": b.top_ids[part], "values": b.top_values[part], "num_logprobs": rows["num_logprobs"]}
        top_logprobs(pack, **tops, logits=logits, **step)
    advance(
        pack,
        result=b.result[part],
        last_tokens=rows["last_tokens"],
        **chosen,
        **step,
        **lengths,
        **{n: rows[n] for n in ADVANCE_FIELDS},
    )


def score_tokens(pack: Pack, rows: RowFields, buffers: SampleBuffers, offset: int) -> None:
    """Log-probability, rank and alternatives of the prompt tokens `offset` to `offset` + R that a step is asked about,
    from logits of the positions before them. By scored token, int32 [P]: `score_targets` (-1: none) and `score_tops`,
    how many alternatives; `score_rows` int32 [R] is 0, 1, 2, ..."""
    b, size = buffers, buffers.logits.shape[0]
    part, tops = slice(offset, offset + size), rows["score_tops"][offset : offset + size]
    score(
        pack,
        logprobs=b.score_logprobs[part],
        ranks=b.score_ranks[part],
        logits=b.logits,
        targets=rows["score_targets"][part],
    )
    top_logprobs(
        pack,
        ids=b.score_top_ids[part],
        values=b.score_top_values[part],
        logits=b.logits,
        slots=rows["score_rows"],
        alive=tops,
        emits=tops,
        num_logprobs=tops,
    )
