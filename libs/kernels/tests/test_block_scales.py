"""Weights of float8_e4m3fn with a scale a block of 128 x 128, and norm weights of float32: the references."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from openinfer.kernels import (
    ContractError,
    CpuPack,
    Op,
    Target,
    Workload,
    experts_add,
    gate_up_silu,
    linear_add,
    norm_linear,
)
from openinfer.kernels.formats.linear import Linear
from openinfer.kernels.linear.choices import scaled_rule
from openinfer.kernels.op.op import mapped
from openinfer.tensor import Tensor, bfloat16

Array = np.ndarray[Any, Any]
F8 = np.dtype(ml_dtypes.float8_e4m3fn)


def run(op: Op[Any], **args: Any) -> None:
    op(CpuPack(batch_invariant=True), **mapped(args, np.ndarray, Tensor.from_numpy))


def quantized(weight: Array) -> tuple[Array, Array, Array]:
    """A float32 weight [N, K] as e4m3 values, their scales, and what the two mean; each block by itself."""
    n, k = weight.shape
    scales = np.zeros((-(-n // 128), -(-k // 128)), np.float32)
    values, meant = np.zeros((n, k), F8), np.zeros((n, k), np.float32)
    for i, j in np.ndindex(*scales.shape):
        block = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
        scales[i, j] = np.abs(weight[block]).max() / 448
        values[block] = (weight[block] / scales[i, j]).astype(F8)
        meant[block] = values[block].astype(np.float32) * scales[i, j]
    return values, scales, meant


def stacked(*weights: Array) -> list[Array]:
    """quantized() of projections that are stacked, each with blocks of its own."""
    return [np.concatenate(parts) for parts in zip(*(quantized(w) for w in weights), strict=True)]


@pytest.fixture
def numbers(rng: np.random.Generator) -> Any:
    # Blocks differ in size by much, so that a wrong block's scale shows.
    return lambda *shape: (rng.standard_normal(shape) * 4.0 ** rng.integers(-3, 4, shape)).astype(np.float32)


@pytest.mark.parametrize(("n", "k"), [(128, 128), (256, 256), (336, 208), (16, 400)])
def test_products_are_those_of_the_meant_weight(numbers: Any, n: int, k: int) -> None:
    values, scales, meant = quantized(numbers(n, k))
    x, norm_weight, h = numbers(3, k), numbers(k), numbers(3, k)
    got, want = np.zeros((2, 3, n), np.float32)
    run(norm_linear, out=got, x=x, norm_weight=norm_weight, weight=Linear(values, scales), eps=1e-6)
    run(norm_linear, out=want, x=x, norm_weight=norm_weight, weight=meant, eps=1e-6)
    np.testing.assert_array_equal(got, want)
    run(linear_add, x=got, h=h, weight=Linear(values, scales))
    run(linear_add, x=want, h=h, weight=meant)
    np.testing.assert_array_equal(got, want)
    swapped = scales[::-1, ::-1]
    for wrong in (
        [swapped, scales.T] if scales.shape == (2, 2) else [swapped][: scales.size - 1]
    ):  # negative control
        run(linear_add, x=got, h=h, weight=Linear(values, np.ascontiguousarray(wrong)))
        run(linear_add, x=want, h=h, weight=meant)
        assert (got != want).any()


@pytest.mark.parametrize("inter", [128, 208])
def test_the_halves_of_a_gated_product_have_blocks_of_their_own(numbers: Any, inter: int) -> None:
    values, scales, meant = stacked(numbers(inter, 160), numbers(inter, 160))
    x, norm_weight = numbers(3, 160), numbers(160)
    got, want = np.zeros((2, 3, inter), np.float32)
    run(gate_up_silu, out=got, x=x, norm_weight=norm_weight, weight=Linear(values, scales), eps=1e-6)
    run(gate_up_silu, out=want, x=x, norm_weight=norm_weight, weight=meant, eps=1e-6)
    np.testing.assert_array_equal(got, want)


def test_what_is_refused(numbers: Any) -> None:
    values, scales, meant = quantized(numbers(256, 256))
    out, x, norm_weight = np.zeros((1, 256), np.float32), numbers(1, 256), numbers(256)
    args = {"out": out, "x": x, "norm_weight": norm_weight, "eps": 1e-6}
    with pytest.raises(ContractError, match="weight is float8_e4m3fn; it must be float32"):
        run(norm_linear, weight=values, **args)
    with pytest.raises(ContractError, match="weight is float32; it must be float8_e4m3fn"):
        run(norm_linear, weight=Linear(meant, scales), **args)
    with pytest.raises(ContractError, match=r"scales of weight has shape \(2, 1\)"):
        run(norm_linear, weight=Linear(values, scales[:, :1].copy()), **args)


def test_a_float32_norm_weight_is_rounded_once(normal: Any) -> None:
    x, weight = normal(4, 64, scale=3.0), normal(32, 64)
    gain = (1 + normal(64).astype(np.float32)).astype(np.float32)
    out = np.zeros((4, 32), np.float32)
    run(norm_linear, out=out, x=x, norm_weight=gain, weight=weight, eps=1e-6)
    wide = x.astype(np.float64)
    normed = (wide / np.sqrt((wide**2).mean(1, keepdims=True) + 1e-6) * gain).astype(bfloat16)
    want = normed.astype(np.float64) @ weight.astype(np.float64).T
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-4)
    run(norm_linear, out=out, x=x, norm_weight=gain.astype(bfloat16), weight=weight, eps=1e-6)
    assert np.abs(out - want).max() > 1e-2  # negative control: a bf16 weight is another result


def mixture(
    numbers: Any, experts: int, chosen: int, hidden: int, inter: int, tokens: int, rng: Any
) -> dict[str, Any]:
    ids = np.stack([rng.permutation(experts)[:chosen] for _ in range(tokens)]).astype(np.int32)
    return {
        "x": numbers(tokens, hidden),
        "norm_weight": numbers(hidden),
        "expert_ids": ids,
        "expert_weights": rng.random((tokens, chosen)).astype(np.float32),
        "gate_up": rng.standard_normal((experts, 2 * inter, hidden)).astype(np.float32) / 8,
        "down": rng.standard_normal((experts, hidden, inter)).astype(np.float32) / 8,
        "eps": 1e-6,
    }


def test_experts_one_by_one(numbers: Any, rng: np.random.Generator) -> None:
    args = mixture(numbers, 5, 2, 64, 48, 7, rng)
    args["expert_ids"][3] = -1  # padding
    args["expert_ids"][4, 1] = -1
    before = args["x"].copy()
    run(experts_add, **args)
    for token in range(7):
        wide = before[token].astype(np.float64)
        h = wide / np.sqrt((wide**2).mean() + 1e-6) * args["norm_weight"]
        want = wide
        for expert, weight in zip(args["expert_ids"][token], args["expert_weights"][token], strict=True):
            if expert >= 0:
                gate, up = np.split(args["gate_up"][expert].astype(np.float64) @ h, 2)
                want = want + weight * (
                    args["down"][expert].astype(np.float64) @ (gate / (1 + np.exp(-gate)) * up)
                )
        np.testing.assert_allclose(args["x"][token], want, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(args["x"][3], before[3])


def test_experts_do_not_see_the_other_tokens(numbers: Any, rng: np.random.Generator) -> None:
    args = mixture(numbers, 4, 3, 32, 16, 19, rng)
    alone = []
    for token in range(19):
        one = {
            k: v[token : token + 1].copy() if k in ("x", "expert_ids", "expert_weights") else v
            for k, v in args.items()
        }
        run(experts_add, **one)
        alone.append(one["x"])
    run(experts_add, **args)
    np.testing.assert_array_equal(args["x"], np.concatenate(alone))


def test_experts_with_scales(numbers: Any, rng: np.random.Generator) -> None:
    args = mixture(numbers, 3, 2, 160, 208, 4, rng)
    ups = [stacked(*np.split(w, 2)) for w in args["gate_up"]]
    downs = [quantized(w) for w in args["down"]]
    scaled = {**args, "x": args["x"].copy()}
    for name, found in (("gate_up", ups), ("down", downs)):
        codes, scales, args[name] = (np.stack(p) for p in zip(*found, strict=True))
        scaled[name] = Linear(codes, scales)
    run(experts_add, **scaled)
    run(experts_add, **args)
    np.testing.assert_array_equal(scaled["x"], args["x"])


def test_experts_cost_what_is_hit(numbers: Any, rng: np.random.Generator) -> None:
    args = mixture(numbers, 8, 2, 64, 32, 64, rng)
    tensors = {k: Tensor.from_numpy(v) if isinstance(v, np.ndarray) else v for k, v in args.items()}
    whole = tensors["gate_up"].nbytes + tensors["down"].nbytes
    one = experts_add.cost(Workload.decode(1, 10), experts_add.args(**tensors))
    many = experts_add.cost(Workload.prefill(64), experts_add.args(**tensors))
    assert whole / 4 < one.bytes < whole / 3.5  # two of eight
    assert many.bytes > whole
    assert many.flops == 64 * one.flops
    shared = experts_add.cost(
        Workload.decode(1, 10), experts_add.args(**tensors, all_experts=32)
    )  # a rank of four
    assert shared.flops == one.flops / 4
    assert whole / 17 < shared.bytes < whole / 14


def test_one_kernel_for_any_number_of_tokens_if_batch_invariant() -> None:
    target = Target(90, 132, batch_invariant=True)
    assert len({scaled_rule(target, "linear_add", m, 2560, 4096) for m in (1, 8, 64, 4096)}) == 1
    assert len({scaled_rule(Target(90, 132), "linear_add", m, 2560, 4096) for m in (1, 8, 64)}) == 3


def scaled_weight(normal: Any, *parts: tuple[int, int]) -> tuple[Array, Array]:
    """float8 values and scales of stacked projections, whose blocks differ in size."""
    # Rows of blocks differ more than columns, so that scales that are transposed on a square grid show.
    sizes = [4.0 ** (2 * (np.arange(n)[:, None] // 128) + np.arange(k)[None, :] // 128) for n, k in parts]
    weights = [normal(n, k).astype(np.float32) * size for (n, k), size in zip(parts, sizes, strict=True)]
    values, scales, _ = stacked(*weights)
    return values, scales


@pytest.mark.parametrize("m", [1, 3, pytest.param(40, marks=pytest.mark.slow), 65])
@pytest.mark.parametrize(("n", "k"), [(256, 512), pytest.param(256, 256, marks=pytest.mark.slow), (336, 208)])
def test_kernels_take_scales(check_op: Any, normal: Any, m: int, n: int, k: int) -> None:
    values, scales = scaled_weight(normal, (n, k))
    x, h, gain = normal(m, k, scale=3.0), normal(m, k), normal(k)
    out, limit = np.full((m, n), np.nan, bfloat16), 6e-3
    args = {"norm_weight": gain, "weight": Linear(values, scales), "eps": 1e-6}
    check_op(norm_linear, {"out": limit}, out=out, x=x, **args)
    residual = normal(m, n, scale=9.0)
    got = check_op(linear_add, {"x": limit}, x=residual, h=h, weight=Linear(values, scales))
    scales[-1, -1] *= 1.1  # negative control: one scale 10 % off
    other = check_op(linear_add, {"x": limit}, x=residual, h=h, weight=Linear(values, scales))
    difference = np.linalg.norm((got["x"] - other["x"]).astype(np.float32))
    assert difference > limit * np.linalg.norm(got["x"].astype(np.float32))


@pytest.mark.parametrize("m", [1, 3, 65])
@pytest.mark.parametrize("k", [272, pytest.param(384, marks=pytest.mark.slow)])
def test_gated_kernels_take_scales(check_op: Any, normal: Any, m: int, k: int) -> None:
    values, scales = scaled_weight(normal, (208, k), (208, k))
    args = {"x": normal(m, k), "norm_weight": normal(k), "weight": Linear(values, scales), "eps": 1e-6}
    check_op(gate_up_silu, {"out": 1.5e-2}, out=np.full((m, 208), np.nan, bfloat16), **args)
