"""A Qwen3.5 before it has memory: the division of the room between cache and states, allocation and loading."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from openinfer.graph import Field
from openinfer.kernels import place_rope_table
from openinfer.kernels.authoring import FP8_CACHE, KvLayout, power_of_two
from openinfer.kvpool import Group
from openinfer.recipes.engine.adapters import adapters_of
from openinfer.recipes.engine.blueprint import Control
from openinfer.recipes.engine.controls import of_halves, of_ranks, of_rotation, of_scales
from openinfer.recipes.engine.decoder import DecoderBlueprint
from openinfer.recipes.engine.limits import Limits, Room
from openinfer.recipes.engine.weights import Mixture
from openinfer.recipes.qwen3_5.config import Config
from openinfer.recipes.qwen3_5.model import Buffers, Model
from openinfer.recipes.qwen3_5.ops.gated_delta_net import STATE_CHUNK
from openinfer.recipes.qwen3_5.states import States
from openinfer.recipes.qwen3_5.weights import NOT_RUN, DeltaNet, Format, Layer, Weights
from openinfer.tensor import Arena, Stream, Tensor

if TYPE_CHECKING:
    from openinfer.recipes.qwen3_5.recipe import HybridOptions


@dataclass(frozen=True, slots=True)
class Qwen35(DecoderBlueprint[Model]):
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

    def weights(self, config: Config, arena: Arena, limits: Limits) -> Weights:
        return Weights.allocate(config, arena, limits.dtype, self.form)

    def ignored(self) -> Sequence[str]:
        """Vision weights, MTP weights that are not loaded, and a head that is tied."""
        return ["model.visual.*"] + ["mtp.*"] * (not self.form.mtp) + ["lm_head.weight"] * self.form.tied

    def kind(self, layer: Layer) -> object:
        return type(layer.mixer)

    def _layout(self, limits: Limits) -> KvLayout:
        c, layers = self.config, self.config.num_full + self.form.mtp
        return KvLayout(layers, c.part.of(c.num_kv_heads), self.page_size, c.head_dim, limits.cache)

    def page_bytes(self, limits: Limits) -> int:
        return self._layout(limits).page_bytes

    def _state_bytes(self, limits: Limits) -> int:
        return self.config.state_bytes(limits.dtype.itemsize)

    def share(self, limits: Limits, room: Room) -> Sequence[int]:
        """Blocks of both groups. States get no more than half of the room, and are no more than one a row, as many
        again for snapshots, and the padding block. With fewer states than rows, rows wait for a state as they do for
        pages. There are no more pages than every row at full length uses."""
        page, state = self.page_bytes(limits), self._state_bytes(limits)
        wanted = self.options.max_num_seqs * (2 if self.options.enable_prefix_caching else 1) + 1
        states = min(wanted, room.nbytes // 2 // state)
        pages = min((room.nbytes - states * state) // page, limits.max_rows * limits.max_blocks + 1)
        if pages < 3 or states < 2:
            raise room.refusal("the KV cache and the recurrent states")
        return pages, states

    def groups(self, limits: Limits, blocks: Sequence[int] | None = None) -> list[Group]:
        pages, states = blocks or (2, 2)
        state = Group("state", STATE_CHUNK, states, self._state_bytes(limits), snapshots=True)
        return [*DecoderBlueprint.groups(self, limits, (pages,)), state]

    def lay_out(self, arena: Arena, stream: Stream, limits: Limits, blocks: Sequence[int]) -> Model:
        c, dtype, (pages, num_states) = self.config, limits.dtype, blocks
        weights = self.weights(c, arena, limits)
        cos_sin = place_rope_table(arena, stream, c.inv_freq, limits.max_model_len, c.rope_scale)
        states = States(self.options.snapshot_interval, limits.step_tokens)
        slots, snapshots = limits.max_rows + 1, limits.max_rows * states.max_snapshots
        adapters = adapters_of(
            arena, limits, weights.adapted(), weights.places, lambda: self.places(limits), NOT_RUN
        )
        batch = self.batch(
            arena,
            stream,
            limits,
            Field("state_from", (slots,)),
            Field("state_to", (slots,)),
            Field("snapshot_ends", (snapshots,)),
            Field("snapshot_blocks", (snapshots,)),
            adapters=adapters,
        )
        buffers = Buffers.allocate(c, weights, arena, limits)
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

    def memory(self, model: Model) -> dict[str, int]:
        recent = model.recent.nbytes if model.recent is not None else 0
        return DecoderBlueprint.memory(self, model) | {"inputs of drafts": recent}

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
