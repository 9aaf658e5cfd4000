"""From router logits to experts, in Triton's interpreter and on a GPU, against the references and by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from openinfer.kernels import ContractError, CpuPack, Op, route, route_topk
from openinfer.kernels.testing import error
from openinfer.tensor import Tensor, bfloat16, float32

Array = np.ndarray[Any, Any]
Both = Callable[..., tuple[dict[str, Array], dict[str, Array]]]
"""both(op, args, target): what the kernels and the reference leave (conftest.py)."""
Run = Callable[..., dict[str, Array]]
F = np.float32


def normal(rng: np.random.Generator, *shape: int) -> Array:
    return rng.standard_normal(shape).astype(F)


def run(op: Op[Any], **args: Any) -> None:
    """The reference, on these arrays."""
    op(CpuPack(), **{k: Tensor.from_numpy(v) if isinstance(v, np.ndarray) else v for k, v in args.items()})


def routing(
    rng: np.random.Generator, tokens: int, experts: int, chosen: int, *, learned: bool
) -> dict[str, Any]:
    """Arguments of `route`: token 1 is padding, token 2 has equal logits, token 3 has none above -15."""
    logits = rng.standard_normal((tokens, experts + 16)).astype(float32)[:, :experts]
    if tokens > 3:
        logits[2] = 0.5
        logits[3] -= 20
    table = np.stack([rng.permutation(experts)[:chosen] for _ in range(50)]).astype(np.int32)
    return {
        "expert_ids": np.full((tokens, chosen), 7, np.int32),
        "expert_weights": np.full((tokens, chosen), np.nan, float32),
        "logits": logits,
        "bias": (np.round(rng.standard_normal(experts) * 4) / 8).astype(float32) if learned else None,
        "table": None if learned else table,
        "token_ids": rng.integers(0, 50, tokens).astype(np.int32),
        "token_slots": np.where(np.arange(tokens) == 1, 0, 3).astype(np.int32),
        "scaling": 1.5,
        "first_expert": 0,
        "num_experts": experts,
    }


@pytest.mark.parametrize("learned", [True, False], ids=["bias", "table"])
@pytest.mark.parametrize(("tokens", "experts", "chosen"), [(9, 256, 6), (1, 16, 2), (5, 24, 3)])
def test_route(
    run_both: Both, rng: np.random.Generator, tokens: int, experts: int, chosen: int, learned: bool
) -> None:
    args = routing(rng, tokens, experts, chosen, learned=learned)
    got, want = run_both(route, args)
    np.testing.assert_array_equal(got["expert_ids"], want["expert_ids"])
    np.testing.assert_allclose(got["expert_weights"], want["expert_weights"], rtol=1e-5)
    if tokens > 1:
        assert (got["expert_ids"][1] == -1).all()
        assert not got["expert_weights"][1].any()
    half = args | {"first_expert": experts // 2, "num_experts": experts // 4}  # another rank's beside
    got, want = run_both(route, half)
    np.testing.assert_array_equal(got["expert_ids"], want["expert_ids"])
    assert (want["expert_ids"] == -1).any()
    np.testing.assert_allclose(got["expert_weights"], want["expert_weights"], rtol=1e-5)


@pytest.mark.parametrize(
    ("experts", "groups", "top", "chosen"), [(256, 8, 4, 8), (16, 4, 1, 3), (64, 1, 1, 8)]
)
@pytest.mark.parametrize("sigmoid", [True, False])
def test_route_from_the_best_groups(
    run_both: Both, rng: np.random.Generator, experts: int, groups: int, top: int, chosen: int, sigmoid: bool
) -> None:
    """Of DeepSeek-V3 and Kimi-K2: weights in the model's dtype, ties among groups and within them."""
    args = routing(rng, 9, experts, chosen, learned=True)
    args |= {"sigmoid": sigmoid, "groups": groups, "top_groups": top}
    args["expert_weights"] = args["expert_weights"].astype(bfloat16)
    got, want = run_both(route, args)
    np.testing.assert_array_equal(got["expert_ids"], want["expert_ids"])
    assert error(got["expert_weights"][2:], want["expert_weights"][2:]) < 4e-3
    for token in (0, 2, 3, 8):  # by hand
        logits = args["logits"][token].astype(np.float64)
        s = 1 / (1 + np.exp(-logits)) if sigmoid else np.sqrt(np.log1p(np.exp(logits)))
        left = (s.astype(F) + args["bias"]).reshape(groups, -1)
        best = [-(np.sort(group)[-1] + np.sort(group)[-2]) for group in left]
        kept = np.argsort(best, kind="stable")[:top]
        mask = np.isin(np.arange(groups), kept)[:, None]
        mine = np.argsort(-np.where(mask, left, -np.inf).reshape(-1), kind="stable")[:chosen]
        assert sorted(mine) == sorted(want["expert_ids"][token])
        right = s[want["expert_ids"][token]] / s[mine].sum() * 1.5
        np.testing.assert_allclose(want["expert_weights"][token].astype(F), right, rtol=5e-3)
    if groups > 1:
        free = run_both(route, args | {"groups": 1, "top_groups": 1})[1]
        assert (free["expert_ids"] != want["expert_ids"]).any()  # groups matter here


def test_groups_that_cannot_be_are_refused(rng: np.random.Generator) -> None:
    args = routing(rng, 4, 32, 4, learned=True)
    for change in (
        {"groups": 5},
        {"groups": 4, "top_groups": 5},
        {"groups": 32},
        {"groups": 16, "top_groups": 1},
    ):
        with pytest.raises(ContractError, match="groups have two experts or more"):
            run(route, **args | change)


