"""norm_linear, linear_add, gate_up_silu: kernels in the interpreter against the references."""

import numpy as np
import pytest

from openinfer.kernels import (
    H200,
    ContractError,
    CpuPack,
    Launch,
    Matmul,
    NullPack,
    Target,
    gate_up_silu,
    linear_add,
    norm_linear,
)
from openinfer.kernels.linear import choices
from openinfer.kernels.linear.cublas import CUBLAS_WORKSPACE
from openinfer.kernels.store.tables import ProductChoice
from openinfer.tensor import Tensor, bfloat16, float32

EPS = 1e-6
BF16 = 4e-3  # relative error of a few roundings to 8 bits

CHOICES = {
    "gemv": ProductChoice("gemv", 1, 8, 64),
    "small": ProductChoice("small", 16, 32, 32),
    "split": ProductChoice("small", 16, 32, 32, split=4),
    "tma": ProductChoice("tma", 32, 64, 32),
    "pointer": ProductChoice("pointer", 32, 64, 32),
}


def nans(*shape, dtype=bfloat16):
    return np.full(shape, np.nan, dtype)


@pytest.fixture(params=CHOICES)
def choice(request, monkeypatch):
    """Every product of the test uses this kernel."""
    choice = CHOICES[request.param]
    monkeypatch.setattr(choices, "choose", lambda *_: choice)
    return choice


def tokens(choice):
    """More than one tile of them where the kernel allows it, and not whole tiles."""
    return {"gemv": 1, "small": 13}.get(choice.kind, 70)


@pytest.mark.parametrize("dtype", [bfloat16, float32])
def test_norm_linear(check_op, normal, choice, dtype):
    m, n, k = tokens(choice), 80, 192
    x, gain, weight = normal(m, k, scale=3.0), normal(k), normal(n, k, scale=k**-0.5)
    out = nans(m, n, dtype=dtype)
    check_op(norm_linear, {"out": BF16}, out=out, x=x, norm_weight=gain, weight=weight, eps=EPS)


@pytest.mark.parametrize("m", [1, 5, 70])
def test_a_norm_weight_of_float32_is_rounded_once(check_op, normal, m):
    x, weight, gain = normal(m, 256, scale=3.0), normal(48, 256), 1 + normal(256).astype(float32)
    args = {"x": x, "weight": weight, "eps": EPS, "norm_weight": gain}
    got = check_op(norm_linear, {"out": BF16}, out=np.full((m, 48), np.nan, float32), **args)["out"]
    args["norm_weight"] = gain.astype(bfloat16)
    want = check_op(norm_linear, {"out": BF16}, out=np.full((m, 48), np.nan, float32), **args)["out"]
    assert 1e-3 < np.linalg.norm(got - want) / np.linalg.norm(want) < 1e-2  # a bf16 weight is another result


def test_linear_add(check_op, normal, choice):
    m, n, k = tokens(choice), 144, 192
    x, h, weight = normal(m, n), normal(m, k), normal(n, k, scale=k**-0.5)
    check_op(linear_add, {"x": BF16}, x=x, h=h, weight=weight)


def test_gate_up_silu(check_op, normal, choice):
    m, n, k = tokens(choice), 80, 192
    x, gain, weight = normal(m, k, scale=3.0), normal(k), normal(2 * n, k, scale=k**-0.5)
    check_op(gate_up_silu, {"out": 2 * BF16}, out=nans(m, n), x=x, norm_weight=gain, weight=weight, eps=EPS)


@pytest.mark.parametrize("m", [1, 2, 16, 17, 64, 65])
def test_the_kernels_chosen_for_a_tiny_model(check_op, normal, m):
    hidden, inter = 256, 384
    x, gain = normal(m, hidden), normal(hidden)
    up, down = normal(2 * inter, hidden, scale=1 / 16), normal(hidden, inter, scale=1 / 20)
    check_op(gate_up_silu, {"out": 2 * BF16}, out=nans(m, inter), x=x, norm_weight=gain, weight=up, eps=EPS)
    check_op(linear_add, {"x": BF16}, x=x, h=normal(m, inter), weight=down)


@pytest.mark.parametrize("m", [1, 5, 70])
@pytest.mark.parametrize("arch", [80, 90])
def test_sizes_that_no_tile_divides(check_op, normal, m, arch):
    n, k = 48, 16 * 7
    x, h, weight = normal(m, n), normal(m, k), normal(n, k, scale=k**-0.5)
    check_op(linear_add, {"x": BF16}, target=Target(arch, 2, interpreted=True), x=x, h=h, weight=weight)


def test_large_gates_neither_overflow_nor_warn(check_op, normal):
    gain, weight = np.ones(32, bfloat16), np.zeros((32, 32), bfloat16)
    weight[:16, 0], weight[16:, 1] = 100, 1
    x = normal(3, 32)
    x[:, 0] = [-30, 30, 0]
    check_op(gate_up_silu, {"out": 2 * BF16}, out=nans(3, 16), x=x, norm_weight=gain, weight=weight, eps=EPS)


