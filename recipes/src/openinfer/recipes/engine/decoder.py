"""What decoders of several families share: the weights around their layers, the ops between attention and experts, the
layer that drafts, and the parts of a blueprint that depend on no family."""

import dataclasses
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar

import numpy as np

from openinfer import kernels
from openinfer.graph import Field
from openinfer.graph.runner import Batch, Read
from openinfer.kernels import NullPack, Pack
from openinfer.kernels.authoring import PUBLISHED_SCALES, Adapters, Linear, LinearPlaces, WeightPart, form_of
from openinfer.kvpool import Group
from openinfer.recipes.engine.blueprint import Blueprint
from openinfer.recipes.engine.config_fields import ModelConfig
from openinfer.recipes.engine.limits import Limits, Room
from openinfer.recipes.engine.weights import Experts, Mlp
from openinfer.tensor import Arena, Checkpoint, Device, LoadReport, Stream, Tensor, int32, nbytes_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A decoder layer: attention over a norm of the residual stream, then an MLP or a mixture over another. Both add to
    the stream. Norm weights are [H]."""

    input_norm: Tensor
    post_norm: Tensor
    next_norm: Tensor | None = None  # of the layer after, at the end the model's


L = TypeVar("L", bound=Layer)


def linked(layers: Iterable[L], norm: Tensor) -> tuple[L, ...]:
    """The layers, each with the norm after it; `norm` is the model's."""
    own = tuple(layers)
    norms = [*(layer.input_norm for layer in own[1:]), norm]
    return tuple(dataclasses.replace(layer, next_norm=n) for layer, n in zip(own, norms, strict=True))


@dataclass(frozen=True, slots=True)
class Mtp(Generic[L]):
    """The layer that drafts, which predicts the token after next. Engines load it where it drafts. The columns of its
    first projection are for the embedding, then for the hidden states."""

    of_embedding: Linear[Tensor]  # [H, H]
    of_hidden: Linear[Tensor]  # [H, H]
    embed_norm: Tensor
    hidden_norm: Tensor
    layer: L
    norm: Tensor
    head: Linear[Tensor]  # [V of the rank, H]


@dataclass(frozen=True, slots=True)
class Weights(Generic[L]):
    """A rank's weights, and where each comes from. `embed` is whole on every rank; a tied `lm_head` is rows of it."""

    embed: Tensor  # [V, H]
    layers: Sequence[L]
    norm: Tensor  # [H]
    lm_head: Tensor  # [V of the rank, H]
    mtp: Mtp[L] | None
    nbytes: int
    places: LinearPlaces


@dataclass(slots=True, kw_only=True)
class Projections(LinearPlaces):
    """Places for a rank's projections."""

    c: Any
    """The config, a ModelConfig."""

    def stack(self, *parts: WeightPart, columns: int, pad: int = 0) -> Linear[Tensor]:
        """Projections in one weight, with `pad` rows of zeros after them."""
        return self.linear(*parts, columns=columns, packing=self.c.packing, pad=pad)

    def back(self, module: str, columns: int) -> Linear[Tensor]:
        """A projection back to the hidden size, of which each rank has as many columns."""
        part = WeightPart(module, self.c.hidden_size, column=self.c.part.rank * columns)
        return self.stack(part, columns=columns)

    def qkv(self, at: str, queries: int, kv_heads: int, dim: int) -> Linear[Tensor]:
        """The projections of a rank's `queries` columns, and of its part of the key-value heads, of `dim` each."""
        part, hidden = self.c.part, self.c.hidden_size
        kv, first = part.of(kv_heads) * dim, part.first(kv_heads) * dim
        sizes = (("q_proj", queries, part.rank * queries), ("k_proj", kv, first), ("v_proj", kv, first))
        return self.stack(*(WeightPart(at + name, rows, row) for name, rows, row in sizes), columns=hidden)

    def mlp(self, at: str, width: int) -> Mlp:
        """A rank's part of the gated MLP of modules that begin with `at`."""
        own, first = self.c.part.of(width), self.c.part.first(width)
        parts = (WeightPart(at + name, own, first) for name in ("gate_proj", "up_proj"))
        return Mlp(self.stack(*parts, columns=self.c.hidden_size), self.back(at + "down_proj", own))


