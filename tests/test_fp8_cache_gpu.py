"""The FP8 cache on a GPU: log-probabilities are near those of a CPU in float32 with the same cache, on every path."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_fp8_cache as C

from openinfer.recipes.engine.engine import Engine

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu")]

DEVICE = "cuda"
MEAN_NAT, P99_NAT = 0.2, 0.8
"""Rounding to bfloat16 moves some values beside a tie to another code, so a run is farther from float32 than without
FP8."""


uneven = C.uneven
Build = Callable[..., Engine]


@pytest.fixture
def engine() -> Iterator[Build]:
    """engine(path, flags), closed at the end."""
    made = []

    def make(path: Path, **flags: Any) -> Engine:
        flags = {"device": DEVICE, "dtype": "bfloat16", "kv_cache_dtype": "fp8", **flags}
        made.append(C.build(C.recipes.find(path), path, **{**C.FLAGS, **flags}).engine)
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_every_path_is_near_a_cpu_in_float32(engine: Build, uneven: Path) -> None:
    """Steps that are recorded and eager, prompts whole and in chunks, cached prefixes, rows alone. Scales that are
    exchanged between heads are noticed."""
    asked = C.prompts(4)
    wanted = C.logprobs(C.logits(engine(uneven, device="cpu", dtype="float32"), asked))
    likely = np.argsort(-wanted, -1)[..., :32]

    def far(found: Any) -> bool:
        distance = np.abs(np.take_along_axis(C.logprobs(found) - wanted, likely, -1))
        return bool(distance.mean() > MEAN_NAT or np.quantile(distance, 0.99) > P99_NAT)

    made = engine(uneven)
    plain = C.logits(made, asked)
    assert not far(plain)
    np.testing.assert_array_equal(C.logits(made, asked), plain, "the same steps give the same bits")
    for chunk in (1, 7, 64):
        assert not far(C.logits(made, asked, chunk=chunk)), chunk
    alone = [[C.logits(made, [one], salt=b"once") for one in asked] for _ in range(2)]
    assert made.pool.stats.hit_tokens > 0
    for found in alone:
        assert not far(np.concatenate(found))
    assert far(C.logits(made, asked, wrong=True))
    assert made.stats().compiles_after_ready == 0
    assert not far(C.logits(engine(uneven, enforce_eager=True), asked))


def test_one_kernel_for_all_rows(engine: Build) -> None:
    """--batch-invariant: a row's bits do not depend on the others'."""
    asked, made = C.prompts(3), engine(C.GOLDENS / "qwen3-tiny", batch_invariant=True)
    together = C.logits(made, asked)
    for n, one in enumerate(asked):
        np.testing.assert_array_equal(C.logits(made, [one])[0], together[n])
