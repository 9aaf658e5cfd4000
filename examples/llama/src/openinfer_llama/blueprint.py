"""The model before it has memory: how the cache is shared out, what is allocated, what is loaded."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from openinfer.graph import Field
from openinfer.graph.runner import Batch
from openinfer.kernels import NullPack, Repeated, place_rope_table
from openinfer.kernels.authoring import FP8_CACHE, CacheForm, KvLayout
from openinfer.kvpool import Group
from openinfer.recipes.engine.blueprint import Blueprint, Control
from openinfer.recipes.engine.controls import of_rotation
from openinfer.recipes.engine.limits import Limits, Room
from openinfer.tensor import (
    Arena,
    Checkpoint,
    Device,
    LoadReport,
    Stream,
    Tensor,
    dtypes,
    load_tensors,
)
from openinfer_llama.config import Config
from openinfer_llama.model import Model, Weights


@dataclass(frozen=True, slots=True)
class Llama(Blueprint[Model]):
    """engine.Blueprint of a Llama. Its pool has one group: pages with the keys and values of all layers."""

    cache_forms = (FP8_CACHE,)
    config: Config
    page_size: int

    def decode_rows(self, max_rows: int) -> Sequence[int]:
        return (1, 2, 4, 8, *range(16, 128, 16), *range(128, max_rows, 32))

    def _weights(self, limits: Limits) -> tuple[Weights, Arena]:
        """Weights without memory, for their names, shapes and bytes."""
        arena = Arena(Device("null"), None)
        return Weights.allocate(self.config, arena, limits.dtype), arena

    def validate(self, checkpoint: Checkpoint, limits: Limits) -> None:
        weights, _ = self._weights(limits)
        expected = {load.name: (load.dst.shape, dtypes.WEIGHTS) for load in weights.loads(self.config)}
        checkpoint.require(expected, ignore=("lm_head.weight",) if self.config.tied else ())

    def _layout(self, limits: Limits) -> KvLayout:
        c = self.config
        return KvLayout(c.num_layers, c.num_kv_heads, self.page_size, c.head_dim, limits.cache)

    def share(self, limits: Limits, room: Room) -> Sequence[int]:
        return (room.pages(limits, self._layout(limits).page_bytes),)

    def groups(self, limits: Limits, blocks: Sequence[int] | None = None) -> list[Group]:
        (pages,) = blocks or (2,)
        return [Group("kv", self.page_size, pages, self._layout(limits).page_bytes)]

    def lay_out(self, arena: Arena, stream: Stream, limits: Limits, blocks: Sequence[int]) -> Model:
        c, (pages,), (t, dtype) = self.config, blocks, (limits.step_tokens, limits.dtype)
        weights = Weights.allocate(c, arena, dtype)
        cos_sin = place_rope_table(arena, stream, c.inv_freq, limits.max_model_len, c.rope_scale)
        batch = Batch.allocate(
            arena, stream, [Field("block_tables", (limits.max_rows + 1, limits.max_blocks))], max_rows=limits.max_rows,
            max_tokens=t, vocab_size=c.vocab_size, width=c.hidden_size, dtype=dtype, max_drafts=limits.max_drafts,
        )  # fmt: skip
        widths = (c.hidden_size, c.q_size + 2 * c.kv_size, c.q_size, c.intermediate_size)
        x, qkv, heads, mlp = (arena.alloc((t, width), dtype) for width in widths)
        kv = self._layout(limits).allocate(arena, stream, pages)
        return Model(c, weights, kv, cos_sin, batch, x, qkv, heads, mlp)

    def cache(self, model: Model) -> Sequence[Sequence[Tensor]]:
        return [[model.kv.pages]]

    def load(
        self, model: Model, checkpoint: Checkpoint, stream: Stream, progress: Callable[[int, int], None]
    ) -> LoadReport:
        return load_tensors(checkpoint, model.weights.loads(self.config), stream, progress)

    def traced(self, model: Model, pack: NullPack) -> Model:
        kinds = Repeated(pack, [(model.weights.layers[0], self.config.num_layers)])
        return dataclasses.replace(model, weights=dataclasses.replace(model.weights, layers=kinds))

    def memory(self, model: Model) -> Mapping[str, int]:
        _, arena = self._weights(
            Limits(2, 1, 1, self.page_size, model.hidden.dtype, CacheForm(model.hidden.dtype))
        )
        buffers = sum(one.nbytes for one in (model.hidden, model.qkv, model.heads, model.mlp))
        return {"weights": arena.used, "activations": buffers, "rotary table": model.cos_sin.nbytes}

    def controls(self, model: Model) -> Iterator[Control]:
        yield from of_rotation(model.cos_sin)
