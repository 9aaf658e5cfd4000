"""route: router logits, or token ids, to the experts of each token and their weights. route_topk: by a softmax."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic

import numpy as np

from openinfer.kernels.op.cases import Memory, OpCase
from openinfer.kernels.op.contract import FLOATS, expect, expect_columns, expect_each, require
from openinfer.kernels.op.launch import Arg, Command, aligned, launch, power_of_two
from openinfer.kernels.op.op import Cost, Op, T, Workload, tensors
from openinfer.kernels.op.reference import Array, f32, rounded
from openinfer.kernels.op.target import Target
from openinfer.tensor import Tensor, float32, int32

_DEVICE = "openinfer.kernels.device.route"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Args(Generic[T]):
    """The K experts of each token, and s / (sum of their s) * scaling, with s = sqrt(softplus(logits[t])), or with
    `sigmoid` s = sigmoid(logits[t]); float32.

    Chosen are the K largest of s + bias (float32 [E]; of equal ones the lower index comes first), or, where bias is
    None, table[token_ids[t]] (int32 [V, K], each in [0, E), no expert twice). Bias has no part in the weights. With
    several `groups`, each of as many neighbours, only those `top_groups` are chosen from whose two largest s + bias
    have the largest sum.

    This rank has the experts first_expert .. first_expert + num_experts - 1 of E: expert_ids are counted from
    first_expert, and -1 for experts of other ranks, whose weights stay in the sum. A token of slot 0 is padding: its
    ids are -1 and its weights 0. logits float32 [T, E], rows at any stride; token_ids, token_slots int32 [T];
    expert_ids int32 [T, K]; expert_weights [T, K] float32, or rounded to another float dtype; K <= E.
    """

    expert_ids: T
    expert_weights: T
    logits: T
    bias: T | None
    table: T | None
    token_ids: T
    token_slots: T
    scaling: float
    first_expert: int
    num_experts: int
    sigmoid: bool = False
    groups: int = 1
    top_groups: int = 1


def _check(a: _Args[Tensor]) -> None:
    expect_columns("logits", a.logits, (-1, -1), float32)
    tokens, experts = a.logits.shape
    expect("expert_ids", a.expert_ids, (tokens, -1), int32)
    chosen = a.expert_ids.shape[1]
    expect("expert_weights", a.expert_weights, (tokens, chosen), *FLOATS)
    require((a.bias is None) != (a.table is None), "experts are chosen by bias or by table: give one of them")
    if a.bias is not None:
        expect("bias", a.bias, (experts,), float32)
    if a.table is not None:
        expect("table", a.table, (-1, chosen), int32)
    expect_each(a, (tokens,), int32, "token_ids", "token_slots")
    _expect_experts(a, chosen, experts)
    require(a.scaling > 0, f"scaling is {a.scaling}; it must be positive")
    size = experts // a.groups
    require(
        1 <= a.top_groups <= a.groups and experts == a.groups * size and (a.groups == 1 or size > 1)
        and chosen <= a.top_groups * size and (a.groups == 1 or a.bias is not None),
        f"{chosen} of {experts} experts in {a.top_groups} of {a.groups} groups: groups have two experts or more, as "
        "many each, are chosen from by bias, and have as many as a token takes",
    )  # fmt: skip


def _expect_experts(a: "_Args[Tensor] | _TopkArgs[Tensor]", chosen: int, experts: int) -> None:
    """Raise ContractError unless a token can have so many experts, and the rank's are among all."""
    require(1 <= chosen <= experts, f"{chosen} experts a token are asked for; there are {experts}")
    own = a.first_expert >= 0 and 1 <= a.num_experts <= experts - a.first_expert
    require(own, f"this rank has {a.num_experts} experts from {a.first_expert} on; there are {experts}")


