"""The engine's eviction policy: by flag and by class."""

import importlib
from pathlib import Path

import pytest

from openinfer.recipes.engine.startup import build
from openinfer.recipes.engine.testing import Session
from openinfer.recipes.qwen3 import RECIPE

TINY = Path(__file__).parents[2] / "tests" / "goldens" / "qwen3-tiny"

pytestmark = pytest.mark.skipif(not TINY.exists(), reason="the checkpoint is in the checkout only")


MODULE = """
from openinfer.kvpool import Lru

class Counted(Lru):
    evicted = 0

    def pop(self):
        Counted.evicted += 1
        return super().pop()
"""


@pytest.fixture
def counted(tmp_path, monkeypatch):
    """A policy that counts what it evicts, as a command line finds it."""
    (tmp_path / "counted_eviction.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    return importlib.import_module("counted_eviction").Counted


@pytest.mark.parametrize("named", [True, False])
def test_the_policy_evicts_the_engines_blocks(named, counted):
    engine = build(
        RECIPE,
        TINY,
        device="cpu",
        max_num_seqs=1,
        max_model_len=64,
        kv_cache_memory_bytes=4 << 20,
        eviction_policy="counted_eviction:Counted" if named else counted,
    ).engine
    try:
        counted.evicted = 0  # it was tried before
        assert engine.info.kv_capacity_tokens < 2 * 48  # no two prompts stay in the cache
        run = Session(engine)
        for number in range(8):
            run.submit([number + 5] * 48, 2)
            run.finish()
    finally:
        engine.close()
    assert counted.evicted > 10


def test_one_that_cannot_serve_is_refused_before_anything_is_loaded():
    with pytest.raises(ValueError, match="no eviction policy is called 'newest'; there are lineage"):
        build(RECIPE, TINY, device="cpu", eviction_policy="newest")
