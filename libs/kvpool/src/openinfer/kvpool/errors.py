"""Everything this library raises.

    PoolError (Exception)
     ├─ InvalidGroup     (ValueError)      a group, a set of groups or an option that no pool can be made of
     ├─ InvalidEviction  (ValueError)      an eviction policy that is not found, or breaks a rule
     ├─ InvalidTokens    (ValueError)      tokens, hashes or counts that do not belong together
     ├─ InvalidBlocks    (ValueError)      blocks that cannot be held: not there, or not complete
     ├─ InvalidConfig    (ValueError)      a configuration of events or peers that cannot be followed
     ├─ InvalidTiers     (ValueError)      tiers with too little room, or a folder that cannot be used
     ├─ PeerRefused      (ConnectionError) another engine is not one to share blocks with
     ├─ LeaseReleased    (RuntimeError)    a lease used after its release
     ├─ LeaseLoading     (RuntimeError)    a lease used before its load has ended
     ├─ EvictionError    (RuntimeError)    an eviction policy chose a block that is not cached
     └─ IntegrityError   (RuntimeError)    check_integrity() found the pool's books wrong: a bug

A pool that is merely full raises nothing: `Lease.reserve` and `Lease.snapshot` answer None.
"""


class PoolError(Exception):
    """Base of all errors of openinfer.kvpool."""


class InvalidGroup(PoolError, ValueError):
    """A group, a set of groups or an option that no pool can be made of."""


class InvalidEviction(PoolError, ValueError):
    """An eviction policy was not found, or it breaks a rule."""

    user_can_mend = True


class InvalidTokens(PoolError, ValueError):
    """Tokens, hashes or counts that do not belong together."""


class InvalidBlocks(PoolError, ValueError):
    """Blocks that cannot be held: not in the pool, or not complete."""


class InvalidConfig(PoolError, ValueError):
    """A configuration of events or peers that cannot be followed; the message says what is allowed."""

    user_can_mend = True


class InvalidTiers(PoolError, ValueError):
    """Tiers have too little room, their folder cannot be used, or the cache is not laid out as its groups say."""

    user_can_mend = True


class PeerRefused(PoolError, ConnectionError):
    """Another engine is not one to share blocks with: another secret, version or model, or words of no sense."""


class LeaseReleased(PoolError, RuntimeError):
    """A lease was used after its release."""


class LeaseLoading(PoolError, RuntimeError):
    """A lease was used before Pool.poll() named it."""


class EvictionError(PoolError, RuntimeError):
    """An eviction policy chose a block that is not cached: a bug of the policy."""


class IntegrityError(PoolError, RuntimeError):
    """The pool's books contradict themselves; `problems` lists how."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("the pool is inconsistent: " + "; ".join(problems))
        self.problems = problems
