"""route_topk: router logits to the experts of each token and their weights."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from openinfer.kernels.op.contract import FLOATS, expect, require
from openinfer.kernels.op.launch import Command, aligned, launch, power_of_two
from openinfer.kernels.op.op import Cost, Op, Workload
from openinfer.kernels.op.reference import Array, f32
from openinfer.kernels.op.target import Target
from openinfer.tensor import Tensor, int32


def _contract(
    *,
    expert_ids: Tensor,
    expert_weights: Tensor,
    logits: Tensor,
    token_slots: Tensor,
    first_expert: int,
    num_experts: int,
) -> None:
    """The K experts with the largest softmax(logits[t]), and those probabilities divided by their sum.

    logits [T, E], rows at any stride, and expert_weights [T, K] of one float dtype; expert_ids int32 [T, K]; K <= E.
    Softmax and quotient in float32, the weights rounded. Of equal logits the lower index comes first. A token of slot 0
    (token_slots int32 [T]) is padding: its ids are -1, and its weights 0.

    This rank has the experts first_expert .. first_expert + num_experts - 1 of E: expert_ids are counted from
    first_expert, and -1 for experts of other ranks, whose weights stay in the sum.
    """
    expect("logits", logits, (-1, -1), *FLOATS, dense=False)
    tokens, experts = logits.shape
    require(tokens <= 1 or logits.strides[1] == 1, "the columns of logits must be next to each other")
    expect("expert_ids", expert_ids, (tokens, -1), int32)
    expect("expert_weights", expert_weights, expert_ids.shape, logits.dtype)
    expect("token_slots", token_slots, (tokens,), int32)
    chosen = expert_ids.shape[1]
    require(1 <= chosen <= experts, f"{chosen} experts a token are asked for; there are {experts}")
    require(
        first_expert >= 0 and 1 <= num_experts <= experts - first_expert,
        f"this rank has {num_experts} experts from {first_expert} on; there are {experts}",
    )


def _reference(
    *,
    expert_ids: Array,
    expert_weights: Array,
    logits: Array,
    token_slots: Array,
    first_expert: int,
    num_experts: int,
) -> None:
    wide, live = f32(logits), token_slots[:, None] != 0
    chosen = np.argsort(-wide, axis=1, kind="stable")[:, : expert_ids.shape[1]]
    # The softmax's denominator cancels in the quotient.
    best = np.exp(np.take_along_axis(wide, chosen, 1) - wide.max(axis=1, keepdims=True))
    mine = chosen - first_expert
    expert_ids[:] = np.where(live & (mine >= 0) & (mine < num_experts), mine, -1)
    expert_weights[:] = np.where(live, best / best.sum(axis=1, keepdims=True), 0)


def _launches(
    target: Target,
    *,
    expert_ids: Tensor,
    expert_weights: Tensor,
    logits: Tensor,
    token_slots: Tensor,
    first_expert: int,
    num_experts: int,
) -> Iterator[Command]:
    (tokens, experts), chosen = logits.shape, expert_ids.shape[1]
    yield launch(
        "openinfer.kernels.device.route",
        "route_topk",
        (tokens,),
        {
            "expert_ids": expert_ids,
            "expert_weights": expert_weights,
            "logits": logits,
            "token_slots": token_slots,
            "logits_stride": aligned(logits.strides[0]),
            "experts": experts,
            "first_expert": first_expert,
            "num_experts": num_experts,
        },
        {"K": chosen, "K_BLOCK": power_of_two(chosen), "BLOCK": power_of_two(experts)},
        num_warps=1,
    )


def _cost(workload: Workload, *, logits: Tensor, expert_ids: Tensor, **rest: object) -> Cost:
    experts, chosen = logits.shape[1], expert_ids.shape[1]
    bytes_per_token = experts * logits.itemsize + chosen * (4 + logits.itemsize)
    return Cost(workload.tokens * bytes_per_token, workload.tokens * 4 * experts)


route_topk = Op("route_topk", _contract, reference=_reference, launches=_launches, cost=_cost)