def test_reference_rows_do_not_depend_on_the_batch(normal):
    x, gain, weight = (a.astype(float32) for a in (normal(19, 64), normal(64), normal(48, 64)))
    outs = []
    for rows in (slice(0, 19), slice(11, 12)):
        out = nans(rows.stop - rows.start, 48, dtype=float32)
        arrays = {"out": out, "x": x[rows].copy(), "norm_weight": gain, "weight": weight}
        norm_linear(
            CpuPack(batch_invariant=True), **{k: Tensor.from_numpy(v) for k, v in arrays.items()}, eps=EPS
        )
        outs.append(out)
    np.testing.assert_array_equal(outs[0][11], outs[1][0])


def linear_args(arena, m, n, k, dtype=bfloat16):
    return {
        "x": arena.alloc((m, n), dtype),
        "h": arena.alloc((m, k), dtype),
        "weight": arena.alloc((n, k), dtype),
    }


def test_large_products_go_to_cublas_where_the_target_has_it(arena, plan):
    args = linear_args(arena, 512, 2560, 4096)
    (command,) = plan(linear_add, **args).calls[0].commands
    assert isinstance(command, Matmul)
    assert command.accumulate
    (own,) = plan(linear_add, target=Target(90, 132), **args).calls[0].commands
    assert isinstance(own, Launch)
    assert own.spec.function == "gemm_tma"
    assert own.grid == (80, 1, 1)  # 4 x 20 tiles of 128 x 128, fewer than SMs
    (old,) = plan(linear_add, target=Target(80, 108), **args).calls[0].commands
    assert old.spec.function == "gemm"


def test_a_gated_product_by_cublas_is_followed_by_the_gate(arena, plan):
    pack = plan(
        gate_up_silu,
        out=arena.alloc((512, 96), bfloat16),
        x=arena.alloc((512, 64), bfloat16),
        norm_weight=arena.alloc((64,), bfloat16),
        weight=arena.alloc((192, 64), bfloat16),
        eps=EPS,
    )
    norm, matmul, gate = pack.calls[0].commands
    assert (norm.spec.function, gate.spec.function) == ("rms_norm", "silu_mul")
    assert matmul.out is gate.args[1]
    assert pack.workspace_bytes(zeroed=False) >= 512 * 64 * 2 + 512 * 192 * 2 + CUBLAS_WORKSPACE


@pytest.mark.parametrize("tokens", [1, 4])
def test_float32_is_for_the_cpu_pack(arena, tokens):
    with pytest.raises(ContractError, match="float32: the cpu pack"):
        linear_add(NullPack(H200), **linear_args(arena, tokens, 32, 32, float32))
    x, weight, gain = (arena.alloc(shape, float32) for shape in ((tokens, 32), (32, 32), (32,)))
    with pytest.raises(ContractError, match="float32: the cpu pack"):
        norm_linear(NullPack(H200), out=x, x=x, weight=weight, norm_weight=gain, eps=EPS)


@pytest.mark.parametrize(("n", "k", "words"), [(40, 32, "multiples of 16"), (32, 8, "multiples of 16")])
def test_sizes_must_be_multiples_of_16(arena, n, k, words):
    with pytest.raises(ContractError, match=words):
        linear_add(NullPack(H200), **linear_args(arena, 4, n, k))


QWEN3_4B = {"qkv": (6144, 2560), "o": (2560, 4096), "down": (2560, 9728)}


@pytest.mark.gpu
@pytest.mark.parametrize("cublas", [True, False])
@pytest.mark.parametrize("name", QWEN3_4B)
def test_products_on_gpu(check_op_gpu, gpu, normal, name, cublas):
    target = Target(gpu[0].arch, gpu[0].num_sms, cublas and gpu[0].cublas, gpu[0].gpu)
    n, k = QWEN3_4B[name]
    weight = normal(n, k, scale=k**-0.5)
    for m in (1, 2, 16, 33, 64, 100, 700):
        if name == "qkv":
            x, gain = normal(m, k), normal(k)
            args = {"out": nans(m, n), "x": x, "norm_weight": gain, "weight": weight, "eps": EPS}
            check_op_gpu(norm_linear, {"out": BF16}, target=target, **args)
        else:
            check_op_gpu(
                linear_add, {"x": BF16}, target=target, x=normal(m, n), h=normal(m, k), weight=weight
            )


@pytest.mark.gpu
@pytest.mark.parametrize("cublas", [True, False])
def test_gate_up_and_logits_on_gpu(check_op_gpu, gpu, normal, cublas):
    target = Target(gpu[0].arch, gpu[0].num_sms, cublas and gpu[0].cublas, gpu[0].gpu)
    gain, up, head = normal(1024), normal(6144, 1024, scale=1 / 32), normal(151936, 1024 // 4, scale=1 / 16)
    for m in (1, 16, 64, 100, 700):
        args = {"out": nans(m, 3072), "x": normal(m, 1024), "norm_weight": gain, "weight": up, "eps": EPS}
        check_op_gpu(gate_up_silu, {"out": 2 * BF16}, target=target, **args)
    for m in (1, 7, 100):
        out, x = nans(m, len(head), dtype=float32), normal(m, 256)
        args = {"out": out, "x": x, "norm_weight": gain[:256].copy(), "weight": head, "eps": EPS}
        check_op_gpu(norm_linear, {"out": BF16}, target=target, **args)