@dataclass(frozen=True, slots=True, kw_only=True)
class Activations:
    """Buffers, allocated once for the largest step; a smaller step uses their first rows. Those that a model has no use
    for are one element wide."""

    x: Tensor  # [T, H]
    mlp: Tensor  # [T, I]
    router: Tensor  # [T, E, padded]; this and the next three are of mixtures
    expert_ids: Tensor  # int32 [T, K]
    expert_weights: Tensor  # [T, K]
    y: Tensor  # [T, H]: of one of several ranks
    drafting: tuple[Tensor, ...]  # two [T, H], of the layer that drafts

    @classmethod
    def place(
        cls, arena: Arena, limits: Limits, c: ModelConfig, experts: Experts | None, *, drafts: bool = False,
        kinds: Mapping[str, np.dtype[Any]] | None = None, **widths: int,
    ) -> Self:  # fmt: skip
        """widths: of the buffers that depend on the family, by field. kinds: the dtypes of those that have not the
        model's."""

        def by_token(width: int, kind: np.dtype[Any] = limits.dtype) -> Tensor:
            return arena.alloc((limits.step_tokens, width), kind)

        chosen, kinds = experts.chosen if experts else 1, kinds or {}
        return cls(
            x=by_token(c.hidden_size),
            expert_ids=by_token(chosen, int32),
            expert_weights=by_token(chosen),
            y=by_token(c.hidden_size if experts and c.part.ranks > 1 else 1),
            drafting=tuple(by_token(c.hidden_size) for _ in range(2 * drafts)),
            **{name: by_token(width, kinds.get(name, limits.dtype)) for name, width in widths.items()},
        )


def leading(buffer: Tensor, tokens: int, columns: int) -> Tensor:
    """[tokens, columns] at the beginning of a buffer's memory."""
    return buffer.reshape(-1)[: tokens * columns].reshape(tokens, columns)


