"""A DeepSeek-V3 before it has memory: the pages of latents, allocation and loading."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from openinfer.kernels import place_rope_table
from openinfer.recipes.deepseek_v3.config import Config
from openinfer.recipes.deepseek_v3.model import Buffers, Model
from openinfer.recipes.deepseek_v3.weights import Layer, Mixture, Weights
from openinfer.recipes.engine.blueprint import Control
from openinfer.recipes.engine.controls import of_halves, of_ranks, of_rotation, of_scales
from openinfer.recipes.engine.decoder import DecoderBlueprint
from openinfer.recipes.engine.limits import Limits
from openinfer.tensor import Arena, Stream, Tensor


@dataclass(frozen=True, slots=True)
class DeepseekV3(DecoderBlueprint[Model]):
    """engine.Blueprint of a DeepSeek-V3. Its pool has one group: pages with all layers' latents and indexers' keys."""

    group = "latents"
    mixture = cache_is_alike = True
    config: Config
    page_size: int
    drafts: bool = False
    """The layer that drafts is loaded."""

    def decode_rows(self, max_rows: int) -> Sequence[int]:
        """At most 7 padding rows up to 32 rows, and 31 above."""
        return (1, 2, 4, *range(8, 32, 8), *range(32, max_rows, 32))

    def weights(self, config: Config, arena: Arena, limits: Limits) -> Weights:
        return Weights.allocate(config, arena, limits.dtype, drafts=self.drafts)

    def ignored(self) -> Sequence[str]:
        """The layer that drafts where it is not loaded, and always its copies of the embedding and of the head."""
        copies = ("embed_tokens.weight", "shared_head.head.weight") if self.drafts else ("*",)
        drafts = [f"model.layers.{self.config.num_layers}.{name}" for name in copies if self.config.mtp]
        return [*drafts, "*.rotary_emb.inv_freq"]

    def kind(self, layer: Layer) -> object:
        return type(layer.mlp)

    def page_bytes(self, limits: Limits) -> int:
        return sum(math.prod(shape) for shape in self._page()) * limits.dtype.itemsize

    def _page(self) -> list[tuple[int, ...]]:
        """The shapes of a page's latents and of its indexers' keys, where there are any."""
        c, size, more = self.config, self.page_size, int(self.drafts)
        shapes: list[tuple[int, ...]] = [(c.num_layers + more, size, c.latent_size)]
        if c.index is not None:
            shapes.append((sum(c.index.layers) + more, size, c.index.dim))
        return shapes

    def lay_out(self, arena: Arena, stream: Stream, limits: Limits, blocks: Sequence[int]) -> Model:
        c, (pages,) = self.config, blocks
        weights = self.weights(c, arena, limits)
        cos_sin = place_rope_table(arena, stream, c.inv_freq, limits.max_model_len, c.rope_scale)
        batch = self.batch(arena, stream, limits)
        buffers = Buffers.allocate(c, weights, arena, limits)
        kv, *keys = (arena.alloc((pages, *shape), limits.dtype, "latents") for shape in self._page())
        model = Model(c, weights, kv, keys[0] if keys else None, cos_sin, batch, buffers)
        for tensor in model.pages if arena.device.kind == "cuda" else []:
            tensor.zero_(stream)
        return model

    def cache(self, model: Model) -> Sequence[Sequence[Tensor]]:
        return [model.pages]

    def controls(self, model: Model) -> Iterator[Control]:
        yield from of_rotation(model.cos_sin)
        layers = model.weights.layers
        mixtures = [layer.mlp for layer in layers if isinstance(layer.mlp, Mixture)]
        yield from of_halves("one MLP", (mixtures[-1].shared if mixtures else layers[-1].mlp).gate_up.weight)
        yield from of_scales(layers[-1].attention.o)
        index = layers[0].attention.indexer
        if index is not None:
            least = 3 * model.buffers.selected.shape[1] // 2
            yield Control("another choice of tokens", [(index.norm, -np.array(index.norm.numpy()))], least)
        for bias in [one.bias for one in mixtures][:1]:
            yield Control("another choice of experts", [(bias, np.roll(bias.numpy(), 1))])
        experts = [mixtures[-1].gate_up, mixtures[-1].down] if mixtures else []
        yield from of_ranks(self.config.part.ranks, [layers[0].attention.o], experts)
