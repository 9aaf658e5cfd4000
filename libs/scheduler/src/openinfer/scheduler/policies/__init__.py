"""The policies that come with the library, by name or as objects, and classes of your own by MODULE:NAME."""

import importlib
import inspect
import math
from collections.abc import Callable
from typing import Any

from ..errors import InvalidSetup
from ..policy import Policy
from .batching import Batching, FirstCome, Pace
from .fair_share import FairShare
from .longest_prefix import LongestPrefix
from .ranked import Deadline, Priority

__all__ = [
    "POLICIES", "Batching", "Deadline", "FairShare", "FirstCome", "LongestPrefix", "Pace", "Priority",
    "imported", "make_policy",
]  # fmt: skip


def imported(name: str, what: str) -> Callable[..., Any]:
    """The class or function MODULE:NAME. what: the word for it in messages. Raises InvalidSetup."""
    module, _, function = name.partition(":")
    if not module or not function:
        raise InvalidSetup(f"the {what} {name!r} is not MODULE:NAME; give both, as in my_module:MyClass")
    try:
        found = getattr(importlib.import_module(module), function, None)
    except (ImportError, ValueError) as error:
        raise InvalidSetup(f"the {what} {name!r} cannot be imported: {error}") from error
    if not callable(found):
        raise InvalidSetup(f"the {what} {name!r}: module {module} has no function {function!r}")
    return found  # type: ignore[no-any-return]


POLICIES: dict[str, Callable[..., Policy]] = {
    "deadline": Deadline,
    "fair-share": FairShare,
    "fcfs": FirstCome,
    "longest-prefix": LongestPrefix,
    "priority": Priority,
}
"""Name -> class."""
_passed: dict[tuple[str, str], Callable[..., Policy]] = {}
"""What passed the suite, by its name and options: the next engine of this process need not wait for it."""


def make_policy(spec: str, **options: Any) -> Policy:
    """The policy that `spec` says: NAME or MODULE:FUNCTION, then perhaps options: "deadline,ttft_s=0.2,tpot_s=0.02".

    The class or function gets the keyword arguments `options`; numbers in the spec override them. Your own passes
    `testing.PolicyConformance` here, once in a process and in about a second. Raises InvalidSetup for a name, an option
    or a function that is unknown, and a policy that breaks a rule of the suite. Other exceptions of the function pass
    through.
    """
    name, *pairs = spec.split(",")
    if name not in POLICIES and ":" not in name:
        raise InvalidSetup(
            f"no policy is called {name!r}; there are {', '.join(POLICIES)}, and MODULE:FUNCTION for your own"
        )
    factory = POLICIES.get(name) or imported(name, "policy")
    for pair in pairs:
        key, _, value = pair.partition("=")
        try:
            number = float(value)
            options[key.strip()] = int(number) if number.is_integer() else number
        except ValueError:
            number = math.nan
        if math.isnan(number):
            raise InvalidSetup(f"{pair!r} in the policy {spec!r} is not OPTION=NUMBER")
    try:
        policy = factory(**options)
    except TypeError as error:
        known = ", ".join(inspect.signature(factory).parameters)
        raise InvalidSetup(f"the policy {spec!r} cannot be made: {error}; its options are {known}") from error
    asked = name, repr({**options, "max_batched_tokens": 0})
    if name not in POLICIES and _passed.get(asked) is not factory:
        _check(spec, lambda most: factory(**{**options, "max_batched_tokens": most}))
        _passed[asked] = factory
    return policy


def _check(spec: str, make: Callable[[int], Policy]) -> None:
    from ..testing import PolicyConformance  # costs as much as the rest of the library, and few need it

    suite: Any = PolicyConformance()
    suite.make_policy = make
    for name in sorted(name for name in dir(suite) if name.startswith("test_")):
        try:
            getattr(suite, name)()
        except Exception as error:  # the policy is not ours and may raise anything
            raise InvalidSetup(
                f"the policy {spec!r} fails {name} of openinfer.scheduler.testing.PolicyConformance: "
                f"{type(error).__name__}: {error}; run that suite on it"
            ) from error
