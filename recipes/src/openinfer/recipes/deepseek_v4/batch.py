"""The batch on the device: what is kept of sequences and rows, and the activations of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from openinfer.graph import Field
from openinfer.recipes.deepseek_v4.config import Config
from openinfer.recipes.deepseek_v4.places import padded as padded_rows
from openinfer.recipes.deepseek_v4.scoring import padded, score_fields
from openinfer.sampler.gpu import adjustment_fields
from openinfer.tensor import Arena, Tensor, float32, int32

MAX_STOP_IDS = 20
MAX_LOGPROBS = 20

TABLES = ("window_tables", "entry_tables")
"""The block tables on the device, in the order of the pool's groups."""


def row_fields(max_rows: int, max_tokens: int, max_blocks: int, vocab_size: int) -> list[Field]:
    """The batch on the device. By slot (0 is padding): the state of a sequence, with a block table of each group. By
    row: the step's sequences. By token: the ids that prompt chunks bring (-1: the token sampled last), and what is
    asked about the prompt."""
    slots = max_rows + 1
    return [
        Field("alive", (slots,), device_written=True),
        Field("seq_lens", (slots,), device_written=True),
        Field("last_tokens", (slots,), device_written=True),
        Field("limits", (slots,)),
        Field("min_lens", (slots,)),
        Field("stop_ids", (slots, MAX_STOP_IDS)),
        Field("temperatures", (slots,), float32),
        Field("top_ks", (slots,)),
        Field("top_ps", (slots,), float32),
        Field("min_ps", (slots,), float32),
        Field("seeds", (slots, 2)),
        Field("num_logprobs", (slots,)),
        *[Field(f.name, (slots, *f.shape), f.dtype, f.device_written) for f in adjustment_fields(vocab_size)],
        *[Field(name, (slots, max_blocks)) for name in TABLES],
        Field("slots", (max_rows,)),
        Field("q_starts", (max_rows + 1,)),
        Field("emits", (max_rows,)),
        Field("prompt", (max_tokens,)),
        *score_fields(max_rows, max_tokens),
    ]


@dataclass(frozen=True, slots=True)
class Buffers:
    """Activations, allocated once for the largest step; a smaller step uses their first rows. `rounded` is `normed`
    where the products' inputs are not rounded, `local_logits` is `logits` where there is one rank."""

    token_ids: Tensor
    positions: Tensor
    token_slots: Tensor
    streams: Tensor
    mix: Tensor
    normed: Tensor
    rounded: Tensor
    y: Tensor
    qkv: Tensor
    qr: Tensor
    q: Tensor
    heads: Tensor
    groups: Tensor
    compressing: Tensor
    index_q: Tensor
    selected: Tensor
    router: Tensor
    expert_ids: Tensor
    expert_weights: Tensor
    hidden: Tensor
    shared: Tensor
    last: Tensor
    collapsed: Tensor
    local_logits: Tensor
    logits: Tensor
    tokens: Tensor
    logprobs: Tensor
    result: Tensor
    top_ids: Tensor
    top_values: Tensor
    score_logprobs: Tensor
    score_ranks: Tensor
    score_top_ids: Tensor
    score_top_values: Tensor

    @classmethod
    def allocate(
        cls,
        config: Config,
        arena: Arena,
        dtype: np.dtype[Any],
        max_tokens: int,
        max_rows: int,
        quantized: bool,
    ) -> Buffers:
        """For steps of at most max_tokens tokens and max_rows rows. `quantized`: products round their inputs."""
        c, hidden, n = config, config.hidden_size, config.hc_mult
        compressing = 4 * (c.head_dim + c.index_dim) + c.index_heads

        def by_token(*shape: int, kind: np.dtype[Any] = dtype) -> Tensor:
            return arena.alloc((max_tokens, *shape), kind)

        scored, normed = padded(max_tokens, max_rows), by_token(hidden)
        logits = arena.alloc((max_rows, c.vocab_size), float32)
        return cls(
            token_ids=by_token(kind=int32),
            positions=by_token(kind=int32),
            token_slots=by_token(kind=int32),
            streams=by_token(n, hidden),
            mix=by_token(n + n * n, kind=float32),
            normed=normed,
            rounded=by_token(hidden) if quantized else normed,
            y=by_token(hidden),
            qkv=by_token(c.q_lora_rank + c.head_dim),
            qr=by_token(c.q_lora_rank),
            q=by_token(c.local_heads, c.head_dim),
            heads=by_token(c.local_heads * c.head_dim),
            groups=by_token(c.local_groups * c.o_lora_rank),
            compressing=by_token(compressing, kind=float32),
            index_q=by_token(c.index_heads, c.index_dim),
            selected=by_token(c.index_topk, kind=int32),
            router=by_token(padded_rows(c.num_experts), kind=float32),
            expert_ids=by_token(c.experts_per_token, kind=int32),
            expert_weights=by_token(c.experts_per_token, kind=float32),
            hidden=by_token(c.local_shared),
            shared=by_token(hidden),
            last=arena.alloc((max_rows, n * hidden), dtype),
            collapsed=arena.alloc((max_rows, hidden), dtype),
            local_logits=logits if c.ranks == 1 else arena.alloc((max_rows, c.local_vocab), float32),
            logits=logits,
            tokens=arena.alloc((max_rows,), int32),
            logprobs=arena.alloc((max_rows,), float32),
            result=arena.alloc((max_rows, 3), int32),
            top_ids=arena.alloc((max_rows, MAX_LOGPROBS), int32),
            top_values=arena.alloc((max_rows, MAX_LOGPROBS), float32),
            score_logprobs=arena.alloc((scored,), float32),
            score_ranks=arena.alloc((scored,), int32),
            score_top_ids=arena.alloc((scored, MAX_LOGPROBS), int32),
            score_top_values=arena.alloc((scored, MAX_LOGPROBS), float32),
        )
