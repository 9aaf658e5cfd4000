"""The tensors that the checkpoint must hold, their places, and the fused layout that the model runs on."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from openinfer.kernels import ContractError, UnsupportedQuantization
from openinfer.kernels.authoring import (
    FP8_MADE,
    AnyPacking,
    Linear,
    WeightPart,
    module_packing,
    padded_rows,
)
from openinfer.recipes.engine import UnsupportedModel, decoder
from openinfer.recipes.engine.config_fields import HEAD, has_own_head
from openinfer.recipes.engine.decoder import Mtp, Projections
from openinfer.recipes.engine.weights import Mixture, Mlp, expert_places
from openinfer.recipes.qwen3_5.config import Config
from openinfer.tensor import Arena, Checkpoint, Tensor, TensorLoad

Array = np.ndarray[Any, Any]
NEVER_PACKED = ("in_proj_a", "in_proj_b", "in_proj_ba", "mlp.gate", "shared_expert_gate", "mtp.fc", "conv1d")
"""Modules that packed checkpoints keep in BF16, by the ends of their names."""
NOT_RUN = ("mtp.", "model.visual.")
"""The beginnings of modules that no engine runs, or only for drafts, which change no token."""


@dataclass(frozen=True, slots=True)
class Format:
    """How a checkpoint spells the weights.

    prefix: the prefix of the text model's names. packing: where it names no modules, it is of all but NEVER_PACKED.
    unfused_experts: experts are tensors of their own. tied: there is no head. mtp: the MTP head is loaded.
    fp8_drafts: its logits are of lm_head in FP8."""

    prefix: str
    packing: AnyPacking | None
    unfused_experts: bool
    tied: bool
    mtp: bool = False
    fp8_drafts: bool = False

    @classmethod
    def published(cls, config: Config) -> "Format":
        """The format of the publisher's checkpoints with this config."""
        prefix = "model." if config.text_only else "model.language_model."
        apart = config.by_key_head or (config.packing is not None and not config.packing.made)
        return cls(prefix, config.packing, apart, bool(config.tie_word_embeddings))

    @classmethod
    def of(cls, checkpoint: Checkpoint, config: Config) -> "Format":
        """The format of this checkpoint, found from the names of its tensors."""
        nested = "model.language_model.embed_tokens.weight" in checkpoint
        prefix, tied = "model.language_model." if nested else "model.", config.tie_word_embeddings
        return cls(
            prefix=prefix,
            packing=config.packing,
            unfused_experts=any(".mlp.experts.0." in name for name in checkpoint),
            tied=(HEAD not in checkpoint if tied is None else tied)
            and not has_own_head(checkpoint, prefix + "embed_tokens.weight"),
        )

    def packing_of(self, module: str) -> AnyPacking | None:
        """How this module's weight is packed."""
        if self.packing is not None and self.packing.modules is None and module.endswith(NEVER_PACKED):
            return None
        return module_packing(self.packing, module)


@dataclass(frozen=True, slots=True)
class Attention:
    """Gated full attention. qkv stacks the q (each head followed by its gate), k and v projections."""

    qkv: Linear[Tensor]  # [2 (A + G) d, H]
    q_norm: Tensor  # float32 [d], 1 + w
    k_norm: Tensor  # float32 [d], 1 + w
    o: Linear[Tensor]  # [H, A d]


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """Gated delta net. in_proj stacks qkv and z, and b and a where `ba` is None: else qkv and z are FP8."""

    in_proj: Linear[Tensor]  # [C + Hv dv (+ 2 Hv, padded), H]
    ba: Linear[Tensor] | None  # [2 Hv, padded, H]
    conv: Tensor  # [C, K]
    decay: Tensor  # float32 [Hv], -exp(A_log)
    dt_bias: Tensor  # float32 [Hv]
    norm: Tensor  # float32 [dv]
    out: Linear[Tensor]  # [H, Hv dv]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer(decoder.Layer):
    """One decoder layer. Norm weights are float32 [H] and hold 1 + w. The router of a mixture has a row E, which is the
    shared expert's gate."""

    mixer: Attention | DeltaNet
    mlp: Mlp | Mixture


