"""Products of a few tokens by clusters of blocks: which calls take them, their resources and their results."""

import dataclasses
from dataclasses import replace
from itertools import product as pairs_of

import numpy as np
import pytest

from openinfer.kernels import (
    H200,
    CudaSpec,
    NullPack,
    Store,
    Target,
    gate_up_silu,
    linear_add,
    norm_linear,
)
from openinfer.kernels.formats.linear import Linear
from openinfer.kernels.linear.choices import choose, cluster_choice, copied_tokens
from openinfer.kernels.linear.cluster import cluster_product
from openinfer.kernels.linear.problem import Problem
from openinfer.kernels.op.launch import Scratch
from openinfer.kernels.op.target import shared_bytes
from openinfer.kernels.testing import copied, of_the_day, run_on_gpu, run_reference
from openinfer.tensor import bfloat16, float8_e4m3fn, float32

TARGET = dataclasses.replace(H200, nvrtc=True)
SHAPES = {  # op, rows of the weight, columns
    "qkv": ("norm_linear", 6144, 2560),
    "o": ("linear_add", 2560, 4096),
    "gate_up": ("gate_up_silu", 19456, 2560),
    "down": ("linear_add", 2560, 9728),
}


def chosen(name, tokens, target=TARGET, *, codes=False):
    op, n, k = SHAPES[name]
    return (cluster_choice if codes else choose)(target, op, tokens, n, k, **{"codes": True} if codes else {})


