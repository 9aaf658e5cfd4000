"""The tensors that the checkpoint must hold, their places, and the fused layout that the model runs on.

FP8 and FP4 weights stay packed, and so do their scales. For a float32 model, which only a CPU runs, they are expanded
once while they are loaded. The values are the same, and a step does not expand them again.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from openinfer.kernels.authoring import (
    FP4_E8M0,
    FP4_SCALE_MOST,
    FP8_E8M0,
    FP8_SCALE_MOST,
    Linear,
    LinearPlaces,
    Packing,
    WeightPart,
    padded_rows,
)
from openinfer.recipes.deepseek_v4.config import CSA, Config, Dspark
from openinfer.recipes.engine.config_fields import WHOLE, Part
from openinfer.tensor import (
    Arena,
    Checkpoint,
    CheckpointError,
    Device,
    Tensor,
    bfloat16,
    float32,
    int8,
    int32,
    int64,
)

Array = np.ndarray[Any, Any]
COPIES = ("mtp.0.emb.tok_emb.weight", "mtp.0.head.weight")
"""Copies of the main model's tensors that some exports have."""


@dataclass(frozen=True, slots=True)
class Format:
    """How a checkpoint spells the weights: FP4 experts (else FP8); and which layers that draft are loaded."""

    fp4_experts: bool
    mtp: bool = False
    dspark: Dspark | None = None

    @property
    def drafting(self) -> int:
        return self.dspark.stages if self.dspark is not None else int(self.mtp)

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> "Format":
        """The format of a checkpoint, by the dtype of the first expert, because config.json may not say it."""
        name = "layers.0.ffn.experts.0.w1.weight"
        return cls(name in checkpoint and checkpoint.info(name).dtype == int8)


class Mixing(NamedTuple):
    """The weights of a hyper-connection, float32: fn [numbers, n D], base [numbers], scale [3], or [1] at the head."""

    fn: Tensor
    base: Tensor
    scale: Tensor


@dataclass(frozen=True, slots=True)
class Compressor:
    """ape float32 [ratio, c], norm float32 [d]; its projections are rows of a fused weight."""

    ape: Tensor
    norm: Tensor


@dataclass(frozen=True, slots=True)
class Heavy:
    """The weights of an HCA layer. `into` stacks wkv and wgate of the compressor."""

    into: Tensor  # [2 d, D]
    compressor: Compressor


@dataclass(frozen=True, slots=True)
class Sparse:
    """The weights of a CSA layer. `into` stacks wkv and wgate of both compressors (the indexer's last), and
    weights_proj."""

    into: Tensor  # [4 d + 4 di + Hi, D]
    compressor: Compressor
    index_compressor: Compressor
    index_q: Linear[Tensor]  # [Hi di, Q]


@dataclass(frozen=True, slots=True)
class Heads:
    """The weights of A heads in g groups."""

    q: Linear[Tensor]  # [A d, Q]
    sinks: Tensor  # float32 [A]
    out_a: Linear[Tensor]  # [g R, A d / g]
    out_b: Linear[Tensor]  # [D, g R]


@dataclass(frozen=True, slots=True)
class Attention:
    """`into` stacks wq_a and wkv. heads: of a rank. every: all heads, where ranks deal tokens; the rank's are views of
    them, but for the columns of out_b."""

    into: Linear[Tensor]  # [Q + d, D]
    q_norm: Tensor  # float32 [Q]
    kv_norm: Tensor  # float32 [d]
    heads: Heads
    every: Heads | None
    entries: Heavy | Sparse | None


