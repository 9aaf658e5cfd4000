"""For tests of policies and pools: a device in miniature, an oracle, and schedules that compare the two."""

from .fake_runner import DeviceFault, FakeRunner
from .model import EOS, VOCABULARY, generate
from .schedule import Mismatch, Schedule
from .simple_pool import SimpleLease, SimplePool

__all__ = [
    "EOS",
    "VOCABULARY",
    "DeviceFault",
    "FakeRunner",
    "Mismatch",
    "Schedule",
    "SimpleLease",
    "SimplePool",
    "generate",
]
