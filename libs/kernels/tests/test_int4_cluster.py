"""Products of a few tokens with INT4 and FP4 weights by clusters: which calls take them, resources, results."""

import dataclasses
from dataclasses import replace

import numpy as np
import pytest

from openinfer.kernels import (
    H200,
    ContractError,
    Launch,
    NullPack,
    Store,
    Target,
    gate_up_silu,
    linear_add,
    norm_linear,
)
from openinfer.kernels.formats.fp4 import fp4_pairs, fp4_row, fp4_scales
from openinfer.kernels.formats.int4 import group_words, pack
from openinfer.kernels.formats.linear import Linear
from openinfer.kernels.linear.int4 import int4_choice, shares, words_of
from openinfer.kernels.linear.kernels import launches as linear_launches
from openinfer.kernels.linear.problem import Problem
from openinfer.kernels.op.target import shared_bytes
from openinfer.kernels.testing import copied, of_the_day, run_on_gpu, run_reference
from openinfer.tensor import bfloat16, float8_e4m3fn, float32, int32, uint8

TARGET = dataclasses.replace(H200, nvrtc=True)
SHAPES = {  # op, rows of the weight, columns
    "qkv": (norm_linear, 6144, 2560),
    "o": (linear_add, 2560, 4096),
    "gate_up": (gate_up_silu, 19456, 2560),
    "down": (linear_add, 2560, 9728),
    "8B qkv": (norm_linear, 6144, 4096),
    "8B o": (linear_add, 4096, 4096),
    "8B gate_up": (gate_up_silu, 24576, 4096),
    "8B down": (linear_add, 4096, 12288),
}