@dataclass(frozen=True, slots=True)
class Mixture:
    """Experts, chosen by `bias` float32 [E] or by `table` int32 [V, K], and the shared expert. gate_up stacks w1 and
    w3."""

    router: Tensor  # [E, padded, D]
    bias: Tensor | None
    table: Tensor | None
    gate_up: Linear[Tensor]  # [E, 2 I, D]
    down: Linear[Tensor]  # [E, D, I]
    shared_gate_up: Linear[Tensor]  # [2 I, D]
    shared_down: Linear[Tensor]  # [D, I]


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer, number `index`, and number `place` among those of its kind; norms float32 [D]."""

    index: int
    place: int
    attn_mixing: Mixing
    attn_norm: Tensor
    attention: Attention
    ffn_mixing: Mixing
    ffn_norm: Tensor
    mixture: Mixture


@dataclass(frozen=True, slots=True)
class Mtp:
    """The weights of the MTP layer."""

    e_proj: Linear[Tensor]  # [D, D]
    h_proj: Linear[Tensor]  # [D, D]
    e_norm: Tensor
    h_norm: Tensor
    layer: Layer
    head: Mixing
    norm: Tensor


@dataclass(frozen=True, slots=True)
class Stages:
    """The weights of a DSpark drafter of k targets and rank r. confidence float32 [D + r]."""

    main_proj: Linear[Tensor]  # [D, k D]
    main_norm: Tensor
    layers: tuple[Layer, ...]
    head: Mixing
    norm: Tensor
    rows: Tensor  # [V, r]: of the token before a draft
    columns: Tensor  # [V, r]: of the draft
    confidence: Tensor


@dataclass(frozen=True, slots=True)
class Weights:
    """A rank's weights, and where each comes from. nbytes: of the arena."""

    embed: Tensor  # [V, D]
    layers: tuple[Layer, ...]
    head: Mixing
    norm: Tensor
    lm_head: Tensor  # [V of the rank, D]
    mtp: Mtp | None
    stages: Stages | None
    places: LinearPlaces
    nbytes: int

    @classmethod
    def allocate(cls, config: Config, arena: Arena, dtype: np.dtype[Any], form: Format) -> "Weights":
        """Uninitialised weights in `arena`."""
        p, c, used = ModelPlaces(arena, dtype, form=form, expand=dtype == float32), config, arena.used
        embed = p.plain("embed.weight", c.vocab_size, c.hidden_size)
        layers = tuple(
            _layer(p, c, f"layers.{n}.", n, c.ratios[:n].count(ratio), ratio, n < c.num_hash_layers)
            for n, ratio in enumerate(c.ratios)
        )
        head, norm = p.mixing("hc_head", c, c.hc_mult, 1), p.gain("norm", c.hidden_size)
        rows = c.part.slice(c.vocab_size)
        lm_head = p.plain("head.weight", rows.stop - rows.start, c.hidden_size, source=(rows,))
        mtp = _mtp(p, c) if form.mtp else None
        stages = _stages(p, c, form.dspark) if form.dspark is not None else None
        return cls(embed, layers, head, norm, lm_head, mtp, stages, p, arena.used - used)


def validate(checkpoint: Checkpoint, config: Config, form: Format) -> None:
    """Raise CheckpointError unless the checkpoint holds exactly the published tensors. Layers that draft may have
    any tensors where they are not loaded."""
    whole = Weights.allocate(config.whole, Arena(Device("null"), None), bfloat16, form)
    checkpoint.require(whole.places.expected(), ignore=COPIES if form.drafting else ("mtp.*",))


@dataclass(slots=True, kw_only=True)
class ModelPlaces(LinearPlaces):
    form: Format

    def gain(self, module: str, size: int) -> Tensor:
        """The weight of a norm in float32: it multiplies before the one rounding."""
        return self.converted(module + ".weight", size, convert=lambda w: w.astype(np.float32))

    def wide(self, name: str, *shape: int, source: tuple[slice, ...] = ()) -> Tensor:
        """A tensor that the checkpoint has in float32, too."""
        self.dtypes[name] = (float32,)
        return self.plain(name, *shape, dtype=float32, source=source)

    def mixing(self, prefix: str, c: Config, numbers: int, scales: int) -> Mixing:
        return Mixing(
            self.wide(prefix + "_fn", numbers, c.hc_mult * c.hidden_size),
            self.wide(prefix + "_base", numbers),
            self.wide(prefix + "_scale", scales),
        )

    def stack(self, *parts: tuple[str, int], columns: int) -> Tensor:
        """Modules (name, rows) of the model's dtype in one weight, filled up with zeros to what products take."""
        total = sum(rows for _, rows in parts)
        return self.linear(*parts, columns=columns, pad=padded_rows(total) - total).weight

    def packed(self, *parts: tuple[str, int], columns: int, part: Part = WHOLE) -> Linear[Tensor]:
        """FP8 modules (name, rows of a rank) in one weight; the rows of all but the last are whole blocks."""
        own = [WeightPart(name, rows, part.rank * rows) for name, rows in parts]
        return self.linear(*own, columns=columns, packing=FP8_E8M0)

    def back(self, part: Part, module: str, rows: int, columns: int) -> Linear[Tensor]:
        """A rank's columns of an FP8 module."""
        own = WeightPart(module, rows, column=part.rank * columns)
        return self.linear(own, columns=columns, packing=FP8_E8M0)

    @property
    def experts(self) -> Packing:
        return FP4_E8M0 if self.form.fp4_experts else FP8_E8M0


