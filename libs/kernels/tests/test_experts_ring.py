"""The rings of few pairs an expert (device/experts_ring.cu, experts_fp4.cu): which mixtures take them, and on a GPU
their numbers."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from openinfer.kernels import H200, Launch, NullPack, Target, experts_add
from openinfer.kernels.formats.linear import Linear
from openinfer.kernels.moe.ring import RingTile, ring_tile
from openinfer.kernels.op.target import shared_bytes
from openinfer.kernels.ops.experts import experts
from openinfer.kernels.testing import codes_of, copied, error, run_on_gpu, run_reference
from openinfer.tensor import bfloat16, float8_e4m3fn, float32

TARGET = dataclasses.replace(H200, nvrtc=True)
Rng = np.random.Generator


def weight_of(rng: Rng, experts: int, n: int, k: int) -> Linear[Any]:
    """Codes of all sizes, subnormal ones too, and scales that differ from block to block."""
    codes = np.clip(rng.standard_normal((experts, n, k)) * 100, -448, 448).astype(float8_e4m3fn)
    codes.view(np.uint8)[rng.random(codes.shape) < 0.05] = 3
    blocks = experts, n // 128, k // 128
    return Linear(codes, (rng.uniform(0.1, 4, blocks) * k**-0.5 / 100).astype(np.float32))


def mixture(rng: Rng, tokens: int, hidden: int, inter: int, experts: int, chosen: int) -> dict[str, Any]:
    ids = np.stack([rng.permutation(experts)[:chosen] for _ in range(tokens)]).astype(np.int32)
    return {
        "x": rng.standard_normal((tokens, hidden)).astype(bfloat16),
        "norm_weight": None,
        "eps": None,
        "expert_ids": ids,
        "expert_weights": rng.random((tokens, chosen)).astype(bfloat16),
        "gate_up": weight_of(rng, experts, 2 * inter, hidden),
        "down": weight_of(rng, experts, hidden, inter),
        "out": np.full((tokens, hidden), np.nan, bfloat16),
        "adds": False,
    }


def kernels(target: Target, args: dict[str, Any], op: Any = experts_add) -> list[str]:
    """The names of a call's kernels."""
    pack = NullPack(target)
    op(pack, **copied(args)[1])
    return [c.spec.function for call in pack.calls for c in call.commands if isinstance(c, Launch)]


def agrees(gpu: Any, args: dict[str, Any], kernel: str, **rolled: int) -> None:
    """A call by this kernel has the numbers of the reference, and the same bits again. rolled: weights and the axis
    along which their scales are moved, for a control."""
    target, driver, _, stream = gpu
    if target.arch != 90:
        pytest.skip("the kernel is for sm_90")
    target = dataclasses.replace(target, nvrtc=True)
    assert kernel in kernels(target, args)
    found = [run_on_gpu(experts_add, args, target, driver, stream)["out"] for _ in range(2)]
    np.testing.assert_array_equal(*found)
    want = run_reference(experts_add, args)["out"].astype(np.float32)
    scale = np.linalg.norm(want, axis=1) + 1e-3
    assert (np.linalg.norm(found[0].astype(np.float32) - want, axis=1) / scale).max() < 4e-3
    for name, axis in rolled.items():
        wrong = dataclasses.replace(args[name], scales=np.roll(args[name].scales, 1, axis=axis))
        far = run_reference(experts_add, args | {name: wrong})["out"].astype(np.float32)
        assert (np.linalg.norm(far - want, axis=1) / scale).max() > 0.05


def test_few_pairs_an_expert_take_the_ring(rng: Rng) -> None:
    few = ["sort_pairs", "experts_ring", "experts_ring", "add_chosen"]
    assert kernels(TARGET, mixture(rng, 10, 256, 128, 16, 4)) == few
    for target, tokens in (
        (H200, 10),  # no NVRTC
        (dataclasses.replace(TARGET, arch=100), 10),
        (dataclasses.replace(TARGET, batch_invariant=True), 10),
        (TARGET, 11),  # 44 pairs of 16 experts
        (TARGET, 4),  # so few that no kernel sorts them
    ):
        assert "experts_ring" not in kernels(target, mixture(rng, tokens, 256, 128, 16, 4)), (target, tokens)


