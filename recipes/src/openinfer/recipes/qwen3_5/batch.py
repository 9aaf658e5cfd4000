"""The batch on the device: what is kept of sequences and rows, and the activations of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from openinfer.graph import Field
from openinfer.recipes.qwen3_5.config import Config
from openinfer.recipes.qwen3_5.scoring import padded, score_fields
from openinfer.recipes.qwen3_5.weights import DeltaNet, Mixture, Weights
from openinfer.sampler.gpu import adjustment_fields
from openinfer.tensor import Arena, Tensor, float32, int32

MAX_STOP_IDS = 20
MAX_LOGPROBS = 20


def row_fields(
    max_rows: int, max_tokens: int, max_blocks: int, max_snapshots: int, vocab_size: int
) -> list[Field]:
    """The batch on the device. By slot (0 is padding): the state of a sequence. By row: the step's sequences, and where
    snapshots of their recurrent state go. By token: the ids that prompt chunks bring (-1: the token sampled last), and
    what is asked about the prompt."""
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
        Field("state_from", (slots,)),
        Field("state_to", (slots,)),
        Field("slots", (max_rows,)),
        Field("q_starts", (max_rows + 1,)),
        Field("emits", (max_rows,)),
        Field("snapshot_ends", (max_rows * max_snapshots,)),
        Field("snapshot_blocks", (max_rows * max_snapshots,)),
        Field("prompt", (max_tokens,)),
        *score_fields(max_rows, max_tokens),
    ]


@dataclass(frozen=True, slots=True)
class Buffers:
    """Activations, allocated once for the largest step; a smaller step uses their first rows. The last three of the
    layers' are one element wide where the model has no use for them."""

    token_ids: Tensor
    positions: Tensor
    token_slots: Tensor
    x: Tensor
    qkv: Tensor
    heads: Tensor
    mixed: Tensor
    values: Tensor
    mlp: Tensor
    ba: Tensor
    router: Tensor
    expert_ids: Tensor
    expert_weights: Tensor
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
        cls,
        config: Config,
        weights: Weights,
        arena: Arena,
        dtype: np.dtype[Any],
        max_tokens: int,
        max_rows: int,
    ) -> Buffers:
        """For steps of at most max_tokens tokens and max_rows rows."""
        mixers = [layer.mixer for layer in weights.layers]
        delta = next(mixer for mixer in mixers if isinstance(mixer, DeltaNet))
        mlp, experts = weights.layers[0].mlp, config.experts
        router = mlp.router.weight.shape[0] if isinstance(mlp, Mixture) else 1
        chosen = experts.chosen if experts else 1

        def by_token(width: int, kind: np.dtype[Any] = dtype) -> Tensor:
            return arena.alloc((max_tokens, width), kind)

        scored = padded(max_tokens, max_rows)
        return cls(
            token_ids=arena.alloc((max_tokens,), int32),
            positions=arena.alloc((max_tokens,), int32),
            token_slots=arena.alloc((max_tokens,), int32),
            x=by_token(config.hidden_size),
            qkv=by_token(config.qkv_size),
            heads=by_token(config.num_heads * config.head_dim),
            mixed=by_token(delta.in_proj.weight.shape[0]),
            values=by_token(config.z_size),
            mlp=by_token(experts.shared_size if experts else config.intermediate_size),
            ba=by_token(delta.ba.weight.shape[0] if delta.ba else 1),
            router=by_token(router),
            expert_ids=by_token(chosen, int32),
            expert_weights=by_token(chosen),
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
