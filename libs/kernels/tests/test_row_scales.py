"""Float8 weights with a scale for each row: kernels against the reference, and against the weights that they mean."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from openinfer.kernels import (
    ContractError,
    CpuPack,
    NullPack,
    Target,
    experts_add,
    gate_up_silu,
    linear_add,
    norm_linear,
)
from openinfer.kernels.formats.linear import Linear
from openinfer.kernels.linear import choices
from openinfer.kernels.store.tables import ProductChoice
from openinfer.kernels.testing import copied, error, run_reference
from openinfer.tensor import Tensor, bfloat16, float8_e4m3fn

RNG = np.random.default_rng(4)
BF16 = 8e-3
CHOICES = {
    "gemv": (1, ProductChoice("gemv", 1, 8, 64)),
    "whole blocks": (1, ProductChoice("gemv", 1, 8, 128)),
    "small": (13, ProductChoice("small", 16, 32, 32)),
    "split": (9, ProductChoice("small", 16, 32, 32, split=4)),
    "pointer": (70, ProductChoice("pointer", 32, 64, 32)),
}


def normal(*shape: int, scale: float = 1.0) -> Any:
    return (RNG.standard_normal(shape) * scale).astype(bfloat16)


def quantized(n: int, k: int) -> tuple[Any, Any]:
    """Codes, and scales [n, 1] that differ much from row to row."""
    weight = RNG.standard_normal((n, k)).astype(np.float32) * RNG.uniform(0.1, 4, (n, 1)) * k**-0.5
    scales = np.abs(weight).max(axis=1, keepdims=True).astype(np.float32) / np.float32(448)
    return (weight / scales).astype(float8_e4m3fn), scales


@pytest.fixture(params=CHOICES)
def tokens(request: Any, monkeypatch: Any) -> int:
    """Every product of the test uses one kernel, with this many tokens."""
    count, choice = CHOICES[request.param]
    for name in ("choose", "scaled_rule"):
        monkeypatch.setattr(choices, name, lambda *_: choice)
    return int(count)


def args_of(op: Any, tokens: int, n: int, k: int) -> dict[str, Any]:
    weight, scales = quantized(2 * n if op is gate_up_silu else n, k)
    common = {"weight": Linear(weight, scales)}
    if op is linear_add:
        return {"x": normal(tokens, n), "h": normal(tokens, k), **common}
    out = np.full((tokens, n), np.nan, bfloat16)
    return {"out": out, "x": normal(tokens, k, scale=3.0), "norm_weight": normal(k), "eps": 1e-6, **common}


@pytest.mark.parametrize("op", [norm_linear, linear_add, gate_up_silu], ids=lambda op: op.name)
def test_kernels_agree_with_the_reference(op: Any, tokens: int, check_op: Any) -> None:
    """n is no multiple of a tile, and of no block of 128."""
    name = "x" if op is linear_add else "out"
    check_op(op, {name: BF16}, **args_of(op, tokens, 80, 256))


@pytest.mark.parametrize("op", [norm_linear, linear_add, gate_up_silu], ids=lambda op: op.name)
def test_the_reference_is_that_of_the_weights_that_are_meant(op: Any) -> None:
    args = args_of(op, 5, 48, 64)
    floats = {
        n: v.astype(np.float32) if getattr(v, "dtype", None) == bfloat16 else v for n, v in args.items()
    }
    meant = {**floats, "weight": args["weight"].values()}
    name = "x" if op is linear_add else "out"
    got, want = run_reference(op, floats)[name], run_reference(op, meant)[name]
    np.testing.assert_array_equal(got, want)
    scales = np.roll(args["weight"].scales, 1, axis=0)
    rolled = {**floats, "weight": replace(args["weight"], scales=scales)}
    assert error(run_reference(op, rolled)[name], want) > 0.05  # negative control


def test_kernels_for_every_size_are_planned() -> None:
    """Also where one kernel serves all numbers of tokens."""
    weight, scales = (Tensor.from_numpy(array) for array in quantized(256, 256))
    for invariant in (False, True):
        pack = NullPack(Target(90, 132, batch_invariant=invariant))
        for tokens in (1, 8, 64, 600):
            x, h = (Tensor.from_numpy(normal(tokens, 256)) for _ in range(2))
            linear_add(pack, x=x, h=h, weight=Linear(weight, scales))
        names = {spec.function for spec in pack.specs()}
        assert "dequantize_rows" in names
        assert "gemv_scaled" not in names


def test_experts_take_blocks_alone() -> None:
    codes, scales = quantized(64, 32)
    down, _ = quantized(32, 32)
    args = {
        "x": normal(2, 32), "norm_weight": normal(32), "expert_ids": np.zeros((2, 1), np.int32),
        "expert_weights": np.ones((2, 1), bfloat16), "gate_up": Linear(codes[None], scales[None]),
        "down": Linear(down[None], np.ones((1, 1, 1), np.float32)),
    }  # fmt: skip
    _, tensors = copied(args)
    with pytest.raises(ContractError, match="scales of gate_up has shape"):
        experts_add(CpuPack(), **tensors, eps=1e-6)
