"""Products of activations that are quantised to float8: the reference, and kernels against it."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from openinfer.kernels import ContractError, CpuPack, NullPack, Target, gate_up_silu, linear_add, norm_linear
from openinfer.kernels.formats.linear import Linear
from openinfer.kernels.op.launch import Launch, Matmul
from openinfer.kernels.op.op import mapped
from openinfer.kernels.op.rounding import coded
from openinfer.kernels.testing import copied, error, run_reference
from openinfer.tensor import Tensor, bfloat16, float8_e4m3fn, float32

RNG = np.random.default_rng(5)
BF16 = 8e-3
OPS = pytest.mark.parametrize("op", [norm_linear, linear_add, gate_up_silu], ids=lambda op: op.name)
CODINGS = pytest.mark.parametrize("coding", ["block", "token", "tensor"])


def normal(*shape: int, scale: float = 1.0) -> Any:
    return (RNG.standard_normal(shape) * scale).astype(bfloat16)


def weight_of(n: int, k: int, parts: int, of: str) -> Any:
    """Codes, and scales that differ much from block to block or row to row."""
    codes = np.clip(RNG.standard_normal((parts * n, k)) * 100, -448, 448).astype(float8_e4m3fn)
    shape = (parts * -(-n // 128), -(-k // 128)) if of == "block" else (parts * n, 1)
    scales = (RNG.uniform(0.1, 4, shape) * k**-0.5 / 100).astype(np.float32)
    return Linear(codes, scales)


def args_of(op: Any, coding: str, tokens: int, n: int, k: int) -> dict[str, Any]:
    x_scale = np.array([0.01], np.float32) if coding == "tensor" else None
    weight = weight_of(n, k, 2 if op is gate_up_silu else 1, coding)
    common = {"weight": replace(weight, coding=coding, x_scale=x_scale)}
    outliers = np.where(RNG.random((tokens, k)) < 0.01, 30, 1).astype(bfloat16)
    if op is linear_add:
        return {"x": normal(tokens, n), "h": normal(tokens, k) * outliers, **common}
    out = np.full((tokens, n), np.nan, bfloat16)
    return {"out": out, "x": normal(tokens, k) * outliers, "norm_weight": normal(k), "eps": 1e-6, **common}


def output(op: Any) -> str:
    return "x" if op is linear_add else "out"


def test_codes_are_those_of_e4m3_with_the_largest_number_at_448() -> None:
    x = RNG.standard_normal((5, 300)).astype(np.float32) * np.float32(3)
    x[2] = 0
    for coding, widths in (("block", (128, 128, 44)), ("token", (300,))):
        got, start = coded(x, coding), 0  # type: ignore[arg-type]
        for width in widths:
            part, made = x[:, start : start + width], got[:, start : start + width]
            scale = np.maximum(np.abs(part).max(axis=1, keepdims=True), 1e-10) / 448
            want = (part / scale).astype(float8_e4m3fn).astype(np.float32) * scale
            np.testing.assert_allclose(
                made, want, rtol=0.07, atol=1e-7
            )  # a quotient between two codes may take either
            assert np.mean(~np.isclose(made, want, rtol=1e-5)) < 0.01
            start += width
    fixed = coded(x, "tensor", np.array([0.01], np.float32))
    assert np.abs(fixed).max() == np.float32(
        4.48
    )  # what is larger than the scale allows becomes the largest number
    assert coded(x, None) is x


@CODINGS
@OPS
def test_the_reference_multiplies_quantised_activations(op: Any, coding: str) -> None:
    args = args_of(op, coding, 5, 48, 256)
    args = {n: v.astype(np.float32) if getattr(v, "dtype", None) == bfloat16 else v for n, v in args.items()}
    weight = args["weight"]
    plain = {**args, "weight": replace(weight, coding=None, x_scale=None)}
    got, of_plain = run_reference(op, args)[output(op)], run_reference(op, plain)[output(op)]
    if coding != "tensor":  # whose scale is too small for the outliers
        assert 0.005 < error(got, of_plain) < 0.06
    if op is linear_add:
        meant = {**plain, "h": coded(args["h"], coding, weight.x_scale)}  # type: ignore[arg-type]
        np.testing.assert_array_equal(got, run_reference(op, meant)[output(op)])
        wide = replace(weight, weight=weight.values(), scales=None)  # as a CPU has it
        expanded = {**args, "weight": wide}
        np.testing.assert_array_equal(got, run_reference(op, expanded)[output(op)])


@pytest.mark.parametrize(
    ("tokens", "n", "k"),
    [(1, 80, 208), (9, 80, 1024), pytest.param(33, 144, 256, marks=pytest.mark.slow), (70, 80, 256)],
)
@CODINGS
@OPS
def test_kernels_agree_with_the_reference(
    op: Any, coding: str, tokens: int, n: int, k: int, check_op: Any
) -> None:
    """n is no multiple of a tile or of a block; k is no multiple of 128, or is split."""
    args = args_of(op, coding, tokens, n, k)
    want = check_op(op, {output(op): BF16}, **args)
    scales = args["weight"].scales
    rolled = {
        **args,
        "weight": replace(args["weight"], scales=np.roll(scales, 1, axis=0)),
    }  # negative control
    if scales.shape[0] > 1:
        assert error(run_reference(op, rolled)[output(op)], want[output(op)]) > 0.05


@CODINGS
def test_one_kernel_serves_any_number_of_tokens_where_rows_may_not_differ(coding: str, check_op: Any) -> None:
    target = Target(90, 132, interpreted=True, batch_invariant=True)
    args = args_of(linear_add, coding, 40, 80, 1024)
    whole = check_op(linear_add, {"x": BF16}, target=target, **args)["x"]
    for rows in (slice(0, 1), slice(7, 20)):
        part = {**args, "x": args["x"][rows].copy(), "h": args["h"][rows].copy()}
        got = check_op(linear_add, {"x": BF16}, target=target, **part)["x"]
        np.testing.assert_array_equal(got, whole[rows])


def test_many_tokens_go_to_cublas_where_it_takes_the_scales() -> None:
    def commands(target: Target, coding: str, tokens: int, k: int) -> list[Any]:
        pack, args = NullPack(target), args_of(gate_up_silu, coding, tokens, 128, k)
        gate_up_silu(pack, **copied(args)[1])
        return [c.spec.function if isinstance(c, Launch) else type(c) for c in pack.calls[0].commands]

    with_cublas, without = Target(90, 132, cublas=True), Target(90, 132)
    for coding in ("block", "token"):
        assert commands(with_cublas, coding, 1024, 512) == ["norm_codes", Matmul, "silu_mul"]
        for target, tokens in ((without, 1024), (with_cublas, 1023), (with_cublas, 32)):
            assert commands(target, coding, tokens, 512) == ["norm_codes", "project_coded"]
    assert commands(with_cublas, "block", 1024, 256) == ["norm_codes", "project_coded"]


def test_what_is_refused() -> None:
    def run(coding: Any, of: str = "block", x_scale: Any = None, pack: Any = None) -> None:
        weight = mapped(weight_of(128, 128, 1, of), np.ndarray, Tensor.from_numpy)
        x, h = (Tensor.from_numpy(normal(2, 128)) for _ in range(2))
        linear_add(pack or CpuPack(), x=x, h=h, weight=replace(weight, coding=coding, x_scale=x_scale))

    scale = Tensor.from_numpy(np.ones(1, np.float32))
    with pytest.raises(ContractError, match="coding is 'token', and weight is FP8 with scales of blocks"):
        run("token")
    with pytest.raises(ContractError, match="coding is 'block', and weight is FP8 with scales of rows"):
        run("block", "token")
    with pytest.raises(ContractError, match=r"those of .* have one"):
        run("tensor", "token")
    with pytest.raises(ContractError, match=r"those of .* have one"):
        run("block", x_scale=scale)
    with pytest.raises(ContractError, match="float8 is for sm_89 and up"):
        run("block", pack=NullPack(Target(80, 108)))
    wide = Tensor.from_numpy(np.ones((128, 128), np.float32).astype(bfloat16))
    x, h = (Tensor.from_numpy(normal(2, 128)) for _ in range(2))
    with pytest.raises(ContractError, match="x is to be quantised and weight is plain"):
        linear_add(NullPack(Target(90, 132)), x=x, h=h, weight=Linear(wide, coding="block"))
    assert scale.dtype == float32


@pytest.mark.gpu
@pytest.mark.parametrize("cublas", [True, False])
@CODINGS
@OPS
def test_products_on_gpu(op: Any, coding: str, cublas: bool, gpu: Any, check_op_gpu: Any) -> None:
    """Through cuBLASLt with more than 256 tokens."""
    target = Target(gpu[0].arch, gpu[0].num_sms, cublas and gpu[0].cublas, gpu[0].gpu)
    for tokens in (1, 8, 16, 33, 130, 272, 304, 1024):
        for n, k in ((1280, 1024), (640, 2560)):
            args = args_of(op, coding, tokens, n, k)
            limit = 2 * BF16 if op is gate_up_silu else BF16
            check_op_gpu(op, {output(op): limit}, target=target, **args)
