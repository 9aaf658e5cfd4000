"""DeepSeek-V3's launch code without a GPU: a whole forward of the tiny model, its packed launches run by Triton's
interpreter, against the cpu pack in the same dtype."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from deepseek_v3_form import CHECKPOINTS
from test_deepseek_v4_interp import write

from openinfer.graph import Buckets
from openinfer.kernels import CpuPack, InterpDriver, LaunchPack, Pack, Target
from openinfer.kernels.authoring import CacheForm
from openinfer.kernels.testing import of_the_day
from openinfer.recipes.deepseek_v3 import RECIPE
from openinfer.recipes.engine import Source
from openinfer.recipes.engine.limits import Limits
from openinfer.recipes.engine.startup import make_start_plan
from openinfer.tensor import Tensor, bfloat16, uint8

LENGTHS, TOKENS = (37, 2, 3), 64
"""Prompt tokens of slots 1, 2 (dead) and 3, and tokens of the bucket."""


def two_steps(place: Any, name: str, prompt: list[int], pack: Pack) -> list[np.ndarray[Any, Any]]:
    """Logits of a mixed step with two prompts (a dead row between them, padding rows and tokens behind), and of a
    decode step."""
    model = place(RECIPE, CHECKPOINTS[name], [9], max_tokens=TOKENS, length=64, dtype=bfloat16)
    for pages in model.pages:
        pages.numpy()[1:], pages.numpy()[0] = np.nan, 0  # what was never written must never be read
    rows = model.batch.rows
    for slot, pages in {1: [4, 2, 8], 3: [3, 1, 5]}.items():
        rows.set("alive", slot, 1)
        rows.set("limits", slot, 200)
        rows.write("stop_ids", slot, [-1] * 20)
        rows.write("block_tables", slot, pages)
    total = sum(LENGTHS)
    rows.write("slots", 0, [1, 2, 3, 0])
    rows.write("q_starts", 0, np.cumsum([0, *LENGTHS, 0]))
    rows.write("prompt", 0, [*prompt[:total], *[-1] * (TOKENS - total)])
    write(model, pack)
    model.forward(pack, TOKENS, 4, TOKENS)
    first = model.batch.logits[:4].numpy().copy()
    for slot, tokens in ((1, LENGTHS[0]), (3, LENGTHS[2])):
        rows.set("seq_lens", slot, tokens)
    rows.write("q_starts", 0, [0, 1, 2, 3, 3])
    rows.write("prompt", 0, [7, 7, 7, *[-1] * (TOKENS - 3)])
    write(model, pack)
    model.forward(pack, 4, 4, 1)
    return [first[[0, 2]], model.batch.logits[:4].numpy()[[0, 2]]]


@pytest.mark.parametrize(
    ("arch", "name"),
    of_the_day([(90, "deepseek_v3-tiny"), (90, "glm_moe_dsa-tiny"), (120, "deepseek_v3-tiny")]),
)
def test_a_whole_forward(place: Any, golden_of: Any, arch: int, name: str) -> None:
    prompt = golden_of("deepseek_v3-tiny").prompt(4)
    limits = Limits(64, 4, TOKENS, 16, np.dtype(bfloat16), CacheForm(np.dtype(bfloat16)))
    target = Target(arch=arch, num_sms=8, interpreted=True)
    blueprint = RECIPE.blueprint(Source.read(CHECKPOINTS[name]), RECIPE.options())
    plan = make_start_plan(blueprint, limits, Buckets((4,), (TOKENS,), (4,)), target)

    def region(nbytes: int) -> Tensor | None:
        return Tensor.from_numpy(np.zeros(nbytes, uint8)) if nbytes else None

    driver = InterpDriver()
    pack = LaunchPack(target, driver, region(plan.scratch_bytes), region(plan.zeroed_bytes))
    ours, expected = (two_steps(place, name, prompt, one) for one in (pack, CpuPack()))
    assert set(driver.launched) <= {str(spec) for spec in plan.specs}, "nothing runs that was not planned"
    ran = {name.partition(".")[2].partition("[")[0] for name in driver.launched}
    more = {"index_scores", "select_entries"} if name == "glm_moe_dsa-tiny" else set()
    more |= {"merge_latents"} if arch == 120 else set()  # Hopper takes 64 positions at a time: all of them
    assert {"write_latents", "split_queries", "latent_attend", "route", *more} <= ran
    for a, b in zip(ours, expected, strict=True):
        assert np.isfinite(a).all()
        assert np.linalg.norm(a - b) / np.linalg.norm(b) < 0.03