def check_scales(checkpoint: Checkpoint, names: Iterable[str]) -> None:
    """Raise CheckpointError if a scale is larger than kernels take, or none (byte 255)."""
    for name in names:
        if not name.endswith(".scale") or checkpoint.info(name).dtype == float32:  # _exponents sees to these
            continue
        info = checkpoint.info(name.removesuffix("scale") + "weight")
        most = FP4_SCALE_MOST if info.dtype == int8 else FP8_SCALE_MOST
        found = int(checkpoint.array(name).view(np.uint8).max())
        if found > most:
            why = "which is NaN" if found == 255 else f"2^{found - 127}"
            problem = f"has a scale of byte {found}, {why}; at most {most} is possible"
            raise CheckpointError(checkpoint.info(name).file, name, problem)


def _layer(p: ModelPlaces, c: Config, at: str, index: int, place: int, ratio: int, hashed: bool) -> Layer:
    numbers = (2 + c.hc_mult) * c.hc_mult
    return Layer(
        index=index,
        place=place,
        attn_mixing=p.mixing(at + "hc_attn", c, numbers, 3),
        attn_norm=p.gain(at + "attn_norm", c.hidden_size),
        attention=_attention(p, c, at + "attn.", ratio, deals=c.part.deals and index < c.num_layers),
        ffn_mixing=p.mixing(at + "hc_ffn", c, numbers, 3),
        ffn_norm=p.gain(at + "ffn_norm", c.hidden_size),
        mixture=_mixture(p, c, at + "ffn.", hashed),
    )


def _attention(p: ModelPlaces, c: Config, at: str, ratio: int, *, deals: bool) -> Attention:
    into = p.packed((at + "wq_a", c.q_lora_rank), (at + "wkv", c.head_dim), columns=c.hidden_size)
    q_norm, kv_norm = p.gain(at + "q_norm", c.q_lora_rank), p.gain(at + "kv_norm", c.head_dim)
    heads, every = _heads(p, c, at, WHOLE if deals else c.part), None
    if deals:
        first, last = c.part.slice(c.num_heads).start, c.part.slice(c.num_heads).stop
        rank, rows = c.part.rank, c.part.of(c.o_groups) * c.o_lora_rank
        every, heads = heads, Heads(
            q=heads.q.rows(first * c.head_dim, last * c.head_dim),
            sinks=heads.sinks[first:last],
            out_a=heads.out_a.rows(rank * rows, (rank + 1) * rows),
            out_b=p.back(c.part, at + "wo_b", c.hidden_size, rows),
        )  # fmt: skip
    return Attention(into, q_norm, kv_norm, heads, every, _entries(p, c, at, ratio))