def test_the_tiles_of_published_mixtures_fit() -> None:
    """Rows of a tile have one scale, and all warps work."""
    sizes = {(2048, 512, 256), (2048, 768, 128), (3072, 1024, 256), (4096, 1024, 512), (4096, 1536, 128)}
    for hidden, inter, count in sizes:
        for n, k, first in ((2 * inter, hidden, True), (hidden, inter, False)):
            blocks = (count, n // 128, k // 128)
            weight = Linear(
                np.broadcast_to(np.zeros(1, float8_e4m3fn), (count, n, k)), np.zeros(blocks, np.float32)
            )
            tile = ring_tile(TARGET, 2 * count, weight, first=first)  # type: ignore[arg-type]
            assert isinstance(tile, RingTile)
            rows = tile.rows // (1 + first)
            assert n % tile.rows == 0
            assert 128 % rows == 0
            assert tile.rows // 16 % (tile.warps // tile.parts) == 0
            assert tile.stages >= 3
            assert tile.shared(k, count) <= shared_bytes(90)


@pytest.mark.gpu
@pytest.mark.parametrize(("hidden", "inter"), [(2048, 512), (2048, 768), (1536, 128), (384, 1024)])
@pytest.mark.parametrize("case", ["even", "one expert has most", "some of no expert"])
def test_numbers_and_bits(gpu: Any, rng: Rng, hidden: int, inter: int, case: str) -> None:
    """Against the reference and a wrong one; and again, the same bits."""
    args = mixture(rng, 22, hidden, inter, 40, 4)
    if case == "one expert has most":
        args["expert_ids"][:, 0] = np.where((args["expert_ids"] == 7).any(1), args["expert_ids"][:, 0], 7)
    if case == "some of no expert":
        args["expert_ids"][args["expert_ids"] > 11] = -1
    agrees(gpu, args, "experts_ring", down=1)


def packed(rng: Rng, experts: int, n: int, k: int) -> Linear[Any]:
    """FP4 of every number, worth about K^-0.5, and scales that differ from block to block."""
    codes = rng.integers(0, 256, (experts, n, k // 2), np.uint8)
    return Linear(codes, rng.integers(117, 124, (experts, n, k // 32), np.uint8))


def packed_mixture(
    rng: Rng, tokens: int, hidden: int, inter: int, experts: int, chosen: int
) -> dict[str, Any]:
    ids = np.stack([rng.permutation(experts)[:chosen] for _ in range(tokens)]).astype(np.int32)
    return {
        "out": np.full((tokens, hidden), np.nan, bfloat16),
        "x": codes_of(rng.standard_normal((tokens, hidden), np.float32)),
        "shared": rng.standard_normal((tokens, hidden)).astype(bfloat16),
        "expert_ids": ids,
        "expert_weights": rng.uniform(0.2, 1, ids.shape).astype(float32),
        "gate_up": packed(rng, experts, 2 * inter, hidden),
        "down": packed(rng, experts, hidden, inter),
        "limit": 1.5,
    }


def test_many_pairs_an_expert_are_multiplied_from_arranged_rows(rng: Rng) -> None:
    many = ["arrange_rows", "sort_pairs", "experts_many", "experts_many", "add_chosen"]
    args = mixture(rng, 64, 512, 512, 8, 4)
    assert sorted(kernels(TARGET, args)) == sorted(many)
    for target, other in (
        (H200, args),  # no NVRTC
        (dataclasses.replace(TARGET, arch=100), args),
        (dataclasses.replace(TARGET, batch_invariant=True), args),
        (TARGET, mixture(rng, 63, 512, 512, 8, 4)),  # 252 pairs of 8 experts
        (TARGET, mixture(rng, 64, 640, 512, 8, 4)),  # rows of the second product that are no multiple of 256
        (TARGET, mixture(rng, 64, 512, 384, 8, 4)),  # as many steps as stages
    ):
        assert "experts_many" not in kernels(target, other)


@pytest.mark.gpu
@pytest.mark.parametrize(("hidden", "inter"), [(2048, 512), (2048, 768), (512, 1024)])
@pytest.mark.parametrize("case", ["even", "of all sizes", "some of no expert"])
def test_numbers_and_bits_of_many(gpu: Any, rng: Rng, hidden: int, inter: int, case: str) -> None:
    """Chunks of all sizes, experts without pairs; against the reference and wrong ones; and again, the same bits."""
    args = mixture(rng, 520, hidden, inter, 12, 4)
    if case == "of all sizes":
        counts = (1, 0, 63, 64, 65, 81, 97, 129, 145, 160, 161, 337)
        ids = np.full(520 * 4, -1, np.int32)
        ids[: sum(counts)] = np.repeat(np.arange(12), counts)
        args["expert_ids"] = rng.permutation(ids).reshape(520, 4)
    if case == "some of no expert":
        args["expert_ids"][args["expert_ids"] > 8] = -1
    agrees(gpu, args, "experts_many", gate_up=2, down=2)


def test_few_pairs_an_expert_of_fp4_take_the_ring(rng: Rng) -> None:
    few = ["experts_fp4", "experts_fp4", "add_chosen"]
    assert kernels(TARGET, packed_mixture(rng, 6, 1024, 1024, 4, 2), experts) == few
    for target, tokens, inter in (
        (H200, 6, 1024),  # no NVRTC
        (dataclasses.replace(TARGET, arch=100), 6, 1024),
        (dataclasses.replace(TARGET, batch_invariant=True), 6, 1024),
        (TARGET, 7, 1024),  # 14 pairs of 4 experts
        (TARGET, 6, 1152),  # no whole stages
    ):
        args = packed_mixture(rng, tokens, 1024, inter, 4, 2)
        assert "experts_fp4" not in kernels(target, args, experts), (target, tokens, inter)
    plain = packed_mixture(rng, 6, 1024, 1024, 4, 2)
    assert "experts_fp4" not in kernels(TARGET, plain | {"x": plain["shared"]}, experts)
    # Of 14 pairs, half are other ranks'.
    assert kernels(TARGET, packed_mixture(rng, 7, 1024, 1024, 4, 2) | {"all_experts": 8}, experts) == few


@pytest.mark.gpu
@pytest.mark.parametrize(("hidden", "inter"), [(2048, 1024), (1024, 3072), (7168, 1024)])
@pytest.mark.parametrize("case", ["even", "one expert has most", "one token", "some of no expert", "none"])
def test_numbers_and_bits_of_fp4(gpu: Any, rng: Rng, hidden: int, inter: int, case: str) -> None:
    """As test_numbers_and_bits."""
    target, driver, _, stream = gpu
    if target.arch != 90:
        pytest.skip("the kernel is for sm_90")
    args = packed_mixture(rng, 1 if case == "one token" else 12, hidden, inter, 24, 4)
    ids = args["expert_ids"]
    if case == "one expert has most":
        ids[:, 0] = np.where((ids == 7).any(1), ids[:, 0], 7)
    if case == "some of no expert":
        ids[ids > 11] = -1
    if case == "none":
        ids[:] = -1
    target = dataclasses.replace(target, nvrtc=True)
    assert "experts_fp4" in kernels(target, args, experts)
    found = [run_on_gpu(experts, args, target, driver, stream)["out"] for _ in range(2)]
    np.testing.assert_array_equal(*found)
    want = run_reference(experts, args)["out"]
    assert error(found[0], want) < 8e-3  # as in test_packed_experts.py
    for name in ("gate_up", "down") if case != "none" else ():
        rolled = dataclasses.replace(args[name], scales=np.roll(args[name].scales, 1, axis=2))
        assert error(run_reference(experts, args | {name: rolled})["out"], want) > 0.05, name
