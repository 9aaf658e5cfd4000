"""For tests of policies, pools and runners: a device in miniature, an oracle, and random schedules that
compare them."""

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
