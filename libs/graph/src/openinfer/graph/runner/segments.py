"""The segments that steps are made of, and the room that their results need."""

import math
from collections.abc import Callable, Sequence
from functools import partial

from openinfer.graph.buckets import Buckets, Shape
from openinfer.graph.runner.model import Model
from openinfer.graph.runner.proposing import draft, forward, keeps
from openinfer.graph.runner.scoring import padded
from openinfer.graph.runner.verifying import draft_fields
from openinfer.kernels import Pack, apply_writes, copy_words, select_rows
from openinfer.sampler import MAX_LOGPROBS
from openinfer.sampler.gpu import greedy_rows, sample_rows, score_tokens, verify_rows
from openinfer.tensor import Tensor

UPLOAD = ("upload",)
"""The key of the segment that scatters a delta into the batch's rows."""


def segments(
    model: Model, pack: Pack, buckets: Buckets, rooms: Sequence[Tensor] | None = None
) -> dict[tuple[object, ...], Callable[[], None]]:
    """Every segment that steps of these buckets are made of, by the key under which a Runner records it: UPLOAD,
    ("forward", shape), ("sample", rows, drafts) or ("greedy", rows, drafts), ("score", first token), and where layers
    of the model draft, ("draft", shape, drafts). rooms: of Readback; each is filled by ("results", place). None: one
    that stands for them in a plan. With rooms (*UPLOAD, place) scatters a delta from the room of the batch's rows."""
    batch, most = model.batch, model.batch.sampled.score_ranks.shape[0]
    work: dict[tuple[object, ...], Callable[[], None]] = {
        UPLOAD: lambda: apply_writes(pack, words=batch.rows.words, writes=batch.rows.writes)
    }
    for shape in buckets.segments():
        work["forward", shape] = partial(forward, model, pack, shape)
        if batch.proposals is not None:
            for places in (0, *buckets.draft_levels):
                work["draft", shape, places] = partial(draft, model, pack, shape, places)
    for rows in buckets.sample_rows():
        args = pack, batch.rows, batch.sampled, rows
        work["sample", rows, 0] = partial(sample_rows, *args)
        work["greedy", rows, 0] = partial(greedy_rows, *args)
        for drafts in buckets.draft_levels:
            work["sample", rows, drafts] = partial(verify_rows, *args, drafts)
            work["greedy", rows, drafts] = partial(verify_rows, *args, drafts, all_greedy=True)
    for offset in range(0, most, batch.logits.shape[0]):
        work["score", offset] = partial(_score, model, pack, offset)
    result = batch.sampled.result.reshape(-1)
    # Last: followers number the others alike.
    for place, room in enumerate([result] if rooms is None else rooms):
        work["results", place] = partial(copy_words, pack, out=room, x=result)
    for place, room in enumerate(batch.rows.rooms if rooms else ()):
        work[*UPLOAD, place] = partial(apply_writes, pack, words=batch.rows.words, writes=room)
    return work


def step_keys(shape: Shape) -> tuple[tuple[object, ...], ...]:
    """The segments that a step of a shape mostly runs."""
    keys = ("forward", shape), ("sample", shape.rows, shape.drafts)
    return keys if keeps(shape) else (*keys, ("draft", shape, shape.drafts))


def _score(model: Model, pack: Pack, offset: int) -> None:
    """Scores of as many prompt tokens as the buffer of logits has rows. It runs after forward and sample of the step,
    since it takes their hidden states and overwrites their logits."""
    batch = model.batch
    size = batch.logits.shape[0]
    after = batch.rows["score_after"][offset : offset + size + 1]
    select_rows(pack, out=batch.last, x=model.hidden, q_starts=after)
    model.head(pack, size)
    score_tokens(pack, batch.rows, batch.sampled, offset)


def readback_bytes(max_rows: int, max_tokens: int, max_drafts: int = 0) -> int:
    """An upper bound of the bytes that the results of one step take in the read-back ring."""
    drafts = sum(4 * math.prod(field.shape) for field in draft_fields(max_rows, max_drafts, 0, False))
    tops, logits = 2 * MAX_LOGPROBS, max_rows * (1 + max_drafts)
    return 4 * (logits * (3 + tops) + padded(max_tokens, logits) * (2 + tops)) + drafts + 8 * 64
