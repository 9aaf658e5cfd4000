"""Products with adapters: kernels against the reference, and the reference against merged weights."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from openinfer.kernels import (
    H200,
    ContractError,
    CpuPack,
    CudaSpec,
    Launch,
    NullPack,
    Op,
    Store,
    Target,
    gate_up_silu,
    linear_add,
    norm_linear,
)
from openinfer.kernels.formats.fp4 import fp4_pairs, fp4_scales
from openinfer.kernels.formats.int4 import group_words, pack
from openinfer.kernels.formats.linear import Linear
from openinfer.kernels.linear.lora import FEW_TOKENS
from openinfer.kernels.lora.low_rank import Lora
from openinfer.kernels.op.target import shared_bytes
from openinfer.kernels.testing import (
    INTERPRETED,
    compare,
    copied,
    error,
    of_the_day,
    run_interpreted,
    run_on_gpu,
    run_reference,
)
from openinfer.tensor import bfloat16, float8_e4m3fn, float32, int32

RNG = np.random.default_rng(0)
BF16 = 8e-3
OPS = [norm_linear, linear_add, gate_up_silu]


def normal(*shape: int, scale: float = 1.0, dtype: Any = bfloat16) -> Any:
    return (RNG.standard_normal(shape) * scale).astype(dtype)


def lora(
    tokens: int, k: int, parts: tuple[int, ...], ids: Any, *, rank: int = 16, dtype: Any = bfloat16
) -> Any:
    """Adapters of a product. ids: those of slots 1, 2, ... which the tokens take in turn. The matrices of an adapter
    lie together, so those of the next begin at another stride."""
    rows, width, places = len(parts) * rank, sum(parts), max(*ids, 1) + 1
    matrices = normal(places, rows * k + width * rank, dtype=dtype)
    a, b = (
        matrices[:, : rows * k].reshape(places, rows, k),
        matrices[:, rows * k :].reshape(places, width, rank),
    )
    a *= k**-0.5
    b *= rank**-0.5
    token_slots = (np.arange(tokens, dtype=np.int32) * 7) % len(ids) + 1
    return Lora(a, b, parts, np.array([0, *ids], np.int32), token_slots)


def call(
    op: Op[Any], tokens: int, k: int, parts: tuple[int, ...], ids: Any, *, rank: int = 16, wide: int = 0,
    dtype: Any = bfloat16,
) -> dict[str, Any]:  # fmt: skip
    """Arguments of a call with adapters. wide: more rows of the weight."""
    n = sum(parts) + wide
    args = {
        "weight": normal(n, k, scale=k**-0.5, dtype=dtype),
        "lora": lora(tokens, k, parts, ids, rank=rank, dtype=dtype),
    }
    if op is linear_add:
        return {"x": normal(tokens, n, dtype=dtype), "h": normal(tokens, k, dtype=dtype), **args}
    out = np.full((tokens, n // 2 if op is gate_up_silu else n), np.nan, dtype)
    args |= {
        "x": normal(tokens, k, scale=3.0, dtype=dtype),
        "norm_weight": normal(k, dtype=dtype),
        "eps": 1e-6,
    }
    return {"out": out, **args}


def kernels_of(op: Op[Any], args: dict[str, Any], target: Target) -> list[str]:
    plan = NullPack(target)
    op(plan, **copied(args)[1])
    return [spec.function for spec in plan.specs()]


def rolled(args: dict[str, Any]) -> Lora[Any]:
    """The adapters of other tokens."""
    return dataclasses.replace(args["lora"], adapters=np.roll(args["lora"].adapters, 1))


def limits(op: Op[Any]) -> dict[str, float]:
    return {"x": BF16} if op is linear_add else {"out": 2 * BF16 if op is gate_up_silu else BF16}


CASES: dict[str, tuple[Op[Any], int, int, tuple[int, ...], list[int], dict[str, Any]]] = {
    "one token": (norm_linear, 1, 256, (128, 64), [2], {}),
    "projections side by side": (norm_linear, 21, 1280, (128, 64, 64), [3, 0, 1, 2, 0], {"wide": 80}),
    "more columns than a program's": (linear_add, 32, 2304, (192,), [1, 2, 4], {}),
    "gated": (gate_up_silu, 9, 384, (192, 192), [1, 0, 5], {}),
    "gated, in two turns": (gate_up_silu, 33, 256, (128, 128), [1, 12, 3, 9], {}),
    "a rank of 64": (norm_linear, 18, 256, (128, 128), [4, 2, 0], {"rank": 64}),
    "no token has one": (linear_add, 5, 256, (64,), [0], {}),
}


@pytest.mark.parametrize("case", CASES)
def test_one_kernel_for_few_tokens(run_both: Any, case: str) -> None:
    op, tokens, k, parts, ids, more = CASES[case]
    args = call(op, tokens, k, parts, ids, **more)
    assert "gemm_small_adapted" in kernels_of(op, args, INTERPRETED)
    got, want = run_both(op, args)
    compare(op, got, want, limits(op))
    if any(ids):  # negative control: with other adapters the result is another
        other = run_reference(op, {**args, "lora": rolled(args)})
        name = "x" if op is linear_add else "out"
        assert error(other[name], want[name]) > 0.1


def fp8_blocks(n: int, k: int, halves: int) -> dict[str, Any]:
    scales = RNG.uniform(0.5, 2, (n // 128, k // 128)).astype(float32) * k**-0.5
    return {"weight": Linear(normal(n, k).astype(float8_e4m3fn), scales)}


def int4(n: int, k: int, halves: int) -> dict[str, Any]:
    words = group_words(np.full((n, k // 128), k**-0.5 / 4, bfloat16), 8)
    return {"weight": Linear(pack(RNG.integers(0, 16, (n, k))), words)}


WEIGHTS: dict[str, Callable[[int, int, int], dict[str, Any]]] = {
    "bf16": lambda n, k, _: {"weight": normal(n, k, scale=k**-0.5)},
    "float8": fp8_blocks,
    "float8 codes": lambda n, k, h: {
        "weight": dataclasses.replace(fp8_blocks(n, k, h)["weight"], coding="block")
    },
    "INT4": int4,
    "FP4": lambda n, k, _: {
        "weight": Linear(
            fp4_pairs(pack(RNG.integers(0, 16, (n, k)))), fp4_scales(np.ones((n, k // 16)), k**-0.5 / 3)
        )
    },
    "INT8": lambda n, k, _: {
        "weight": Linear(RNG.integers(-9, 9, (n, k), np.int8), np.full((n, 1), k**-0.5 / 5, float32))
    },
}


@pytest.mark.parametrize(
    ("op", "kind"),
    # By default all ops with one kind of weight, and all kinds with one op.
    [
        pytest.param(op, kind, marks=() if op is norm_linear or kind == "bf16" else pytest.mark.slow)
        for op in OPS
        for kind in WEIGHTS
    ],
    ids=lambda one: getattr(one, "name", one),
)
def test_other_products_come_before_the_adapters(op: Op[Any], kind: str) -> None:
    """More tokens than one kernel has, and weights in few bits."""
    tokens = FEW_TOKENS + 6 if kind == "bf16" else 20
    parts = (128, 128) if op is not linear_add else (256,)
    args = {**call(op, tokens, 256, parts, [1, 0, 2]), **WEIGHTS[kind](256, 256, len(parts))}
    assert "gemm_small_adapted" not in kernels_of(op, args, INTERPRETED)
    got, want = run_interpreted(op, args), run_reference(op, args)
    compare(op, got, want, {name: 2 * limit for name, limit in limits(op).items()})


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
@pytest.mark.parametrize("tokens", [70, pytest.param(133, marks=pytest.mark.slow)])
def test_many_tokens(op: Op[Any], tokens: int) -> None:
    """Tiles of tokens with several adapters, several parts of K, and the gate in the last kernel."""
    parts = (128, 128) if op is not linear_add else (256,)
    args = call(op, tokens, 640, parts, [1, 0, 20, 2], wide=64 if op is norm_linear else 0)
    kernels = kernels_of(op, args, INTERPRETED)
    assert {"lora_shrink", "lora_expand"} <= set(kernels)
    assert "silu_mul" not in kernels
    got, want = run_interpreted(op, args), run_reference(op, args)
    compare(op, got, want, {name: 2 * limit for name, limit in limits(op).items()})
    other = run_reference(op, {**args, "lora": rolled(args)})
    name = "x" if op is linear_add else "out"
    assert error(other[name], want[name]) > 0.1


def test_one_kernel_for_all_tokens_has_no_adapters() -> None:
    args = call(norm_linear, 9, 256, (128, 64), [1, 2])
    fixed = dataclasses.replace(INTERPRETED, batch_invariant=True)
    assert "gemm_small_adapted" not in kernels_of(norm_linear, args, fixed)
    compare(
        norm_linear,
        run_interpreted(norm_linear, args, fixed),
        run_reference(norm_linear, args),
        {"out": BF16},
    )


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_it_is_the_product_of_merged_weights(op: Op[Any]) -> None:
    parts = (64, 64) if op is not linear_add else (96,)
    args = call(op, 11, 64, parts, [2, 0, 1], dtype=float32)
    name = "x" if op is linear_add else "out"
    got = run_reference(op, args)[name]
    own = args["lora"]
    plain = {n: v for n, v in args.items() if n != "lora"}
    for token, adapter in enumerate(own.adapters[own.token_slots]):
        weight = args["weight"].copy()
        if adapter:
            a, b, start = own.a[adapter - 1], own.b[adapter - 1], 0
            for part, size in enumerate(parts):
                weight[start : start + size] += b[start : start + size] @ a[part * 16 : part * 16 + 16]
                start += size
        row = {n: v[token : token + 1] for n, v in plain.items() if n in ("x", "h", "out")}
        want = run_reference(op, {**plain, "weight": weight, **row})[name]
        np.testing.assert_allclose(got[token], want[0], rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize(
    ("op", "change", "why"),
    [
        (norm_linear, {"parts": (64, 48)}, "must be"),
        (norm_linear, {"out": np.zeros((3, 128), float32)}, "out is float32"),
        (gate_up_silu, {"parts": (128,), "a": normal(3, 16, 64)}, "two parts of 64"),
        (linear_add, {"parts": (64, 64)}, "one part of 128"),
    ],
)
def test_what_the_contract_refuses(op: Op[Any], change: dict[str, Any], why: str) -> None:
    args = call(op, 3, 64, (64, 64), [1, 2])
    args |= change if "out" in change else {"lora": dataclasses.replace(args["lora"], **change)}
    with pytest.raises(ContractError, match=why):
        op(CpuPack(), **copied(args)[1])


QWEN3_4B: dict[str, tuple[Op[Any], int, tuple[int, ...]]] = {
    "qkv": (norm_linear, 2560, (4096, 1024, 1024)),
    "o": (linear_add, 4096, (2560,)),
    "gate_up": (gate_up_silu, 2560, (9728, 9728)),
    "down": (linear_add, 9728, (2560,)),
}


CLUSTERS = dataclasses.replace(H200, nvrtc=True)
PRODUCTS = {**QWEN3_4B, "the most sums": (gate_up_silu, 5120, (17408, 17408))}


def shapes_of(product: str, tokens: int, rank: int = 16, places: int = 8) -> dict[str, tuple[int, ...]]:
    op, k, parts = PRODUCTS[product]
    n, width = sum(parts), rank * len(parts)
    shapes = {"weight": (n, k), "a": (places, width, k), "b": (places, n, rank)}
    if op is linear_add:
        return {**shapes, "x": (tokens, n), "h": (tokens, k)}
    return {**shapes, "x": (tokens, k), "out": (tokens, n // 2 if op is gate_up_silu else n)}


def without_values(arena: Any, product: str, tokens: int, rank: int = 16, **more: Any) -> dict[str, Any]:
    """Arguments on the null device; more: fields of the adapters."""
    shapes = shapes_of(product, tokens, rank)
    args: dict[str, Any] = {name: arena.alloc(shape, bfloat16) for name, shape in shapes.items()}
    ids, slots = (arena.alloc((tokens,), int32) for _ in range(2))
    own = Lora(args.pop("a"), args.pop("b"), PRODUCTS[product][2], ids, slots)
    return {**args, "lora": dataclasses.replace(own, **more)}


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1, 32, 64])
@pytest.mark.parametrize("product", QWEN3_4B)
def test_the_kernel_of_a_model_fits(
    product: str, tokens: int, arena: Any, cubins: Any, resources: Any
) -> None:
    op, args = QWEN3_4B[product][0], without_values(arena, product, tokens)
    plan, store = NullPack(H200), Store(90, cubins, folders=[])
    op(plan, **args)
    (spec,) = [spec for spec in plan.specs() if spec.function == "gemm_small_adapted"]
    store.prepare([spec])
    used = resources(store.get(spec).cubin)
    assert used["STACK"] == used["LOCAL"] == 0
    assert store.get(spec).shared <= shared_bytes(90)


def clusters_of(
    arena: Any, product: str, tokens: int, rank: int, *, target: Target = CLUSTERS, **more: Any
) -> list[CudaSpec]:
    """The kernels of clusters that have adapters. Each launch of their op is early."""
    (op, k, _), args = PRODUCTS[product], without_values(arena, product, tokens, rank, **more)
    if op is not linear_add:
        args |= {"norm_weight": arena.alloc((k,), bfloat16), "eps": 1e-6}
    plan = NullPack(target)
    op(plan, **args)
    launches = [command for call in plan.calls for command in call.commands if isinstance(command, Launch)]
    found = [
        launch.spec
        for launch in launches
        if isinstance(launch.spec, CudaSpec) and "RANK" in dict(launch.spec.constants)
    ]
    assert not found or all(launch.early for launch in launches)
    return found


@pytest.mark.parametrize("product", QWEN3_4B)
def test_clusters_multiply_up_to_128_tokens_with_adapters(arena: Any, product: str) -> None:
    for tokens in (1, 2, 64, 65, 128):
        (spec,) = clusters_of(arena, product, tokens, 16)
        constants = dict(spec.constants)
        assert (constants["RANK"], constants["PROJECTIONS"]) == (16, len(QWEN3_4B[product][2]))
        assert spec.shared <= shared_bytes(90)
    invariant = dataclasses.replace(CLUSTERS, batch_invariant=True)
    assert not clusters_of(arena, product, 129, 16)
    assert not clusters_of(arena, product, 32, 128)  # a warp would read too much of B
    assert not clusters_of(arena, product, 32, 16, target=invariant)


def test_a_block_has_at_most_two_projections(arena: Any) -> None:
    """Else the adapters have kernels of their own."""
    for parts, taken in (((6000, 88, 56), False), ((5952, 96, 96), True), ((5900, 140, 104), False)):
        b = arena.alloc((8, sum(parts), 16), bfloat16)
        assert bool(clusters_of(arena, "qkv", 32, 16, parts=parts, b=b)) is taken


@pytest.mark.parametrize(
    ("rank", "n", "op"),
    of_the_day([(rank, n, op.name) for op in OPS for rank in (16, 32, 64) for n in (8, 64, 128)]),
)
def test_clusters_with_adapters_compile_without_spills(
    arena: Any, cubins: Any, resources: Any, rank: int, n: int, op: str
) -> None:
    products = [product for product, (its, *_) in PRODUCTS.items() if its.name == op]
    specs = {spec for product in products for spec in clusters_of(arena, product, n, rank)}
    assert specs
    store = Store(90, cubins, folders=[])
    store.prepare(specs)
    for spec in specs:
        used = resources(store.get(spec).cubin)
        assert used["STACK"] == used["LOCAL"] == 0
        assert used["REG"] * spec.threads <= 65536


ALL = [*range(1, 9), 0]
ON_CLUSTERS = {
    **{f"{n} tokens": (n, ALL, 16) for n in (1, 5, 32, 128)},
    "one adapter": (64, [3], 16),
    "no adapter": (9, [0], 16),
    "a rank of 64": (40, [5, 0, 2], 64),
}


@pytest.mark.gpu
@pytest.mark.parametrize("case", ON_CLUSTERS)
@pytest.mark.parametrize("product", QWEN3_4B)
def test_clusters_with_adapters_on_a_gpu(gpu: Any, product: str, case: str) -> None:
    """Each token by itself, the same bits again, and that adapters count."""
    target, driver, _, stream = gpu
    if target.arch != 90:
        pytest.skip("the kernel is for sm_90")
    own = dataclasses.replace(target, nvrtc=True)
    op, k, parts = QWEN3_4B[product]
    tokens, ids, rank = ON_CLUSTERS[case]
    args = call(op, tokens, k, parts, ids, rank=rank)
    assert "cluster_product" in kernels_of(op, args, own)
    name = "x" if op is linear_add else "out"
    found = [run_on_gpu(op, args, own, driver, stream)[name] for _ in range(2)]
    np.testing.assert_array_equal(found[0].view(np.uint16), found[1].view(np.uint16))
    some = np.unique(np.r_[0, tokens - 1, RNG.integers(0, tokens, 8)])
    few = {key: value[some].copy() if key in ("x", "h", "out") else value for key, value in args.items()}
    few["lora"] = dataclasses.replace(args["lora"], token_slots=args["lora"].token_slots[some])
    got, want = found[0][some].astype(float32), run_reference(op, few)[name].astype(float32)
    off = np.linalg.norm(got - want, axis=1) / np.linalg.norm(want, axis=1)
    assert off.max() < 1e-2
    if any(ids):
        other = run_reference(op, {**few, "lora": rolled(few)})[name].astype(float32)
        assert np.linalg.norm(other - want) > 0.1 * np.linalg.norm(want)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 32, 64, 200])
@pytest.mark.parametrize("product", QWEN3_4B)
def test_a_model_on_a_gpu(gpu: Any, product: str, tokens: int) -> None:
    """The result, and the same bits again."""
    target, driver, _, stream = gpu
    op, k, parts = QWEN3_4B[product]
    args = call(op, tokens, k, parts, [0, *range(1, 9)])
    first, second = (run_on_gpu(op, args, target, driver, stream) for _ in range(2))
    compare(op, first, run_reference(op, args), limits(op))
    name = "x" if op is linear_add else "out"
    np.testing.assert_array_equal(first[name].view(np.uint16), second[name].view(np.uint16))
