"""The kernels of `experts`, in Triton's interpreter and on a GPU, against the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from openinfer.kernels import ContractError, NullPack, Store, Target
from openinfer.kernels.formats.linear import Linear
from openinfer.kernels.moe import packed as mixture
from openinfer.kernels.op.coded import Coded
from openinfer.kernels.op.target import shared_bytes
from openinfer.kernels.ops.experts import experts
from openinfer.kernels.testing import codes_of, error
from openinfer.tensor import Arena, Device, Tensor, bfloat16, float8_e4m3fn, float32, int32, uint8

Array = np.ndarray[Any, Any]
Both = Callable[..., tuple[dict[str, Array], dict[str, Array]]]
"""both(op, args, target): what the kernels and the reference leave (conftest.py)."""
Run = Callable[..., dict[str, Array]]
LIMIT = 1.5
"""Of the gated product: small enough that many values are cut off."""


def packed(rng: np.random.Generator, shape: tuple[int, ...], kind: int) -> tuple[Array, Array | None]:
    """A weight [..., N, K] of every number of its format, worth about K^-0.5, and its scales."""
    *lead, n, k = shape
    if kind == mixture.BF16:
        return (rng.standard_normal(shape) * k**-0.5).astype(bfloat16), None
    if kind == mixture.FP4:
        weight = rng.integers(0, 256, (*lead, n, k // 2), np.uint8)
        return weight, rng.integers(118, 124, (*lead, n, k // 32), np.uint8)
    codes = rng.integers(0, 256, shape, np.uint8)
    codes[codes & 127 == 127] = 0  # NaN
    return codes.view(float8_e4m3fn), rng.integers(117, 120, (*lead, -(-n // 128), -(-k // 128)), np.uint8)


def mixture_of(
    rng: np.random.Generator, tokens: int, chosen: int, count: int, kind: int, *, quantized: bool,
    width: int = 128, inter: int = 128,
) -> dict[str, Any]:  # fmt: skip
    """Arguments of `experts`; one token is padding, one has a choice of another rank, the last expert gets no token."""
    ids = np.stack([rng.permutation(count - 1)[:chosen] for _ in range(tokens)]).astype(np.int32)
    ids[rng.integers(tokens)] = -1
    ids[0, 0] = -1
    x = rng.standard_normal((tokens, width), np.float32)
    gate_up, gate_up_scales = packed(rng, (count, 2 * inter, width), kind)
    down, down_scales = packed(rng, (count, width, inter), kind)
    return {
        "out": np.full((tokens, width), np.nan, bfloat16),
        "x": codes_of(x) if quantized else x.astype(bfloat16),
        "shared": (0.1 * rng.standard_normal((tokens, width))).astype(bfloat16),
        "expert_ids": ids,
        "expert_weights": rng.uniform(0.2, 1, ids.shape).astype(float32),
        "gate_up": Linear(gate_up, gate_up_scales),
        "down": Linear(down, down_scales),
        "limit": LIMIT,
    }


ROUNDED = 8e-3
"""The error where hidden values are rounded by q8: sums that differ in their last bits, as those of codes do on Hopper
(some 14 bits), now and then change a code of 4 bits."""

KINDS = {"bf16": mixture.BF16, "float8": mixture.FLOAT8, "fp4": mixture.FP4}
COUNTS = {"one": (1, 2, 4), "few": (7, 2, 4), "middle": (40, 2, 4), "many": (80, 2, 3), "most": (140, 2, 3)}
"""Tokens, choices of each, and experts: a tile of each kind."""


@pytest.mark.parametrize(
    ("kind", "count", "quantized"),
    [
        ("fp4", "one", True), ("fp4", "few", False), ("fp4", "middle", True), ("fp4", "many", True),
        ("fp4", "most", False),
        ("float8", "one", False), ("float8", "few", True), ("bf16", "few", False), ("bf16", "many", True),
        pytest.param("float8", "many", True, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_experts(run_both: Both, rng: np.random.Generator, kind: str, count: str, quantized: bool) -> None:
    args = mixture_of(rng, *COUNTS[count], KINDS[kind], quantized=quantized)
    got, want = run_both(experts, args)
    assert error(got["out"], want["out"]) < (ROUNDED if quantized else 4e-3)


@pytest.mark.parametrize(
    "kind", ["fp4", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("float8", "bf16"))]
)
def test_a_token_alone_has_the_bits_that_it_has_among_others(
    check_alone: Any, rng: np.random.Generator, kind: str
) -> None:
    check_alone(experts, mixture_of(rng, *COUNTS["many"], KINDS[kind], quantized=True), "out")


@pytest.mark.parametrize(
    "name", ["limit", "expert_weights", "gate_up.scales", "down.scales", "down.weight", "x"]
)
def test_experts_notice(reference: Run, rng: np.random.Generator, name: str) -> None:
    """Negative control: what a call has is in the numbers that are compared."""
    args = mixture_of(rng, *COUNTS["few"], mixture.FP4, quantized=False)
    name, _, part = name.partition(".")
    old = args[name]
    if name == "x":
        new: Any = codes_of(old.astype(float32))
    elif isinstance(old, float):
        new = 1.4 * old
    elif name == "expert_weights":
        new = np.roll(old, 1, axis=1)
    else:
        other = getattr(old, part).copy()
        other[:, 17] ^= 2  # of a row of 256 or fewer
        new = replace(old, **{part: other})
    want, found = reference(experts, args), reference(experts, args | {name: new})
    assert error(want["out"], found["out"]) > ROUNDED + 1e-3


def test_kernels_before_hopper(run_both: Both, rng: np.random.Generator) -> None:
    args = mixture_of(rng, *COUNTS["few"], mixture.FP4, quantized=False)
    got, want = run_both(experts, args, Target(arch=80, num_sms=4, interpreted=True))
    assert error(got["out"], want["out"]) < 4e-3
    with pytest.raises(ContractError, match="q8 is asked for on sm_80"):
        run_both(
            experts,
            args | {"x": codes_of(args["x"].astype(float32))},
            Target(arch=80, num_sms=4, interpreted=True),
        )


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["fp4", "float8"])
@pytest.mark.parametrize("tokens", [1, 20, 40, 80, 200])
def test_published_shapes(
    on_gpu: Run, reference: Run, rng: np.random.Generator, kind: str, tokens: int
) -> None:
    args = mixture_of(rng, tokens, 2, 4, KINDS[kind], quantized=True, width=4096, inter=2048)
    assert error(on_gpu(experts, args)["out"], reference(experts, args)["out"]) < ROUNDED


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fp4", "float8"])
def test_kernels_of_published_shapes_compile(tmp_path: Path, kind: str) -> None:
    """They fit the shared memory of a block. V4-Flash and V4-Pro."""
    pack, store = NullPack(Target(90, 132)), Store(90, tmp_path, folders=[])
    for width, inter, count in ((4096, 2048, 256), (7168, 3072, 384)):
        for tokens in (1, 32, 128, 1024, 2048, 4096):
            experts(pack, **null_call(tokens, width, inter, count, kind))
    store.prepare(pack.specs())
    assert max(store.get(s).shared for s in pack.specs()) <= shared_bytes(90)


def null_call(tokens: int, width: int, inter: int, count: int, kind: str) -> dict[str, Any]:
    """Arguments of `experts` in null memory."""
    arena, fp4 = Arena(Device("null"), None), kind == "fp4"

    def weight(rows: int, columns: int) -> tuple[Tensor, Tensor]:
        if fp4:
            shapes = (count, rows, columns // 2), (count, rows, columns // 32)
        else:
            shapes = (count, rows, columns), (count, rows // 128, columns // 128)
        return arena.alloc(shapes[0], uint8 if fp4 else float8_e4m3fn), arena.alloc(shapes[1], uint8)

    gate_up, down = weight(2 * inter, width), weight(width, inter)
    return {
        "out": arena.alloc((tokens, width), bfloat16),
        "x": Coded.allocate(arena, (tokens, width), bfloat16),
        "shared": arena.alloc((tokens, width), bfloat16),
        "expert_ids": arena.alloc((tokens, 6), int32),
        "expert_weights": arena.alloc((tokens, 6), float32),
        "gate_up": Linear(*gate_up),
        "down": Linear(*down),
        "limit": 10.0,
    }
