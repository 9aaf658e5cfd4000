"""The kernels of DeepSeek-V4's projections, router and hyper-connections, in Triton's interpreter, against the
references."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton; compile workers drop it

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from openinfer.kernels import Target
from openinfer.recipes.deepseek_v4 import mixture
from openinfer.recipes.deepseek_v4.formats import q8
from openinfer.recipes.deepseek_v4.ops.hyper_connections import hc_head, hc_post, hc_pre, spread
from openinfer.recipes.deepseek_v4.ops.project import gate_up_clamped, norm_rows, project
from openinfer.recipes.deepseek_v4.ops.route import route
from openinfer.tensor import bfloat16, float8_e4m3fn, float32

Array = np.ndarray[Any, Any]
Both = Callable[..., tuple[dict[str, Array], dict[str, Array]]]
"""both(op, args, target): what the kernels and the reference leave (conftest.py)."""
Run = Callable[..., dict[str, Array]]
LIMIT = 1.5
"""Of the gated product: small enough that many values are cut off."""


def error(got: Array, want: Array) -> float:
    """Relative Frobenius error; infinite where something is not finite."""
    g, w = got.astype(np.float64), want.astype(np.float64)
    return float(np.linalg.norm(g - w) / np.linalg.norm(w)) if np.isfinite(g).all() else float("inf")


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


KINDS = {"bf16": mixture.BF16, "float8": mixture.FLOAT8}


def mixing(rng: np.random.Generator, tokens: int, width: int) -> dict[str, Any]:
    """Arguments of `hc_pre` whose numbers matter: logits of about 1, streams that differ."""
    return {
        "out": np.full((tokens, width), np.nan, bfloat16),
        "rounded_out": np.full((tokens, width), np.nan, bfloat16),
        "mix": np.full((tokens, 20), np.nan, float32),
        "streams": rng.standard_normal((tokens, 4, width)).astype(bfloat16),
        "fn": (rng.standard_normal((24, 4 * width)) * (4 * width) ** -0.5).astype(float32),
        "base": rng.standard_normal(24).astype(float32),
        "scale": np.array([1, 1.2, 2], float32),
        "norm_weight": rng.uniform(0.5, 1.5, width).astype(float32),
        "eps": 1e-6,
        "hc_eps": 1e-6,
        "iters": 20,
    }


@pytest.mark.parametrize(("tokens", "width"), [(1, 256), (5, 384), (17, 256), (70, 128)])
def test_hc_pre(reference: Run, run_both: Both, rng: np.random.Generator, tokens: int, width: int) -> None:
    args = mixing(rng, tokens, width)
    got, want = run_both(hc_pre, args)
    np.testing.assert_allclose(got["mix"], want["mix"], rtol=2e-5, atol=1e-6)
    assert error(got["out"], want["out"]) < 5e-4  # a rounding may fall to the other side
    assert error(got["rounded_out"], want["rounded_out"]) < 4e-3
    (got, want) = run_both(hc_pre, args | {"rounded_out": None, "iters": 1})
    np.testing.assert_allclose(got["mix"], want["mix"], rtol=2e-5, atol=1e-6)
    other = reference(hc_pre, args | {"iters": 2})
    assert np.abs(other["mix"] - want["mix"]).max() > 1e-3  # negative control


def test_hc_numbers_are_those_of_float32(reference: Run, run_both: Both, rng: np.random.Generator) -> None:
    """The matrix is not rounded to bf16, nor to two of them."""
    args = mixing(rng, 3, 128)
    got, want = run_both(hc_pre, args)
    rounded = reference(hc_pre, args | {"fn": args["fn"].astype(bfloat16).astype(float32)})
    exact = np.abs(got["mix"] - want["mix"]).max()
    assert exact < 2e-6
    assert np.abs(rounded["mix"] - want["mix"]).max() > 100 * exact


def test_hc_head(reference: Run, run_both: Both, rng: np.random.Generator) -> None:
    args = mixing(rng, 6, 384)
    args = {name: args[name] for name in ("out", "streams", "fn", "base", "scale", "eps", "hc_eps")}
    args |= {"fn": args["fn"][:4] * 3, "base": args["base"][:4], "scale": args["scale"][:1]}
    got, want = run_both(hc_head, args)
    assert error(got["out"], want["out"]) < 5e-4
    assert error(reference(hc_head, args | {"base": args["base"] + 0.1})["out"], want["out"]) > 5e-3


def test_hc_post(reference: Run, run_both: Both, rng: np.random.Generator) -> None:
    args = {
        "streams": rng.standard_normal((5, 4, 1152)).astype(bfloat16),
        "y": rng.standard_normal((5, 1152)).astype(bfloat16),
        "mix": rng.uniform(0, 1, (5, 20)).astype(float32),
    }
    got, want = run_both(hc_post, args)
    assert error(got["streams"], want["streams"]) < 3e-4
    transposed = args["mix"].copy()
    transposed[:, 4:] = transposed[:, 4:].reshape(5, 4, 4).swapaxes(1, 2).reshape(5, 16)
    assert error(reference(hc_post, args | {"mix": transposed})["streams"], want["streams"]) > 0.1


@pytest.mark.parametrize("add", [False, True])
def test_spread(run_both: Both, rng: np.random.Generator, add: bool) -> None:
    args = {
        "streams": rng.standard_normal((3, 4, 1100)).astype(bfloat16),
        "x": rng.standard_normal((3, 1100)).astype(bfloat16),
        "add": add,
    }
    got, want = run_both(spread, args)
    np.testing.assert_array_equal(got["streams"], want["streams"])


def routing(
    rng: np.random.Generator, tokens: int, experts: int, chosen: int, *, learned: bool
) -> dict[str, Any]:
    """Arguments of `route`: token 1 is padding, token 2 has equal logits, token 3 has none above -15."""
    logits = rng.standard_normal((tokens, experts + 16)).astype(float32)[:, :experts]
    if tokens > 3:
        logits[2] = 0.5
        logits[3] -= 20
    table = np.stack([rng.permutation(experts)[:chosen] for _ in range(50)]).astype(np.int32)
    return {
        "expert_ids": np.full((tokens, chosen), 7, np.int32),
        "expert_weights": np.full((tokens, chosen), np.nan, float32),
        "logits": logits,
        "bias": (np.round(rng.standard_normal(experts) * 4) / 8).astype(float32) if learned else None,
        "table": None if learned else table,
        "token_ids": rng.integers(0, 50, tokens).astype(np.int32),
        "token_slots": np.where(np.arange(tokens) == 1, 0, 3).astype(np.int32),
        "scaling": 1.5,
        "first_expert": 0,
        "num_experts": experts,
    }


@pytest.mark.parametrize("learned", [True, False], ids=["bias", "table"])
@pytest.mark.parametrize(("tokens", "experts", "chosen"), [(9, 256, 6), (1, 16, 2), (5, 24, 3)])
def test_route(
    run_both: Both, rng: np.random.Generator, tokens: int, experts: int, chosen: int, learned: bool
) -> None:
    args = routing(rng, tokens, experts, chosen, learned=learned)
    got, want = run_both(route, args)
    np.testing.assert_array_equal(got["expert_ids"], want["expert_ids"])
    np.testing.assert_allclose(got["expert_weights"], want["expert_weights"], rtol=1e-5)
    if tokens > 1:
        assert (got["expert_ids"][1] == -1).all()
        assert not got["expert_weights"][1].any()
    half = args | {"first_expert": experts // 2, "num_experts": experts // 4}  # another rank's beside
    got, want = run_both(route, half)
    np.testing.assert_array_equal(got["expert_ids"], want["expert_ids"])
    assert (want["expert_ids"] == -1).any()
    np.testing.assert_allclose(got["expert_weights"], want["expert_weights"], rtol=1e-5)


def test_route_breaks_ties_by_index(run_both: Both, rng: np.random.Generator) -> None:
    args = routing(rng, 4, 32, 4, learned=True)
    args["bias"][:] = 0
    got, want = run_both(route, args)
    assert got["expert_ids"][2].tolist() == [0, 1, 2, 3]
    np.testing.assert_array_equal(got["expert_ids"], want["expert_ids"])


def test_padding_is_routed_without_a_look_at_the_table(interpreted: Run, rng: np.random.Generator) -> None:
    """While an engine warms up, the table is not loaded yet: what is in its memory names no experts."""
    args = routing(rng, 3, 16, 2, learned=False)
    args["token_slots"][:] = [0, 1, 0]
    args["token_ids"][:] = [0, 1, 0]
    args["table"][0] = 1 << 30
    got = interpreted(route, args)
    assert got["expert_ids"].tolist() == [[-1, -1], args["table"][1].tolist(), [-1, -1]]
    assert not got["expert_weights"][[0, 2]].any()


def layer(
    rng: np.random.Generator,
    tokens: int,
    n: int,
    k: int,
    kind: str,
    groups: int = 1,
    *,
    rounded: bool = False,
    quantized: bool = False,
) -> dict[str, Any]:
    """Arguments of `project`; x is columns of something wider."""
    weight, scales = packed(rng, (n, k), KINDS[kind])
    wide = rng.standard_normal((tokens, groups * k + 64), np.float32)
    if rounded:
        wide[:, : groups * k] = q8(wide[:, : groups * k], 128)
    return {
        "out": np.full((tokens, n), np.nan, bfloat16),
        "x": wide.astype(bfloat16)[:, : groups * k],
        "weight": weight,
        "scales": scales,
        "groups": groups,
        "rounded_x": rounded,
        "quantized": quantized,
    }


@pytest.mark.parametrize("kind", ["float8", "bf16"])
@pytest.mark.parametrize(
    ("tokens", "n", "k", "groups"),
    [(1, 144, 512, 1), (3, 128, 192, 2), (40, 64, 128, 1), (70, 128, 128, 2), (1, 64, 2048, 1)],
)
def test_project(
    reference: Run,
    run_both: Both,
    rng: np.random.Generator,
    kind: str,
    tokens: int,
    n: int,
    k: int,
    groups: int,
) -> None:
    args = layer(rng, tokens, n, k, kind, groups)
    got, want = run_both(project, args)
    assert error(got["out"], want["out"]) < 3e-3
    wide = args | {"out": np.full((tokens, n), np.nan, float32)}
    got, want = run_both(project, wide)
    assert error(got["out"], want["out"]) < 3e-6
    if args["scales"] is not None:
        other = reference(project, wide | {"scales": args["scales"] + np.uint8(1)})
        assert error(other["out"], want["out"]) > 0.1


@pytest.mark.parametrize(
    ("tokens", "n", "k"), [(1, 144, 512), (20, 256, 128), (70, 128, 256), (3, 64, 4224), (600, 64, 128)]
)
def test_project_of_codes(
    reference: Run, run_both: Both, rng: np.random.Generator, tokens: int, n: int, k: int
) -> None:
    """Columns are shared among programs as far as they go round; Hopper's sums of codes have some 14 bits."""
    args = layer(rng, tokens, n, k, "float8", rounded=True) | {"out": np.full((tokens, n), np.nan, float32)}
    got, want = run_both(project, args)
    assert error(got["out"], want["out"]) < 3e-4
    other = reference(project, args | {"scales": args["scales"] + np.uint8(1)})
    assert error(other["out"], want["out"]) > 0.1


