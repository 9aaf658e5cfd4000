"""route_topk: router logits to the experts of each token and their weights."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic

import numpy as np

from openinfer.kernels.op.contract import FLOATS, expect, require
from openinfer.kernels.op.launch import Command, aligned, launch, power_of_two
from openinfer.kernels.op.op import Cost, Op, T, Workload, tensors
from openinfer.kernels.op.reference import Array, f32
from openinfer.kernels.op.target import Target
from openinfer.tensor import Tensor, int32


@dataclass(frozen=True, kw_only=True, slots=True)
class _Args(Generic[T]):
    """The K experts with the largest softmax(logits[t]), and those probabilities divided by their sum.

    logits [T, E], rows at any stride, and expert_weights [T, K] of one float dtype; expert_ids int32 [T, K]; K <= E.
    Softmax and quotient in float32, the weights rounded. Of equal logits the lower index comes first. A token of slot 0
    (token_slots int32 [T]) is padding: its ids are -1, and its weights 0.

    This rank has the experts first_expert .. first_expert + num_experts - 1 of E: expert_ids are counted from
    first_expert, and -1 for experts of other ranks, whose weights stay in the sum.
    """

    expert_ids: T
    expert_weights: T
    logits: T
    token_slots: T
    first_expert: int
    num_experts: int


def _check(a: _Args[Tensor]) -> None:
    expect("logits", a.logits, (-1, -1), *FLOATS, dense=False)
    tokens, experts = a.logits.shape
    require(tokens <= 1 or a.logits.strides[1] == 1, "the columns of logits must be next to each other")
    expect("expert_ids", a.expert_ids, (tokens, -1), int32)
    expect("expert_weights", a.expert_weights, a.expert_ids.shape, a.logits.dtype)
    expect("token_slots", a.token_slots, (tokens,), int32)
    chosen = a.expert_ids.shape[1]
    require(1 <= chosen <= experts, f"{chosen} experts a token are asked for; there are {experts}")
    require(
        a.first_expert >= 0 and 1 <= a.num_experts <= experts - a.first_expert,
        f"this rank has {a.num_experts} experts from {a.first_expert} on; there are {experts}",
    )


def _reference(a: _Args[Array]) -> None:
    wide, live = f32(a.logits), a.token_slots[:, None] != 0
    chosen = np.argsort(-wide, axis=1, kind="stable")[:, : a.expert_ids.shape[1]]
    # The softmax's denominator cancels in the quotient.
    best = np.exp(np.take_along_axis(wide, chosen, 1) - wide.max(axis=1, keepdims=True))
    mine = chosen - a.first_expert
    a.expert_ids[:] = np.where(live & (mine >= 0) & (mine < a.num_experts), mine, -1)
    a.expert_weights[:] = np.where(live, best / best.sum(axis=1, keepdims=True), 0)


def _launches(target: Target, a: _Args[Tensor]) -> Iterator[Command]:
    (tokens, experts), chosen = a.logits.shape, a.expert_ids.shape[1]
    yield launch(
        "openinfer.kernels.device.route",
        "route_topk",
        (tokens,),
        {
            **tensors(a, "expert_ids", "expert_weights", "logits", "token_slots"),
            "logits_stride": aligned(a.logits.strides[0]),
            "experts": experts,
            "first_expert": a.first_expert,
            "num_experts": a.num_experts,
        },
        {"K": chosen, "K_BLOCK": power_of_two(chosen), "BLOCK": power_of_two(experts)},
        num_warps=1,
    )


def _cost(workload: Workload, a: _Args[Tensor]) -> Cost:
    experts, chosen = a.logits.shape[1], a.expert_ids.shape[1]
    bytes_per_token = experts * a.logits.itemsize + chosen * (4 + a.logits.itemsize)
    return Cost(workload.tokens * bytes_per_token, workload.tokens * 4 * experts)


route_topk = Op("route_topk", _Args[Tensor], _check, _reference, _launches, _cost)
