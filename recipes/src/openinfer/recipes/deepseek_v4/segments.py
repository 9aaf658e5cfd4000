"""The recorded segments one by one: with a workload each, on the null device or ready to run on an engine's."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from openinfer.kernels import Pack, Target, Workload
from openinfer.recipes.deepseek_v4.buckets import Buckets
from openinfer.recipes.deepseek_v4.config import Config
from openinfer.recipes.deepseek_v4.engine import DeepseekV4Engine
from openinfer.recipes.deepseek_v4.forced import Forced
from openinfer.recipes.deepseek_v4.model import Model
from openinfer.recipes.deepseek_v4.ops.common import PAGE
from openinfer.recipes.deepseek_v4.places import Format
from openinfer.recipes.deepseek_v4.sizes import OUTSIDE_BYTES, Options, Room, decide_sizes, window_pages
from openinfer.recipes.deepseek_v4.startup import lay_out, make_plan
from openinfer.recipes.deepseek_v4.weights import Weights
from openinfer.tensor import Arena, Device, Stream

MARGIN = 8
"""Tokens that a placed sequence may grow by before its block table ends, besides those asked for."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Half a step: its name with the buckets it runs in, what is in the step, and `run(pack)`, which calls its ops."""

    name: str
    workload: Workload
    run: Callable[[Pack], None]


def step_segments(
    model: Model, buckets: Buckets, rows: int, context: int, prefill: int = 0, start: int = 0
) -> list[Segment]:
    """Both segments of a step in which `rows` sequences get token number `context` and one more gets `prefill` tokens
    after `start`."""
    workload = Workload(
        rows + prefill,
        rows + bool(prefill),
        rows * context + bool(prefill) * (start + prefill),
        rows * context + prefill * start + prefill * (prefill + 1) // 2,
    )
    tokens, num_rows, longest = buckets.choose(workload.tokens, workload.rows)
    forward = functools.partial(model.forward, num_tokens=tokens, num_rows=num_rows, max_q_len=longest)
    sample = functools.partial(model.sample, num_rows=num_rows)
    return [
        Segment(f"forward {tokens} tokens, {num_rows} rows", workload, forward),
        Segment(f"sample {num_rows} rows", workload, sample),
    ]


class Outline:
    """An engine with these flags on the null device: its steps can be traced, its memory counted. Needs no GPU.

    `memory` is bytes by what they are for, the cache aside; `page_bytes` and `page_tokens` are a page's of entries,
    with the same again that the window group gets, `max_pages` as many as all rows at full length take. `target` is
    what is planned for. `config`: instead of the checkpoint's. `ranks`: the part of the first of so many GPUs.
    """

    def __init__(
        self, model_dir: str, target: Target, config: Config | None = None, ranks: int = 1, **flags: Any
    ) -> None:
        options = Options(**{**flags, "device": "cuda"})
        config, null = (config or Config.load(Path(model_dir))).of_rank(0, ranks), Device("null")
        form = Format(fp4_experts=True)
        sizes = decide_sizes(config, options, Device("cuda"))
        arena = Arena(null, None)
        self.model = lay_out(config, form, sizes, arena, Stream(null), Room(1, 1))
        self.buckets = Buckets.up_to(sizes.max_rows, sizes.max_tokens)
        self.target = target
        plan = make_plan(config, form, sizes, self.buckets, target)
        weights = Arena(null, None)
        Weights.allocate(config, weights, sizes.dtype, form)
        self.page_tokens, self.max_pages = PAGE, sizes.max_rows * sizes.max_blocks + 1
        self.page_bytes = 2 * config.entry_page_bytes(sizes.dtype.itemsize)
        self.memory = {
            "weights": weights.used,
            "activations and logits": sum(
                getattr(self.model.buffers, f.name).nbytes for f in dataclasses.fields(self.model.buffers)
            ),
            "batch state": self.model.rows.words.nbytes + self.model.rows.writes.nbytes,
            "rotary tables": self.model.cos_sin.nbytes + self.model.compress_cos_sin.nbytes,
            "workspace": plan.scratch_bytes + plan.zeroed_bytes,
            "outside the arena": OUTSIDE_BYTES,
        }

    def decode(self, rows: int, context: int) -> list[list[Segment]]:
        """The segments of a decode step, as one step. Raises ValueError for more rows than a step has."""
        if rows > self.buckets.decode_rows[-1]:
            raise ValueError(
                f"{rows} rows; a step has at most {self.buckets.decode_rows[-1]} (--max-num-seqs)"
            )
        return [step_segments(self.model, self.buckets, rows, context)]

    def prefill(self, tokens: int) -> list[list[Segment]]:
        """The segments of the steps that one prompt takes."""
        chunk = self.buckets.mixed_tokens[-1]
        return [
            step_segments(self.model, self.buckets, 0, 0, min(chunk, tokens - start), start)
            for start in range(0, tokens, chunk)
        ]