def _reference(a: _Args[Array]) -> None:
    live, count = a.token_slots[:, None] != 0, a.expert_ids.shape[1]
    small = np.exp(-np.abs(a.logits))
    if a.sigmoid:
        s = np.where(a.logits < 0, small, np.float32(1)) / (1 + small)
    else:
        s = np.sqrt(np.maximum(a.logits, 0) + np.log1p(small))
    if a.table is None:
        left = s + a.bias
        if a.groups > 1:
            grouped = left.reshape(len(left), a.groups, -1)
            best = np.sort(grouped, axis=2)[:, :, -2:].sum(axis=2)
            out = np.argsort(-best, axis=1, kind="stable")[:, a.top_groups :]
            np.put_along_axis(grouped, out[:, :, None], -np.inf, 1)
        chosen = np.argsort(-left, axis=1, kind="stable")[:, :count]
    else:
        chosen = a.table[a.token_ids]
    best = np.take_along_axis(s, chosen, 1)
    total = best[:, 0].copy()
    for j in range(1, count):  # one after the other: numpy's sums depend on what lies beside
        total += best[:, j]
    mine = chosen - a.first_expert
    a.expert_ids[:] = np.where(live & (mine >= 0) & (mine < a.num_experts), mine, -1)
    a.expert_weights[:] = np.where(live, best / total[:, None] * np.float32(a.scaling), 0)


def _launches(target: Target, a: _Args[Tensor]) -> Iterator[Command]:
    (tokens, experts), chosen = a.logits.shape, a.expert_ids.shape[1]
    fits = a.groups == 1 or (experts == power_of_two(experts) and a.groups == power_of_two(a.groups))
    require(fits, f"{experts} experts in {a.groups} groups; on a GPU both are powers of two")
    args: dict[str, Arg] = {**tensors(a, "expert_ids", "expert_weights", "logits")}
    args["bias"] = a.logits if a.bias is None else a.bias
    args["table"] = a.expert_ids if a.table is None else a.table
    args |= {**tensors(a, "token_ids", "token_slots"), "logits_stride": aligned(a.logits.strides[0])}
    args |= {"experts": experts, "scaling": a.scaling}
    args |= {"first_expert": a.first_expert, "num_experts": a.num_experts}
    constants = {"K": chosen, "K_BLOCK": power_of_two(chosen), "BLOCK": power_of_two(experts)}
    constants |= {"LEARNED": a.bias is not None, "SIGMOID": a.sigmoid}
    constants |= {"GROUPS": a.groups, "TOP_GROUPS": a.top_groups}
    yield launch(_DEVICE, "route", (tokens,), args, constants, num_warps=1, early=target.starts_early)


def _cost(workload: Workload, a: _Args[Tensor]) -> Cost:
    experts, chosen = a.logits.shape[1], a.expert_ids.shape[1]
    return Cost(workload.tokens * (4 * experts + 12 * chosen), workload.tokens * 8 * experts)


route = Op(
    "route", _Args[Tensor], _check, _reference, _launches, _cost, writes=("expert_ids", "expert_weights")
)


