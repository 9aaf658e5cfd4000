"""Everything this library raises.

    PoolError (Exception)
     ├─ InvalidGroup     (ValueError)      a group, or a set of groups, that no pool can be made of
     ├─ InvalidTokens    (ValueError)      tokens, hashes or counts that do not belong together
     ├─ LeaseReleased    (RuntimeError)    a lease used after its release
     └─ IntegrityError   (RuntimeError)    check_integrity() found the pool's books wrong: a bug

A pool that is merely full raises nothing: `Lease.reserve` answers None.
"""

from __future__ import annotations


class PoolError(Exception):
    """Base of all errors of openinfer.kvpool."""


class InvalidGroup(PoolError, ValueError):
    """A group, or a set of groups, that no pool can be made of."""


class InvalidTokens(PoolError, ValueError):
    """Tokens, hashes or counts that do not belong together."""


class LeaseReleased(PoolError, RuntimeError):
    """A lease was used after its release."""


class IntegrityError(PoolError, RuntimeError):
    """The pool's books contradict themselves; `problems` lists how."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("the pool is inconsistent: " + "; ".join(problems))
        self.problems = problems