def test_route_breaks_ties_by_index(run_both: Both, rng: np.random.Generator) -> None:
    args = routing(rng, 4, 32, 4, learned=True)
    args["bias"][:] = 0
    got, want = run_both(route, args)
    assert got["expert_ids"][2].tolist() == [0, 1, 2, 3]
    np.testing.assert_array_equal(got["expert_ids"], want["expert_ids"])


def test_padding_is_routed_without_a_look_at_the_table(interpreted: Run, rng: np.random.Generator) -> None:
    """While an engine warms up, the table is not loaded yet: what is in its memory names no experts."""
    args = routing(rng, 3, 16, 2, learned=False)
    args["token_slots"][:] = [0, 1, 0]
    args["token_ids"][:] = [0, 1, 0]
    args["table"][0] = 1 << 30
    got = interpreted(route, args)
    assert got["expert_ids"].tolist() == [[-1, -1], args["table"][1].tolist(), [-1, -1]]
    assert not got["expert_weights"][[0, 2]].any()


def test_routing_by_bias_and_by_table() -> None:
    rng = np.random.default_rng(8)
    logits, bias = normal(rng, 4, 8), normal(rng, 8)
    table = np.stack([rng.permutation(8)[:3] for _ in range(10)]).astype(np.int32)
    token_ids, token_slots = np.array([3, 9, 0, 1], np.int32), np.array([1, 2, 0, 1], np.int32)
    s = np.sqrt(np.log1p(np.exp(logits.astype(float))))
    for case in ({"bias": bias, "table": None}, {"bias": None, "table": table}):
        for first, count in ((0, 8), (2, 4)):
            ids, weights = np.empty((4, 3), np.int32), np.empty((4, 3), F)
            run(
                route,
                expert_ids=ids,
                expert_weights=weights,
                logits=logits,
                token_ids=token_ids,
                token_slots=token_slots,
                scaling=1.5,
                first_expert=first,
                num_experts=count,
                **case,
            )
            for t in (0, 1, 3):
                best = (
                    list(np.argsort(-(s + bias)[t])[:3])
                    if case["table"] is None
                    else list(table[token_ids[t]])
                )
                assert list(ids[t]) == [e - first if first <= e < first + count else -1 for e in best]
                assert np.abs(weights[t] - s[t, best] / s[t, best].sum() * 1.5).max() < 1e-5
            assert (ids[2] == -1).all()
            assert not weights[2].any()


@pytest.mark.parametrize(("experts", "chosen"), [(256, 8), (10, 3), (512, 10), (4, 4)])
def test_route_topk(run_both: Both, rng: np.random.Generator, experts: int, chosen: int) -> None:
    logits = (rng.standard_normal((6, experts + 3)) * 3).astype(bfloat16)[:, :experts]
    logits[1] = bfloat16.type(0)  # all alike
    logits[2, : experts // 2] = bfloat16.type(20)
    args = {
        "expert_ids": np.full((6, chosen), 99, np.int32),
        "expert_weights": np.full((6, chosen), np.nan, bfloat16),
        "logits": logits,
        "token_slots": np.array([1, 2, 3, 0, 5, 1], np.int32),
    }
    for first, count in ((0, experts), (experts // 2, experts // 4)):  # of one rank, and of one of several
        got, want = run_both(route_topk, args | {"first_expert": first, "num_experts": count})
        np.testing.assert_array_equal(got["expert_ids"], want["expert_ids"])
        assert error(got["expert_weights"], want["expert_weights"]) < 1e-3


@pytest.mark.parametrize("width", [64, 1040])
def test_route_topk_gates_a_shared_expert(run_both: Both, rng: np.random.Generator, width: int) -> None:
    """The gate is the column after the logits. Of padding it is applied too."""
    router, shared = ((rng.standard_normal((3, n)) * 4).astype(bfloat16) for n in (24, width))
    args = {
        "expert_ids": np.full((3, 2), 99, np.int32), "expert_weights": np.full((3, 2), np.nan, bfloat16),
        "logits": router[:, :16], "token_slots": np.array([1, 0, 2], np.int32), "first_expert": 0, "num_experts": 16,
    }  # fmt: skip
    alone, _ = run_both(route_topk, args)
    got, want = run_both(route_topk, args | {"shared": shared, "gate": router[:, 16:17]})
    for name in ("expert_ids", "expert_weights"):
        np.testing.assert_array_equal(got[name], alone[name])
    wide, gate = shared.astype(np.float64), router[:, 16:17].astype(np.float64)
    assert error(got["shared"], want["shared"]) < 1e-3
    assert error(want["shared"], wide / (1 + np.exp(-gate))) < 5e-3


def test_route_topk_by_hand() -> None:
    logits = np.array([[1, 5, 5, 0], [9, -9, 2, 3], [0, 0, 0, 0]], np.float32)
    for first, count, want in ((0, 4, [[1, 2], [0, 3], [-1, -1]]), (2, 2, [[-1, 0], [-1, 1], [-1, -1]])):
        ids, weights = np.full((3, 2), 7, np.int32), np.full((3, 2), 7, np.float32)
        run(
            route_topk,
            expert_ids=ids,
            expert_weights=weights,
            logits=logits,
            token_slots=np.array([4, 1, 0], np.int32),
            first_expert=first,
            num_experts=count,
        )
        assert ids.tolist() == want
        second = np.exp(-6) / (1 + np.exp(-6))
        np.testing.assert_allclose(weights, [[0.5, 0.5], [1 - second, second], [0, 0]], rtol=1e-6)
