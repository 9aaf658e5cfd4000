"""Qwen3, as a straight list of op calls: two segments of a step, `forward` and `sample`; and `score`, for prompts.

Written once, run by every pack. Shapes: T tokens of the step, R rows (sequences) in it, S slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from openinfer.graph import Field, Rows
from openinfer.kernels import (
    Pack,
    embed,
    expand_rows,
    gate_up_silu,
    linear_add,
    norm_linear,
    norm_rope_attend,
    select_rows,
)
from openinfer.recipes.qwen3.config import Config
from openinfer.recipes.qwen3.scoring import padded, score_fields
from openinfer.recipes.qwen3.weights import Weights
from openinfer.sampler.gpu import adjustment_fields, advance, sample, score, top_logprobs
from openinfer.tensor import Arena, Tensor, float32, int32

MAX_STOP_IDS = 20
MAX_LOGPROBS = 20


def row_fields(max_rows: int, max_tokens: int, max_blocks: int, vocab_size: int) -> list[Field]:
    """The batch on the device. By slot (0 is padding): the state of a sequence. By row: the step's sequences. By
    token: the ids that prompt chunks bring (-1: the token sampled last), and what is asked about the prompt."""
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
        Field("block_tables", (slots, max_blocks)),
        Field("slots", (max_rows,)),
        Field("q_starts", (max_rows + 1,)),
        Field("emits", (max_rows,)),
        Field("prompt", (max_tokens,)),
        *score_fields(max_rows, max_tokens),
    ]


@dataclass(frozen=True, slots=True)
class Buffers:
    """Activations, allocated once for the largest step; a smaller step uses their first rows."""

    token_ids: Tensor
    positions: Tensor
    token_slots: Tensor
    x: Tensor
    qkv: Tensor
    heads: Tensor
    mlp: Tensor
    last: Tensor
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
        cls, config: Config, arena: Arena, dtype: np.dtype[Any], max_tokens: int, max_rows: int
    ) -> Buffers:
        """For steps of at most max_tokens tokens and max_rows rows."""
        q_size = config.num_heads * config.head_dim
        scored = padded(max_tokens, max_rows)
        return cls(
            token_ids=arena.alloc((max_tokens,), int32),
            positions=arena.alloc((max_tokens,), int32),
            token_slots=arena.alloc((max_tokens,), int32),
            x=arena.alloc((max_tokens, config.hidden_size), dtype),
            qkv=arena.alloc((max_tokens, config.qkv_size), dtype),
            heads=arena.alloc((max_tokens, q_size), dtype),
            mlp=arena.alloc((max_tokens, config.intermediate_size), dtype),
            last=arena.alloc((max_rows, config.hidden_size), dtype),
            logits=arena.alloc((max_rows, config.vocab_size), float32),
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


@dataclass(frozen=True, slots=True)
class Model:
    """Weights, cache and buffers that the two segments run on.

    kv [pages, L, 2, G, page_size, d] (page-first: a page holds all layers); cos_sin float32 [max_model_len, 2, d / 2].
    """

    config: Config
    weights: Weights
    kv: Tensor
    cos_sin: Tensor
    rows: Rows
    buffers: Buffers

    def forward(self, pack: Pack, num_tokens: int, num_rows: int, max_q_len: int) -> None:
        """Tokens of the step to logits of each row's last token; keys and values go to the cache."""
        c, w, b, rows, t, r = self.config, self.weights, self.buffers, self.rows, num_tokens, num_rows
        slots, q_starts = rows["slots"][:r], rows["q_starts"][: r + 1]
        seq_lens, alive, block_tables = rows["seq_lens"], rows["alive"], rows["block_tables"]
        positions, token_slots, x = b.positions[:t], b.token_slots[:t], b.x[:t]
        qkv, heads, mlp = b.qkv[:t], b.heads[:t], b.mlp[:t]
        expand_rows(
            pack,
            token_ids=b.token_ids[:t],
            positions=positions,
            token_slots=token_slots,
            prompt=rows["prompt"][:t],
            slots=slots,
            q_starts=q_starts,
            seq_lens=seq_lens,
            last_tokens=rows["last_tokens"],
            alive=alive,
        )
        embed(pack, out=x, token_ids=b.token_ids[:t], table=w.embed)
        for n, layer in enumerate(w.layers):
            kv = self.kv[:, n]
            norm_linear(
                pack, out=qkv, x=x, norm_weight=layer.input_norm, weight=layer.qkv, eps=c.rms_norm_eps
            )
            norm_rope_attend(
                pack,
                out=heads,
                kv=kv,
                qkv=qkv,
                q_norm=layer.q_norm,
                k_norm=layer.k_norm,
                cos_sin=self.cos_sin,
                positions=positions,
                token_slots=token_slots,
                slots=slots,
                q_starts=q_starts,
                seq_lens=seq_lens,
                alive=alive,
                block_tables=block_tables,
                eps=c.rms_norm_eps,
                scale=c.head_dim**-0.5,
                window=c.windows[n],
                max_q_len=max_q_len,
            )
            linear_add(pack, x=x, h=heads, weight=layer.o)
            gate_up_silu(
                pack,
                out=mlp,
                x=x,
                norm_weight=layer.post_norm,
                weight=layer.gate_up,
                eps=c.rms_norm_eps,
            )
            linear_add(pack, x=x, h=mlp, weight=layer.down)
        select_rows(pack, out=b.last[:r], x=x, q_starts=q_starts)
        norm_linear(
            pack, out=b.logits[:r], x=b.last[:r], norm_weight=w.norm, weight=w.lm_head, eps=c.rms_norm_eps
        )

    def sample(self, pack: Pack, num_rows: int) -> None:
        """Logits to tokens; ends rows; moves the state of live rows past the step."""
        b, rows, r = self.buffers, self.rows, num_rows
        logits, tokens, logprobs = b.logits[:r], b.tokens[:r], b.logprobs[:r]
        slots, q_starts, emits = rows["slots"][:r], rows["q_starts"][: r + 1], rows["emits"][:r]
        seq_lens, alive = rows["seq_lens"], rows["alive"]
        sample(
            pack,
            tokens=tokens,
            logprobs=logprobs,
            logits=logits,
            slots=slots,
            q_starts=q_starts,
            seq_lens=seq_lens,
            alive=alive,
            emits=emits,
            temperatures=rows["temperatures"],
            top_ks=rows["top_ks"],
            top_ps=rows["top_ps"],
            min_ps=rows["min_ps"],
            seeds=rows["seeds"],
            min_lens=rows["min_lens"],
            stop_ids=rows["stop_ids"],
            adjusts=rows["adjusts"],
            prompt_lens=rows["prompt_lens"],
            penalties=rows["penalties"],
            prompt_masks=rows["prompt_masks"],
            output_counts=rows["output_counts"],
            recent_tokens=rows["recent_tokens"],
            allowed_masks=rows["allowed_masks"],
            bias_ids=rows["bias_ids"],
            biases=rows["biases"],
            bad_words=rows["bad_words"],
        )
        top_logprobs(
            pack,
            ids=b.top_ids[:r],
            values=b.top_values[:r],
            logits=logits,
            slots=slots,
            alive=alive,
            emits=emits,
            num_logprobs=rows["num_logprobs"],
        )
        advance(
            pack,
            result=b.result[:r],
            tokens=tokens,
            logprobs=logprobs,
            slots=slots,
            q_starts=q_starts,
            emits=emits,
            alive=alive,
            seq_lens=seq_lens,
            last_tokens=rows["last_tokens"],
            limits=rows["limits"],
            min_lens=rows["min_lens"],
            stop_ids=rows["stop_ids"],
            adjusts=rows["adjusts"],
            output_counts=rows["output_counts"],
            recent_tokens=rows["recent_tokens"],
        )

    def score(self, pack: Pack, offset: int) -> None:
        """Log-probabilities of the prompt tokens from `offset` on that a step is asked about, as many as the buffer of
        logits has rows. After forward and sample of the step: it takes their hidden states and their buffers."""
        b, w, rows = self.buffers, self.weights, self.rows
        size = b.logits.shape[0]
        part, tops = slice(offset, offset + size), rows["score_tops"][offset : offset + size]
        select_rows(pack, out=b.last, x=b.x, q_starts=rows["score_after"][offset : offset + size + 1])
        norm_linear(
            pack, out=b.logits, x=b.last, norm_weight=w.norm, weight=w.lm_head, eps=self.config.rms_norm_eps
        )
        score(
            pack,
            logprobs=b.score_logprobs[part],
            ranks=b.score_ranks[part],
            logits=b.logits,
            targets=rows["score_targets"][part],
        )
        top_logprobs(
            pack,
            ids=b.score_top_ids[part],
            values=b.score_top_values[part],
            logits=b.logits,
            slots=rows["score_rows"],
            alive=tops,
            emits=tops,
            num_logprobs=tops,
        )
