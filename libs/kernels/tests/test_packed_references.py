"""The references of packed formats, products and experts, by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from openinfer.kernels import ContractError, CpuPack, Op, experts, project
from openinfer.kernels.formats.linear import Linear
from openinfer.kernels.op import rounding
from openinfer.kernels.op.op import mapped
from openinfer.kernels.testing import codes_of, never_coded
from openinfer.tensor import Tensor, float8_e4m3fn

Array = np.ndarray[Any, Any]
F = np.float32


def run(op: Op[Any], **args: Any) -> None:
    """The reference, on these arrays."""
    op(CpuPack(), **mapped(args, np.ndarray, Tensor.from_numpy))


def normal(rng: np.random.Generator, *shape: int) -> Array:
    return rng.standard_normal(shape).astype(F)


def test_formats_round_to_the_nearest_with_scales_of_powers_of_two() -> None:
    x = normal(np.random.default_rng(0), 5, 256) * F(10) ** np.arange(-6, 4, 2, dtype=F)[:, None]
    for y, steps, block in ((rounding.q8(x, 128), 2**-4, 128), (rounding.q4(x), 2**-1, 32)):
        peak = np.repeat(np.abs(x.reshape(5, -1, block)).max(axis=-1), block, axis=1)
        assert np.all(np.abs(y - x) <= np.maximum(np.abs(x), peak / 4) * steps + 1e-4 * (block == 128))
        assert np.abs(y - x).max() > 0
        np.testing.assert_array_equal(y, rounding.q8(y, 128) if block == 128 else rounding.q4(y))
    halves = np.array([[0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6] + [0] * 24], F)
    np.testing.assert_array_equal(rounding.q4(halves)[0, :8], [0, 1, 1, 2, 2, 4, 4, 6])  # ties to even codes
    np.testing.assert_array_equal(rounding.unpack_fp4(np.array([0x2F, 0x81], np.uint8)), [-6, 1, 0.5, -0.0])
    np.testing.assert_array_equal(rounding.e8m0(np.array([127, 0, 254], np.uint8)), [1, 2.0**-127, 2.0**127])
    assert np.isnan(rounding.e8m0(np.array([255], np.uint8)))


@pytest.mark.parametrize("kind", ["float32", "uint8"])
def test_scales_of_a_square_grid_are_not_transposed(kind: str) -> None:
    """The scale of row block i and column block j is at [i, j], also of stacked projections."""
    codes = np.ones((2, 256, 256), float8_e4m3fn)
    exponents = np.array([[0, 1], [2, 3]])
    scales = (2.0**exponents).astype(F) if kind == "float32" else (127 + exponents).astype(np.uint8)
    want = np.kron(2.0**exponents, np.ones((128, 128)))
    for parts in (1, 2):
        np.testing.assert_array_equal(Linear(codes[0], scales).values(parts), want)
    both = np.stack([scales, scales.T])
    np.testing.assert_array_equal(Linear(codes, both).values(), np.stack([want, want.T]))
    for half, rows in zip(Linear(codes[0], scales).halves(), (want[:128], want[128:]), strict=True):
        np.testing.assert_array_equal(half, rows)


def test_hadamard_keeps_products() -> None:
    x, y = normal(np.random.default_rng(0), 2, 128)
    assert abs(rounding.hadamard(x) @ rounding.hadamard(y) - x @ y) < 1e-4
    np.testing.assert_allclose(rounding.hadamard(np.eye(4, dtype=F)[1]), [0.5, -0.5, 0.5, -0.5])


@pytest.mark.parametrize("kind", ["fp4", "fp8"])
def test_packed_experts_are_their_values(kind: str) -> None:
    rng = np.random.default_rng(9)
    width, inter, count = 128, 128, 3

    def packed(rows: int, columns: int) -> tuple[Array, Array]:
        if kind == "fp4":
            codes = rng.integers(0, 256, (count, rows, columns // 2)).astype(np.uint8)
            return codes, rng.integers(118, 124, (count, rows, columns // 32)).astype(np.uint8)
        weight = normal(rng, count, rows, columns).astype(float8_e4m3fn)
        return weight, rng.integers(118, 124, (count, rows // 128, columns // 128)).astype(np.uint8)

    gate_up, gate_up_scales = packed(2 * inter, width)
    down, down_scales = packed(width, inter)
    x, shared = normal(rng, 5, width), normal(rng, 5, width)
    ids = np.array([[0, 2], [1, -1], [2, 1], [-1, -1], [0, 1]], np.int32)
    weights = np.abs(normal(rng, 5, 2))
    out = np.empty((5, width), F)
    args = {
        "x": x,
        "shared": shared,
        "expert_ids": ids,
        "expert_weights": weights,
        "limit": 0.7,
    }
    run(
        experts,
        out=out,
        gate_up=Linear(gate_up, gate_up_scales),
        down=Linear(down, down_scales),
        **args,
    )
    first = Linear(gate_up, gate_up_scales).values(2)
    second = Linear(down, down_scales).values()
    expected = shared.astype(float)
    for t, j in np.argwhere(ids >= 0):
        g, u = np.split(first[ids[t, j]].astype(float) @ x[t], 2)
        g, u = np.minimum(g, 0.7), np.clip(u, -0.7, 0.7)
        expected[t] += second[ids[t, j]].astype(float) @ (g / (1 + np.exp(-g)) * u * weights[t, j])
    assert np.abs(out - expected).max() < 1e-3
    wide = np.empty((5, width), F)
    run(experts, out=wide, gate_up=first, down=second, **args)
    np.testing.assert_array_equal(wide, out)


def test_projections_in_groups() -> None:
    rng = np.random.default_rng(10)
    x, weight = normal(rng, 5, 2 * 64), normal(rng, 128, 64)
    out = np.empty((5, 128), F)
    run(project, out=out, x=x, weight=weight, groups=2)
    expected = np.concatenate([x[:, :64] @ weight[:64].T, x[:, 64:] @ weight[64:].T], axis=1)
    assert np.abs(out - expected).max() < 1e-4
    codes = never_coded(5, 128, np.dtype(F))
    run(project, out=codes, x=x, weight=weight, groups=2)
    np.testing.assert_array_equal(codes.values(), rounding.q8(out, 128))
    with pytest.raises(ContractError, match="3 groups"):
        run(project, out=out, x=x, weight=weight, groups=3)


@pytest.mark.parametrize("width", [32, 384])
def test_codes_are_the_values_of_q8(width: int) -> None:
    x = normal(np.random.default_rng(3), 6, width)
    codes = codes_of(x, np.dtype(F))
    assert (codes.shape, codes.scales.shape) == ((6, width), (6, -(-width // 128)))
    assert codes.nbytes == 6 * width + 6 * -(-width // 128)
    np.testing.assert_array_equal(codes.values(), rounding.q8(x, min(width, 128)))
    np.testing.assert_array_equal(codes[2:5].values(), codes.values()[2:5])


def test_products_of_codes_are_those_of_their_values() -> None:
    rng = np.random.default_rng(4)
    codes, weight = codes_of(normal(rng, 5, 128), np.dtype(F)), normal(rng, 32, 128)
    found, wanted = np.empty((5, 32), F), np.empty((5, 32), F)
    run(project, out=found, x=codes, weight=weight, groups=1)
    run(project, out=wanted, x=codes.values(), weight=weight, groups=1)
    np.testing.assert_array_equal(found, wanted)
    with pytest.raises(ContractError, match="x is codes in 2 groups"):
        run(project, out=found, x=codes, weight=weight[:, :64], groups=2)
    with pytest.raises(ContractError, match="x has 48 columns; q8 takes multiples of 128"):
        run(project, out=found, x=never_coded(5, 48, np.dtype(F)), weight=normal(rng, 32, 48), groups=1)
