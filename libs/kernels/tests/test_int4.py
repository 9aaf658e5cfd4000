"""INT4 weights: what the bytes and words mean, and kernels against the reference."""

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from openinfer.kernels import (
    ContractError,
    CpuPack,
    NullPack,
    Target,
    Workload,
    experts_add,
    gate_up_silu,
    linear_add,
    norm_linear,
)
from openinfer.kernels.formats.int4 import GROUPS, group_words, int4_values, pack, unpack
from openinfer.kernels.formats.linear import Linear
from openinfer.kernels.testing import copied, error, run_reference
from openinfer.tensor import Tensor, bfloat16

RNG = np.random.default_rng(4)
BF16 = 8e-3
OPS = [norm_linear, linear_add, gate_up_silu]


def normal(*shape: int, scale: float = 1.0) -> Any:
    return (RNG.standard_normal(shape) * scale).astype(bfloat16)


def quantized(n: int, k: int, group: int, dtype: Any = np.float16) -> tuple[Any, Any, Any]:
    """Bytes, words, and the values by the definition. Zero points and scales differ much."""
    codes, zeros = RNG.integers(0, 16, (n, k)), RNG.integers(0, 16, (n, k // group))
    scales = (RNG.uniform(0.1, 4, zeros.shape) * k**-0.5 / 5).astype(dtype)
    wide = np.repeat(scales.astype(np.float64), group, axis=1)
    values = (codes - np.repeat(zeros, group, axis=1)) * wide
    return pack(codes), group_words(scales, zeros), values


def test_where_a_column_is() -> None:
    """Column 32 i + j is in the low half of byte 16 i + j, column 32 i + 16 + j in its high half."""
    codes = RNG.integers(0, 16, (3, 96))
    packed = pack(codes)
    assert packed.shape == (3, 48)
    assert packed.dtype == np.uint8
    for column in range(96):
        run, j = divmod(column, 32)
        byte = packed[:, 16 * run + j % 16]
        np.testing.assert_array_equal(byte >> 4 if j >= 16 else byte & 15, codes[:, column])
    np.testing.assert_array_equal(unpack(packed), codes)


@pytest.mark.parametrize("dtype", [np.float16, bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("group", GROUPS)
def test_values_are_exact(group: int, dtype: Any) -> None:
    packed, words, values = quantized(48, 256, group, dtype)
    np.testing.assert_array_equal(int4_values(packed, words), values)
    np.testing.assert_array_equal(Linear(packed, words).values(), values)
    np.testing.assert_array_equal(np.concatenate(Linear(packed, words).halves()), values)


def test_every_scale_keeps_its_bits() -> None:
    """All finite numbers of both dtypes, subnormal ones too."""
    for dtype in (np.float16, ml_dtypes.bfloat16):
        scales = np.arange(1 << 16, dtype=np.uint16).view(dtype)
        scales = scales[np.isfinite(scales.astype(np.float32))]
        words = group_words(scales, 15)
        np.testing.assert_array_equal((words & ~15).view(np.float32), scales.astype(np.float32))
        assert (words & 15 == 15).all()
    with pytest.raises(ValueError, match="a scale is not finite"):
        group_words(np.array([1, np.nan], np.float16), 8)


def args_of(op: Any, tokens: int, n: int, k: int, group: int) -> dict[str, Any]:
    weight, words, _ = quantized(2 * n if op is gate_up_silu else n, k, group)
    common = {"weight": Linear(weight, words)}
    if op is linear_add:
        return {"x": normal(tokens, n), "h": normal(tokens, k), **common}
    out = np.full((tokens, n), np.nan, bfloat16)
    return {"out": out, "x": normal(tokens, k, scale=3.0), "norm_weight": normal(k), "eps": 1e-6, **common}


@pytest.mark.parametrize(
    ("tokens", "k", "group"), [(1, 256, 128), (13, 1024, 64), (70, 384, 32), (300, 128, 128)]
)
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_kernels_agree_with_the_reference(op: Any, tokens: int, k: int, group: int, check_op: Any) -> None:
    """n is no multiple of a tile. Few tokens, K in parts, several tiles of tokens, and the weight made bf16."""
    check_op(op, {"x" if op is linear_add else "out": BF16}, **args_of(op, tokens, 80, k, group))


@pytest.mark.parametrize(("k", "group"), [(128, 32), (128, 128), (384, 64)])
def test_kernels_unpack_exactly(k: int, group: int, check_op: Any) -> None:
    """Times the unit matrix: 384 tokens are those of a weight that is made bf16."""
    weight, words, values = quantized(80, k, group)
    args = {
        "x": np.zeros((k, 80), bfloat16),
        "h": np.eye(k).astype(bfloat16),
        "weight": Linear(weight, words),
    }
    np.testing.assert_array_equal(run_reference(linear_add, args)["x"], values.astype(bfloat16).T)
    check_op(linear_add, {"x": 0.0}, **args)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_the_reference_is_that_of_the_weights_that_are_meant(op: Any) -> None:
    args = args_of(op, 5, 48, 128, 32)
    floats = {
        n: v.astype(np.float32) if getattr(v, "dtype", None) == bfloat16 else v for n, v in args.items()
    }
    weight = args["weight"]
    meant = {**floats, "weight": int4_values(weight.weight, weight.scales)}
    name = "x" if op is linear_add else "out"
    got, want = run_reference(op, floats)[name], run_reference(op, meant)[name]
    np.testing.assert_array_equal(got, want)
    for wrong in (np.roll(weight.scales, 1, axis=1), weight.scales & ~15 | 8):  # negative controls
        other = run_reference(op, {**floats, "weight": replace(weight, scales=wrong)})
        assert error(other[name], want) > 0.05


def test_kernels_for_every_size_are_planned() -> None:
    """Batch-invariant engines have one product for all numbers of tokens: of the weight made bf16."""
    weight, words, _ = quantized(256, 256, 128)
    for invariant in (False, True):
        pack_ = NullPack(Target(90, 132, batch_invariant=invariant))
        for tokens in (1, 8, 64, 600):
            x, h = (Tensor.from_numpy(normal(tokens, 256)) for _ in range(2))
            layer = Linear(Tensor.from_numpy(weight), Tensor.from_numpy(words))
            linear_add(pack_, x=x, h=h, weight=layer)
        names = {spec.function for spec in pack_.specs()}
        assert "dequantize_int4" in names
        assert ("project_int4_packed" in names) is not invariant


def test_costs_count_the_bytes_of_codes_and_words() -> None:
    _, args = copied(args_of(linear_add, 4, 256, 512, 128))
    cost = linear_add.cost(Workload(4, 4, 0, 0), linear_add.args(**args))
    assert cost.flops == 2 * 4 * 256 * 512
    assert cost.bytes == 256 * 512 // 2 + 4 * 256 * 4 + 4 * (512 + 2 * 256) * 2


def test_groups_of_another_size_are_refused() -> None:
    args = args_of(linear_add, 2, 48, 128, 64)
    words = np.repeat(args["weight"].scales, 8, axis=1)  # groups of 8
    _, tensors = copied({**args, "weight": replace(args["weight"], scales=words)})
    with pytest.raises(
        ContractError, match=r"16 INT4 groups in 128 columns; a group has one of \(32, 64, 128\)"
    ):
        linear_add(CpuPack(), **tensors)


def mixture(tokens: int, count: int, hidden: int, inter: int, group: int, chosen: int = 2) -> dict[str, Any]:
    """Arguments of experts_add; some choices are no expert."""
    gate_up = [quantized(2 * inter, hidden, group)[:2] for _ in range(count)]
    down = [quantized(hidden, inter, group)[:2] for _ in range(count)]
    ids = np.stack([RNG.permutation(count)[:chosen] for _ in range(tokens)]).astype(np.int32)
    ids[:: tokens // 2 + 1, 0] = -1
    return {
        "x": normal(tokens, hidden), "norm_weight": normal(hidden), "expert_ids": ids,
        "expert_weights": RNG.uniform(0.1, 1, ids.shape).astype(bfloat16), "eps": 1e-6,
        "gate_up": Linear(*map(np.stack, zip(*gate_up, strict=True))),
        "down": Linear(*map(np.stack, zip(*down, strict=True))),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("tokens", "hidden", "inter", "group"), [(1, 128, 96, 32), (9, 80 + 48, 128, 64), (150, 128, 128, 128)]
)
def test_experts_agree_with_the_reference(
    tokens: int, hidden: int, inter: int, group: int, check_op: Any
) -> None:
    """A token, few rows an expert, and more than fill a tile."""
    check_op(experts_add, {"x": 2 * BF16}, **mixture(tokens, 4, hidden, inter, group))


def test_a_token_alone_has_the_bits_that_it_has_among_others(check_alone: Any) -> None:
    check_alone(experts_add, mixture(150, 4, 128, 128, 128), "x")


def test_the_reference_of_experts_is_that_of_the_weights_that_are_meant() -> None:
    args = mixture(5, 3, 64, 32, 32)
    floats = {
        n: v.astype(np.float32) if getattr(v, "dtype", None) == bfloat16 else v for n, v in args.items()
    }
    meant = dict(floats)
    for name in ("gate_up", "down"):
        meant |= {name: int4_values(args[name].weight, args[name].scales)}
    want = run_reference(experts_add, meant)["x"]
    np.testing.assert_array_equal(run_reference(experts_add, floats)["x"], want)
    swapped = {**floats, "down": replace(args["down"], weight=args["down"].weight[::-1].copy())}
    assert error(run_reference(experts_add, swapped)["x"], want) > 0.05  # negative control


@pytest.mark.gpu
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("tokens", [1, 8, 33, 128, 256, 1024])
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_kernels_on_a_gpu(op: Any, tokens: int, group: int, check_op_gpu: Any) -> None:
    check_op_gpu(op, {"x" if op is linear_add else "out": BF16}, **args_of(op, tokens, 1088, 2560, group))


@pytest.mark.gpu
def test_kernels_unpack_exactly_on_a_gpu(check_op_gpu: Any) -> None:
    for k in (128, 1024):  # in the product, and made bf16
        weight, words, _ = quantized(80, k, 128)
        x, h = np.zeros((k, 80), bfloat16), np.eye(k).astype(bfloat16)
        check_op_gpu(linear_add, {"x": 0.0}, x=x, h=h, weight=Linear(weight, words))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 16, 300])
def test_experts_on_a_gpu(tokens: int, check_op_gpu: Any) -> None:
    check_op_gpu(experts_add, {"x": 2 * BF16}, **mixture(tokens, 8, 512, 256, 128))