class Weights(decoder.Weights[Layer]):
    @classmethod
    def allocate(cls, config: Config, arena: Arena, dtype: np.dtype[Any], form: Format) -> "Weights":
        """Uninitialised weights in `arena`. Raises UnsupportedModel where projections cannot be stacked."""
        p, rows, before = (
            _Places(arena, dtype, c=config, form=form),
            config.part.slice(config.vocab_size),
            arena.used,
        )
        embed = p.table(form.prefix + "embed_tokens", config.vocab_size, config.hidden_size, form.packing)
        layers = [_layer(p, config, f"{form.prefix}layers.{n}.", full) for n, full in enumerate(config.full)]
        norm = p.gain(form.prefix + "norm.weight", config.hidden_size)
        if form.tied:
            head = embed if config.part.ranks == 1 else embed[rows]
        else:
            count = rows.stop - rows.start
            head = p.table("lm_head", count, config.hidden_size, form.packing, rows.start)
        mtp = _mtp(p, config, head) if form.mtp else None
        return cls(embed, decoder.linked(layers, norm), norm, head, mtp, arena.used - before, p)

    def adapted(self) -> Iterator[Tensor]:
        """The weights that adapters may change: all linear layers but the router and its experts."""
        for layer in self.layers:
            mixer, mlp = layer.mixer, layer.mlp
            linears = (
                (mixer.qkv, mixer.o) if isinstance(mixer, Attention) else (mixer.in_proj, mixer.ba, mixer.out)
            )
            own = mlp.shared if isinstance(mlp, Mixture) else mlp
            yield from (linear.weight for linear in (*linears, own.gate_up, own.down) if linear is not None)


@dataclass(slots=True, kw_only=True)
class _Places(Projections):
    form: Format

    def wide(
        self, name: str, size: int, convert: Callable[[Array], Array], source: tuple[slice, ...] = ()
    ) -> Tensor:
        """A float32 vector; `convert` gets float32 values."""
        return self.converted(name, size, convert=lambda w: convert(w.astype(np.float32)), source=source)

    def gain(self, name: str, size: int) -> Tensor:
        """The weight of a norm that multiplies by 1 + w: in float32, where the sum is exact."""
        return self.wide(name, size, lambda w: np.float32(1) + w)

    def stack(self, *parts: WeightPart, columns: int, pad: int = 0) -> Linear[Tensor]:
        """Projections in one weight, with `pad` rows of zeros after them."""
        kinds = {self.form.packing_of(part.module) for part in parts}
        packing = kinds.pop() if len(kinds) == 1 else self.form.packing
        try:
            return self.linear(*parts, columns=columns, packing=packing, pad=pad)
        except (ContractError, UnsupportedQuantization) as error:  # the former: a rank's part
            raise UnsupportedModel(str(error)) from None


def _layer(p: _Places, config: Config, at: str, full: bool) -> Layer:
    hidden, dense = config.hidden_size, config.intermediate_size
    mixer = _attention(p, config, at + "self_attn.") if full else _delta_net(p, config, at + "linear_attn.")
    return Layer(
        input_norm=p.gain(at + "input_layernorm.weight", hidden),
        mixer=mixer,
        post_norm=p.gain(at + "post_attention_layernorm.weight", hidden),
        mlp=_mixture(p, config, at + "mlp.") if config.experts else p.mlp(at + "mlp.", dense),
    )


