"""A Qwen3.5 before it has memory: the division of the room between cache and states, allocation and loading."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from openinfer.graph import Field
from openinfer.graph.runner import Batch
from openinfer.kernels import NullPack, Repeated, one_of_each, place_rope_table
from openinfer.kernels.authoring import FP8_CACHE, KvLayout, form_of, power_of_two
from openinfer.kvpool import Group
from openinfer.recipes.engine.adapters import adapters_of
from openinfer.recipes.engine.blueprint import Blueprint, Control
from openinfer.recipes.engine.controls import of_halves, of_ranks, of_rotation, of_scales
from openinfer.recipes.engine.limits import Limits, Room
from openinfer.recipes.qwen3_5.config import Config
from openinfer.recipes.qwen3_5.model import Buffers, Model
from openinfer.recipes.qwen3_5.ops.gated_delta_net import STATE_CHUNK
from openinfer.recipes.qwen3_5.states import States
from openinfer.recipes.qwen3_5.weights import NOT_RUN, DeltaNet, Format, Mixture, Weights, validate
from openinfer.tensor import Arena, Checkpoint, Device, LoadReport, Stream, Tensor, nbytes_of

if TYPE_CHECKING:
    from openinfer.recipes.qwen3_5.recipe import HybridOptions


@dataclass(frozen=True, slots=True)
class Qwen35(Blueprint[Model]):
    """engine.Blueprint of a Qwen3.5.

    Its pool has two groups: pages with keys and values of the full-attention layers, and blocks with the recurrent
    states of a sequence. Snapshots of these states are kept where a cached prefix may end.
    """

    cache_forms = (FP8_CACHE,)
    config: Config
    form: Format
    options: "HybridOptions"

    @property
    def page_size(self) -> int:
        return self.options.block_size

    @property
    def mixture(self) -> bool:
        return self.config.experts is not None

    def decode_rows(self, max_rows: int) -> Sequence[int]:
        """At most 31 padding rows: their programs end at once, and weights are read for 32 rows as for one."""
        return (1, 2, 4, 8, 16, *range(32, max_rows, 32))

    def validate(self, checkpoint: Checkpoint, limits: Limits) -> None:
        validate(checkpoint, self._whole(limits))

    def _whole(self, limits: Limits) -> Weights:
        return Weights.allocate(self.config.whole, Arena(Device("null"), None), limits.dtype, self.form)

    def _layout(self, limits: Limits) -> KvLayout:
        c, layers = self.config, self.config.num_full + self.form.mtp
        return KvLayout(layers, c.part.of(c.num_kv_heads), self.page_size, c.head_dim, limits.cache)

    def _block_bytes(self, limits: Limits) -> tuple[int, int]:
        return self._layout(limits).page_bytes, self.config.state_bytes(limits.dtype.itemsize)

    def share(self, limits: Limits, room: Room) -> Sequence[int]:
        """Blocks of both groups. States get no more than half of the room, and are no more than one a row, as many
        again for snapshots, and the padding block. With fewer states than rows, rows wait for a state as they do for
        pages. There are no more pages than every row at full length uses."""
        page, state = self._block_bytes(limits)
        wanted = self.options.max_num_seqs * (2 if self.options.enable_prefix_caching else 1) + 1
        states = min(wanted, room.nbytes // 2 // state)
        pages = min((room.nbytes - states * state) // page, limits.max_rows * limits.max_blocks + 1)
        if pages < 3 or states < 2:
            raise room.refusal("the KV cache and the recurrent states")
        return pages, states

    def groups(self, limits: Limits, blocks: Sequence[int] | None = None) -> list[Group]:
        pages, states = blocks or (2, 2)
        page, state = self._block_bytes(limits)
        return [
            Group("kv", self.page_size, pages, page),
            Group("state", STATE_CHUNK, states, state, snapshots=True),
        ]

    def lay_out(self, arena: Arena, stream: Stream, limits: Limits, blocks: Sequence[int]) -> Model:
        c, dtype, (pages, num_states) = self.config, limits.dtype, blocks
        weights = Weights.allocate(c, arena, dtype, self.form)
        cos_sin = place_rope_table(arena, stream, c.inv_freq, limits.max_model_len, c.rope_scale)
        states = States(self.options.snapshot_interval, limits.step_tokens)
        slots, snapshots = limits.max_rows + 1, limits.max_rows * states.max_snapshots
        batch = Batch.allocate(
            arena, stream,
            [
                Field("block_tables", (slots, limits.max_blocks)),
                Field("state_from", (slots,)),
                Field("state_to", (slots,)),
                Field("snapshot_ends", (snapshots,)),
                Field("snapshot_blocks", (snapshots,)),
            ],
            max_rows=limits.max_rows, max_tokens=limits.step_tokens, vocab_size=c.vocab_size,
            width=c.hidden_size, dtype=dtype, max_drafts=limits.max_drafts, proposes=limits.proposes,
            ranks=c.part.ranks, mixture=self.mixture,
            adapters=adapters_of(
                arena, limits, weights.adapted(), weights.places, lambda: self._whole(limits).places, NOT_RUN
            ),
        )  # fmt: skip
        buffers = Buffers.allocate(c, weights, arena, dtype, limits.step_tokens)
        kv = self._layout(limits).allocate(arena, stream, pages)
        recurrent = (c.num_linear, c.part.of(c.value_heads), c.key_dim, c.value_dim)
        state = arena.alloc((num_states, *recurrent), c.state_dtype, "recurrent states")
        ring = (c.num_linear, c.conv_kernel, c.conv_size)
        conv_state = arena.alloc((num_states, *ring), dtype, "convolution states")
        if arena.device.kind == "cuda":
            for memory in (state, conv_state):
                memory.zero_(stream)
        recent = None
        if limits.max_drafts:
            width = c.conv_size + 2 * c.part.of(c.value_heads)
            shape = (slots, c.num_linear, power_of_two(2 * limits.max_drafts + 2), width)
            recent = arena.alloc(shape, dtype, "inputs of drafts")
        return Model(c, weights, kv, state, conv_state, cos_sin, batch, buffers, states, recent)

    def cache(self, model: Model) -> Sequence[Sequence[Tensor]]:
        return [[model.kv.pages], [model.state, model.conv_state]]

    def load(
        self, model: Model, checkpoint: Checkpoint, stream: Stream, progress: Callable[[int, int], None]
    ) -> LoadReport:
        return model.weights.places.load(checkpoint, stream, progress)

    def traced(self, model: Model, pack: NullPack) -> Model:
        layers, several = model.weights.layers, self.config.part.ranks > 1
        kinds = one_of_each(layers, lambda layer: (type(layer.mixer), form_of(layer)), first=several)
        weights = dataclasses.replace(model.weights, layers=Repeated(pack, kinds))
        return dataclasses.replace(model, weights=weights)

    def memory(self, model: Model) -> Mapping[str, int]:
        return {
            "weights": model.weights.nbytes,
            "activations": nbytes_of(model.buffers),
            "rotary table": model.cos_sin.nbytes,
            "inputs of drafts": model.recent.nbytes if model.recent is not None else 0,
        }

    def controls(self, model: Model) -> Iterator[Control]:
        yield from of_rotation(model.cos_sin)
        mlp = model.weights.layers[1].mlp
        yield from of_halves("one mixture" if isinstance(mlp, Mixture) else "one MLP", mlp.gate_up.weight)
        experts = [mlp.gate_up, mlp.down] if isinstance(mlp, Mixture) else []
        if not experts:
            yield from of_scales(mlp.down)
        delta = next(x.mixer for x in model.weights.layers if isinstance(x.mixer, DeltaNet))
        decay = np.array(delta.decay.numpy())
        yield Control("one layer forgets too fast", [(delta.decay, decay * np.float32(4))])
        yield from of_ranks(self.config.part.ranks, [delta.out], experts)