def _heads(p: ModelPlaces, c: Config, at: str, part: Part) -> Heads:
    heads, groups = part.of(c.num_heads), part.of(c.o_groups)
    width, own = heads * c.head_dim, (part.slice(c.num_heads),)
    return Heads(
        q=p.packed((at + "wq_b", width), columns=c.q_lora_rank, part=part),
        sinks=p.wide(at + "attn_sink", heads, source=own),
        out_a=p.packed((at + "wo_a", groups * c.o_lora_rank), columns=width // groups, part=part),
        out_b=p.back(part, at + "wo_b", c.hidden_size, groups * c.o_lora_rank),
    )


def _entries(p: ModelPlaces, c: Config, at: str, ratio: int) -> Heavy | Sparse | None:
    if ratio == 0:
        return None

    def projections(module: str, dim: int) -> list[tuple[str, int]]:
        rows = dim * (2 if ratio == CSA else 1)
        return [(module + "wkv", rows), (module + "wgate", rows)]

    def compressor(module: str, dim: int) -> Compressor:
        ape = p.wide(module + "ape", ratio, dim * (2 if ratio == CSA else 1))
        return Compressor(ape, p.gain(module + "norm", dim))

    main, index = at + "compressor.", at + "indexer.compressor."
    own = projections(main, c.head_dim)
    if ratio != CSA:
        return Heavy(p.stack(*own, columns=c.hidden_size), compressor(main, c.head_dim))
    further = [*projections(index, c.index_dim), (at + "indexer.weights_proj", c.index_heads)]
    return Sparse(
        into=p.stack(*own, *further, columns=c.hidden_size),
        compressor=compressor(main, c.head_dim),
        index_compressor=compressor(index, c.index_dim),
        index_q=p.packed((at + "indexer.wq_b", c.index_heads * c.index_dim), columns=c.q_lora_rank),
    )


def _mixture(p: ModelPlaces, c: Config, at: str, hashed: bool) -> Mixture:
    inter, hidden, own = c.moe_intermediate_size, c.hidden_size, c.part.slice(c.num_experts)
    count, width = own.stop - own.start, c.part.of(inter)
    bias = table = None
    if hashed:
        name, convert = at + "gate.tid2eid", partial(_table, c.num_experts)
        p.dtypes[name] = (int64,)
        table = p.converted(name, c.vocab_size, c.experts_per_token, convert=convert, dtype=int32)
    else:
        bias = p.wide(at + "gate.bias", c.num_experts)
    gate_up = p.empty((count,), [inter, inter], hidden, p.experts, at + "experts")
    down = p.empty((count,), [hidden], inter, p.experts, at + "experts")

    def fill() -> None:
        for expert in range(count):
            module = f"{at}experts.{own.start + expert}."
            p.fill(gate_up[expert], [(module + "w1", inter), (module + "w3", inter)], p.experts)
            p.fill(down[expert], [(module + "w2", hidden)], p.experts)

    p.later(fill)
    shared = at + "shared_experts."
    return Mixture(
        router=p.stack((at + "gate", c.num_experts), columns=hidden),
        bias=bias,
        table=table,
        gate_up=gate_up,
        down=down,
        shared_gate_up=p.packed((shared + "w1", width), (shared + "w3", width), columns=hidden, part=c.part),
        shared_down=p.back(c.part, shared + "w2", hidden, width),
    )


def _table(count: int, table: Array) -> Array:
    if table.min() < 0 or table.max() >= count:
        raise ValueError(f"names experts {table.min()} to {table.max()}; there are {count}")
    if (np.diff(np.sort(table, axis=1), axis=1) == 0).any():
        raise ValueError("names an expert twice for one token")
    return table.astype(np.int32)


def _mtp(p: ModelPlaces, c: Config) -> Mtp:
    at, hidden = "mtp.0.", c.hidden_size
    return Mtp(
        e_proj=p.packed((at + "e_proj", hidden), columns=hidden),
        h_proj=p.packed((at + "h_proj", hidden), columns=hidden),
        e_norm=p.gain(at + "enorm", hidden),
        h_norm=p.gain(at + "hnorm", hidden),
        layer=_layer(p, c, at, c.num_layers, 0, 0, hashed=False),
        head=p.mixing(at + "hc_head", c, c.hc_mult, 1),
        norm=p.gain(at + "norm", hidden),
    )


def _stages(p: ModelPlaces, c: Config, d: Dspark) -> Stages:
    last, hidden = f"mtp.{d.stages - 1}.", c.hidden_size
    markov, proj = last + "markov_head.markov_", last + "confidence_head.proj.weight"
    return Stages(
        main_proj=p.packed(("mtp.0.main_proj", hidden), columns=len(d.targets) * hidden),
        main_norm=p.gain("mtp.0.main_norm", hidden),
        layers=tuple(
            _layer(p, c, f"mtp.{n}.", c.num_layers + n, 0, 0, hashed=False) for n in range(d.stages)
        ),
        head=p.mixing(last + "hc_head", c, c.hc_mult, 1),
        norm=p.gain(last + "norm", hidden),
        rows=p.plain(markov + "w1.weight", c.vocab_size, d.rank),
        columns=p.plain(markov + "w2.weight", c.vocab_size, d.rank),
        confidence=p.converted(proj, 1, hidden + d.rank, convert=lambda w: w.astype(np.float32)),
    )
