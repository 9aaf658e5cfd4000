"""The tensors that the checkpoint must hold, their places, and the layout that the model runs on."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from openinfer.kernels import UnsupportedQuantization
from openinfer.kernels.authoring import (
    Linear,
    Packing,
    WeightPart,
    module_packing,
    packing_text,
    padded_rows,
    scale_blocks,
)
from openinfer.recipes.deepseek_v3.config import Config, Indexing
from openinfer.recipes.engine import decoder, weights
from openinfer.recipes.engine.config_fields import FP8_BLOCK
from openinfer.recipes.engine.decoder import Mtp, Projections
from openinfer.recipes.engine.errors import UnsupportedModel
from openinfer.recipes.engine.weights import Mlp, expert_places
from openinfer.tensor import Arena, Conversion, Tensor, dtypes, float8_e4m3fn, float32

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Indexer:
    """What chooses the tokens that a layer attends to: I heads of D numbers, of which the last r rotate in pairs.
    Published rows come in another order, which changes no product of query and key. All ranks have it whole."""

    q: Linear[Tensor]  # [I D, Q]
    weights: Linear[Tensor]  # [I, padded, H]
    norm: Tensor  # float32 [2, D]: weight and bias
    key: Linear[Tensor] | None  # [D, H]: where its packing is not that of Attention.into, which has it then


@dataclass(frozen=True, slots=True)
class Attention:
    """Multi-head latent attention: A heads of the rank, C numbers of a latent, r rotated ones, n of a query that are
    not rotated, v of a value. keys and values are the halves of kv_b_proj, in the model's dtype. Keys are transposed:
    they make a latent of a query, so that no key is made of a latent."""

    into: Linear[Tensor]  # [D + Q + C + r, padded, H]: an indexer's wk, q_a_proj and kv_a_proj_with_mqa
    q_norm: Tensor  # float32 [Q]
    kv_norm: Tensor  # float32 [C]
    q: Linear[Tensor]  # [A (n + r), Q]
    keys: Tensor  # [A C, n]
    values: Tensor  # [A v, C]
    o: Linear[Tensor]  # [H, A v]
    indexer: Indexer | None


@dataclass(frozen=True, slots=True)
class Mixture(weights.Mixture):
    """A mixture of experts. bias: what is added to scores for the choice of experts."""

    bias: Tensor  # float32 [E]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer(decoder.Layer):
    """One decoder layer. Norm weights are float32 [H]."""

    attention: Attention
    mlp: Mlp | Mixture


class Weights(decoder.Weights[Layer]):
    @classmethod
    def allocate(
        cls, config: Config, arena: Arena, dtype: np.dtype[Any], *, drafts: bool = False
    ) -> "Weights":
        """Uninitialised weights in `arena`; drafts: of the layer that drafts too. Raises UnsupportedModel."""
        p, hidden, before = _Places(arena, dtype, c=config), config.hidden_size, arena.used
        embed = p.table("model.embed_tokens", config.vocab_size, hidden, config.packing)
        layers = [_layer(p, config, f"model.layers.{n}.", n) for n in range(config.num_layers)]
        norm, rows = p.gain("model.norm", hidden), config.part.slice(config.vocab_size)
        head = p.table("lm_head", rows.stop - rows.start, hidden, config.packing, rows.start)
        mtp = _mtp(p, config, f"model.layers.{config.num_layers}.", head) if drafts else None
        return cls(embed, decoder.linked(layers, norm), norm, head, mtp, arena.used - before, p)


def index_order(index: Indexing, rotary: int) -> Array:
    """The rows of a published head of the indexer in the order of ours: the rotated ones last, and in pairs."""
    turned = np.arange(rotary)
    paired = turned if index.pairs else turned.reshape(2, -1).T.ravel()
    return np.concatenate([np.arange(rotary, index.dim), paired])


@dataclass(slots=True, kw_only=True)
class _Places(Projections):
    c: Config

    def gain(self, module: str, size: int) -> Tensor:
        """The weight of a norm in float32: it multiplies before the one rounding."""
        return self.converted(module + ".weight", size, convert=lambda w: w.astype(np.float32))

    def stack(
        self, *parts: WeightPart, columns: int, pad: int = 0, order: Array | None = None
    ) -> Linear[Tensor]:
        """Projections in one weight, with `pad` rows of zeros after them. order: of the rows of each head of the first
        one; a block of FP8 has whole heads, so its scale is theirs in any order."""
        loads, conversions = len(self.loads), len(self.conversions)
        try:
            linear = self.linear(*parts, columns=columns, packing=self.c.packing, pad=pad)
        except UnsupportedQuantization as error:
            raise UnsupportedModel(str(error)) from None
        if order is None:
            return linear
        own, rows, added = parts[0].module + ".", parts[0].rows, self.loads[loads:]
        self.loads[loads:] = [load for load in added if not load.name.startswith(own)]
        for load in [load for load in added if load.name.startswith(own)]:
            self.conversions.append(Conversion((load.name,), load.dst, np.asarray, (load.source,)))
            kind = load.dst.dtype
            self.dtypes.setdefault(load.name, dtypes.WEIGHTS if kind in dtypes.WEIGHTS else (kind,))
        for n in range(conversions, len(self.conversions)):
            one = self.conversions[n]
            if not one.names[0].startswith(own) or one.dst.ndim == 1:  # one scale, of activations
                continue
            if one.dst.shape[0] == rows:
                self.conversions[n] = one._replace(convert=partial(_reordered, one.convert, order))
            elif FP8_BLOCK % len(order) or one.dst.shape[0] != scale_blocks(rows):
                raise UnsupportedModel(
                    f"{parts[0].module}: its scales are of parts of heads of {len(order)} rows, which are reordered"
                )
        return linear

    def half(self, module: str, pick: Callable[[Array], Array], rows: int, columns: int) -> Tensor:
        """`pick` of the rank's heads [A, n + v, C] of kv_b_proj, in the model's dtype: they cannot stay packed."""
        c, own = self.c, module_packing(self.c.packing, module)
        packed = own is not None and not own.made
        fp8 = isinstance(own, Packing) and own.block_rows and not own.whole and not own.fp4
        if own and packed and not fp8:
            raise UnsupportedModel(
                f"{module} is {packing_text(own)}; it may be plain, or FP8 in blocks of [128, 128]"
            )
        each, heads = c.nope_dim + c.value_dim, c.part.slice(c.num_heads)
        start, stop = heads.start * each, heads.stop * each
        names, sources = [module + ".weight"], [(slice(start, stop), slice(0, c.kv_lora_rank))]
        if packed:
            assert isinstance(own, Packing)
            blocks = slice(start // FP8_BLOCK, scale_blocks(stop))
            names.append(module + own.scales)
            sources.append((blocks, slice(0, scale_blocks(c.kv_lora_rank))))
            self.dtypes[names[0]] = (float8_e4m3fn,)

        def convert(weight: Array, scales: Array | None = None) -> Array:
            wide = Linear(weight, None if scales is None else scales.astype(np.float32)).values()
            return pick(wide.reshape(-1, each, c.kv_lora_rank)).reshape(rows, columns)

        tensor = self.arena.alloc((rows, columns), self.dtype, module)
        self.conversions.append(Conversion(tuple(names), tensor, convert, tuple(sources)))
        return tensor


def _layer(p: _Places, c: Config, at: str, number: int) -> Layer:
    dense = number < c.dense_layers
    return Layer(
        input_norm=p.gain(at + "input_layernorm", c.hidden_size),
        attention=_attention(p, c, at + "self_attn.", number),
        post_norm=p.gain(at + "post_attention_layernorm", c.hidden_size),
        mlp=p.mlp(at + "mlp.", c.intermediate_size) if dense else _mixture(p, c, at + "mlp."),
    )


def _mtp(p: _Places, c: Config, at: str, lm_head: Tensor) -> Mtp[Layer]:
    """Its embedding and its head are the model's."""
    parts = [WeightPart(at + "eh_proj", c.hidden_size, column=column) for column in (0, c.hidden_size)]
    into = [p.linear(part, columns=c.hidden_size) for part in parts]  # never packed
    norms = [p.gain(at + name, c.hidden_size) for name in ("enorm", "hnorm", "shared_head.norm")]
    layer, head = _layer(p, c, at, c.num_layers), Linear(lm_head, None)
    return Mtp(into[0], into[1], norms[0], norms[1], layer, norms[2], head)


