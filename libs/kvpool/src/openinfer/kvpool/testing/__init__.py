"""Is your own pool, or your own eviction policy, sound? Subclass a suite, say how to make one, and run pytest:

    from openinfer.kvpool.testing import EvictionSuite

    class TestMine(EvictionSuite):
        def make_policy(self, group):
            return MyPolicy(group)

`History` drives any pool through random operations over a simulated memory, and can be used by itself.
"""

from .history import Broken, History
from .loader import FakeLoader
from .suites import EvictionSuite, LoadingSuite, PoolSuite

__all__ = ["Broken", "EvictionSuite", "FakeLoader", "History", "LoadingSuite", "PoolSuite"]
