"""Every tensor of a published checkpoint: its shape and its dtype."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from openinfer.kernels.authoring import FP4_BLOCK, scale_blocks
from openinfer.recipes.deepseek_v4.config import CSA, Config, Dspark
from openinfer.tensor import bfloat16, float8_e4m3fn, float8_e8m0fnu, float32, int8, int64

COPIES = ("mtp.0.emb.tok_emb.weight", "mtp.0.head.weight")
"""Copies of the main model's tensors that some exports have."""


class Entry(NamedTuple):
    """A tensor of a checkpoint."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


def inventory(
    config: Config, *, fp4_experts: bool, mtp: bool, dspark: Dspark | None = None
) -> Iterator[Entry]:
    """The tensors of the main model, and of the MTP layer or the DSpark drafter if these draft."""
    c = config
    yield Entry("embed.weight", (c.vocab_size, c.hidden_size), bfloat16)
    yield Entry("head.weight", (c.vocab_size, c.hidden_size), bfloat16)
    yield Entry("norm.weight", (c.hidden_size,), bfloat16)
    yield from _hyper_connection(c, "hc_head", c.hc_mult, 1)
    for layer, ratio in enumerate(c.ratios):
        yield from _layer(c, f"layers.{layer}.", ratio, layer < c.num_hash_layers, fp4_experts)
    if mtp:
        yield from _layer(c, "mtp.0.", 0, False, fp4_experts)
        for name in ("e_proj", "h_proj"):
            yield from _fp8(f"mtp.0.{name}", c.hidden_size, c.hidden_size)
        for name in ("enorm", "hnorm", "norm"):
            yield Entry(f"mtp.0.{name}.weight", (c.hidden_size,), bfloat16)
        yield from _hyper_connection(c, "mtp.0.hc_head", c.hc_mult, 1)
    if dspark is not None:
        last = f"mtp.{dspark.stages - 1}."
        for stage in range(dspark.stages):
            yield from _layer(c, f"mtp.{stage}.", 0, False, fp4_experts)
        yield from _fp8("mtp.0.main_proj", c.hidden_size, len(dspark.targets) * c.hidden_size)
        for name in ("mtp.0.main_norm", last + "norm"):
            yield Entry(name + ".weight", (c.hidden_size,), bfloat16)
        yield from _hyper_connection(c, last + "hc_head", c.hc_mult, 1)
        for name in ("markov_w1", "markov_w2"):
            yield Entry(f"{last}markov_head.{name}.weight", (c.vocab_size, dspark.rank), bfloat16)
        yield Entry(last + "confidence_head.proj.weight", (1, c.hidden_size + dspark.rank), bfloat16)


def _fp8(module: str, rows: int, columns: int) -> Iterator[Entry]:
    yield Entry(module + ".weight", (rows, columns), float8_e4m3fn)
    yield Entry(module + ".scale", (scale_blocks(rows), scale_blocks(columns)), float8_e8m0fnu)


def _hyper_connection(c: Config, prefix: str, numbers: int, scales: int) -> Iterator[Entry]:
    yield Entry(prefix + "_fn", (numbers, c.hc_mult * c.hidden_size), float32)
    yield Entry(prefix + "_base", (numbers,), float32)
    yield Entry(prefix + "_scale", (scales,), float32)


def _layer(c: Config, at: str, ratio: int, hashed: bool, fp4_experts: bool) -> Iterator[Entry]:
    for part in ("attn", "ffn"):
        yield Entry(f"{at}{part}_norm.weight", (c.hidden_size,), bfloat16)
        yield from _hyper_connection(c, f"{at}hc_{part}", (2 + c.hc_mult) * c.hc_mult, 3)
    yield from _attention(c, at + "attn.", ratio)
    yield from _mixture(c, at + "ffn.", hashed, fp4_experts)


def _attention(c: Config, at: str, ratio: int) -> Iterator[Entry]:
    width = c.num_heads * c.head_dim
    yield Entry(at + "attn_sink", (c.num_heads,), float32)
    yield from _fp8(at + "wq_a", c.q_lora_rank, c.hidden_size)
    yield Entry(at + "q_norm.weight", (c.q_lora_rank,), bfloat16)
    yield from _fp8(at + "wq_b", width, c.q_lora_rank)
    yield from _fp8(at + "wkv", c.head_dim, c.hidden_size)
    yield Entry(at + "kv_norm.weight", (c.head_dim,), bfloat16)
    yield from _fp8(at + "wo_a", c.o_groups * c.o_lora_rank, width // c.o_groups)
    yield from _fp8(at + "wo_b", c.hidden_size, c.o_groups * c.o_lora_rank)
    if ratio:
        yield from _compressor(c, at + "compressor.", ratio, c.head_dim)
    if ratio == CSA:
        yield from _fp8(at + "indexer.wq_b", c.index_heads * c.index_dim, c.q_lora_rank)
        yield Entry(at + "indexer.weights_proj.weight", (c.index_heads, c.hidden_size), bfloat16)
        yield from _compressor(c, at + "indexer.compressor.", ratio, c.index_dim)


def _compressor(c: Config, at: str, ratio: int, dim: int) -> Iterator[Entry]:
    columns = dim * (2 if ratio == CSA else 1)
    yield Entry(at + "wkv.weight", (columns, c.hidden_size), bfloat16)
    yield Entry(at + "wgate.weight", (columns, c.hidden_size), bfloat16)
    yield Entry(at + "ape", (ratio, columns), float32)
    yield Entry(at + "norm.weight", (dim,), bfloat16)


def _mixture(c: Config, at: str, hashed: bool, fp4_experts: bool) -> Iterator[Entry]:
    hidden, inter = c.hidden_size, c.moe_intermediate_size
    yield Entry(at + "gate.weight", (c.num_experts, hidden), bfloat16)
    if hashed:
        yield Entry(at + "gate.tid2eid", (c.vocab_size, c.experts_per_token), int64)
    else:
        yield Entry(at + "gate.bias", (c.num_experts,), float32)
    sizes = {"w1": (inter, hidden), "w3": (inter, hidden), "w2": (hidden, inter)}
    for expert in range(c.num_experts):
        for name, (rows, columns) in sizes.items():
            module = f"{at}experts.{expert}.{name}"
            if fp4_experts:
                yield Entry(module + ".weight", (rows, columns // 2), int8)
                yield Entry(module + ".scale", (rows, columns // FP4_BLOCK), float8_e8m0fnu)
            else:
                yield from _fp8(module, rows, columns)
    for name, (rows, columns) in sizes.items():
        yield from _fp8(f"{at}shared_experts.{name}", rows, columns)
