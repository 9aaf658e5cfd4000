"""Eviction policies by name, as a command line gives them."""

import importlib

from .errors import InvalidEviction
from .eviction import POLICIES, Eviction, Factory
from .group import Group


def make_eviction(spec: str) -> Factory:
    """The factory of an eviction policy: `lru`, `lineage`, `priority`, `s3fifo`, or MODULE:CLASS for your own.

    A pool calls the factory with each of its groups. Your own class passes `testing.EvictionSuite` here. Raises
    InvalidEviction for a name that is not found, and for a policy that breaks a rule of the suite.
    """
    if spec in POLICIES:
        return POLICIES[spec]
    module, _, name = spec.partition(":")
    if not name:
        raise InvalidEviction(
            f"no eviction policy is called {spec!r}; there are {', '.join(POLICIES)}, and MODULE:CLASS for your own"
        )
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ImportError as error:
        raise InvalidEviction(f"the eviction policy {spec!r} cannot be imported: {error}") from error
    if not callable(found):
        raise InvalidEviction(f"the eviction policy {spec!r}: module {module} has no class {name!r}")
    _check(spec, found)
    return found  # type: ignore[no-any-return]


def _check(spec: str, make: Factory) -> None:
    from .testing import EvictionSuite  # costs as much as the rest of the library, and few need it

    class Suite(EvictionSuite):
        def make_policy(self, group: Group) -> Eviction:
            return make(group)

    suite = Suite()
    for name in sorted(name for name in dir(suite) if name.startswith("test_")):
        try:
            getattr(suite, name)()
        except Exception as error:  # the policy is not ours and may raise anything
            raise InvalidEviction(
                f"the eviction policy {spec!r} fails {name} of openinfer.kvpool.testing.EvictionSuite: "
                f"{type(error).__name__}: {error}; run that suite on it"
            ) from error
