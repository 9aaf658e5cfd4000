"""FP4 and INT8 weights: kernels against the reference, whose values are those of the formats' definitions."""

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from openinfer.kernels import (
    ContractError,
    NullPack,
    Target,
    experts_add,
    gate_up_silu,
    linear_add,
    norm_linear,
)
from openinfer.kernels.formats.fp4 import Fp4, fp4_pairs, fp4_scales
from openinfer.kernels.formats.int4 import pack
from openinfer.kernels.formats.int8 import Int8
from openinfer.kernels.formats.linear import Linear
from openinfer.kernels.op.rounding import FP4_VALUES, coded
from openinfer.kernels.op.target import shared_bytes
from openinfer.kernels.store.cubins import Store
from openinfer.kernels.testing import of_the_day, run_reference
from openinfer.tensor import Tensor, bfloat16, float32, int32

RNG = np.random.default_rng(8)
BF16 = 8e-3
OPS = [norm_linear, linear_add, gate_up_silu]


def normal(*shape: int, scale: float = 1.0) -> Any:
    return (RNG.standard_normal(shape) * scale).astype(bfloat16)


def nvfp4(*shape: int) -> tuple[Linear[Any], Any]:
    """A weight, and its values by the definition. Rows have factors of their own."""
    k, codes = shape[-1], RNG.integers(0, 16, shape)
    scales = RNG.uniform(0.01, 448, (*shape[:-1], k // 16)).astype(ml_dtypes.float8_e4m3fn)
    scales.reshape(-1)[:2] = 448, 2**-9  # the largest, and a subnormal number
    factors = RNG.uniform(1, 4, (*shape[:-1], 1)).astype(np.float32) * np.float32(k**-0.5 / 900)
    values = FP4_VALUES[codes] * np.repeat(scales.astype(np.float32), 16, axis=-1) * factors
    return Linear(fp4_pairs(pack(codes)), fp4_scales(scales, factors)), values


def mxfp4(*shape: int) -> tuple[Linear[Any], Any]:
    codes, exponents = RNG.integers(0, 16, shape), RNG.integers(-12, -5, (*shape[:-1], shape[-1] // 32))
    scales = 2.0 ** exponents.astype(np.float32)
    weight = Linear(fp4_pairs(pack(codes)), fp4_scales(np.repeat(scales, 2, -1), 1.0))
    return weight, FP4_VALUES[codes] * np.repeat(scales, 32, -1)


def int8(group: int) -> Any:
    def make(*shape: int) -> tuple[Linear[Any], Any]:
        k, codes = shape[-1], RNG.integers(-128, 128, shape).astype(np.int8)
        count = k // group if group else 1
        scales = RNG.uniform(0.1, 2, (*shape[:-1], count)).astype(np.float32) * np.float32(k**-0.5 / 90)
        return Linear(codes, scales), codes * np.repeat(scales, k // count, axis=-1)

    return make


KINDS = {"NVFP4": nvfp4, "MXFP4": mxfp4, "INT8": int8(0), "INT8 in groups of 64": int8(64)}
FORMS = {"NVFP4": Fp4(), "MXFP4": Fp4(), "INT8": Int8(0), "INT8 in groups of 64": Int8(64)}


def args_of(op: Any, kind: str, tokens: int, n: int, k: int) -> tuple[dict[str, Any], Any]:
    weight, values = KINDS[kind](2 * n if op is gate_up_silu else n, k)
    if op is linear_add:
        return {"x": normal(tokens, n), "h": normal(tokens, k), "weight": weight}, values
    out = np.full((tokens, n), np.nan, bfloat16)
    x = normal(tokens, k, scale=3.0)
    return {"out": out, "x": x, "norm_weight": normal(k), "eps": 1e-6, "weight": weight}, values


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_those_of_the_definition(kind: str) -> None:
    weight, values = KINDS[kind](48, 256)
    assert weight.form == FORMS[kind]
    assert weight.shape == (48, 256)
    np.testing.assert_array_equal(weight.values(), values.astype(np.float32))


def test_scales_are_those_of_a_row_and_small_ones_are_not_less_than_2_to_the_31st_of_its_largest() -> None:
    codes = np.full((4, 64), 2, np.uint8)  # 1.0
    scales = np.array([[0] * 4, [2.0**127, 1.5, 2.0**97, 0], [448, 2**-9, 7 * 2.0**-9, 1], [2.0**-126] * 4])
    weight = Linear(fp4_pairs(pack(codes)), fp4_scales(scales, np.float32([[3], [1], [0.5], [2.0**100]])))
    least = 2.0 ** (127 - 31)
    want = [[0] * 4, [2.0**127, least, 2.0**97, least], [224, 2**-10, 7 * 2.0**-10, 0.5], [2.0**-26] * 4]
    np.testing.assert_array_equal(weight.values()[:, ::16], np.float32(want))
    for wrong, why in ((1 + 2**-4, "more digits"), (-1, "negative"), (np.inf, "not finite")):
        with pytest.raises(ValueError, match=why):
            fp4_scales(np.full((1, 4), wrong), 1.0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
@pytest.mark.parametrize(("tokens", "k"), [(1, 512), (13, 1024), (70, 384)])
def test_kernels_agree_with_the_reference(op: Any, kind: str, tokens: int, k: int, check_op: Any) -> None:
    """n is no multiple of a tile. Few tokens, K in parts, and the weight made bf16."""
    args, _ = args_of(op, kind, tokens, 80, k)
    check_op(op, {"x" if op is linear_add else "out": BF16}, **args)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [128, 192, 384])
def test_kernels_unpack_exactly(kind: str, k: int, check_op: Any) -> None:
    """Times the unit matrix, a part of it for few tokens. 192 columns are no multiple of what FP4's kernel takes."""
    weight, values = KINDS[kind](80, k)
    for h in (np.eye(k), np.eye(k)[k // 2 : k // 2 + 60]):
        args = {"x": np.zeros((len(h), 80), bfloat16), "h": h.astype(bfloat16), "weight": weight}
        want = (h @ values.astype(np.float64).T).astype(np.float32).astype(bfloat16)
        np.testing.assert_array_equal(run_reference(linear_add, args)["x"], want)
        check_op(linear_add, {"x": 0.0}, **args)


@pytest.mark.parametrize("kind", KINDS)
def test_mixtures_agree_with_the_reference(kind: str, check_op: Any) -> None:
    for tokens in (2, 40):
        check_op(experts_add, {"x": BF16}, **mixture_args(kind, tokens, 3, 128, 256))


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_alone_has_the_bits_that_it_has_among_others(kind: str, check_alone: Any) -> None:
    check_alone(experts_add, mixture_args(kind, 70, 3, 128, 128), "x")


def mixture_args(kind: str, tokens: int, experts: int, hidden: int, inter: int) -> dict[str, Any]:
    """One expert that all tokens have, and others that none has."""
    ids = np.zeros((tokens, 2), np.int32)
    ids[:, 1] = np.where(np.arange(tokens) % 3, experts - 1, -1)
    return {
        "x": normal(tokens, hidden), "norm_weight": normal(hidden), "eps": 1e-6, "expert_ids": ids,
        "expert_weights": normal(tokens, 2, scale=0.5),
        "gate_up": KINDS[kind](experts, 2 * inter, hidden)[0], "down": KINDS[kind](experts, hidden, inter)[0],
    }  # fmt: skip


@pytest.mark.parametrize("coding", ["int8 token", "int8 tensor"])
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
@pytest.mark.parametrize("tokens", [1, 20])
def test_products_of_int8_codes(op: Any, coding: Any, tokens: int, check_op: Any) -> None:
    args, _ = args_of(op, "INT8", tokens, 80, 384)
    x_scale = np.array([0.02], np.float32) if coding == "int8 tensor" else None
    args["weight"] = replace(args["weight"], coding=coding, x_scale=x_scale)
    name = "x" if op is linear_add else "out"
    check_op(op, {name: 2 * BF16}, **args)
    if op is linear_add:
        h = args["h"].astype(np.float32)
        largest = np.abs(h).max(1, keepdims=True)
        scale, per = (x_scale, 1 / x_scale) if x_scale is not None else (largest / 127, 127 / largest)
        codes = np.clip(np.rint(h * per), -128, 127)
        np.testing.assert_allclose(coded(h, coding, x_scale), codes * scale, rtol=1e-6)
        assert (np.abs(coded(h, coding, x_scale) - h) > 0).any()  # negative control


def test_codings_are_of_their_formats(check_op: Any) -> None:
    for kind, coding in (("NVFP4", "token"), ("INT8", "token"), ("INT8 in groups of 64", "int8 token")):
        args, _ = args_of(linear_add, kind, 2, 80, 128)
        args["weight"] = replace(args["weight"], coding=coding)
        with pytest.raises(ContractError, match=f"coding is '{coding}', and weight is {FORMS[kind]}"):
            check_op(linear_add, {"x": BF16}, **args)


@pytest.mark.parametrize("kind", KINDS)
def test_few_tokens_take_the_packed_weight(kind: str) -> None:
    weight, _ = KINDS[kind](64, 512)
    x = Tensor.from_numpy(np.zeros((4, 64), bfloat16))
    h = Tensor.from_numpy(np.zeros((4, 512), bfloat16))
    packed = Linear(Tensor.from_numpy(weight.weight), Tensor.from_numpy(weight.scales))
    for invariant in (False, True):
        null = NullPack(Target(90, 132, batch_invariant=invariant))
        linear_add(null, x=x, h=h, weight=packed)
        names = {spec.function for spec in null.specs()}
        assert any(name.startswith("project_") for name in names) is not invariant
        assert any(name.startswith("dequantize_") for name in names) is invariant


def calls(arena: Any, target: Target, kind: str, tokens: int) -> NullPack:
    """The plan of a dense layer's products and of a mixture's."""
    pack = NullPack(target)

    def of(*shape: int) -> Linear[Tensor]:
        small, _ = KINDS[kind](*(1 for _ in shape[:-1]), shape[-1])
        weight, scales = (
            arena.alloc((*shape[:-1], one.shape[-1]), one.dtype) for one in (small.weight, small.scales)
        )
        return Linear(weight, scales)

    x, h = arena.alloc((tokens, 2560), bfloat16), arena.alloc((tokens, 4096), bfloat16)
    linear_add(pack, x=x, h=h, weight=of(2560, 4096))
    for coding in ("int8 token", "int8 tensor") if kind == "INT8" else ():
        x_scale = arena.alloc((1,), float32) if coding == "int8 tensor" else None
        weight = replace(of(2560, 4096), coding=coding, x_scale=x_scale)
        linear_add(pack, x=x, h=h, weight=weight)
    gate_up_silu(pack, out=arena.alloc((tokens, 1024), bfloat16), x=x, weight=of(2048, 2560))
    ids, weights = arena.alloc((tokens, 8), int32), arena.alloc((tokens, 8), bfloat16)
    experts_add(
        pack, x=x, norm_weight=arena.alloc((2560,), bfloat16), eps=1e-6, expert_ids=ids, expert_weights=weights,
        gate_up=of(64, 1536, 2560), down=of(64, 2560, 768),
    )  # fmt: skip
    return pack


@pytest.mark.parametrize("kind", of_the_day(list(KINDS)))
@pytest.mark.parametrize(
    "arch", [pytest.param(80, marks=pytest.mark.slow), 90, pytest.param(120, marks=pytest.mark.slow)]
)
def test_kernels_compile_without_spills(
    arena: Any, cubins: Any, resources: Any, arch: int, kind: str
) -> None:
    store = Store(arch, cubins, folders=[])
    specs = {spec for n in (8, 600) for spec in calls(arena, Target(arch, 132), kind, n).specs()}
    own = [spec for spec in specs if any(part in spec.function for part in ("fp4", "int8", "code"))]
    assert {spec.function.split("_")[0] for spec in own} >= {"project", "experts", "dequantize"}
    store.prepare(own)
    for spec in own:
        assert resources(store.get(spec).cubin)["STACK"] == 0, spec
        assert store.get(spec).shared <= shared_bytes(arch)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
@pytest.mark.parametrize("tokens", [1, 13, 64, 300])
def test_on_gpu(op: Any, kind: str, tokens: int, check_op_gpu: Any) -> None:
    args, _ = args_of(op, kind, tokens, 2560, 1024)
    check_op_gpu(op, {"x" if op is linear_add else "out": BF16}, **args)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [1, 40, 700])
def test_mixtures_on_gpu(kind: str, tokens: int, check_op_gpu: Any) -> None:
    check_op_gpu(experts_add, {"x": BF16}, **mixture_args(kind, tokens, 32, 512, 256))


@pytest.mark.gpu
@pytest.mark.parametrize("coding", ["int8 token", "int8 tensor"])
@pytest.mark.parametrize("tokens", [1, 20, 300])
def test_int8_codes_on_gpu(coding: Any, tokens: int, check_op_gpu: Any) -> None:
    args, _ = args_of(norm_linear, "INT8", tokens, 2560, 1024)
    x_scale = np.array([0.02], np.float32) if coding == "int8 tensor" else None
    args["weight"] = replace(args["weight"], coding=coding, x_scale=x_scale)
    check_op_gpu(norm_linear, {"out": 2 * BF16}, **args)
