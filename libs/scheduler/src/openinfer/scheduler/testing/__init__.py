"""For tests of policies and pools: a fake device, a sequential oracle, random schedules that compare the two, and the
rules of every policy and every drafter."""

from .conformance import DrafterConformance, PolicyConformance
from .fake_runner import EOS, VOCABULARY, DeviceFault, FakeRunner, generate
from .schedule import Mismatch, RandomDrafts, Schedule
from .simple_pool import PoolShape, SimpleLease, SimplePool
from .tier import FakeTier, TierLoad, TierPiece

__all__ = [
    "EOS", "VOCABULARY", "DeviceFault", "DrafterConformance", "FakeRunner", "FakeTier", "Mismatch",
    "PolicyConformance", "PoolShape", "RandomDrafts", "Schedule", "SimpleLease", "SimplePool", "TierLoad",
    "TierPiece", "generate",
]  # fmt: skip
