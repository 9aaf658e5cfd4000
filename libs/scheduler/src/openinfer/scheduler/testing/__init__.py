"""For tests of policies and pools: a device in miniature, an oracle, schedules that compare the two, and the rules
that every policy must keep."""

from .conformance import PolicyConformance
from .drafts import RandomDrafts
from .fake_runner import DeviceFault, FakeRunner
from .model import EOS, VOCABULARY, generate
from .schedule import Mismatch, Schedule
from .simple_pool import Shape, SimpleLease, SimplePool
from .tier import FakeTier, Load, Piece

__all__ = [
    "EOS",
    "VOCABULARY",
    "DeviceFault",
    "FakeRunner",
    "FakeTier",
    "Load",
    "Mismatch",
    "Piece",
    "PolicyConformance",
    "RandomDrafts",
    "Schedule",
    "Shape",
    "SimpleLease",
    "SimplePool",
    "generate",
]