class Decoder(Generic[L]):
    """Ops of a graph.runner.Model on a residual stream x [T, H]."""

    config: ModelConfig
    weights: Weights[L]
    cos_sin: Tensor
    batch: Batch
    buffers: Activations

    @property
    def hidden(self) -> Tensor:
        return self.buffers.x

    seen = hidden
    """See graph.runner.Proposer."""

    def add(self, pack: Pack, linear: Linear[Tensor], h: Tensor, norm: Tensor | None) -> Read:
        """x += h @ linear^T. Returns the input of a product of x's norm."""
        x, ranks, eps = self.buffers.x[: h.shape[0]], self.config.part.ranks, self.config.rms_norm_eps
        return self.batch.add(pack, x, h=h, weight=linear, ranks=ranks, norm=norm, eps=eps)

    def gate_up(self, pack: Pack, read: Read, weight: Linear[Tensor], t: int) -> Tensor:
        """The hidden layer of a gated MLP."""
        out = leading(self.buffers.mlp, t, weight.shape[0] // 2)
        kernels.gate_up_silu(pack, out=out, **read, weight=weight, lora=self.batch.adapted(weight, t))
        return out

    def add_experts(
        self, pack: Pack, read: Read, gate_up: Linear[Tensor], down: Linear[Tensor], norm: Tensor | None,
        *, t: int, count: int, shared: tuple[Tensor, Linear[Tensor]] | None = None,
    ) -> Read:  # fmt: skip
        """x += the experts that each token has chosen of `count`, and the shared one: its hidden layer and what leads
        back. Returns the input of a product of x's norm."""
        b, ranks = self.buffers, self.config.part.ranks
        x, y = b.x[:t], b.x[:t] if ranks == 1 else b.y[:t]
        kernels.experts_add(
            pack, **read, expert_ids=b.expert_ids[:t], expert_weights=b.expert_weights[:t], gate_up=gate_up,
            down=down, out=y, adds=ranks == 1, all_experts=count,
        )  # fmt: skip
        if shared is not None:
            self.batch.add(pack, y, h=shared[0], weight=shared[1])
        return self.batch.add_sum(pack, x, y=y, ranks=ranks, norm=norm, eps=self.config.rms_norm_eps)

    def head(self, pack: Pack, num_rows: int) -> None:
        self._logits(pack, num_rows, self.weights.norm, self.weights.lm_head)

    def draft_head(self, pack: Pack, num_rows: int, place: int) -> None:
        """See graph.runner.Proposer."""
        self._logits(pack, num_rows, self.mtp.norm, self.mtp.head)

    def _logits(self, pack: Pack, num_rows: int, norm: Tensor, head: Linear[Tensor] | Tensor) -> None:
        last, eps = self.batch.last[:num_rows], self.config.rms_norm_eps
        self.batch.head(pack, last, norm=norm, eps=eps, weight=head)

    @property
    def mtp(self) -> Mtp[L]:
        """The layer that drafts, of a model that has it."""
        assert self.weights.mtp is not None
        return self.weights.mtp

    def read_drafts(self, pack: Pack, token_ids: Tensor, norm: Tensor | None) -> Read:
        """The input of the layer that drafts: hidden states, normed first where there is a `norm`, and the embedding of
        the tokens that follow."""
        b, eps, mtp, t = self.buffers, self.config.rms_norm_eps, self.mtp, token_ids.shape[0]
        x, states, other = b.x[:t], b.drafting[0][:t], b.drafting[1][:t]
        if norm is not None:
            kernels.norm_rows(pack, out=other, x=x, norm_weight=norm, eps=eps)
        before = x if norm is None else other
        kernels.norm_rows(pack, out=states, x=before, norm_weight=mtp.hidden_norm, eps=eps)
        kernels.embed(pack, out=other, token_ids=token_ids, table=self.weights.embed)
        kernels.norm_linear(
            pack, out=x, x=other, norm_weight=mtp.embed_norm, weight=mtp.of_embedding, eps=eps
        )
        kernels.linear_add(pack, x=x, h=states, weight=mtp.of_hidden)
        return Read(x=x, norm_weight=mtp.layer.input_norm, eps=eps)


D = TypeVar("D", bound=Any)
"""A Decoder that is a graph.runner.Model."""


class DecoderBlueprint(Blueprint[D]):
    """A Blueprint of a Decoder. Its pool has one group, of pages; a subclass may have more."""

    group: str = "kv"
    """The name of the group of pages."""

    @abstractmethod
    def page_bytes(self, limits: Limits) -> int:
        """Bytes of a page."""

    @abstractmethod
    def weights(self, config: Any, arena: Arena, limits: Limits) -> Weights[Any]:
        """Uninitialised weights of a model of this config. Raises UnsupportedModel."""

    @abstractmethod
    def ignored(self) -> Sequence[str]:
        """Tensors that a checkpoint may have and the model does not take."""

    @abstractmethod
    def kind(self, layer: Any) -> object:
        """On what the ops of a layer depend besides the formats of its weights."""

    def share(self, limits: Limits, room: Room) -> Sequence[int]:
        return (room.pages(limits, self.page_bytes(limits)),)

    def groups(self, limits: Limits, blocks: Sequence[int] | None = None) -> list[Group]:
        (pages,) = blocks or (2,)
        return [Group(self.group, self.page_size, pages, self.page_bytes(limits))]

    def places(self, limits: Limits) -> LinearPlaces:
        """Where the tensors of a checkpoint lie in the model on one rank."""
        return self.weights(self.config.whole, Arena(Device("null"), None), limits).places

    def validate(self, checkpoint: Checkpoint, limits: Limits) -> None:
        places = self.places(limits)
        checkpoint.require(places.expected(), ignore=(*places.ignored, *self.ignored(), *PUBLISHED_SCALES))

    def batch(
        self, arena: Arena, stream: Stream, limits: Limits, *fields: Field, adapters: Adapters | None = None
    ) -> Batch:
        """The buffers of a step. fields: of a row, besides its block table."""
        c, tables = self.config, Field("block_tables", (limits.max_rows + 1, limits.max_blocks))
        return Batch.allocate(
            arena, stream, [tables, *fields], max_rows=limits.max_rows, max_tokens=limits.step_tokens,
            vocab_size=c.vocab_size, width=c.hidden_size, dtype=limits.dtype, adapters=adapters,
            max_drafts=limits.max_drafts, proposes=limits.proposes, ranks=c.part.ranks, mixture=self.mixture,
        )  # fmt: skip

    def load(
        self, model: D, checkpoint: Checkpoint, stream: Stream, progress: Callable[[int, int], None]
    ) -> LoadReport:
        places: LinearPlaces = model.weights.places
        return places.load(checkpoint, stream, progress)

    def traced(self, model: D, pack: NullPack) -> D:
        kinds = kernels.one_of_each(
            model.weights.layers, lambda one: (self.kind(one), form_of(one)), first=self.config.part.ranks > 1
        )
        weights = dataclasses.replace(model.weights, layers=kernels.Repeated(pack, kinds))
        return dataclasses.replace(model, weights=weights)

    def memory(self, model: D) -> dict[str, int]:
        sizes = model.weights.nbytes, nbytes_of(model.buffers), model.cos_sin.nbytes
        return dict(zip(("weights", "activations", "rotary table"), sizes, strict=True))
