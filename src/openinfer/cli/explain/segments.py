"""The recorded segments one by one, each with a workload, on the null device or on the device of an engine."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from openinfer.graph import Buckets, Shape
from openinfer.graph.runner import Model
from openinfer.kernels import GPUS, H200, Call, CudaSpec, Pack, Target, Workload
from openinfer.kvpool import Pool
from openinfer.recipes.engine.engine import Engine
from openinfer.recipes.engine.errors import SetupError
from openinfer.recipes.engine.forced import Forced, NoRoom
from openinfer.recipes.engine.limits import OUTSIDE_BYTES, Room, decide
from openinfer.recipes.engine.options import O
from openinfer.recipes.engine.recipe import Recipe, Source
from openinfer.recipes.engine.startup import buckets_for, make_start_plan, options_target, with_room
from openinfer.sampler.gpu import sample_rows
from openinfer.tensor import Device

MARGIN = 8
"""Tokens that a placed sequence may grow by before its block table ends, besides those asked for."""
SERVED = replace(H200, nvrtc=True)
"""An H200 as engines take it by default. Its wheels have the kernels of CUDA C++, or NVRTC makes them."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Half a step: its name with the buckets it runs in, the step's workload, and `run(pack)`, which calls its ops."""

    name: str
    workload: Workload
    run: Callable[[Pack], None]


Steps = list[list[Segment]]
"""Steps, each of its segments."""


def step_segments(
    model: Model, buckets: Buckets, rows: int, context: int, prefill: int = 0, start: int = 0
) -> list[Segment]:
    """Both segments of a step: `rows` sequences get token number `context`, one more `prefill` tokens after `start`."""
    workload = Workload(
        rows + prefill,
        rows + bool(prefill),
        rows * context + bool(prefill) * (start + prefill),
        rows * context + prefill * start + prefill * (prefill + 1) // 2,
    )
    tokens, num_rows, longest, _ = buckets.choose(workload.tokens, workload.rows)
    forward = functools.partial(model.forward, num_tokens=tokens, num_rows=num_rows, max_q_len=longest)
    batch = model.batch

    def sample(pack: Pack) -> None:
        sample_rows(pack, batch.rows, batch.sampled, num_rows)

    return [
        Segment(f"forward {tokens} tokens, {num_rows} rows", workload, forward),
        Segment(f"sample {num_rows} rows", workload, sample),
    ]


class Outline:
    """An engine with these options on the null device: its steps can be traced, its memory counted. Needs no GPU.

    `memory`: bytes by their use, without the cache; `fixed_bytes`: all of them. `target`: the GPU that the plan is for.
    `max_model_len`: tokens of a sequence, where the cache has room for them. cache_form: of the cache of keys and
    values. `groups`: the kinds of the cache, with the fewest blocks. `parts`: GPUs that each hold a part of a block of
    the cache. `steps`: the calls of every recorded step by its shape. ranks: GPUs that share the model, by default as
    the options say; of several, this is the first one's part. memory_bytes: of each GPU.
    """

    def __init__(
        self, recipe: Recipe[O], source: Source, options: O, target: Target, *, ranks: int | None = None,
        memory_bytes: float = GPUS[H200.gpu].memory_bytes,
    ) -> None:  # fmt: skip
        ranks = options.tensor_parallel_size if ranks is None else ranks
        blueprint: Any = recipe.blueprint(source, options, ranks=ranks)
        limits = decide(options, Device("cuda"), blueprint)
        self.target = options_target(options, target)
        plan = make_start_plan(blueprint, limits, buckets_for(blueprint, limits), self.target)
        self._plan = plan = with_room(plan, blueprint, options, self.target, memory_bytes)
        self._blueprint, self._limits = blueprint, plan.limits
        self._prefix_cache = options.enable_prefix_caching
        self.buckets = buckets_for(blueprint, plan.limits)
        self.max_model_len, self.cache_form = limits.max_model_len, limits.cache
        self.groups, self.parts = blueprint.groups(limits), 1 if blueprint.cache_is_alike else ranks
        self.model, self.fixed_bytes = plan.model, plan.fixed_bytes + OUTSIDE_BYTES
        self.steps: Mapping[Shape, Sequence[Call]] = plan.steps
        rows, own = self.model.batch.rows, dict(blueprint.memory(self.model))
        own["activations"] += self.model.batch.nbytes
        if self.model.batch.adapters is not None:
            own["adapters"] = self.model.batch.adapters.nbytes
        self.memory = {
            **own,
            "batch state": rows.words.nbytes + rows.writes.nbytes,
            "workspace": plan.scratch_bytes + plan.zeroed_bytes,
            "outside the arena": OUTSIDE_BYTES,
        }

    @property
    def kernels(self) -> str:
        """How many kernels the engine has, and what is assumed of those of CUDA C++."""
        specs = self._plan.specs
        own = sum(isinstance(spec, CudaSpec) for spec in specs)
        text = f"kernels: {len(specs)}"
        if own:
            text += f", of which {own} are CUDA C++ (assumed: sm_90, and a wheel with them or NVRTC; else Triton's run)"
        return text

    def cache(self, nbytes: int) -> Pool:
        """The pool that an engine makes of `nbytes`. Raises SetupError where they are too few."""
        blocks = self._blueprint.share(self._limits, Room(nbytes, Device("cuda"), self.fixed_bytes))
        return Pool(self._blueprint.groups(self._limits, blocks), prefix_cache=self._prefix_cache)

    def decode(self, rows: int, context: int) -> Steps:
        """A decode step. Raises SetupError for more rows than a step has."""
        if rows > self.buckets.max_rows:
            raise SetupError(f"{rows} rows; a step has at most {self.buckets.max_rows} (--max-num-seqs)")
        return [step_segments(self.model, self.buckets, rows, context)]

    def prefill(self, tokens: int) -> Steps:
        """The steps that one prompt takes."""
        chunks = self.buckets.chunks(tokens)
        return [step_segments(self.model, self.buckets, 0, 0, count, start) for start, count in chunks]


