"""The cuda pack's launch code without a GPU: a tiny forward, its packed launches run by Triton's interpreter, against
the cpu pack in the same dtype."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from openinfer.kernels import CpuPack, InterpDriver, LaunchPack, Pack, Target, apply_writes
from openinfer.recipes.qwen3.config import Config
from openinfer.recipes.qwen3.model import Model
from openinfer.recipes.qwen3.runner import Buckets
from openinfer.recipes.qwen3.startup import Sizes, lay_out, make_plan
from openinfer.tensor import Arena, Checkpoint, Device, Load, Stream, Tensor, bfloat16, load_tensors, uint8

CPU = Device("cpu")
PROMPTS = {1: 21, 3: 5}
"""Prompt tokens by slot."""


def bf16_model(golden: Any, sizes: Sizes) -> Model:
    arena, stream = Arena(CPU, 128 << 20), Stream(CPU)
    config = Config.load(golden.path)
    model = lay_out(config, sizes, arena, stream, num_pages=9)
    model.kv.numpy()[:] = np.nan  # what was never written must never be read
    model.kv.numpy()[0] = 0
    with Checkpoint(golden.path) as checkpoint:
        loads: list[Load] = list(model.weights.loads(config))
        load_tensors(checkpoint, loads, stream)
    return model


def write(model: Model, pack: Pack) -> None:
    for _ in model.rows.uploads(Stream(CPU)):
        apply_writes(pack, words=model.rows.words, writes=model.rows.writes)


def two_steps(
    golden: Any, sizes: Sizes, pack: Pack
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], list[int]]:
    """A mixed step with two prompts (a dead row between them, padding rows and tokens behind), then a decode step.
    Returns both steps' logits and the tokens of the second."""
    model = bf16_model(golden, sizes)
    rows, rng = model.rows, np.random.default_rng(3)
    for slot, pages in {1: [4, 2], 3: [7]}.items():
        rows.set("alive", slot, 1)
        rows.set("limits", slot, 100)
        rows.write("stop_ids", slot, [-1] * 20)
        rows.write("block_tables", slot, pages)
    lengths = [PROMPTS[1], 2, PROMPTS[3]]
    rows.write("slots", 0, [1, 2, 3, 0])
    rows.write("q_starts", 0, np.cumsum([0, *lengths, 0]))
    rows.write("emits", 0, [1, 1, 1, 0])
    rows.write("prompt", 0, np.append(rng.integers(3, 600, sum(lengths)), [-1] * (64 - sum(lengths))))
    write(model, pack)
    model.forward(pack, 64, 4, 64)
    first = model.buffers.logits[:4].numpy().copy()
    model.sample(pack, 4)
    assert model.buffers.result[:4].numpy()[:, 1].tolist() == [1, 0, 1, 0]
    rows.write("q_starts", 0, [0, 1, 2, 3, 3])
    rows.write("prompt", 0, [-1] * 64)
    write(model, pack)
    model.forward(pack, 4, 4, 1)
    second = model.buffers.logits[:4].numpy().copy()
    model.sample(pack, 4)
    return first[[0, 2]], second[[0, 2]], model.buffers.result[:4].numpy()[[0, 2], 0].tolist()


@pytest.mark.parametrize("arch", [80, 90])
def test_a_whole_forward(tiny, arch):
    sizes = Sizes(64, 4, 64, 16, np.dtype(bfloat16))
    target = Target(arch=arch, num_sms=4, interpreted=True)
    plan = make_plan(Config.load(tiny.path), sizes, Buckets((4,), (64,), (4,)), target)

    def region(nbytes: int) -> Tensor | None:
        return Tensor.from_numpy(np.zeros(nbytes, uint8)) if nbytes else None

    driver = InterpDriver()
    pack = LaunchPack(target, driver, region(plan.scratch_bytes), region(plan.zeroed_bytes))
    ours, expected = two_steps(tiny, sizes, pack), two_steps(tiny, sizes, CpuPack())
    assert set(driver.launched) <= {str(spec) for spec in plan.specs}, "nothing runs that was not planned"
    assert {"gemm_small", "attend_short", "attend_long", "qk_norm_rope_write", "advance"} <= {
        name.partition(".")[2].partition("[")[0] for name in driver.launched
    }
    for a, b in zip(ours[:2], expected[:2], strict=True):
        assert np.isfinite(a).all()
        error = np.linalg.norm(a - b) / np.linalg.norm(b)
        assert error < 0.03, error
