"""The policies that come with the library, by name or as objects."""

from .batching import Batching, FirstCome, Pace
from .fair_share import FairShare
from .longest_prefix import LongestPrefix
from .named import POLICIES, make_policy
from .ranked import Deadline, Priority

__all__ = [
    "POLICIES",
    "Batching",
    "Deadline",
    "FairShare",
    "FirstCome",
    "LongestPrefix",
    "Pace",
    "Priority",
    "make_policy",
]