def launches(arena, tokens, target=TARGET, coding=None):
    """The commands of a layer of Qwen3-4B, by product."""
    found = {}
    for name, (op, n, k) in SHAPES.items():
        pack, gated = NullPack(target), op == "gate_up_silu"
        weight = arena.alloc((n, k), bfloat16 if coding is None else float8_e4m3fn)
        gain, x = arena.alloc((k,), bfloat16), arena.alloc((tokens, k), bfloat16)
        out = arena.alloc((tokens, n // 2 if gated else n), bfloat16)
        more = {"weight": Linear(weight)}
        if coding is not None:
            blocks = (-(-n // 128), k // 128) if coding == "block" else (n, 1)
            more = {"weight": Linear(weight, arena.alloc(blocks, float32), coding)}
        if op == "linear_add":
            linear_add(pack, x=out, h=x, **more)
        else:
            of = gate_up_silu if gated else norm_linear
            of(pack, out=out, x=x, norm_weight=gain, eps=1e-6, **more)
        found[name] = [command for call in pack.calls for command in call.commands]
    return found


@pytest.mark.parametrize(
    ("tokens", "products"),
    [(3, 4), (64, 4), (65, 2), (128, 2), (129, 0), (2, 0)],
)
def test_few_tokens_take_clusters_that_run_at_once(arena, tokens, products):
    found = launches(arena, tokens)
    clusters = {name: c[-1] for name, c in found.items() if chosen(name, tokens).kind == "cluster"}
    assert len(clusters) == products
    for name, launch in clusters.items():
        assert launch.early
        choice, halves = chosen(name, tokens), 2 if name == "gate_up" else 1
        stage = (copied_tokens(tokens) + halves * choice.bn) * 128
        shared = launch.spec.shared
        assert shared <= shared_bytes(90)
        assert shared_bytes(90) < shared + stage + 16 or choice.stages == 16  # no stage is left out
        assert 0.75 * 132 <= launch.grid[0] <= (112 if chosen(name, tokens).split == 4 else 132)
        assert all(command.early for command in found[name])  # the norm, too


@pytest.mark.parametrize("coding", ["block", "token"])
@pytest.mark.parametrize("tokens", [2, 64, 128])
def test_codes_of_few_tokens_take_clusters_too(arena, tokens, coding):
    for name, (coded, product) in launches(arena, tokens, coding=coding).items():
        assert coded.early
        assert product.early
        constants = dict(product.spec.constants)
        assert constants["CODES"] == (1 if coding == "block" else 2)
        weights = constants["COLUMNS"] * (1 + constants["GATED"]) * 128  # of a stage
        few = min(constants["STAGES"], max(1, (40 << 10) // weights))
        assert constants["UNDER_WAY"] == (few if tokens == 2 else constants["STAGES"])
        assert constants["COLUMNS"] <= 128  # the rows of a block have two scales
        assert product.grid[0] <= (112 if chosen(name, tokens, codes=True).split == 4 else 132)
    for found in launches(arena, 129, coding=coding).values():
        assert not any(getattr(command, "early", False) for command in found)


@pytest.mark.parametrize(
    "target",
    [
        H200,
        dataclasses.replace(TARGET, arch=100),
        dataclasses.replace(TARGET, batch_invariant=True),
    ],
)
def test_other_targets_choose_as_without_it(target):
    for name in SHAPES:
        assert chosen(name, 32, target) == chosen(name, 32, dataclasses.replace(target, nvrtc=False))
        assert chosen(name, 32, target, codes=True) is None


def test_a_weight_that_a_kernel_ahead_writes_is_not_read_early(arena):
    out, x = arena.alloc((8, 2560), bfloat16), arena.alloc((8, 4096), bfloat16)
    wide = Scratch((2560, 4096), bfloat16)
    problem = Problem(TARGET, "linear_add", out, x, Linear(wide))
    assert not cluster_product(chosen("o", 8), problem).early


@pytest.mark.parametrize(("coding", "n"), of_the_day([*pairs_of((None, "block", "token"), (8, 64, 128))]))
def test_clusters_of_published_sizes_compile_without_spills(arena, cubins, resources, coding, n):
    specs = {
        c.spec
        for found in launches(arena, n, coding=coding).values()
        for c in found
        if isinstance(getattr(c, "spec", None), CudaSpec)
    }
    kernels = Store(90, cubins, folders=[])
    kernels.prepare(specs)
    for spec in specs:
        used = resources(kernels.get(spec).cubin)
        assert used["STACK"] == used["LOCAL"] == 0
        assert used["REG"] * spec.threads <= 65536


@pytest.mark.parametrize("coding", of_the_day([None, "block"]))
def test_sums_of_few_tokens_cross_blocks_without_a_fence(arena, cubins, fences, coding):
    """A fence of the GPU waits while others' weights are copied. The control: sums of 64 tokens have one."""
    found = {tokens: launches(arena, tokens, coding=coding)["o"][-1].spec for tokens in (8, 64)}
    assert dict(found[8].constants)["SPLIT"] > 1
    kernels = Store(90, cubins, folders=[])
    kernels.prepare(set(found.values()))
    assert [fences(kernels.get(found[tokens]).cubin) for tokens in (8, 64)] == [0, 1]


@pytest.mark.gpu
@pytest.mark.parametrize("coding", [None, "block", "token"])
@pytest.mark.parametrize("tokens", [5, 16, 33, 64, 65, 128])
@pytest.mark.parametrize("name", SHAPES)
def test_it_agrees_with_the_reference_and_repeats_its_bits(gpu, rng, normal, tokens, name, coding):
    target, driver, _, stream = gpu
    if target.arch != 90:
        pytest.skip("the kernel is for sm_90")
    target = Target(target.arch, target.num_sms, target.cublas, target.gpu, nvrtc=True)
    kind, n, k = SHAPES[name]
    choice = chosen(name, tokens, target, codes=coding is not None)
    if choice is None or choice.kind != "cluster":
        pytest.skip("more tokens than its product takes")
    weight, gain = normal(n, k, scale=k**-0.5), (1 + normal(k, scale=0.1).astype(float32)).astype(bfloat16)
    if coding is not None:
        weight = np.clip(normal(n, k, scale=100), -448, 448).astype(float8_e4m3fn)
        blocks = (-(-n // 128), k // 128) if coding == "block" else (n, 1)
        scales = (rng.uniform(0.1, 4, blocks) * k**-0.5 / 100).astype(float32)
        weight = Linear(weight, scales, coding)
    if kind == "linear_add":
        op, written = linear_add, "x"
        args = {"x": normal(tokens, n), "h": normal(tokens, k), "weight": weight}
    else:
        op, written = norm_linear if kind == "norm_linear" else gate_up_silu, "out"
        args = {"out": normal(tokens, n // 2 if kind == "gate_up_silu" else n), "x": normal(tokens, k)}
        args |= {"norm_weight": gain, "weight": weight, "eps": 1e-6}
    assert isinstance(op.plan(target, op.args(**copied(args)[1]))[-1].spec, CudaSpec)
    found = [run_on_gpu(op, args, target, driver, stream)[written] for _ in range(2)]
    np.testing.assert_array_equal(found[0], found[1])
    some = np.unique(np.r_[0, tokens - 1, rng.integers(0, tokens, 6)])
    tensors = {key: value[some].copy() if key in ("x", "h", "out") else value for key, value in args.items()}
    want, got = run_reference(op, tensors)[written].astype(float32), found[0][some].astype(float32)
    error = np.linalg.norm(got - want, axis=1) / np.linalg.norm(want, axis=1)
    limit = 1e-2 if coding is None else 2e-2  # a code may be the next one
    assert error.max() < limit  # of each token by itself
    if coding is not None:  # control
        wrong = {**tensors, "weight": replace(weight, scales=np.roll(scales, 1, axis=0))}
        far = run_reference(op, wrong)[written].astype(float32)
        assert np.linalg.norm(far - want) > 4 * limit * np.linalg.norm(want)
