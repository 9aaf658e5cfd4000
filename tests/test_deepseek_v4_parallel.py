"""The page on several GPUs says what its script prints, and the parts of the ranks make up the model."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from openinfer.recipes.deepseek_v4.config import Config
from openinfer.recipes.deepseek_v4.inventory import inventory
from openinfer.recipes.deepseek_v4.places import Format
from openinfer.recipes.deepseek_v4.published import config_json
from openinfer.recipes.deepseek_v4.weights import Weights
from openinfer.recipes.engine import UnsupportedModel
from openinfer.tensor import Arena, Device, bfloat16

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    path = ROOT / "scripts" / "deepseek_v4_parallel.py"
    spec = importlib.util.spec_from_file_location("deepseek_v4_parallel", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_page_is_what_the_script_prints(
    script: ModuleType, every: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for the numbers of kernels, which change as kernels do, and what is expected by them."""

    def firm(line: str) -> str:
        return "|".join(line.split("|")[:5])

    if not every:
        monkeypatch.setattr(script, "RANKS", script.RANKS[:2])
        monkeypatch.setattr(script, "STEPS", (script.STEPS[1], script.STEPS[-1]))
    page = {firm(line) for line in (ROOT / "docs" / "deepseek_v4_parallel.md").read_text().splitlines()}
    lines = list(script.figures("Flash"))
    assert len(lines) == 5 + len(script.RANKS) * (1 + len(script.STEPS))
    for line in lines:
        assert firm(line) in page, line


@pytest.mark.parametrize("ranks", [2, 8])
def test_ranks_have_all_of_the_model_between_them(ranks: int) -> None:
    whole = Config.parse(config_json("Flash"))
    entries = [e for e in inventory(whole, fp4_experts=True) if not e.name.startswith("mtp.")]
    shared = sum(entry.nbytes for entry in entries if entry.shard)
    same = sum(entry.nbytes for entry in entries if not entry.shard)
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
