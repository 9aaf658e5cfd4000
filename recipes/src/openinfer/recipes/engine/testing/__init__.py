"""EngineConformance: the test suite that every recipe passes, as tests to subclass.

    class TestMine(EngineConformance):
        recipe = RECIPE
        checkpoint = Path("tiny-checkpoint")

pytest collects the tests of the subclass; nothing here imports pytest. Engines run on the CPU in float32.
"""

from openinfer.recipes.engine.testing.checkpoint import write_random_checkpoint
from openinfer.recipes.engine.testing.restless import Planted, Restless
from openinfer.recipes.engine.testing.session import Golden, Outcome, Session
from openinfer.recipes.engine.testing.suite import EngineConformance

__all__ = [
    "EngineConformance", "Golden", "Outcome", "Planted", "Restless", "Session", "write_random_checkpoint",
]  # fmt: skip
