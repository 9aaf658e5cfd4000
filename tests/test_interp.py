"""The cuda pack's launch code without a GPU: a tiny forward, its packed launches run by Triton's interpreter, against
the cpu pack in the same dtype."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from openinfer.graph import Buckets
from openinfer.kernels import CpuPack, InterpDriver, LaunchPack, Pack, Target, apply_writes
from openinfer.kernels.authoring import FP8_CACHE, CacheForm
from openinfer.kernels.lora.adapters import AdapterSizes
from openinfer.kernels.testing import of_the_day
from openinfer.recipes.engine import Source
from openinfer.recipes.engine.limits import Limits
from openinfer.recipes.engine.startup import make_start_plan
from openinfer.recipes.qwen3 import RECIPE
from openinfer.recipes.qwen3.model import Model
from openinfer.sampler.gpu import sample_rows
from openinfer.tensor import Device, Stream, Tensor, bfloat16, uint8

CPU = Device("cpu")
PROMPTS = {1: 21, 3: 5}
"""Prompt tokens by slot."""
LAYERS = 2
"""Of the model's four: the first, and one whose input another layer made."""


ADAPTERS = AdapterSizes(places=2, max_rank=16)


def bf16_model(place: Any, golden: Any, adapters: AdapterSizes | None, cache: str) -> Model:
    model: Model = place(
        RECIPE, golden.path, [9], max_tokens=64, length=64, dtype=bfloat16, adapters=adapters,
        kv_cache_dtype=cache,
    )  # fmt: skip
    model.kv.pages.numpy().view(np.uint8)[:] = 0xFF  # NaN: what was never written must never be read
    model.kv.pages.numpy()[0] = 0
    few = dataclasses.replace(model.weights, layers=model.weights.layers[:LAYERS])
    return dataclasses.replace(model, weights=few)


def write(model: Model, pack: Pack) -> None:
    for _ in model.batch.rows.uploads(Stream(CPU)):
        apply_writes(pack, words=model.batch.rows.words, writes=model.batch.rows.writes)


def two_steps(
    place: Any, golden: Any, pack: Pack, adapters: AdapterSizes | None = None, cache: str = "auto"
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], list[int]]:
    """A mixed step with two prompts (a dead row between them, padding rows and tokens behind), then a decode step.
    Returns both steps' logits and the tokens of the second."""
    model = bf16_model(place, golden, adapters, cache)
    # Both packs must sample the same tokens. Prompts of seed 3 have a near tie over an FP8 cache.
    rows, rng = model.batch.rows, np.random.default_rng(4 if cache == "fp8" else 3)
    if model.batch.adapters is not None:  # slot 1 has the second adapter, slot 3 the first
        own = np.random.default_rng(4)
        for at in (1, 2):
            values = (own.standard_normal(model.batch.adapters.num_values) * 0.07).astype(bfloat16)
            model.batch.adapters.put(at, values, Stream(CPU))
        rows.set("adapters", 1, 2)
        rows.set("adapters", 3, 1)
    for slot, pages in {1: [4, 2], 3: [7]}.items():
        rows.set("alive", slot, 1)
        rows.set("limits", slot, 100)
        rows.write("stop_ids", slot, [-1] * 20)
        rows.write("block_tables", slot, pages)
    lengths = [PROMPTS[1], 2, PROMPTS[3]]
    rows.write("slots", 0, [1, 2, 3, 0])
    rows.write("q_starts", 0, np.cumsum([0, *lengths, 0]))
    rows.write("emits", 0, [1, 1, 1, 0])
    rows.write("prompt", 0, np.append(rng.integers(3, 480, sum(lengths)), [-1] * (64 - sum(lengths))))
    write(model, pack)
    model.forward(pack, 64, 4, 64)
    first = model.batch.logits[:4].numpy().copy()
    sample_rows(pack, model.batch.rows, model.batch.sampled, 4)
    assert model.batch.sampled.result[:4].numpy()[:, 1].tolist() == [1, 0, 1, 0]
    rows.write("q_starts", 0, [0, 1, 2, 3, 3])
    rows.write("prompt", 0, [-1] * 64)
    write(model, pack)
    model.forward(pack, 4, 4, 1)
    second = model.batch.logits[:4].numpy().copy()
    sample_rows(pack, model.batch.rows, model.batch.sampled, 4)
    return first[[0, 2]], second[[0, 2]], model.batch.sampled.result[:4].numpy()[[0, 2], 0].tolist()


@pytest.mark.parametrize(
    ("arch", "adapters", "cache"),
    of_the_day([(80, None, "auto"), (90, None, "fp8"), (90, None, "auto"), (90, ADAPTERS, "auto")], 2),
)
def test_a_whole_forward(place, tiny, arch, adapters, cache):
    form = FP8_CACHE if cache == "fp8" else CacheForm(np.dtype(bfloat16))
    limits = Limits(64, 4, 64, 16, np.dtype(bfloat16), form, adapters)
    target = Target(arch=arch, num_sms=4, interpreted=True)
    plan = make_start_plan(
        RECIPE.blueprint(Source.read(tiny.path), RECIPE.options()), limits, Buckets((4,), (64,), (4,)), target
    )

    def region(nbytes: int) -> Tensor | None:
        return Tensor.from_numpy(np.zeros(nbytes, uint8)) if nbytes else None

    driver = InterpDriver()
    pack = LaunchPack(target, driver, region(plan.scratch_bytes), region(plan.zeroed_bytes))
    ours, expected = (two_steps(place, tiny, one, adapters, cache) for one in (pack, CpuPack()))
    assert set(driver.launched) <= {str(spec) for spec in plan.specs}, "nothing runs that was not planned"
    assert {"gemm_small", "attend_split", "qk_norm_rope_write", "advance"} <= {
        name.partition(".")[2].partition("[")[0] for name in driver.launched
    }
    if adapters is not None:
        plain = two_steps(place, tiny, CpuPack())
        assert all(
            np.linalg.norm(a - b) > 0.2 * np.linalg.norm(b) for a, b in zip(ours[:2], plain, strict=False)
        )
        assert any(".gemm_small_adapted[" in name for name in driver.launched)
    for a, b in zip(ours[:2], expected[:2], strict=True):
        assert np.isfinite(a).all()
        error = np.linalg.norm(a - b) / np.linalg.norm(b)
        assert error < 0.03, error