class Placed:
    """Sequences of random tokens in an engine's slots, put there by real prefill; any of them can be made a step's.

    Slots 1, 2, ... hold `lengths[0]`, `lengths[1]`, ... tokens and can grow by `room`. The engine must be idle and
    have no prefix cache; `leave` gives it back.
    """

    def __init__(
        self, engine: DeepseekV4Engine, lengths: Sequence[int], room: Sequence[int], rng: np.random.Generator
    ) -> None:
        self._runner, self._forced = engine.runner, Forced(engine.runner)
        self._vocab, self._rng = engine.info.vocab_size, rng
        chunk = self._runner.buckets.mixed_tokens[-1]
        for slot, (length, more) in enumerate(zip(lengths, room, strict=True), start=1):
            self._forced.join(slot, length + more + MARGIN)
            self._forced.feed(slot, self._ids(length), chunk)
            self._runner.model.rows.set("limits", slot, 1 << 30)

    def _ids(self, count: int) -> list[int]:
        ids: list[int] = self._rng.integers(0, self._vocab, count).tolist()
        return ids

    def step(self, slots: Sequence[int], prefill: int = 0) -> None:
        """Make the batch: a token for each of these slots, the last slot `prefill` tokens if that is not 0; and run its
        forward segment once, so that all buffers hold what they do in such a step."""
        rows, decoding = self._runner.model.rows, len(slots) - bool(prefill)
        counts = [1] * decoding + [prefill] * bool(prefill)
        self._forced.step([(slot, self._ids(count)) for slot, count in zip(slots, counts, strict=True)])
        rows.write("emits", 0, np.ones(len(slots), np.int32))
        rows.write("prompt", 0, np.full(decoding, -1, np.int32))

    def rewind(self, lengths: dict[int, int]) -> None:
        """Set the lengths of slots, and send what changed."""
        self._forced.rewind(lengths)

    def leave(self) -> None:
        """End all sequences."""
        rows = self._runner.model.rows
        rows.write("emits", 0, np.zeros(rows["emits"].shape[0], np.int32))
        self._forced.leave()


def engine_segments(
    engine: DeepseekV4Engine, context: int, tokens: Sequence[int] | None = None
) -> Iterator[Segment]:
    """Every segment that the engine recorded (or those of these token counts), one after the other: while one is in
    hand, its state is on the device, and its ops can be run there on engine.runner.pack, again and again.

    Decode rows have `context` tokens; a segment for more is all decode rows but one, and one prompt from its start.
    """
    runner, buckets = engine.runner, engine.runner.buckets
    max_rows, largest = buckets.mixed_rows[-1], buckets.mixed_tokens[-1]
    wanted = [s for s in buckets.segments() if tokens is None or s[0] in tokens]
    if not wanted:
        raise ValueError(f"no recorded segment has a token count of {tokens}")
    lengths = [context - 1] * max_rows
    need = sum(length + MARGIN + PAGE for length in lengths) + largest
    room, windows = engine.info.kv_capacity_tokens, runner.model.cache.window.shape[0] - 1
    needed = window_pages(max_rows, largest, engine.info.max_model_len)
    if need > room or max(context, largest) + MARGIN > engine.info.max_model_len:
        raise ValueError(
            f"{max_rows} sequences of {context} tokens and a prompt of {largest} do not fit: the cache holds {room} "
            f"tokens, a sequence {engine.info.max_model_len}; lower --context"
        )
    if needed > windows:
        raise ValueError(
            f"{max_rows} sequences and a prompt of {largest} tokens need {needed} pages for windows, there are "
            f"{windows}; lower --max-num-seqs or raise --kv-cache-memory-bytes"
        )
    placed = Placed(
        engine, lengths, [*[1] * (max_rows - 1), max(1, largest - context + 1)], np.random.default_rng(7)
    )
    for num_tokens, num_rows, longest in wanted:
        # A step with as many tokens as rows is a decode step, so a segment of that shape gets one row less.
        decoding = num_rows if longest == 1 else num_rows - 1 - (num_tokens == num_rows)
        prefill = num_tokens - decoding
        state = {**dict.fromkeys(range(1, decoding + 1), context - 1), **({max_rows: 0} if prefill else {})}
        placed.rewind(state)
        placed.step(list(state), prefill)
        segments = step_segments(runner.model, buckets, decoding, context, prefill)
        for segment in segments if longest == 1 else segments[:1]:
            placed.rewind(state)
            yield segment
        runner.stream.synchronize()
    placed.leave()
