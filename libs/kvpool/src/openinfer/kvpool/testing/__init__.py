"""Tests for a pool or an eviction policy of your own. Subclass a suite, make the object, and run pytest:

    from openinfer.kvpool.testing import EvictionSuite

    class TestMine(EvictionSuite):
        def make_policy(self, group):
            return MyPolicy(group)

`History` drives any pool through random operations over a simulated memory. It can be used alone.
"""

from .history import Broken, History
from .loader import FakeLoader
from .suites import EvictionSuite, LoadingSuite, PoolSuite

__all__ = ["Broken", "EvictionSuite", "FakeLoader", "History", "LoadingSuite", "PoolSuite"]
