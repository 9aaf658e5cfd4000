"""The page on several GPUs has the bytes that engines plan, and the parts of the ranks make up the model."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest

from openinfer.cli.explain.segments import Outline
from openinfer.kernels import GPUS, H200
from openinfer.recipes.deepseek_v4 import RECIPE
from openinfer.recipes.deepseek_v4.cache import groups
from openinfer.recipes.deepseek_v4.config import Config
from openinfer.recipes.deepseek_v4.published import config_json
from openinfer.recipes.deepseek_v4.weights import Format, Weights
from openinfer.recipes.engine import Source, UnsupportedModel
from openinfer.tensor import Arena, Device, bfloat16

PAGE = Path(__file__).parents[1] / "docs" / "deepseek_v4_parallel.md"
SHARED = re.compile(
    r"head\.weight|layers\.\d+\.(attn\.(attn_sink|wq_b\..*|wo_.*)|ffn\.(experts|shared_experts)\..*)"
)
"""The tensors of which each rank has a part."""
MEMORY = GPUS[H200.gpu].memory_bytes * 0.9


@pytest.mark.parametrize(
    ("size", "ranks"),
    [
        ("Flash", (2, 4)),
        *(pytest.param(size, (2, 4, 8), marks=pytest.mark.slow) for size in ("Flash", "Pro")),
    ],
)
def test_the_page_has_the_bytes_of_a_plan(size: str, ranks: tuple[int, ...]) -> None:
    options = RECIPE.options(max_num_seqs=128, max_num_batched_tokens=4096, max_model_len=131072)
    source, page = Source(config_json(size)), PAGE.read_text()
    plans = {n: Outline(RECIPE, source, options, H200, ranks=n).memory for n in ranks}
    same = (4 * plans[4]["weights"] - 2 * plans[2]["weights"]) / 2  # a rank of n has same + shared / n
    entry = groups(Config.parse(source.config), bfloat16, (2, 2))[1].block_bytes / 128
    for n, plan in plans.items():
        left = MEMORY - sum(plan.values())
        tokens = f"{left / 2 / entry / 1e6:.1f} million" if left > 0 else "it does not fit"
        cells = " | ".join(f"{nbytes / 1e9:.1f} GB" for nbytes in (plan["weights"], same, max(left, 0)))
        assert f"| {size}, {n} | {cells} | {tokens} |" in page


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 8])
def test_ranks_have_all_of_the_model_between_them(ranks: int) -> None:
    whole = Config.parse(config_json("Flash"))
    published = Weights.allocate(whole, Arena(Device("null"), None), bfloat16, Format(fp4_experts=True))
    expected = published.places.expected().items()
    nbytes = {name: math.prod(shape) * kinds[0].itemsize for name, (shape, kinds) in expected}
    shared = sum(size for name, size in nbytes.items() if SHARED.fullmatch(name))
    same = sum(nbytes.values()) - shared
    experts: set[str] = set()
    for rank in (0, ranks - 1):
        arena = Arena(Device("null"), None)
        weights = Weights.allocate(whole.of_rank(rank, ranks), arena, bfloat16, Format(fp4_experts=True))
        assert arena.used == pytest.approx(same + shared / ranks, rel=1e-3)
        own = {
            name.split(".experts.")[1].split(".")[0] for name in weights.places.names() if ".experts." in name
        }
        assert own == {str(e) for e in np.arange(256).reshape(ranks, -1)[rank]}
        assert not experts & own
        experts |= own


def test_what_cannot_be_shared_evenly_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="o_groups is 8; 16 ranks"):
        Config.parse(config_json("Flash")).of_rank(0, 16)
