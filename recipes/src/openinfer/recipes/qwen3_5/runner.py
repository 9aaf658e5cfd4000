"""The runner: steps of the loop as changes to Rows and launches of recorded segments."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from openinfer.graph import Readback, StepGraphs, bucket_for
from openinfer.kernels import Pack, apply_writes
from openinfer.kvpool import Lease
from openinfer.recipes.qwen3_5.model import MAX_LOGPROBS, MAX_STOP_IDS, Model
from openinfer.recipes.qwen3_5.ops.gated_delta_net import STATE_CHUNK
from openinfer.sampler import SamplingParams, seed_words
from openinfer.sampler.gpu import RowStatus, adjustment_values
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


class Payload(NamedTuple):
    """Results of a step along its rows: token ids [R], log-probabilities [R] of them, and the most likely tokens
    [R, MAX_LOGPROBS] where a row asked."""

    token_ids: np.ndarray[Any, Any]
    logprobs: np.ndarray[Any, Any]
    top_ids: np.ndarray[Any, Any] | None
    top_logprobs: np.ndarray[Any, Any] | None


PAGES, STATES = 0, 1
"""The pool's groups: keys and values of full attention, and recurrent states."""


@dataclass(frozen=True, slots=True)
class Boundaries:
    """Where snapshots of a prompt's state are taken: at the powers of two from STATE_CHUNK on below `interval`, so that
    short shared prefixes are found too, at its multiples, and where the last whole chunk of the prompt ends."""

    interval: int

    def within(self, start: int, end: int, prompt: int) -> list[int]:
        """Those in (start, end] of a prompt of so many tokens; the last of them leaves a token to compute."""
        regular = {*range(self.interval, end + 1, self.interval), (prompt - 1) // STATE_CHUNK * STATE_CHUNK}
        power = STATE_CHUNK
        while power < self.interval:
            regular.add(power)
            power *= 2
        return sorted(n for n in regular if start < n <= end and n < prompt)

    def most(self, num_tokens: int) -> int:
        """At most so many are within a chunk of num_tokens tokens."""
        powers = (self.interval // STATE_CHUNK).bit_length()
        return num_tokens // self.interval + powers + 1


LONE_TOKENS = 128
"""A lone row of at most this many tokens has segments of its own: its attention is then split over the whole GPU."""


@dataclass(frozen=True, slots=True)
class Buckets:
    """The shapes that steps are recorded in. A step runs in the smallest that holds it."""

    decode_rows: tuple[int, ...]
    mixed_tokens: tuple[int, ...]
    mixed_rows: tuple[int, ...]

    @classmethod
    def up_to(cls, max_rows: int, max_tokens: int) -> Buckets:
        """Padding of at most 7 rows in decode, and in mixed steps of a third up to 256 tokens and a quarter above: a
        prompt of 1,024 tokens beside decode rows must not pay for 1,536."""
        decode = [n for n in (1, 2, 4, *range(8, max_rows, 8)) if n < max_rows]
        sizes = [16, 32, 64, 96, 128, 192]
        octave = 256
        while octave < max_tokens:
            sizes += [
                octave * eighths // 8
                for eighths in ((8, 10, 12, 14) if octave < 1024 else (8, 9, 10, 12, 14))
            ]
            octave *= 2
        mixed = [n for n in sizes if n < max_tokens]
        rows = [n for n in (8, 64) if n < max_rows]
        return cls((*decode, max_rows), (*mixed, max_tokens), (*rows, max_rows))

    def segments(self) -> Iterator[tuple[int, int, int]]:
        """(tokens, rows, longest row) of every forward segment, largest first."""
        for tokens in reversed(self.mixed_tokens):
            yield from ((tokens, rows, tokens) for rows in reversed(self.mixed_rows) if rows <= tokens)
            if tokens <= LONE_TOKENS:
                yield tokens, 1, tokens
        yield from ((rows, rows, 1) for rows in reversed(self.decode_rows))

    def sample_rows(self) -> list[int]:
        """Rows of every sample segment."""
        return sorted({1, *self.decode_rows, *self.mixed_rows})

    def choose(self, tokens: int, rows: int) -> tuple[int, int, int]:
        """The segment for a step."""
        if tokens == rows:
            bucket = bucket_for(self.decode_rows, rows)
            return bucket, bucket, 1
        num_rows = bucket_for(self.mixed_rows, rows)
        num_tokens = bucket_for(self.mixed_tokens, max(tokens, num_rows))
        if rows == 1 and bucket_for(self.mixed_tokens, tokens) <= LONE_TOKENS:
            num_rows, num_tokens = 1, bucket_for(self.mixed_tokens, tokens)
        return num_tokens, num_rows, num_tokens


@dataclass(slots=True)
class Runner:
    """scheduler.Runner over the model: one stream, results in the order of the steps."""

    model: Model
    pack: Pack
    stream: Stream
    graphs: StepGraphs
    buckets: Buckets
    readback: Readback
    boundaries: Boundaries
    _joined: list[tuple[int, int]] = field(default_factory=list)
    _launched: list[Step] = field(default_factory=list)
    _shape: tuple[int, int, int] = (0, 0, 0)
    _wants_logprobs: bool = False

    def record(self) -> None:
        """Record every segment of the buckets."""
        for tokens, rows, longest in self.buckets.segments():
            self.graphs.record(("forward", tokens, rows, longest), self._forward(tokens, rows, longest))
        for rows in self.buckets.sample_rows():
            self.graphs.record(("sample", rows), self._sample(rows))

    def _forward(self, tokens: int, rows: int, longest: int) -> Any:
        return lambda: self.model.forward(self.pack, tokens, rows, longest)

    def _sample(self, rows: int) -> Any:
        return lambda: self.model.sample(self.pack, rows)

    def launch(self, step: Step) -> None:
        """Write what changed, then put both segments and the read-back on the stream."""
        rows = self.model.rows
        for slot in step.left:
            rows.set("alive", slot, 0)
        for (
            slot,
            live,
        ) in self._joined:  # the first step read a snapshot perhaps, and left a state of the row's own
            rows.set("state_from", slot, live)
        self._joined = [(seq.slot, self._join(seq)) for seq in step.joined]
        for write in step.blocks:
            if write.group == PAGES:
                rows.write("block_tables", write.seq.slot, write.blocks, offset=write.first)
        if step.changed:
            self._write_batch(step)
        for _ in rows.uploads(self.stream):
            apply_writes(self.pack, words=rows.words, writes=rows.writes)
        tokens, num_rows, longest = self._shape
        self.graphs.launch(("forward", tokens, num_rows, longest))
        self.graphs.launch(("sample", num_rows))
        b, n = self.model.buffers, len(step.rows)
        tops = [b.top_ids[:n], b.top_values[:n]] if self._wants_logprobs else []
        self.readback.enqueue(self.stream, [b.result[:n], *tops])
        self._launched.append(step)

    def collect(self, wait_s: float | None) -> StepResult | None:
        """The oldest step's result. Waiting blocks on the device; a step is milliseconds, so wait_s is not a limit."""
        arrays = self.readback.take(wait=wait_s is None or wait_s > 0)
        if arrays is None:
            return None
        step = self._launched.pop(0)
        result, *tops = arrays
        ended = np.flatnonzero(result[:, 1] > RowStatus.RUNNING)
        finished = [(step.rows[i].seq.slot, FINISH_REASONS[RowStatus(result[i, 1])]) for i in ended.tolist()]
        payload = Payload(result[:, 0], result[:, 2].view(np.float32), *(tops or (None, None)))
        return StepResult(step.index, finished, payload)

    def _join(self, seq: Seq) -> int:
        """Write the state of a sequence that got a slot; returns the block of its recurrent state."""
        rows, slot, sampling = self.model.rows, seq.slot, seq.owner
        if not isinstance(sampling, Sampling):
            raise TypeError(f"sequence {seq.id} joined without sampling state")
        p, lease = sampling.params, _lease(seq)
        (live,) = lease.block_table(STATES)
        sources = [copy.source for copy in lease.copies if copy.group == STATES]
        rows.set("alive", slot, 1)
        rows.set("seq_lens", slot, lease.num_cached)
        rows.set("state_from", slot, sources[0] if sources else live)
        rows.set("state_to", slot, live)
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
        if not p.adjusts_logits:
            rows.set("adjusts", slot, 0)
            return live
        prompt, output = seq.tokens[: seq.prompt_len], seq.tokens[seq.prompt_len :]
        for name, values in adjustment_values(p, prompt, output, self.model.config.vocab_size).items():
            rows.write(name, slot, values)
        return live

    def _write_batch(self, step: Step) -> None:
        """The step's rows and its prompt chunks, and the segment that it runs in."""
        lengths = np.fromiter((row.num_tokens for row in step.rows), np.int32, len(step.rows))
        starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        self._shape = num_tokens, num_rows, _ = self.buckets.choose(int(starts[-1]), len(step.rows))
        self._wants_logprobs = any(_asks_logprobs(row.seq) for row in step.rows)
        slots = np.zeros(num_rows, np.int32)
        slots[: len(step.rows)] = [row.seq.slot for row in step.rows]
        emits = np.zeros(num_rows, np.int32)
        emits[: len(step.rows)] = [row.emits for row in step.rows]
        q_starts = np.full(num_rows + 1, starts[-1], np.int32)
        q_starts[: len(starts)] = starts
        prompt = np.full(num_tokens, -1, np.int32)
        for row, start in zip(step.rows[step.num_decode :], starts[step.num_decode :].tolist(), strict=False):
            if row.start is not None:
                prompt[start : start + row.num_tokens] = row.seq.tokens[
                    row.start : row.start + row.num_tokens
                ]
        rows = self.model.rows
        if self._shape[2] > 1:
            self._write_snapshots(step)
        rows.write("slots", 0, slots)
        rows.write("emits", 0, emits)
        rows.write("q_starts", 0, q_starts)
        rows.write("prompt", 0, prompt)

    def _write_snapshots(self, step: Step) -> None:
        """Where the step's chunks are to leave their state, as far as the pool has room. The lease's commit makes
        these snapshots findable."""
        wanted = np.zeros((2, self._shape[1], self.model.max_snapshots), np.int32)
        for index, row in enumerate(step.rows[step.num_decode :], start=step.num_decode):
            if row.start is None:
                continue
            lease, count = _lease(row.seq), 0
            for end in self.boundaries.within(row.start, row.start + row.num_tokens, row.seq.target):
                for copy in lease.snapshot(end) or ():
                    wanted[:, index, count] = end, copy.target
                    count += 1
        self.model.rows.write("snapshot_ends", 0, wanted[0].reshape(-1))
        self.model.rows.write("snapshot_blocks", 0, wanted[1].reshape(-1))

    def close(self) -> None:
        """Wait for what is under way and give everything back but the memory."""
        self.stream.synchronize()
        self.graphs.close()
        self.readback.close()
        self.model.rows.close()


def _lease(seq: Seq) -> Lease:
    """Its lease, as the pool makes it: the scheduler's protocol knows no copies and no snapshots."""
    if not isinstance(seq.lease, Lease):
        raise TypeError(f"sequence {seq.id} has no lease of the pool")
    return seq.lease


def _asks_logprobs(seq: Seq) -> bool:
    return isinstance(seq.owner, Sampling) and bool(seq.owner.params.logprobs)


READBACK_BYTES_PER_ROW = 4 * (3 + 2 * MAX_LOGPROBS)
"""Of results and top logprobs, for the size of the read-back ring's buffers (alignment comes on top)."""
