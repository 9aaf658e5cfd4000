"""Every recipe passes the suite of engines, with the tokens and logits of its goldens. What is a model's own is in
test_MODEL_*.py."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
from deepseek_v3_form import CHECKPOINT as DEEPSEEK_V3_TINY
from deepseek_v3_form import CHECKPOINTS as DEEPSEEK_V3_KIN

from openinfer.recipes.deepseek_v3 import RECIPE as DEEPSEEK_V3
from openinfer.recipes.deepseek_v4 import RECIPE as DEEPSEEK_V4
from openinfer.recipes.engine.testing import EngineConformance, Golden
from openinfer.recipes.qwen3 import RECIPE as QWEN3
from openinfer.recipes.qwen3_5 import RECIPE as QWEN3_5

FOLDER = Path(__file__).parent / "goldens"


TODAY = datetime.date.today().toordinal()


class Suite(EngineConformance):
    """The suite on a golden checkpoint; `compared`: whether the goldens are of an engine with these flags. A third of
    the options of requests are of the day; a slow test has all of them, with `more_chunks` and `more_seeds`."""

    compared: ClassVar[bool] = True
    share = (TODAY % 3, 3)
    more_chunks: ClassVar[Sequence[int]] = ()
    more_seeds: ClassVar[Sequence[int]] = ()

    @pytest.mark.slow
    def test_all_options_chunks_and_seeds(self) -> None:
        self.share, self.chunks, self.seeds = (0, 1), self.more_chunks, self.more_seeds  # of this test alone
        self.test_any_two_options_in_any_company()
        self.test_drafts_change_no_token()
        self.test_the_goldens_in_chunks_of_any_size()
        if self.seeds:
            self.test_greedy_tokens_whatever_the_schedule()


class TestQwen3(Suite):
    recipe, checkpoint = QWEN3, FOLDER / "qwen3-tiny"
    chunks, more_chunks = (1, 17, 352), (3, 16, 128)
    seeds, more_seeds = (TODAY % 3,), (0, 1, 2)


EXACT = {"batch_invariant": True}
"""Where values are rounded to few bits, another order of sums makes another value of some, and no small error."""


@pytest.mark.slow
class TestQwen3Fp8Cache(Suite):
    recipe, checkpoint, compared = QWEN3, FOLDER / "qwen3-tiny", False
    flags = {"kv_cache_dtype": "fp8", **EXACT}  # noqa: RUF012


@pytest.mark.slow  # test_qwen3_goldens has its tokens and logits
class TestQwen3Untied(Suite):
    recipe, checkpoint = QWEN3, FOLDER / "qwen3-tiny-untied"


@pytest.mark.slow
class TestQwen3TwoRanks(Suite):
    recipe, checkpoint = QWEN3, FOLDER / "qwen3-tiny-untied"
    flags = {"tensor_parallel_size": 2}  # noqa: RUF012
    chunks = (1, 17, 352)


@pytest.mark.slow
class TestQwen3FourRanks(Suite):
    """Two ranks have the same key-value head."""

    recipe, checkpoint = QWEN3, FOLDER / "qwen3-tiny"
    flags = {"tensor_parallel_size": 4}  # noqa: RUF012
    chunks = (17, 352)


class TestQwen35(Suite):
    recipe, checkpoint = QWEN3_5, FOLDER / "qwen3_5-tiny"
    flags = {"snapshot_interval": 64}  # noqa: RUF012
    chunks = (1, 17, 352)


@pytest.mark.slow
class TestQwen35Fp8Cache(Suite):
    recipe, checkpoint, compared = QWEN3_5, FOLDER / "qwen3_5-tiny", False
    flags = {"snapshot_interval": 64, "kv_cache_dtype": "fp8", **EXACT}  # noqa: RUF012


@pytest.mark.slow
class TestQwen35Bf16States(Suite):
    recipe, checkpoint, compared = QWEN3_5, FOLDER / "qwen3_5-tiny", False
    flags = {"snapshot_interval": 64, "mamba_ssm_cache_dtype": "bfloat16", **EXACT}  # noqa: RUF012


@pytest.mark.slow  # its two ranks are not
class TestQwen35Mixture(Suite):
    recipe, checkpoint = QWEN3_5, FOLDER / "qwen3_5-moe-tiny"
    flags = {"snapshot_interval": 64}  # noqa: RUF012
    chunks = (1, 17, 352)


@pytest.mark.slow
class TestQwen35TwoRanks(Suite):
    recipe, checkpoint = QWEN3_5, FOLDER / "qwen3_5-tiny"
    flags = {"snapshot_interval": 64, "tensor_parallel_size": 2}  # noqa: RUF012
    chunks = (17, 352)


@pytest.mark.slow  # test_ranks has its tokens, beside faults
class TestQwen35MixtureTwoRanks(Suite):
    recipe, checkpoint = QWEN3_5, FOLDER / "qwen3_5-moe-tiny"
    flags = {"snapshot_interval": 64, "tensor_parallel_size": 2}  # noqa: RUF012
    chunks = (1, 352)


class TestDeepSeekV3(Suite):
    recipe, checkpoint = DEEPSEEK_V3, DEEPSEEK_V3_TINY
    chunks = (17, 352)


@pytest.mark.slow
class TestDeepSeekV3TwoRanks(Suite):
    recipe, checkpoint = DEEPSEEK_V3, DEEPSEEK_V3_TINY
    flags = {"tensor_parallel_size": 2}  # noqa: RUF012
    chunks = (1, 352)


@pytest.mark.slow
class TestDeepSeekV3FourRanks(Suite):
    recipe, checkpoint = DEEPSEEK_V3, DEEPSEEK_V3_TINY
    flags = {"tensor_parallel_size": 4}  # noqa: RUF012
    chunks = (17, 352)


@pytest.mark.slow
class TestGlm5(Suite):
    recipe, checkpoint = DEEPSEEK_V3, DEEPSEEK_V3_KIN["glm_moe_dsa-tiny"]
    chunks = (17, 352)


class TestDeepSeekV4(Suite):
    recipe, checkpoint = DEEPSEEK_V4, FOLDER / "deepseek_v4-tiny"
    flags = {"activation_quantization": "off"}  # noqa: RUF012
    chunks, more_chunks = (129, 352), (1,)


@pytest.mark.slow
class TestDeepSeekV4Rounded(Suite):
    recipe, checkpoint, compared = DEEPSEEK_V4, FOLDER / "deepseek_v4-tiny", False
    flags = EXACT


@pytest.mark.slow
class TestDeepSeekV4TwoRanks(Suite):
    recipe, checkpoint = DEEPSEEK_V4, FOLDER / "deepseek_v4-tiny"
    flags = {"activation_quantization": "off", "tensor_parallel_size": 2}  # noqa: RUF012
    chunks = (352,)


@pytest.mark.slow
class TestDeepSeekV4RoundedTwoRanks(Suite):
    recipe, checkpoint = DEEPSEEK_V4, FOLDER / "deepseek_v4-tiny"
    flags = {"tensor_parallel_size": 2, **EXACT}  # noqa: RUF012
    compared = False


@pytest.fixture(scope="module", autouse=True)
def _goldens(golden_of: Callable[[str], Any]) -> None:
    for suite in filter(lambda suite: suite.compared, Suite.__subclasses__()):
        found = golden_of(suite.checkpoint.name)
        suite.goldens = [
            Golden(
                found.prompt(n),
                found.greedy(n),
                dict(zip(fact["logit_positions"], found.numbers[f"p{n}.logits_fp32"], strict=True)),
            )
            for n, fact in enumerate(found.facts["prompts"])
        ]
