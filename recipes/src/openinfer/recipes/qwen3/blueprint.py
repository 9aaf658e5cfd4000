"""A Qwen3 before it has memory: the division of the cache, allocation and loading."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from openinfer.graph import Field
from openinfer.graph.runner import Batch
from openinfer.kernels import NullPack, Repeated, one_of_each, place_rope_table
from openinfer.kernels.authoring import FP8_CACHE, KvLayout, form_of
from openinfer.kvpool import Group
from openinfer.recipes.eagle3 import Drafter, Head
from openinfer.recipes.engine.adapters import adapters_of
from openinfer.recipes.engine.blueprint import Blueprint, Control
from openinfer.recipes.engine.controls import of_halves, of_ranks, of_rotation, of_scales
from openinfer.recipes.engine.limits import Limits, Room
from openinfer.recipes.qwen3.config import Config
from openinfer.recipes.qwen3.model import Buffers, DraftingModel, Model
from openinfer.recipes.qwen3.weights import Weights, validate
from openinfer.tensor import Arena, Checkpoint, Device, LoadReport, Stream, Tensor, nbytes_of


@dataclass(frozen=True, slots=True)
class Qwen3(Blueprint[Model]):
    """engine.Blueprint of a Qwen3. Its pool has one group: pages with the keys and values of all layers."""

    cache_forms = (FP8_CACHE,)
    config: Config
    page_size: int
    head: Head | None = None
    """The EAGLE-3 head that drafts."""

    @property
    def mixture(self) -> bool:
        return self.config.experts is not None

    def decode_rows(self, max_rows: int) -> Sequence[int]:
        """At most 15 padding rows up to 128 rows, and 31 above: products of 17 rows take as long as those of 32."""
        return (1, 2, 4, 8, *range(16, 128, 16), *range(128, max_rows, 32))

    def validate(self, checkpoint: Checkpoint, limits: Limits) -> None:
        validate(checkpoint, self.config, self._whole(limits).places)

    def _whole(self, limits: Limits) -> Weights:
        return Weights.allocate(self.config.whole, Arena(Device("null"), None), limits.dtype)

    def _layout(self, limits: Limits) -> KvLayout:
        c, layers = self.config, self.config.num_layers + (self.head is not None)
        return KvLayout(layers, c.part.of(c.num_kv_heads), self.page_size, c.head_dim, limits.cache)

    def share(self, limits: Limits, room: Room) -> Sequence[int]:
        return (room.pages(limits, self._layout(limits).page_bytes),)

    def groups(self, limits: Limits, blocks: Sequence[int] | None = None) -> list[Group]:
        (pages,) = blocks or (2,)
        return [Group("kv", self.page_size, pages, self._layout(limits).page_bytes)]

    def lay_out(self, arena: Arena, stream: Stream, limits: Limits, blocks: Sequence[int]) -> Model:
        c, (pages,) = self.config, blocks
        weights = Weights.allocate(c, arena, limits.dtype)
        cos_sin = place_rope_table(arena, stream, c.inv_freq, limits.max_model_len, c.rope_scale)
        batch = Batch.allocate(
            arena, stream, [Field("block_tables", (limits.max_rows + 1, limits.max_blocks))],
            max_rows=limits.max_rows, max_tokens=limits.step_tokens, vocab_size=c.vocab_size,
            width=c.hidden_size, dtype=limits.dtype, ranks=c.part.ranks, mixture=self.mixture,
            max_drafts=limits.max_drafts, proposes=limits.proposes,
            adapters=adapters_of(
                arena, limits, weights.adapted(), weights.places, lambda: self._whole(limits).places
            ),
        )  # fmt: skip
        buffers = Buffers.allocate(c, arena, limits.dtype, limits.step_tokens)
        kv = self._layout(limits).allocate(arena, stream, pages)
        if self.head is None:
            return Model(c, weights, kv, cos_sin, batch, buffers)
        drafter = Drafter.allocate(self.head, c, arena, stream, limits)
        return DraftingModel(c, weights, kv, cos_sin, batch, buffers, drafter=drafter)

    def cache(self, model: Model) -> Sequence[Sequence[Tensor]]:
        return [[model.kv.pages]]

    def load(
        self, model: Model, checkpoint: Checkpoint, stream: Stream, progress: Callable[[int, int], None]
    ) -> LoadReport:
        if isinstance(model, DraftingModel):
            model.drafter.weights.load(model.drafter.head, self.config.whole, stream)
        return model.weights.places.load(checkpoint, stream, progress)

    def traced(self, model: Model, pack: NullPack) -> Model:
        c, layers = self.config, model.weights.layers
        kinds = one_of_each(
            range(c.num_layers), lambda n: (c.windows[n], form_of(layers[n])), first=c.part.ranks > 1
        )
        windows = tuple(c.windows[n] for n, _ in kinds)
        if isinstance(model, DraftingModel):
            model = dataclasses.replace(model, drafter=model.drafter.traced(len(windows)))
        return dataclasses.replace(
            model,
            config=dataclasses.replace(c, num_layers=len(windows), windows=windows),
            weights=dataclasses.replace(
                model.weights, layers=Repeated(pack, ((layers[n], times) for n, times in kinds))
            ),
        )

    def memory(self, model: Model) -> Mapping[str, int]:
        weights, activations = model.weights.nbytes, nbytes_of(model.buffers)
        uses = {"weights": weights, "activations": activations, "rotary table": model.cos_sin.nbytes}
        if isinstance(model, DraftingModel):
            uses["EAGLE-3 head"] = model.drafter.nbytes
        return uses

    def controls(self, model: Model) -> Iterator[Control]:
        yield from of_rotation(model.cos_sin)
        layer = model.weights.layers[len(model.weights.layers) // 2]
        yield from of_halves("one layer", layer.gate_up.weight)
        experts = [layer.gate_up, layer.down] if layer.router else []
        if not experts:
            yield from of_scales(layer.down)
        yield from of_ranks(self.config.part.ranks, [layer.o], experts)
