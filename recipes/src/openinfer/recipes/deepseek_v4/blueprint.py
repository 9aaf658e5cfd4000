"""A DeepSeek-V4 before it has memory: the division of the cache between its groups, allocation and loading."""

import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from openinfer.graph import Field
from openinfer.graph.runner import Batch
from openinfer.kernels import NullPack, Repeated, one_of_each, place_rope_table
from openinfer.kvpool import Eviction, Group
from openinfer.recipes.deepseek_v4.cache import TABLES, Recent, V4Cache, eviction, groups
from openinfer.recipes.deepseek_v4.choices import choices
from openinfer.recipes.deepseek_v4.config import Config
from openinfer.recipes.deepseek_v4.dspark import BlockBuffers, BlockDraftingModel
from openinfer.recipes.deepseek_v4.layers import layers_alone
from openinfer.recipes.deepseek_v4.model import Buffers, DraftingModel, Model, activations
from openinfer.recipes.deepseek_v4.ops import PAGE
from openinfer.recipes.deepseek_v4.weights import Format, Layer, Weights, check_scales, validate
from openinfer.recipes.engine.blueprint import Blueprint, Control
from openinfer.recipes.engine.controls import of_halves, of_ranks, of_rotation
from openinfer.recipes.engine.engine import Engine
from openinfer.recipes.engine.limits import Limits, Room
from openinfer.recipes.engine.speculation import MAX_DRAFTS
from openinfer.recipes.engine.verdict import Check, Reference
from openinfer.tensor import Arena, Checkpoint, LoadReport, Stream, Tensor, nbytes_of

if TYPE_CHECKING:
    from openinfer.recipes.deepseek_v4.recipe import DeepseekOptions

log = logging.getLogger("openinfer.deepseek_v4")

WRONG_ENTRIES = "entries of the wrong size"


