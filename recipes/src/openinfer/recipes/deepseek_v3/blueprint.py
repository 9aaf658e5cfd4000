"""A DeepSeek-V3 before it has memory: the pages of latents, allocation and loading."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from openinfer.graph import Field
from openinfer.graph.runner import Batch
from openinfer.kernels import NullPack, Repeated, one_of_each, place_rope_table
from openinfer.kernels.authoring import form_of
from openinfer.kvpool import Group
from openinfer.recipes.deepseek_v3.config import Config
from openinfer.recipes.deepseek_v3.model import Buffers, Model
from openinfer.recipes.deepseek_v3.weights import Mixture, Weights, validate
from openinfer.recipes.engine.blueprint import Blueprint, Control
from openinfer.recipes.engine.controls import of_halves, of_ranks, of_rotation, of_scales
from openinfer.recipes.engine.limits import Limits, Room
from openinfer.tensor import Arena, Checkpoint, Device, LoadReport, Stream, Tensor, nbytes_of


@dataclass(frozen=True, slots=True)
class DeepseekV3(Blueprint[Model]):
    """engine.Blueprint of a DeepSeek-V3. Its pool has one group: pages with all layers' latents and indexers' keys."""

    mixture = cache_is_alike = True
    config: Config
    page_size: int
    drafts: bool = False
    """The layer that drafts is loaded."""

    def decode_rows(self, max_rows: int) -> Sequence[int]:
        """At most 7 padding rows up to 32 rows, and 31 above."""
        return (1, 2, 4, *range(8, 32, 8), *range(32, max_rows, 32))

    def validate(self, checkpoint: Checkpoint, limits: Limits) -> None:
        arena = Arena(Device("null"), None)
        whole = Weights.allocate(self.config.whole, arena, limits.dtype, drafts=self.drafts)
        validate(checkpoint, self.config, whole)

    def _page(self, limits: Limits) -> tuple[list[tuple[int, ...]], int]:
        """The shapes of a page's latents and of its indexers' keys, where there are any, and the bytes of all."""
        c, size, more = self.config, self.page_size, int(self.drafts)
        shapes: list[tuple[int, ...]] = [(c.num_layers + more, size, c.latent_size)]
        if c.index is not None:
            shapes.append((sum(c.index.layers) + more, size, c.index.dim))
        return shapes, sum(math.prod(shape) for shape in shapes) * limits.dtype.itemsize

    def share(self, limits: Limits, room: Room) -> Sequence[int]:
        return (room.pages(limits, self._page(limits)[1]),)

    def groups(self, limits: Limits, blocks: Sequence[int] | None = None) -> list[Group]:
        (pages,) = blocks or (2,)
        return [Group("latents", self.page_size, pages, self._page(limits)[1])]

    def lay_out(self, arena: Arena, stream: Stream, limits: Limits, blocks: Sequence[int]) -> Model:
        c, (pages,) = self.config, blocks
        weights = Weights.allocate(c, arena, limits.dtype, drafts=self.drafts)
        cos_sin = place_rope_table(arena, stream, c.inv_freq, limits.max_model_len, c.rope_scale)
        batch = Batch.allocate(
            arena, stream, [Field("block_tables", (limits.max_rows + 1, limits.max_blocks))],
            max_rows=limits.max_rows, max_tokens=limits.step_tokens, vocab_size=c.vocab_size,
            width=c.hidden_size, dtype=limits.dtype, ranks=c.part.ranks, mixture=self.mixture,
            max_drafts=limits.max_drafts, proposes=limits.proposes,
        )  # fmt: skip
        buffers = Buffers.allocate(c, weights, arena, limits.dtype, limits.step_tokens)
        kv, *keys = (arena.alloc((pages, *shape), limits.dtype, "latents") for shape in self._page(limits)[0])
        model = Model(c, weights, kv, keys[0] if keys else None, cos_sin, batch, buffers)
        for tensor in model.pages if arena.device.kind == "cuda" else []:
            tensor.zero_(stream)
        return model

    def cache(self, model: Model) -> Sequence[Sequence[Tensor]]:
        return [model.pages]

    def load(
        self, model: Model, checkpoint: Checkpoint, stream: Stream, progress: Callable[[int, int], None]
    ) -> LoadReport:
        return model.weights.places.load(checkpoint, stream, progress)

    def traced(self, model: Model, pack: NullPack) -> Model:
        kinds = one_of_each(
            model.weights.layers, lambda layer: (type(layer.mlp), form_of(layer)), first=self.config.part.ranks > 1
        )  # fmt: skip
        weights = dataclasses.replace(model.weights, layers=Repeated(pack, kinds))
        return dataclasses.replace(model, weights=weights)

    def memory(self, model: Model) -> Mapping[str, int]:
        uses = {"weights": model.weights.nbytes, "activations": nbytes_of(model.buffers)}
        return uses | {"rotary table": model.cos_sin.nbytes}

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
