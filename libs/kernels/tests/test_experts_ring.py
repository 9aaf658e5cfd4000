"""The ring of few pairs an expert (device/experts_ring.cu): which mixtures take it, and on a GPU its numbers."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from openinfer.kernels import H200, Launch, NullPack, Target, experts_add
from openinfer.kernels.formats.linear import Linear
from openinfer.kernels.moe.ring import RingTile, ring_tile
from openinfer.kernels.op.target import shared_bytes
from openinfer.kernels.testing import copied, run_on_gpu, run_reference
from openinfer.tensor import bfloat16, float8_e4m3fn

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


def kernels(target: Target, args: dict[str, Any]) -> list[str]:
    """The names of a call's kernels."""
    pack = NullPack(target)
    experts_add(pack, **copied(args)[1])
    return [c.spec.function for call in pack.calls for c in call.commands if isinstance(c, Launch)]


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
    for hidden, inter, experts in sizes:
        for n, k, first in ((2 * inter, hidden, True), (hidden, inter, False)):
            blocks = (experts, n // 128, k // 128)
            weight = Linear(
                np.broadcast_to(np.zeros(1, float8_e4m3fn), (experts, n, k)), np.zeros(blocks, np.float32)
            )
            tile = ring_tile(TARGET, 2 * experts, weight, first=first)  # type: ignore[arg-type]
            assert isinstance(tile, RingTile)
            rows = tile.rows // (1 + first)
            assert n % tile.rows == 0
            assert 128 % rows == 0
            assert tile.rows // 16 % (tile.warps // tile.parts) == 0
            assert tile.stages >= 3
            assert tile.shared(k, experts) <= shared_bytes(90)


@pytest.mark.gpu
@pytest.mark.parametrize(("hidden", "inter"), [(2048, 512), (2048, 768), (1536, 128), (384, 1024)])
@pytest.mark.parametrize("case", ["even", "one expert has most", "some of no expert"])
def test_numbers_and_bits(gpu: Any, rng: Rng, hidden: int, inter: int, case: str) -> None:
    """Against the reference and a wrong one; and again, the same bits."""
    target, driver, _, stream = gpu
    if target.arch != 90:
        pytest.skip("the kernel is for sm_90")
    args = mixture(rng, 22, hidden, inter, 40, 4)
    if case == "one expert has most":
        args["expert_ids"][:, 0] = np.where((args["expert_ids"] == 7).any(1), args["expert_ids"][:, 0], 7)
    if case == "some of no expert":
        args["expert_ids"][args["expert_ids"] > 11] = -1
    target = dataclasses.replace(target, nvrtc=True)
    assert "experts_ring" in kernels(target, args)
    found = [run_on_gpu(experts_add, args, target, driver, stream)["out"] for _ in range(2)]
    np.testing.assert_array_equal(*found)
    want = run_reference(experts_add, args)["out"].astype(np.float32)
    scale = np.linalg.norm(want, axis=1) + 1e-3
    assert (np.linalg.norm(found[0].astype(np.float32) - want, axis=1) / scale).max() < 4e-3
    rolled = dataclasses.replace(args["down"], scales=np.roll(args["down"].scales, 1, axis=1))
    far = run_reference(experts_add, args | {"down": rolled})["out"].astype(np.float32)
    assert (np.linalg.norm(far - want, axis=1) / scale).max() > 0.05