@pytest.mark.parametrize("tokens", [2, 70])
def test_project_rounds_its_output(
    reference: Run, run_both: Both, rng: np.random.Generator, tokens: int
) -> None:
    args = layer(rng, tokens, 256, 128, "float8", 2, quantized=True)
    got, want = run_both(project, args)
    assert error(got["out"], want["out"]) < 4e-3
    assert error(reference(project, args | {"quantized": False})["out"], want["out"]) > 1e-2


@pytest.mark.parametrize(
    "target",
    [
        Target(arch=80, num_sms=4, interpreted=True),
        Target(arch=90, num_sms=4, batch_invariant=True, interpreted=True),
    ],
)
def test_project_elsewhere(run_both: Both, rng: np.random.Generator, target: Target) -> None:
    for tokens in (3, 70):
        got, want = run_both(project, layer(rng, tokens, 128, 192, "float8", 2), target)
        assert error(got["out"], want["out"]) < 3e-3


@pytest.mark.parametrize("kind", ["float8", "bf16"])
@pytest.mark.parametrize(("tokens", "quantized"), [(1, True), (5, False), (70, True)])
def test_gate_up_clamped(
    reference: Run, run_both: Both, rng: np.random.Generator, kind: str, tokens: int, quantized: bool
) -> None:
    weight, scales = packed(rng, (256, 128), KINDS[kind])
    x = rng.standard_normal((tokens, 128), np.float32)
    args = {
        "out": np.full((tokens, 128), np.nan, bfloat16),
        "x": (q8(x, 128) if quantized else x).astype(bfloat16),
        "weight": weight,
        "scales": scales,
        "limit": LIMIT,
        "quantized": quantized,
    }
    got, want = run_both(gate_up_clamped, args)
    assert error(got["out"], want["out"]) < 6e-3
    assert error(reference(gate_up_clamped, args | {"limit": 1.2 * LIMIT})["out"], want["out"]) > 1e-2