def _attention(p: _Places, config: Config, at: str) -> Attention:
    dim = config.head_dim
    q = 2 * config.part.of(config.num_heads) * dim
    return Attention(
        qkv=p.qkv(at, q, config.num_kv_heads, dim),
        q_norm=p.gain(at + "q_norm.weight", dim),
        k_norm=p.gain(at + "k_norm.weight", dim),
        o=p.back(at + "o_proj", q // 2),
    )


def _delta_net(p: _Places, config: Config, at: str) -> DeltaNet:
    c, hidden, heads = config, config.hidden_size, config.part.of(config.value_heads)
    keys, group = c.key_heads * c.key_dim, c.value_heads // c.key_heads
    each, skip = heads // c.part.of(c.key_heads), c.part.rank * heads % group  # ranks may share a key head
    key, values, mine, start = c.key_dim, group * c.value_dim, each * c.value_dim, skip * c.value_dim
    sections = (0, key, key), (keys, key, key), (2 * keys + start, values, mine)
    if c.by_key_head:
        whole, of_v = 2 * (key + values), 2 * key + start
        of_heads = (0, whole, key), (key, whole, key), (of_v, whole, mine), (of_v + values, whole, mine)
        qkvz = _parts(c, at + "in_proj_qkvz", *of_heads)
        ba = _parts(c, at + "in_proj_ba", (skip, 2 * group, each), (group + skip, 2 * group, each))
    else:
        qkvz = _parts(c, at + "in_proj_qkv", *sections) + _parts(c, at + "in_proj_z", (start, values, mine))
        ba = [part for name in "ba" for part in _parts(c, f"{at}in_proj_{name}", (skip, group, each))]
    pad = padded_rows(2 * heads) - 2 * heads
    ba_too = p.form.packing_of(qkvz[0].module) == p.form.packing_of(ba[0].module)
    if ba_too:
        qkvz += ba
    conv, filled = p.arena.alloc((c.conv_size, c.conv_kernel), p.dtype, at + "conv1d"), 0
    for module, rows, first, _ in _parts(c, at + "conv1d.weight", *sections):
        channels = conv[filled : filled + rows].reshape(rows, 1, c.conv_kernel)
        p.loads.append(TensorLoad(module, channels, (slice(first, first + rows),)))
        filled += rows
    own = (c.part.slice(c.value_heads),)
    return DeltaNet(
        in_proj=p.stack(*qkvz, columns=hidden, pad=pad if ba_too else 0),
        ba=None if ba_too else p.stack(*ba, columns=hidden, pad=pad),
        conv=conv,
        decay=p.wide(at + "A_log", heads, lambda a_log: -np.exp(a_log), own),
        dt_bias=p.wide(at + "dt_bias", heads, lambda bias: bias, own),
        norm=p.wide(at + "norm.weight", c.value_dim, lambda w: w),
        out=p.back(at + "out_proj", c.z_size),
    )


def _parts(config: Config, module: str, *sections: tuple[int, int, int]) -> list[WeightPart]:
    """Rows of this rank's key heads, section by section. A section has the first row of head 0, how many rows further
    the next head begins, and how many rows the rank has of each. Rows that follow each other are one part."""
    own, found = config.part.slice(config.key_heads), list[WeightPart]()
    for first, stride, count in sections:
        for row in range(first + own.start * stride, first + own.stop * stride, stride):
            if found and found[-1].row + found[-1].rows == row:
                found[-1] = found[-1]._replace(rows=found[-1].rows + count)
            else:
                found.append(WeightPart(module, count, row))
    return found


def _mixture(p: _Places, config: Config, at: str) -> Mixture:
    experts, hidden = config.experts, config.hidden_size
    assert experts is not None
    router = (WeightPart(at + "gate", experts.count), WeightPart(at + "shared_expert_gate", 1))
    packing, unfused = p.form.packing_of(at + "experts.0.gate_proj"), p.form.unfused_experts
    gate_up, down = expert_places(p, at + "experts", experts, config.part, hidden, packing, unfused=unfused)
    pad = padded_rows(experts.count + 1) - experts.count - 1
    return Mixture(
        router=p.stack(*router, columns=hidden, pad=pad),
        gate_up=gate_up,
        down=down,
        shared=p.mlp(at + "shared_expert.", experts.shared_size),
    )


def _mtp(p: _Places, config: Config, lm_head: Tensor) -> Mtp[Layer]:
    hidden, head = config.hidden_size, Linear(lm_head, None)
    if p.form.fp8_drafts:
        rows, name = config.part.slice(config.vocab_size), p.form.prefix + "embed_tokens"
        part = WeightPart(name if p.form.tied else "lm_head", rows.stop - rows.start, rows.start)
        head = p.linear(part, columns=hidden, packing=FP8_MADE)
    into = [p.linear(WeightPart("mtp.fc", hidden, column=at), columns=hidden) for at in (0, hidden)]
    return Mtp(
        of_embedding=into[0],
        of_hidden=into[1],
        embed_norm=p.gain("mtp.pre_fc_norm_embedding.weight", hidden),
        hidden_norm=p.gain("mtp.pre_fc_norm_hidden.weight", hidden),
        layer=_layer(p, config, "mtp.layers.0.", True),
        norm=p.gain("mtp.norm.weight", hidden),
        head=head,
    )