class Placed:
    """Sequences of random tokens in an engine's slots, put there by real prefill. A step can take any of them.

    Slots 1, 2, ... hold `lengths[0]`, `lengths[1]`, ... tokens and can grow by `room`. They take the engine's adapters
    in turn, if it has any. The engine must be idle; `leave` gives it back. Raises NoRoom.
    """

    def __init__(
        self, engine: Engine, lengths: Sequence[int], room: Sequence[int], rng: np.random.Generator
    ) -> None:
        self._runner, self._forced = engine.runner, Forced(engine)
        chunk, vocab = self._runner.buckets.max_tokens, engine.info.vocab_size
        places = min(len(engine.stats().adapters), engine.info.max_adapters)
        self._seqs = []
        for slot, (length, more) in enumerate(zip(lengths, room, strict=True), start=1):
            tokens = rng.integers(0, vocab, length + more + MARGIN).tolist()
            seq = self._forced.join(slot, tokens)
            if places:
                seq.seq.owner.place = 1 + (slot - 1) % places
            self._forced.feed(seq, length, chunk)
            self._seqs.append(seq)
        for seq, length, more in zip(self._seqs, lengths, room, strict=True):
            if length:
                self._forced.reserve(seq, length + more + MARGIN)

    def step(self, slots: Sequence[int], prefill: int = 0) -> None:
        """Make the batch: a token for each of these slots, the last slot `prefill` tokens if that is not 0; and run it
        once, so that all buffers hold what they do in such a step."""
        rows, decoding = self._runner.model.batch.rows, len(slots) - bool(prefill)
        counts = [1] * decoding + [prefill] * bool(prefill)
        self._forced.step([(self._seqs[slot - 1], n) for slot, n in zip(slots, counts, strict=True)])
        rows.write("emits", 0, np.ones(len(slots), np.int32))
        rows.write("prompt", 0, np.full(decoding, -1, np.int32))

    def rewind(self, lengths: dict[int, int]) -> None:
        """Set the lengths of slots, and send what changed."""
        for slot, length in lengths.items():
            self._forced.rewind(self._seqs[slot - 1], length)
        self._runner.upload()

    def leave(self) -> None:
        rows = self._runner.model.batch.rows
        rows.write("emits", 0, np.zeros(rows["emits"].shape[0], np.int32))
        self._forced.leave()


def engine_segments(engine: Engine, context: int, tokens: Sequence[int] | None = None) -> Iterator[Segment]:
    """Every segment without drafts that the engine recorded (or those of these token counts), one after the other.

    While one is in hand, its state is on the device, and engine.runner.pack can run its ops again and again.

    Decode rows have `context` tokens; a segment for more is all decode rows but one, and one prompt from its start.
    """
    runner, buckets = engine.runner, engine.runner.buckets
    max_rows = buckets.max_rows
    wanted = [s for s in buckets.segments() if not s.drafts and (tokens is None or s.tokens in tokens)]
    if not wanted:
        raise SetupError(f"no recorded segment has a token count of {tokens}")
    largest = max(shape.tokens for shape in wanted)
    need = max_rows * (context + MARGIN + engine.info.block_size) + largest
    if need > engine.info.kv_capacity_tokens or max(context, largest) + MARGIN > engine.info.max_model_len:
        raise NoRoom(
            f"{max_rows} sequences of {context} tokens and a prompt of {largest} do not fit: the cache holds "
            f"{engine.info.kv_capacity_tokens} tokens, a sequence {engine.info.max_model_len}; lower --context"
        )
    lengths, room = [context - 1] * max_rows, [*[1] * (max_rows - 1), max(1, largest - context + 1)]
    placed = Placed(engine, lengths, room, np.random.default_rng(7))
    for num_tokens, num_rows, longest, _ in wanted:
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