def commands(arena, name, tokens, target=TARGET, group=128, form="INT4"):
    """The commands of a product."""
    (op, n, k), pack_ = SHAPES[name], NullPack(target)
    words = arena.alloc(*((n, k // group), int32) if form == "INT4" else ((n, fp4_row(k)), uint8))
    weight = arena.alloc((n, k // 2), uint8)
    x, gain = arena.alloc((tokens, k), bfloat16), arena.alloc((k,), bfloat16)
    out = arena.alloc((tokens, n // 2 if op is gate_up_silu else n), bfloat16)
    if op is linear_add:
        linear_add(pack_, x=out, h=x, weight=Linear(weight, words))
    else:
        op(pack_, out=out, x=x, norm_weight=gain, weight=Linear(weight, words), eps=1e-6)
    return [command for call in pack_.calls for command in call.commands]


def names(*args, **options):
    return [command.spec.function for command in commands(*args, **options) if hasattr(command, "spec")]


@pytest.mark.parametrize("form", ["INT4", "FP4"])
@pytest.mark.parametrize("tokens", [2, 8, 9, 32, 33, 64, 65, 128])
@pytest.mark.parametrize("name", SHAPES)
def test_few_tokens_take_clusters_that_run_at_once(arena, name, tokens, form):
    found = commands(arena, name, tokens, form=form)
    normed = [] if SHAPES[name][0] is linear_add else ["rms_norm"]
    assert [command.spec.function for command in found] == [*normed, "int4_cluster"]
    assert all(command.early for command in found)
    constants, blocks = dict(found[-1].spec.constants), found[-1].grid[0]
    assert 0.75 * 132 <= blocks <= (112 if constants["SPLIT"] == 4 else 132)
    assert found[-1].spec.shared <= shared_bytes(90)
    assert constants["TOKENS"] >= tokens
    assert found[-1].grid[1] == 1
    assert constants["STAGES"] >= 2


@pytest.mark.parametrize("tokens", [129, 256])
def test_large_weights_take_two_waves_of_more_tokens(arena, tokens):
    two = [name for name in SHAPES if "int4_cluster" in names(arena, name, tokens)]
    assert two == ["gate_up", "down", "8B qkv", "8B gate_up", "8B down"]
    assert all(commands(arena, name, tokens)[-1].grid[1] == 2 for name in two)


@pytest.mark.parametrize("form", ["INT4", "FP4"])
@pytest.mark.parametrize("tokens", [1, 257])
def test_other_numbers_of_tokens_do_not(arena, tokens, form):
    assert all("int4_cluster" not in names(arena, name, tokens, form=form) for name in SHAPES)


@pytest.mark.parametrize(
    "target",
    [
        H200,
        dataclasses.replace(TARGET, arch=100),
        dataclasses.replace(TARGET, arch=89),
        dataclasses.replace(TARGET, batch_invariant=True),
    ],
)
def test_other_targets_choose_as_without_it(arena, target):
    for name in SHAPES:
        without = names(arena, name, 32, dataclasses.replace(target, nvrtc=False))
        assert names(arena, name, 32, target) == without
        assert "int4_cluster" not in without


def test_groups_of_another_size_do_not(arena):
    for group in (32, 64):
        assert names(arena, "down", 8, group=group) == ["project_int4"]


@pytest.mark.parametrize(("n", "k"), [(2560, 10880), (2560, 512), (2568, 4096), (65536, 4096)])
def test_sizes_that_the_kernel_does_not_take(arena, n, k):
    """Stages of half a group, few columns, rows that are no multiple of 16, and more rows than one wave has."""
    out, x, weight = (arena.alloc(shape, bfloat16) for shape in ((8, n), (8, k), (n, k // 4)))
    layer = Linear(weight.view_as(uint8), arena.alloc((n, k // 128), int32))
    assert int4_choice(Problem(TARGET, "linear_add", out, x, layer)) is None


def test_x_of_another_dtype_is_refused(arena):
    weight, words = arena.alloc((2560, 2048), uint8), arena.alloc((2560, 32), int32)
    out, x = arena.alloc((8, 2560), bfloat16), arena.alloc((8, 4096), float32)
    with pytest.raises(ContractError, match="x is float32"):
        list(linear_launches(Problem(TARGET, "linear_add", out, x, Linear(weight, words))))


def test_words_of_neighbouring_rows_are_in_other_banks():
    for k in range(256, 32768, 256):
        for split in (1, 2, 4):
            words = words_of(k, split)
            assert words * 128 * split >= k
            for size in (1, 2):  # 4 and 8 bytes
                assert len({row * words * size % 32 // size for row in range(8)}) == 8


@pytest.mark.parametrize(("tokens", "most"), [(8, 6), (32, 6), (64, 6), (128, 4)])
def test_each_tile_has_a_warpgroup(tokens, most):
    for tiles in range(1, most + 1):
        sides, parts = shares(tokens, 64 * tiles - 8)
        each = -(-tiles // sides)
        assert (sides - 1) * each < tiles <= sides * each
        assert 2 <= sides * parts <= 4


MODELS = {"4B": list(SHAPES)[:4], "8B": list(SHAPES)[4:]}


@pytest.mark.parametrize(
    ("form", "tokens", "model"),
    of_the_day(
        [(form, n, model) for model in MODELS for n in (2, 16, 17, 64, 128) for form in ("INT4", "FP4")]
    ),
)
def test_clusters_compile_without_spills(arena, cubins, resources, form, tokens, model):
    specs = {commands(arena, name, tokens, form=form)[-1].spec for name in MODELS[model]}
    kernels = Store(90, cubins, folders=[])
    kernels.prepare(specs)
    for spec in specs:
        compiled = kernels.get(spec)
        used = resources(compiled.cubin)
        assert used["STACK"] == used["LOCAL"] == 0
        assert used["REG"] * spec.threads <= 65536
        assert [made["swizzle"] for made in compiled.tensor_maps] == [3, 3]  # x and codes


def test_sums_of_few_tokens_cross_blocks_without_a_fence(arena, cubins, fences):
    """As in test_cluster_product; 64 tokens are the control."""
    found = {tokens: commands(arena, "o", tokens)[-1].spec for tokens in (16, 64)}
    assert dict(found[16].constants)["SPLIT"] > 1
    kernels = Store(90, cubins, folders=[])
    kernels.prepare(set(found.values()))
    assert [fences(kernels.get(found[tokens]).cubin) for tokens in (16, 64)] == [0, 1]


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["INT4", "FP4"])
@pytest.mark.parametrize("tokens", [1, 2, 5, 16, 17, 33, 64, 65, 128, 200, 256])
@pytest.mark.parametrize("name", ["qkv", "o", "gate_up", "down"])
def test_it_agrees_with_the_reference_and_repeats_its_bits(gpu, rng, normal, tokens, name, form):
    target, driver, _, stream = gpu
    if target.arch != 90:
        pytest.skip("the kernel is for sm_90")
    target = Target(target.arch, target.num_sms, target.cublas, target.gpu, nvrtc=True)
    op, n, k = SHAPES[name]
    codes, zeros = rng.integers(0, 16, (n, k)), rng.integers(0, 16, (n, k // 128))
    if form == "INT4":
        words = group_words((rng.uniform(0.1, 4, zeros.shape) * k**-0.5 / 5).astype(np.float16), zeros)
    else:
        scales = rng.uniform(0.1, 4, (n, k // 16)).astype(float8_e4m3fn)
        words = fp4_scales(scales, rng.uniform(0.5, 2, (n, 1)) * k**-0.5 / 5)
    args = {"weight": Linear(pack(codes) if form == "INT4" else fp4_pairs(pack(codes)), words)}
    if op is linear_add:
        written, args = "x", {"x": normal(tokens, n), "h": normal(tokens, k), **args}
    else:
        out = normal(tokens, n // 2 if op is gate_up_silu else n)
        gain = (1 + normal(k, scale=0.1).astype(float32)).astype(bfloat16)
        written, args = "out", {"out": out, "x": normal(tokens, k), "norm_weight": gain, **args, "eps": 1e-6}
    functions = [
        c.spec.function for c in op.plan(target, op.args(**copied(args)[1])) if isinstance(c, Launch)
    ]
    expected = "gemv_ring_groups" if tokens == 1 else "int4_cluster"
    assert (expected in functions) == (tokens <= 128 or n * k > 20 << 20)
    found = [run_on_gpu(op, args, target, driver, stream)[written] for _ in range(2)]
    np.testing.assert_array_equal(found[0], found[1])
    some = np.unique(np.r_[0, tokens - 1, rng.integers(0, tokens, 6)])
    tensors = {key: value[some].copy() if key in ("x", "h", "out") else value for key, value in args.items()}
    want, got = run_reference(op, tensors)[written].astype(float32), found[0][some].astype(float32)
    error = np.linalg.norm(got - want, axis=1) / np.linalg.norm(want, axis=1)
    assert error.max() < 1e-2  # of each token by itself
    rolled = args["weight"].scales.copy()  # without FP4's factors
    own = k // 128 if form == "INT4" else k // 16
    rolled[:, :own] = np.roll(rolled[:, :own], 1, axis=1)
    wrong = {**tensors, "weight": replace(args["weight"], scales=rolled)}  # negative control
    other = run_reference(op, wrong)[written].astype(float32)
    assert (np.linalg.norm(got - other, axis=1) > 0.05 * np.linalg.norm(other, axis=1)).all()