def _reordered(convert: Callable[..., Array], order: Array, *arrays: Array) -> Array:
    made = convert(*arrays)
    return made.reshape(-1, len(order), *made.shape[1:])[:, order].reshape(made.shape)


def _indexer(p: _Places, c: Config, index: Indexing, at: str, order: Array, *, key: bool) -> Indexer:
    dim, heads = index.dim, index.heads
    norm, names = p.arena.alloc((2, dim), float32, at + "k_norm"), (at + "k_norm.weight", at + "k_norm.bias")
    whole = ((slice(0, dim),),) * 2
    p.conversions.append(Conversion(names, norm, lambda *both: np.stack(both)[:, order], whole))
    return Indexer(
        q=p.stack(WeightPart(at + "wq_b", heads * dim), columns=c.q_lora_rank, order=order),
        weights=p.linear((at + "weights_proj", heads), columns=c.hidden_size, pad=padded_rows(heads) - heads),
        norm=norm,
        key=p.stack(WeightPart(at + "wk", dim), columns=c.hidden_size, order=order) if key else None,
    )


def _attention(p: _Places, c: Config, at: str, number: int) -> Attention:
    heads, own = c.part.of(c.num_heads), c.nope_dim + c.rope_dim
    latent, kv_b, order, indexer = c.kv_lora_rank, at + "kv_b_proj", None, None
    into = [WeightPart(at + "q_a_proj", c.q_lora_rank), WeightPart(at + "kv_a_proj_with_mqa", c.latent_size)]
    if c.index is not None and c.index.chooses(number):
        key, order = WeightPart(at + "indexer.wk", c.index.dim), index_order(c.index, c.rope_dim)
        apart = module_packing(c.packing, key.module) != module_packing(c.packing, into[0].module)
        indexer = _indexer(p, c, c.index, at + "indexer.", order, key=apart)
        into, order = (into, None) if apart else ([key, *into], order)
    rows = sum(part.rows for part in into)
    q = WeightPart(at + "q_b_proj", heads * own, c.part.first(c.num_heads) * own)
    return Attention(
        into=p.stack(*into, columns=c.hidden_size, pad=padded_rows(rows) - rows, order=order),
        q_norm=p.gain(at + "q_a_layernorm", c.q_lora_rank),
        kv_norm=p.gain(at + "kv_a_layernorm", latent),
        q=p.stack(q, columns=c.q_lora_rank),
        keys=p.half(kv_b, lambda w: w[:, : c.nope_dim].transpose(0, 2, 1), heads * latent, c.nope_dim),
        values=p.half(kv_b, lambda w: w[:, c.nope_dim :], heads * c.value_dim, latent),
        o=p.back(at + "o_proj", heads * c.value_dim),
        indexer=indexer,
    )


def _mixture(p: _Places, c: Config, at: str) -> Mixture:
    experts, hidden, count = c.experts, c.hidden_size, c.experts.count
    unfused = c.unfused_experts
    gate_up, down = expert_places(p, at + "experts", experts, c.part, hidden, c.packing, unfused=unfused)
    bias = p.converted(at + "gate.e_score_correction_bias", count, convert=lambda w: w.astype(np.float32))
    router = p.linear((at + "gate", count), columns=hidden, pad=padded_rows(count) - count)
    return Mixture(router, gate_up, down, p.mlp(at + "shared_experts.", experts.shared_size), bias)
