"""The runner: steps of the loop as changes to Rows and launches of recorded segments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from openinfer.graph import Readback, StepGraphs, StepPace, StepTrace
from openinfer.kernels import Pack, apply_writes
from openinfer.recipes.deepseek_v4.batch import MAX_LOGPROBS, MAX_STOP_IDS, TABLES
from openinfer.recipes.deepseek_v4.buckets import Buckets
from openinfer.recipes.deepseek_v4.model import Model
from openinfer.recipes.deepseek_v4.scoring import (
    PromptScore,
    Scores,
    Share,
    padded,
    read_scores,
    write_scores,
)
from openinfer.sampler import SamplingParams, seed_words
from openinfer.sampler.constraint import Constraint, Masks
from openinfer.sampler.gpu import Adjustment, RowStatus, adjustment_values
from openinfer.scheduler import FinishReason, Seq, Step, StepResult
from openinfer.tensor import Stream

FINISH_REASONS = {
    RowStatus.STOP: FinishReason.STOP,
    RowStatus.LENGTH: FinishReason.LENGTH,
    RowStatus.FAILED: FinishReason.ERROR,
}


@dataclass(slots=True)
class Sampling:
    """What a row needs written when its sequence joins: Seq.owner of this engine."""

    params: SamplingParams
    seed: int
    stop_ids: tuple[int, ...]  # eos included unless ignored
    constraint: Constraint | None = None
    score: PromptScore | None = None


Constrained = Sequence[tuple[int, Seq[Sampling], Constraint]]
"""The rows of a step that get a token under a grammar: position in the step, sequence, constraint."""


class Payload(NamedTuple):
    """Results of a step along its rows: token ids [R], log-probabilities [R] of them, and the most likely tokens
    [R, MAX_LOGPROBS] where a row asked."""

    token_ids: np.ndarray[Any, Any]
    logprobs: np.ndarray[Any, Any]
    top_ids: np.ndarray[Any, Any] | None
    top_logprobs: np.ndarray[Any, Any] | None


class Launched(NamedTuple):
    """A step under way, and what it was asked for."""

    step: Step[Sampling]
    constrained: Constrained
    wants_logprobs: bool
    shares: Sequence[Share]


@dataclass(slots=True)
class Runner:
    """scheduler.Runner over the model: one stream, results in the order of the steps."""

    model: Model
    pack: Pack
    stream: Stream
    graphs: StepGraphs
    buckets: Buckets
    readback: Readback
    pace: StepPace = field(default_factory=StepPace)
    trace: StepTrace | None = None
    masks: Masks | None = None
    """Needed for sequences with a constraint."""
    _launched: list[Launched] = field(default_factory=list)
    _shape: tuple[int, int, int] = (0, 0, 0)
    _wants_logprobs: bool = False
    _constrained: Constrained = ()
    _asks_logprobs: np.ndarray[Any, Any] = field(init=False)  # by slot, as are the next
    _has_constraint: np.ndarray[Any, Any] = field(init=False)
    _shares: Sequence[Share] = ()
    _scores: list[Scores] = field(default_factory=list)
    _waiting: Launched | None = None
    """The last launched step, if its `sample` waits for the result of the step before."""

    def __post_init__(self) -> None:
        slots = self.model.rows["alive"].shape[0]
        self._asks_logprobs, self._has_constraint = np.zeros(slots, bool), np.zeros(slots, bool)

    def record(self) -> None:
        """Record every segment of the buckets, and the upload of changes."""
        self.graphs.record("upload", self._apply)
        for tokens, rows, longest in self.buckets.segments():
            self.graphs.record(("forward", tokens, rows, longest), self._forward(tokens, rows, longest))
        for rows in self.buckets.sample_rows():
            self.graphs.record(("sample", rows), self._sample(rows))
        for offset in range(0, self.model.buffers.score_ranks.shape[0], self._slice):
            self.graphs.record(("score", offset), self._score(offset))

    def _apply(self) -> None:
        apply_writes(self.pack, words=self.model.rows.words, writes=self.model.rows.writes)

    @property
    def _slice(self) -> int:
        """Prompt tokens that are scored at once."""
        return self.model.buffers.logits.shape[0]

    def _forward(self, tokens: int, rows: int, longest: int) -> Any:
        return lambda: self.model.forward(self.pack, tokens, rows, longest)

    def _sample(self, rows: int) -> Any:
        return lambda: self.model.sample(self.pack, rows)

    def _score(self, offset: int) -> Any:
        return lambda: self.model.score(self.pack, offset)

    def launch(self, step: Step[Sampling]) -> None:
        """Write what changed, then put both segments and the read-back on the stream.

        Rows with a constraint need a mask that depends on their last token: while that is under way only `forward` is
        launched here, and `sample` as soon as the token has been collected.
        """
        rows, trace = self.model.rows, self.trace
        if trace is not None:
            trace.mark("write rows")
        for slot in step.left:
            rows.set("alive", slot, 0)
        for seq in step.joined:
            self._join(seq)
        for write in step.blocks:
            rows.write(TABLES[write.group], write.seq.slot, write.blocks, offset=write.first)
        if step.changed:
            self._write_batch(step)
        waits = bool(self._constrained and self._launched)
        if not waits:
            self._write_masks(self._constrained)
        if trace is not None:
            trace.mark("upload")
        self._upload()
        tokens, num_rows, longest = self._shape
        if trace is not None:
            trace.launch(step.index, bucket=f"{tokens} tokens, {num_rows} rows", rows=len(step.rows))
            trace.mark("launch")
        self.readback.begin(self.stream)
        self.graphs.launch(("forward", tokens, num_rows, longest))
        self.pace.launch(self._shape, timed=not waits and not self._shares)
        self._launched.append(Launched(step, self._constrained, self._wants_logprobs, self._shares))
        if waits:
            self._waiting = self._launched[-1]
        else:
            self._sample_now(self._launched[-1])

    def _upload(self) -> None:
        for _ in self.model.rows.uploads(self.stream):
            self.graphs.launch("upload")

    def _sample_now(self, launched: Launched) -> None:
        """The second half of a launch; the shape and the rows are still the step's."""
        self.graphs.launch(("sample", self._shape[1]))
        b, n = self.model.buffers, len(launched.step.rows)
        results = [b.result[:n]]
        if launched.wants_logprobs:
            results += [b.top_ids[:n], b.top_values[:n]]
        if launched.shares:
            scored = sum(share.size for share in launched.shares)
            for offset in range(0, scored, self._slice):
                self.graphs.launch(("score", offset))
            scores = (b.score_logprobs, b.score_ranks, b.score_top_ids, b.score_top_values)
            results += [tensor[:scored] for tensor in scores]
        self.readback.enqueue(self.stream, results)

    def _write_masks(self, constrained: Constrained) -> None:
        if not constrained:
            return
        if self.masks is None:
            raise TypeError("a sequence has a constraint, and the runner no masks")
        rows = self.model.rows
        masks, complete = self.masks.fill([constraint for _, _, constraint in constrained])
        for (_, seq, _), mask, ends in zip(constrained, masks, complete, strict=True):
            rows.write("allowed_masks", seq.slot, mask)
            if ends:
                rows.set("min_lens", seq.slot, 0)  # a complete output ends, however short it is

    def collect(self, wait_s: float | None) -> StepResult[Payload] | None:
        """The oldest step's result. Waiting blocks on the device; a step is milliseconds, so wait_s is not a limit."""
        trace = self.trace
        if trace is not None:
            trace.mark("read back")
        arrays = self.readback.take(wait=wait_s is None or wait_s > 0)
        if trace is not None:
            trace.mark("reconcile")
        if arrays is None:
            return None
        seconds = self.readback.seconds
        outlier = self.pace.result(seconds)
        if trace is not None:
            trace.result(seconds or 0.0)
            if outlier is not None:
                trace.keep()
        launched, result = self._launched.pop(0), arrays[0]
        step, tops = launched.step, arrays[1:3] if launched.wants_logprobs else (None, None)
        self._scores += read_scores(launched.shares, arrays[-4:])
        if launched.constrained:
            self._accept(launched.constrained, result)
        if self._waiting is not None:
            waiting, self._waiting = self._waiting, None
            if trace is not None:
                trace.mark("masks")
            # Rows that have ended get no mask; the device skips them.
            self._write_masks([one for one in waiting.constrained if not one[2].ended])
            self._upload()
            self._sample_now(waiting)
        ended = np.flatnonzero(result[:, 1] > RowStatus.RUNNING)
        finished = [(step.rows[i].seq.slot, FINISH_REASONS[RowStatus(result[i, 1])]) for i in ended.tolist()]
        payload = Payload(result[:, 0], result[:, 2].view(np.float32), *tops)
        return StepResult(step.index, finished, payload, seconds=seconds)

    def take_scores(self) -> list[Scores]:
        """Of prompts, from the steps collected since the last call; a sequence's in the order of its tokens."""
        taken, self._scores = self._scores, []
        return taken

    def _accept(self, constrained: Constrained, result: np.ndarray[Any, Any]) -> None:
        """Move constraints past the tokens of a step."""
        for position, _, constraint in constrained:
            match result[position, 1]:
                case RowStatus.RUNNING:
                    constraint.accept(int(result[position, 0]))
                case RowStatus.STOP | RowStatus.LENGTH | RowStatus.FAILED:
                    constraint.ended = True

    def _join(self, seq: Seq[Sampling]) -> None:
        """Write the state of a sequence that got a slot."""
        rows, slot, sampling = self.model.rows, seq.slot, seq.owner
        if not isinstance(sampling, Sampling):
            raise TypeError(f"sequence {seq.id} joined without sampling state")
        p = sampling.params
        if seq.lease is None:
            raise TypeError(f"sequence {seq.id} joined without a lease")
        self._asks_logprobs[slot], self._has_constraint[slot] = (
            bool(p.logprobs),
            sampling.constraint is not None,
        )
        self.pace.join(slot, seq.lease.num_cached)
        rows.set("alive", slot, 1)
        rows.set("seq_lens", slot, seq.lease.num_cached)
        rows.set("limits", slot, seq.max_len)
        rows.set("min_lens", slot, seq.prompt_len + p.min_tokens)
        stop_ids = (*sampling.stop_ids, *[-1] * (MAX_STOP_IDS - len(sampling.stop_ids)))
        rows.write("stop_ids", slot, stop_ids)
        rows.set("temperatures", slot, 0.0 if p.is_greedy else p.temperature)
        rows.set("top_ks", slot, p.top_k)
        rows.set("top_ps", slot, p.top_p)
        rows.set("min_ps", slot, p.min_p)
        rows.write("seeds", slot, np.array(seed_words(sampling.seed), np.uint32).view(np.int32))
        rows.set("num_logprobs", slot, p.logprobs or 0)
        if not p.adjusts_logits and sampling.constraint is None:
            rows.set("adjusts", slot, 0)
            return
        prompt, output = seq.tokens[: seq.prompt_len], seq.tokens[seq.prompt_len :]
        values = adjustment_values(p, prompt, output, self.model.config.vocab_size)
        if sampling.constraint is not None:
            values["adjusts"] |= Adjustment.ALLOWED
            values.pop("allowed_masks", None)  # written for each token
        for name, array in values.items():
            rows.write(name, slot, array)

    def _write_batch(self, step: Step[Sampling]) -> None:
        """The step's rows and its prompt chunks, and the segment that it runs in."""
        count, decoding = len(step.rows), step.num_decode  # decode rows have one token each, and emit
        chunks = step.rows[decoding:]
        lengths = np.ones(count, np.int32)
        lengths[decoding:] = [row.num_tokens for row in chunks]
        starts = np.zeros(count + 1, np.int32)
        lengths.cumsum(out=starts[1:])
        total = int(starts[-1])
        self._shape = num_tokens, num_rows, _ = self.buckets.choose(total, count)
        slots, emits = np.zeros(num_rows, np.int32), np.zeros(num_rows, np.int32)
        slots[:count] = [row.seq.slot for row in step.rows]
        self.pace.change(slots[:count], lengths)
        emits[:decoding] = 1
        emits[decoding:count] = [row.emits for row in chunks]
        q_starts = np.full(num_rows + 1, total, np.int32)
        q_starts[: count + 1] = starts
        prompt = np.full(num_tokens, -1, np.int32)
        for row, start in zip(chunks, starts[decoding:].tolist(), strict=False):
            if row.start is not None:
                prompt[start : start + row.num_tokens] = row.seq.tokens[
                    row.start : row.start + row.num_tokens
                ]
        self._wants_logprobs = bool(self._asks_logprobs[slots].any())
        self._constrained = [
            (at, step.rows[at].seq, constraint)
            for at in np.flatnonzero(self._has_constraint[slots[:count]] & (emits[:count] != 0)).tolist()
            if (constraint := _constraint(step.rows[at].seq)) is not None
        ]
        rows = self.model.rows
        asked = [
            (row, start, wish)
            for row, start in zip(chunks, starts[decoding:].tolist(), strict=False)
            if (wish := _wish(row.seq)) is not None
        ]
        self._shares = write_scores(rows, self._slice, asked)
        rows.write("slots", 0, slots)
        rows.write("emits", 0, emits)
        rows.write("q_starts", 0, q_starts)
        rows.write("prompt", 0, prompt)

    def close(self) -> None:
        """Wait for what is under way and give everything back but the memory."""
        self.stream.synchronize()
        if self.trace is not None:
            self.trace.close()
        self.graphs.close()
        self.readback.close()
        self.model.rows.close()


def _constraint(seq: Seq[Sampling]) -> Constraint | None:
    return seq.owner.constraint if isinstance(seq.owner, Sampling) else None


def _wish(seq: Seq[Sampling]) -> PromptScore | None:
    return seq.owner.score if isinstance(seq.owner, Sampling) else None


def readback_bytes(max_rows: int, max_tokens: int) -> int:
    """What the results of one step take at most in the read-back ring."""
    tops = 2 * MAX_LOGPROBS
    return 4 * (max_rows * (3 + tops) + padded(max_tokens, max_rows) * (2 + tops)) + 7 * 64
