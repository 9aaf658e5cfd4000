"""The end of a step, whatever the model: logits to tokens, rows that end, and scores of prompts.

Names of fields by slot are `fields`'; a step's rows are `slots` int32 [R], `q_starts` int32 [R + 1] and `emits`
int32 [R]; `alive`, `seq_lens` and `last_tokens` are int32 by slot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from openinfer.kernels import Pack
from openinfer.sampler.gpu.ops.advance import advance
from openinfer.sampler.gpu.ops.sample import sample
from openinfer.sampler.gpu.ops.score import score
from openinfer.sampler.gpu.ops.state import ADVANCE_FIELDS, SAMPLE_FIELDS
from openinfer.sampler.gpu.ops.top_logprobs import top_logprobs
from openinfer.sampler.params import MAX_LOGPROBS
from openinfer.tensor import Arena, Tensor, float32, int32


class Fields(Protocol):
    """The batch on the device, by name of field; openinfer.graph.Rows is one, a dict of tensors another."""

    def __getitem__(self, name: str) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class SampleBuffers:
    """The buffers of the segments, for at most R rows and P scored prompt tokens. K is MAX_LOGPROBS."""

    logits: Tensor  # float32 [R, V]
    tokens: Tensor  # int32 [R]
    logprobs: Tensor  # float32 [R]
    result: Tensor  # int32 [R, 3]: token, RowStatus, bits of the logprob
    top_ids: Tensor  # int32 [R, K]
    top_values: Tensor  # float32 [R, K]
    score_logprobs: Tensor  # float32 [P]
    score_ranks: Tensor  # int32 [P]
    score_top_ids: Tensor  # int32 [P, K]
    score_top_values: Tensor  # float32 [P, K]

    @classmethod
    def allocate(cls, arena: Arena, max_rows: int, max_scored: int, vocabulary: int) -> SampleBuffers:
        """Uninitialised. The arena owns the memory."""
        return cls(
            logits=arena.alloc((max_rows, vocabulary), float32, "logits"),
            tokens=arena.alloc((max_rows,), int32),
            logprobs=arena.alloc((max_rows,), float32),
            result=arena.alloc((max_rows, 3), int32),
            top_ids=arena.alloc((max_rows, MAX_LOGPROBS), int32),
            top_values=arena.alloc((max_rows, MAX_LOGPROBS), float32),
            score_logprobs=arena.alloc((max_scored,), float32),
            score_ranks=arena.alloc((max_scored,), int32),
            score_top_ids=arena.alloc((max_scored, MAX_LOGPROBS), int32),
            score_top_values=arena.alloc((max_scored, MAX_LOGPROBS), float32),
        )


def sample_rows(pack: Pack, rows: Fields, buffers: SampleBuffers, num_rows: int) -> None:
    """Choose the next token of the first `num_rows` rows from their logits, and end rows that are over. Then advance
    the state of live rows past the step. A step has one such call, after its forward pass."""
    b, r = buffers, num_rows
    step = {"slots": rows["slots"][:r], "emits": rows["emits"][:r], "alive": rows["alive"]}
    lengths = {"q_starts": rows["q_starts"][: r + 1], "seq_lens": rows["seq_lens"]}
    chosen = {"tokens": b.tokens[:r], "logprobs": b.logprobs[:r]}
    sample(pack, logits=b.logits[:r], **chosen, **step, **lengths, **{n: rows[n] for n in SAMPLE_FIELDS})
    top_logprobs(
        pack,
        ids=b.top_ids[:r],
        values=b.top_values[:r],
        logits=b.logits[:r],
        num_logprobs=rows["num_logprobs"],
        **step,
    )
    advance(
        pack,
        result=b.result[:r],
        last_tokens=rows["last_tokens"],
        **chosen,
        **step,
        **lengths,
        **{n: rows[n] for n in ADVANCE_FIELDS},
    )


def score_tokens(pack: Pack, rows: Fields, buffers: SampleBuffers, offset: int) -> None:
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