@dataclass(frozen=True, slots=True)
class DeepseekV4(Blueprint[Model]):
    """engine.Blueprint of a DeepSeek-V4. Its pool has two groups (see `cache`): windows and entries."""

    page_size = PAGE
    mixture = cache_is_alike = True
    config: Config
    form: Format
    options: "DeepseekOptions"

    @property
    def quantized(self) -> bool:
        """Whether activations are rounded where the published code rounds them."""
        return self.options.activation_quantization == "on"

    @property
    def trained_drafts(self) -> int:
        return min(self.form.dspark.block, MAX_DRAFTS) if self.form.dspark is not None else 0

    def decode_rows(self, max_rows: int) -> Sequence[int]:
        """At most 7 padding rows."""
        return (1, 2, 4, *range(8, max_rows, 8))

    def validate(self, checkpoint: Checkpoint, limits: Limits) -> None:
        validate(checkpoint, self.config, self.form)

    def share(self, limits: Limits, room: Room) -> Sequence[int]:
        """Pages of both groups in this room. Raises SetupError where they are too few to run one sequence.

        A sequence keeps all its entries, so the entries group must hold one sequence of --max-model-len, if given. Rows
        need few window pages, but a cached prefix can end only at a window page that is kept. So with the prefix cache
        the window group gets half of the room: kvpool's bench_eviction.py finds most prefixes with that share.
        """
        window, entry = (group.block_bytes for group in self.groups(limits))
        most = limits.max_rows * limits.max_blocks + 1  # every row at full length
        least = min(3, most)  # the window may lie on two pages
        longest = limits.max_blocks + 1 if self.options.max_model_len is not None else 0
        windows = max(least, min(most, room.nbytes // 2 // window, (room.nbytes - longest * entry) // window))
        busy = window_pages(limits.max_rows, 2 * limits.step_tokens, limits.max_model_len) + 1
        if not self.options.enable_prefix_caching:
            windows = min(windows, busy)
        entries = min(most, (room.nbytes - windows * window) // entry) if entry else most
        if room.nbytes < windows * window or entries < least:
            raise room.refusal(
                "the cache",
                f"a page for windows takes {window / 1e6:.1f} MB, one for entries {entry / 1e6:.1f} MB, and {least} of "
                "each are needed; ",
            )
        windows = min(windows, entries)
        if windows < busy:
            log.warning(
                "%d pages for windows, where %d sequences in full steps use %d: some will wait or be preempted",
                windows - 1, limits.max_rows, busy - 1,
            )  # fmt: skip
        return windows, entries

    def groups(self, limits: Limits, blocks: Sequence[int] | None = None) -> list[Group]:
        return groups(self.config, limits.dtype, blocks or (2, 2), drafting=self.form.drafting)

    def eviction(self, group: Group) -> Eviction:
        return eviction(group)

    def lay_out(self, arena: Arena, stream: Stream, limits: Limits, blocks: Sequence[int]) -> Model:
        c, d = self.config, self.form.dspark
        length, width, seen = limits.max_model_len, c.hc_mult * c.hidden_size, None
        if d is not None:  # a step's drafts are computed at once, and may lie behind the last position
            limits = dataclasses.replace(limits, max_tokens=max(limits.max_tokens, d.block * limits.max_rows))
            length, seen = length + d.block, len(d.targets) * c.hidden_size
        weights = Weights.allocate(c, arena, limits.dtype, self.form)
        tables = [place_rope_table(arena, stream, one, length) for one in (c.main_freq, c.compress_freq)]
        batch = Batch.allocate(
            arena, stream, [Field(name, (limits.max_rows + 1, limits.max_blocks)) for name in TABLES],
            max_rows=limits.max_rows, max_tokens=limits.step_tokens, vocab_size=c.vocab_size,
            width=width, seen=seen, dtype=limits.dtype, max_drafts=limits.max_drafts, proposes=limits.proposes,
            ranks=c.part.ranks, adds=False,
        )  # fmt: skip
        buffers = Buffers.allocate(c, arena, limits, self.quantized)
        cache = V4Cache.allocate(c, arena, limits.dtype, blocks, drafting=self.form.drafting)
        if arena.device.kind == "cuda":
            cache.zero_(stream)
        recent = None
        if limits.max_drafts:
            recent = Recent.allocate(cache, arena, limits.max_rows + 1, limits.max_drafts)
        parts = (c, weights, cache, tables[0], tables[1], batch, buffers, self.quantized)
        if d is not None:
            kept = BlockBuffers.allocate(c, d, arena, limits, self.quantized)
            reads = tuple(n + 1 for n in d.targets)
            return BlockDraftingModel(*parts, recent=recent, drafter=d, kept=kept, reads=reads)
        if not self.form.mtp:
            return Model(*parts, recent=recent)
        shape = (limits.step_tokens * c.hc_mult, c.hidden_size)
        work = activations(arena, shape, limits.dtype, self.quantized)
        return DraftingModel(*parts, recent=recent, work=work)

    def cache(self, model: Model) -> Sequence[Sequence[Tensor]]:
        return model.cache.by_group()

    def load(
        self, model: Model, checkpoint: Checkpoint, stream: Stream, progress: Callable[[int, int], None]
    ) -> LoadReport:
        check_scales(checkpoint, model.weights.places.names())
        return model.weights.places.load(checkpoint, stream, progress)

    def traced(self, model: Model, pack: NullPack) -> Model:
        layers = Repeated(pack, one_of_each(model.weights.layers, _kind))
        if isinstance(model, BlockDraftingModel):  # what it reads counts once, not for each layer of a kind
            model = dataclasses.replace(model, reads=(len(layers),) * len(model.reads))
        return dataclasses.replace(model, weights=dataclasses.replace(model.weights, layers=layers))

    def memory(self, model: Model) -> Mapping[str, int]:
        own = nbytes_of(model.kept) if isinstance(model, BlockDraftingModel) else 0
        own += model.work.nbytes if isinstance(model, DraftingModel) else 0
        return {
            "weights": model.weights.nbytes,
            "activations": nbytes_of(model.buffers) + own,
            "rotary tables": model.cos_sin.nbytes + model.compress_cos_sin.nbytes,
            "states of drafts": nbytes_of(model.recent) if model.recent is not None else 0,
        }

    def controls(self, model: Model) -> Iterator[Control]:
        yield from of_rotation(model.cos_sin, model.compress_cos_sin)
        shared = [layer.mixture.shared_gate_up for layer in model.weights.layers]
        yield from of_halves("shared experts", *(x for one in shared for x in (one.weight, one.scales)))
        compressors = [e.compressor for x in model.weights.layers if (e := x.attention.entries) is not None]
        smaller = [(c.norm, c.norm.numpy() * np.float32(0.25)) for c in compressors]
        yield Control(WRONG_ENTRIES, smaller, min_tokens=2 * PAGE)
        layers, mixture = model.weights.layers, model.weights.layers[-1].mixture
        outputs = [
            one.out_b for x in layers for one in (x.attention.heads, x.attention.every) if one is not None
        ]
        yield from of_ranks(self.config.part.ranks, outputs, [mixture.gate_up, mixture.down])

    def notices(self, fault: str) -> bool:
        """Rounding hides wrong entries, except from a layer alone."""
        of_entries = fault in (WRONG_ENTRIES, "entry_tables")
        return not (self.quantized and self.config.part.ranks > 1 and of_entries)

    def comparable(self, references: Sequence[Reference]) -> Sequence[Reference]:
        return [one.rounded() for one in references] if self.quantized else references

    def checks(
        self, engine: Engine, references: Sequence[Reference], wrong_table: str | None = None
    ) -> Iterator[Check]:
        if wrong_table is None:
            yield from choices(engine, references[-1], quantized=self.quantized)
        if self.quantized and self.config.part.ranks == 1:  # other ranks would not get the layers' inputs
            for reference in references:
                yield from layers_alone(engine, reference, wrong_table)


def window_pages(rows: int, tokens: int, longest: int) -> int:
    """Enough pages of the window group for `rows` rows of at most `longest` tokens, `tokens` of them being written.

    Each row needs three pages: the window may lie on two, and the row writes one. Chunks of prompts write more pages.
    """
    return min(3 * rows + -(-tokens // PAGE), rows * -(-longest // PAGE))


def _kind(layer: Layer) -> tuple[type, bool]:
    """The kind of a layer, on which its ops depend: the type of its entries, and whether a router picks its experts."""
    return type(layer.attention.entries), layer.mixture.table is None