def cases(memory: Memory) -> Iterator[OpCase]:
    """DeepSeek-V4-Flash's router, by bias and by table."""
    experts, chosen, vocabulary = 256, 6, 129280
    table = memory.ints(memory.rng.integers(0, experts, (vocabulary, chosen)))
    for tokens in (1, 32, 128, 4096):
        args = {
            "expert_ids": memory.empty(tokens, chosen, dtype=int32),
            "expert_weights": memory.empty(tokens, chosen, dtype=float32),
            "logits": memory.normal(tokens, experts, dtype=float32),
            "token_ids": memory.ints(memory.rng.integers(0, vocabulary, tokens)),
            "token_slots": memory.ints(np.ones(tokens)),
            "scaling": 1.5, "first_expert": 0, "num_experts": experts,
        }  # fmt: skip
        for name, how in (("bias", {"bias": memory.normal(experts, dtype=float32), "table": None}),
                          ("table", {"bias": None, "table": table})):  # fmt: skip
            yield OpCase(
                f"V4-Flash by {name}, {tokens} tokens", route, [args | how], Workload(tokens, tokens, 0, 0)
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class _TopkArgs(Generic[T]):
    """The K experts with the largest softmax(logits[t]), and those probabilities divided by their sum.

    logits [T, E], rows at any stride, and expert_weights [T, K] of one float dtype; expert_ids int32 [T, K]; K <= E.
    Softmax and quotient in float32, the weights rounded. Of equal logits the lower index comes first. A token of slot 0
    (token_slots int32 [T]) is padding: its ids are -1, and its weights 0.

    This rank has the experts first_expert .. first_expert + num_experts - 1 of E: expert_ids are counted from
    first_expert, and -1 for experts of other ranks, whose weights stay in the sum.

    shared [T, I] of logits' dtype, where there is a `gate` [T, 1], rows at any stride: what a shared expert's last
    layer reads becomes shared * sigmoid(gate), in place. The sigmoid is rounded, then the product.
    """

    expert_ids: T
    expert_weights: T
    logits: T
    token_slots: T
    first_expert: int
    num_experts: int
    shared: T | None = None
    gate: T | None = None


def _topk_check(a: _TopkArgs[Tensor]) -> None:
    expect_columns("logits", a.logits, (-1, -1), *FLOATS)
    tokens, experts = a.logits.shape
    expect("expert_ids", a.expert_ids, (tokens, -1), int32)
    expect("expert_weights", a.expert_weights, a.expert_ids.shape, a.logits.dtype)
    expect("token_slots", a.token_slots, (tokens,), int32)
    _expect_experts(a, a.expert_ids.shape[1], experts)
    require((a.shared is None) == (a.gate is None), "shared and gate come together")
    if a.shared is not None and a.gate is not None:
        expect("shared", a.shared, (tokens, -1), a.logits.dtype)
        expect("gate", a.gate, (tokens, 1), a.logits.dtype, dense=False)


def _topk_reference(a: _TopkArgs[Array]) -> None:
    wide, live = f32(a.logits), a.token_slots[:, None] != 0
    chosen = np.argsort(-wide, axis=1, kind="stable")[:, : a.expert_ids.shape[1]]
    # The softmax's denominator cancels in the quotient.
    best = np.exp(np.take_along_axis(wide, chosen, 1) - wide.max(axis=1, keepdims=True))
    mine = chosen - a.first_expert
    a.expert_ids[:] = np.where(live & (mine >= 0) & (mine < a.num_experts), mine, -1)
    a.expert_weights[:] = np.where(live, best / best.sum(axis=1, keepdims=True), 0)
    if a.shared is not None and a.gate is not None:
        half = np.float32(0.5)
        a.shared[:] = f32(a.shared) * rounded(half + half * np.tanh(f32(a.gate) * half), a.shared.dtype)


def _topk_launches(target: Target, a: _TopkArgs[Tensor]) -> Iterator[Command]:
    (tokens, experts), chosen = a.logits.shape, a.expert_ids.shape[1]
    shared, gate = a.logits if a.shared is None else a.shared, a.logits if a.gate is None else a.gate
    width, early = shared.shape[1], target.starts_early
    block = min(1024, power_of_two(width))
    args: dict[str, Arg] = {**tensors(a, "expert_ids", "expert_weights", "logits", "token_slots")}
    args |= {"shared": shared, "gate": gate, "logits_stride": aligned(a.logits.strides[0])}
    args |= {"gate_stride": aligned(gate.strides[0]), "width": aligned(width), "experts": experts}
    args |= {"first_expert": a.first_expert, "num_experts": a.num_experts}
    grid = (tokens, 1 if a.shared is None else 1 + -(-width // block))
    constants = {"K": chosen, "K_BLOCK": power_of_two(chosen), "BLOCK": power_of_two(experts)}
    constants["COLUMNS"] = block
    yield launch(_DEVICE, "route_topk", grid, args, constants, num_warps=1, early=early)


def _topk_cost(workload: Workload, a: _TopkArgs[Tensor]) -> Cost:
    experts, chosen = a.logits.shape[1], a.expert_ids.shape[1]
    columns = experts + chosen + (0 if a.shared is None else 2 * a.shared.shape[1] + 1)
    bytes_per_token = 4 * chosen + columns * a.logits.itemsize
    return Cost(workload.tokens * bytes_per_token, workload.tokens * 4 * experts)


route_topk = Op(
    "route_topk", _TopkArgs[Tensor], _topk_check, _topk_reference, _topk_launches, _topk_cost,
    writes=("expert_ids", "expert_weights", "shared"),
)  # fmt: skip
