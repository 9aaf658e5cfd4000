"""The kernels of DeepSeek-V4's hyper-connections, in Triton's interpreter and on a GPU, against the references."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton; compile workers drop it

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from openinfer.kernels import CudaDriver, Launch, LaunchPack, NullPack, Target, project
from openinfer.kernels.authoring import Linear, Memory
from openinfer.kernels.measure.tuner import DeviceMeter
from openinfer.kernels.testing import error, never_coded, values_in
from openinfer.recipes.deepseek_v4.ops.hyper_connections import hc_head, hc_post, hc_pre, spread
from openinfer.tensor import bfloat16, float32

Array = np.ndarray[Any, Any]
Both = Callable[..., tuple[dict[str, Array], dict[str, Array]]]
"""both(op, args, target): what the kernels and the reference leave (conftest.py)."""
Run = Callable[..., dict[str, Array]]


def mixing(rng: np.random.Generator, tokens: int, width: int) -> dict[str, Any]:
    """Arguments of `hc_pre` whose numbers matter: logits of about 1, streams that differ."""
    return {
        "out": np.full((tokens, width), np.nan, bfloat16),
        "rounded_out": never_coded(tokens, width),
        "mix": np.full((tokens, 20), np.nan, float32),
        "streams": rng.standard_normal((tokens, 4, width)).astype(bfloat16),
        "fn": (rng.standard_normal((24, 4 * width)) * (4 * width) ** -0.5).astype(float32),
        "base": rng.standard_normal(24).astype(float32),
        "scale": np.array([1, 1.2, 2], float32),
        "norm_weight": rng.uniform(0.5, 1.5, width).astype(float32),
        "eps": 1e-6,
        "hc_eps": 1e-6,
    }


@pytest.mark.parametrize(
    ("tokens", "width", "sms"), [(1, 256, 132), (5, 384, 132), (17, 256, 2), (70, 128, 132)]
)
def test_hc_pre(run_both: Both, rng: np.random.Generator, tokens: int, width: int, sms: int) -> None:
    """Programs of one step; of two, where the last have none; of many, on a small GPU."""
    args = mixing(rng, tokens, width)
    target = Target(90, sms, interpreted=True) if sms < 132 else None
    got, want = run_both(hc_pre, args, target)
    np.testing.assert_allclose(got["mix"], want["mix"], rtol=2e-5, atol=1e-6)
    assert error(got["out"], want["out"]) < 5e-4  # a rounding may fall to the other side
    assert error(values_in(got, "rounded_out"), values_in(want, "rounded_out")) < 4e-3
    (got, want) = run_both(hc_pre, args | {"rounded_out": None})
    np.testing.assert_allclose(got["mix"], want["mix"], rtol=2e-5, atol=1e-6)


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


@pytest.mark.parametrize("tokens", [5, 40])
def test_hc_post(reference: Run, run_both: Both, rng: np.random.Generator, tokens: int) -> None:
    args = {
        "streams": rng.standard_normal((tokens, 4, 1152)).astype(bfloat16),
        "y": rng.standard_normal((tokens, 1152)).astype(bfloat16),
        "mix": (2 * rng.standard_normal((tokens, 20))).astype(float32),
        "hc_eps": 1e-6,
        "iters": 20,
    }
    for iters in (1, 20):
        got, want = run_both(hc_post, args | {"iters": iters})
        assert error(got["streams"], want["streams"]) < 3e-4
    assert error(reference(hc_post, args | {"iters": 2})["streams"], want["streams"]) > 1e-2
    transposed = args["mix"].copy()
    transposed[:, 4:] = transposed[:, 4:].reshape(tokens, 4, 4).swapaxes(1, 2).reshape(tokens, 16)
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


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 40, 300, 2000])
def test_hyper_connections_of_published_shape(
    on_gpu: Run, reference: Run, rng: np.random.Generator, tokens: int
) -> None:
    args = mixing(rng, tokens, 4096)
    got, want = on_gpu(hc_pre, args), reference(hc_pre, args)
    np.testing.assert_allclose(got["mix"], want["mix"], rtol=1e-4, atol=1e-5)
    assert error(got["out"], want["out"]) < 1e-3
    args = {"streams": args["streams"], "y": want["out"], "mix": want["mix"], "hc_eps": 1e-6, "iters": 20}
    assert error(on_gpu(hc_post, args)["streams"], reference(hc_post, args)["streams"]) < 5e-4


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 8])
def test_early_starts_change_no_bit(meter: DeviceMeter, monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    """What is read before a wait is what the kernels before the one ahead wrote, though an SM has read it before: the
    same kernels have the same bits where each waits for the one ahead to end."""
    memory, width = Memory(meter.device, meter.stream), 4096
    begin = memory.rng.standard_normal((tokens, 4, width)).astype(bfloat16)
    streams, y, x = memory.of(begin), memory.normal(tokens, width), memory.coded(tokens, width, empty=True)
    mix = memory.of(np.zeros((tokens, 20), np.float32))
    pre = {
        "out": memory.empty(tokens, width), "rounded_out": x, "mix": mix, "streams": streams,
        "fn": memory.normal(24, 4 * width, scale=(4 * width) ** -0.5, dtype=float32),
        "base": memory.normal(24, dtype=float32), "scale": memory.normal(3, dtype=float32),
        "norm_weight": memory.normal(width, dtype=float32), "eps": 1e-6, "hc_eps": 1e-6,
    }  # fmt: skip
    scales = memory.codes(width // 128, width // 128, low=118, high=121)
    product = {"out": y, "x": x, "weight": Linear(memory.float8(width, width), scales), "groups": 1}
    post = {"streams": streams, "y": y, "mix": mix, "hc_eps": 1e-6, "iters": 20}
    calls, found = ((hc_pre, pre), (project, product), (hc_post, post)), []
    workspace = [memory.of(np.zeros(1 << 24, np.uint8)) for _ in range(2)]
    pack, plan = LaunchPack(meter.target, meter.driver, *workspace), NullPack(meter.target)
    for op, args in calls:
        op(plan, **args)
    assert all(one.early for call in plan.calls for one in call.commands if isinstance(one, Launch))
    meter.store.prepare(plan.specs())
    launch = CudaDriver.launch

    def late(driver: CudaDriver, spec: Any, grid: Any, parameters: Any, early: bool) -> None:
        launch(driver, spec, grid, parameters, False)

    for overlapped in (True, False):
        if not overlapped:
            monkeypatch.setattr(CudaDriver, "launch", late)
        streams.copy_from(begin, meter.stream)
        for _ in range(20):
            for op, args in calls:
                op(pack, **args)
        meter.stream.synchronize()
        found.append(streams.numpy().copy())
    np.testing.assert_array_equal(*found)
