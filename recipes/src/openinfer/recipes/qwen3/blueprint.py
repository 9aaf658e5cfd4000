"""A Qwen3 before it has memory: the division of the cache, allocation and loading."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from openinfer.kernels import NullPack, place_rope_table
from openinfer.kernels.authoring import FP8_CACHE, KvLayout
from openinfer.recipes.eagle3 import Drafter, Head
from openinfer.recipes.engine.adapters import adapters_of
from openinfer.recipes.engine.blueprint import Control
from openinfer.recipes.engine.controls import of_halves, of_ranks, of_rotation, of_scales
from openinfer.recipes.engine.decoder import DecoderBlueprint
from openinfer.recipes.engine.limits import Limits
from openinfer.recipes.qwen3.config import Config
from openinfer.recipes.qwen3.model import Buffers, DraftingModel, Model
from openinfer.recipes.qwen3.weights import Layer, Weights
from openinfer.tensor import Arena, Checkpoint, LoadReport, Stream, Tensor


@dataclass(frozen=True, slots=True)
class Qwen3(DecoderBlueprint[Model]):
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

    def weights(self, config: Config, arena: Arena, limits: Limits) -> Weights:
        return Weights.allocate(config, arena, limits.dtype)

    def ignored(self) -> Sequence[str]:
        """Some tied checkpoints carry a copy of the embedding as lm_head."""
        return ("lm_head.weight",) if self.config.tie_word_embeddings else ()

    def kind(self, layer: Layer) -> object:
        return layer.window

    def _layout(self, limits: Limits) -> KvLayout:
        c, layers = self.config, self.config.num_layers + (self.head is not None)
        return KvLayout(layers, c.part.of(c.num_kv_heads), self.page_size, c.head_dim, limits.cache)

    def page_bytes(self, limits: Limits) -> int:
        return self._layout(limits).page_bytes

    def lay_out(self, arena: Arena, stream: Stream, limits: Limits, blocks: Sequence[int]) -> Model:
        c, (pages,) = self.config, blocks
        weights = self.weights(c, arena, limits)
        cos_sin = place_rope_table(arena, stream, c.inv_freq, limits.max_model_len, c.rope_scale)
        adapters = adapters_of(arena, limits, weights.adapted(), weights.places, lambda: self.places(limits))
        batch = self.batch(arena, stream, limits, adapters=adapters)
        buffers = Buffers.allocate(c, arena, limits)
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
        return DecoderBlueprint.load(self, model, checkpoint, stream, progress)

    def traced(self, model: Model, pack: NullPack) -> Model:
        traced = DecoderBlueprint.traced(self, model, pack)
        if isinstance(traced, DraftingModel):
            layers = len(traced.weights.layers)
            return dataclasses.replace(traced, drafter=traced.drafter.traced(layers))
        return traced

    def memory(self, model: Model) -> dict[str, int]:
        head = {"EAGLE-3 head": model.drafter.nbytes} if isinstance(model, DraftingModel) else {}
        return DecoderBlueprint.memory(self, model) | head

    def controls(self, model: Model) -> Iterator[Control]:
        yield from of_rotation(model.cos_sin)
        layer = model.weights.layers[len(model.weights.layers) // 2]
        yield from of_halves("one layer", layer.gate_up.weight)
        experts = [layer.gate_up, layer.down] if layer.router else []
        if not experts:
            yield from of_scales(layer.down)
        yield from of_ranks(self.config.part.ranks, [layer.o], experts)
