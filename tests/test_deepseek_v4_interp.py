"""DeepSeek-V4's launch code without a GPU: a whole forward of the tiny model with packed weights, its packed launches
run by Triton's interpreter, against the cpu pack in the same dtype."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from openinfer.graph import Buckets
from openinfer.kernels import CpuPack, InterpDriver, LaunchPack, Pack, Target, apply_writes
from openinfer.kernels.authoring import CacheForm
from openinfer.recipes.deepseek_v4 import RECIPE
from openinfer.recipes.deepseek_v4.model import Model
from openinfer.recipes.engine import Source
from openinfer.recipes.engine.limits import Limits
from openinfer.recipes.engine.startup import make_start_plan
from openinfer.sampler.gpu import sample_rows
from openinfer.tensor import Device, Stream, Tensor, bfloat16, uint8

CPU = Device("cpu")
SHORT, LONG = ((9, 2, 3), 16, 2), ((131, 2, 5), 160, 4)
"""Prompt tokens of slots 1, 2 (dead) and 3, tokens of the bucket, layers. The long one has more entries than the
indexer may choose, and one of 128 tokens."""


def bf16_model(place: Any, golden: Any, tokens: int, layers: int, rounding: str) -> Model:
    flags = {"max_tokens": tokens, "length": 256, "dtype": bfloat16, "activation_quantization": rounding}
    model: Model = place(RECIPE, golden.path, [5, 5], **flags)
    cache = model.cache
    for memory in (cache.window, cache.csa_state, cache.index_state, cache.hca_state, cache.csa_entries):
        memory.numpy()[1:] = np.nan  # what was never written must never be read
        memory.numpy()[0] = 0
    few = dataclasses.replace(model.weights, layers=model.weights.layers[:layers])
    return dataclasses.replace(model, weights=few)


def write(model: Model, pack: Pack) -> None:
    for _ in model.batch.rows.uploads(Stream(CPU)):
        apply_writes(pack, words=model.batch.rows.words, writes=model.batch.rows.writes)


def two_steps(
    place: Any, golden: Any, pack: Pack, step: tuple[tuple[int, ...], int, int], rounding: str
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], list[int]]:
    """A mixed step with two prompts (a dead row between them, padding rows and tokens behind), then a decode step.
    Returns both steps' logits and the tokens of the second."""
    lengths, tokens, layers = step
    model = bf16_model(place, golden, tokens, layers, rounding)
    rows, prompt = model.batch.rows, golden.prompt(4)
    for slot, pages in {1: [4, 2], 3: [3, 1]}.items():
        rows.set("alive", slot, 1)
        rows.set("limits", slot, 200)
        rows.write("stop_ids", slot, [-1] * 20)
        rows.write("window_tables", slot, pages)
        rows.write("entry_tables", slot, pages[::-1])
    ids = [*prompt[: lengths[0]], *prompt[:2], *prompt[100 : 100 + lengths[2]]]
    rows.write("slots", 0, [1, 2, 3, 0])
    rows.write("q_starts", 0, np.cumsum([0, *lengths, 0]))
    rows.write("emits", 0, [1, 1, 1, 0])
    rows.write("prompt", 0, [*ids, *[-1] * (tokens - len(ids))])
    write(model, pack)
    model.forward(pack, tokens, 4, tokens)
    first = model.batch.logits[:4].numpy().copy()
    sample_rows(pack, model.batch.rows, model.batch.sampled, 4)
    assert model.batch.sampled.result[:4].numpy()[:, 1].tolist() == [1, 0, 1, 0]
    rows.write("q_starts", 0, [0, 1, 2, 3, 3])
    rows.write("prompt", 0, [7, 7, 7, *[-1] * (tokens - 3)])  # the same tokens, whatever was sampled
    write(model, pack)
    model.forward(pack, 4, 4, 1)
    second = model.batch.logits[:4].numpy().copy()
    sample_rows(pack, model.batch.rows, model.batch.sampled, 4)
    return first[[0, 2]], second[[0, 2]], model.batch.sampled.result[:4].numpy()[[0, 2], 0].tolist()


@pytest.mark.parametrize(
    ("quantized", "step"),
    [
        (True, SHORT),
        pytest.param(True, LONG, marks=pytest.mark.slow),
    ],
    ids=["short", "long"],
)
def test_a_whole_forward(place, deepseek, quantized, step):
    tokens, rounding = step[1], "on" if quantized else "off"
    limits = Limits(256, 4, tokens, 128, np.dtype(bfloat16), CacheForm(np.dtype(bfloat16)))
    target = Target(arch=90, num_sms=4, interpreted=True)
    blueprint = RECIPE.blueprint(Source.read(deepseek.path), RECIPE.options(activation_quantization=rounding))
    plan = make_start_plan(blueprint, limits, Buckets((4,), (tokens,), (4,)), target)

    def region(nbytes: int) -> Tensor | None:
        return Tensor.from_numpy(np.zeros(nbytes, uint8)) if nbytes else None

    driver = InterpDriver()
    pack = LaunchPack(target, driver, region(plan.scratch_bytes), region(plan.zeroed_bytes))
    ours, expected = (two_steps(place, deepseek, p, step, rounding) for p in (pack, CpuPack()))
    assert set(driver.launched) <= {str(spec) for spec in plan.specs}, "nothing runs that was not planned"
    launched = {name.partition(".")[2].partition("[")[0] for name in driver.launched}
    assert {
        "compress",
        "sparse_attend",
        "index_scores",
        "coded_product",
        "project_codes",
        "hc_post",
        "route",
    } <= launched
    for a, b in zip(ours[:2], expected[:2], strict=True):
        assert np.isfinite(a).all()
        error = np.linalg.norm(a - b) / np.linalg.norm(b)
        assert error < (0.5 if quantized else 0.1), error  # uncorrelated: 1.4