@pytest.mark.parametrize("quantized", [False, True])
def test_norm_rows(reference: Run, run_both: Both, rng: np.random.Generator, quantized: bool) -> None:
    gain = rng.uniform(0.5, 1.5, 384).astype(float32)
    args = {
        "out": np.full((3, 384), np.nan, bfloat16),
        "x": rng.standard_normal((3, 384)).astype(bfloat16),
        "norm_weight": gain,
        "eps": 1e-6,
        "quantized": quantized,
    }
    got, want = run_both(norm_rows, args)
    assert error(got["out"], want["out"]) < 1e-3
    assert (
        error(reference(norm_rows, args | {"norm_weight": gain * np.float32(1.01)})["out"], want["out"])
        > 5e-3
    )


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("n", "k", "groups"), [(1536, 4096, 1), (32768, 1024, 1), (8192, 4096, 8), (4096, 8192, 1)]
)
@pytest.mark.parametrize("tokens", [1, 33, 128, 600])
@pytest.mark.parametrize("rounded", [False, True])
def test_projections_of_published_shape(
    on_gpu: Run,
    reference: Run,
    rng: np.random.Generator,
    tokens: int,
    n: int,
    k: int,
    groups: int,
    rounded: bool,
) -> None:
    args = layer(rng, tokens, n, k, "float8", groups, rounded=rounded)
    assert error(on_gpu(project, args)["out"], reference(project, args)["out"]) < 3e-3


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 40, 300, 2000])
def test_hyper_connections_of_published_shape(
    on_gpu: Run, reference: Run, rng: np.random.Generator, tokens: int
) -> None:
    args = mixing(rng, tokens, 4096)
    got, want = on_gpu(hc_pre, args), reference(hc_pre, args)
    np.testing.assert_allclose(got["mix"], want["mix"], rtol=1e-4, atol=1e-5)
    assert error(got["out"], want["out"]) < 1e-3
    args = {"streams": args["streams"], "y": want["out"], "mix": want["mix"]}
    assert error(on_gpu(hc_post, args)["streams"], reference(hc_post, args)["streams"]) < 5e-4
