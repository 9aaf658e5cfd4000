"""Lending: the records of host memory that peers may read, and leases that keep some of them until a peer has them."""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ..host import HostMemory, Slot


@dataclass(slots=True)
class _Lease:
    until: float
    slots: list[Slot]


class Lending:
    """Lends records to peers. The owner's thread grants leases; threads that serve peers do the rest.

    lease_s: seconds that a lease lasts, from its grant or from the last `keep`. clock: seconds.
    """

    def __init__(self, host: HostMemory, lease_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._host, self._lease_s, self._clock = host, lease_s, clock
        self._leases: dict[str, _Lease] = {}
        self._lock = threading.Lock()
        self.lent = 0
        """Records that peers took."""
        self.expired = 0
        """Leases that no peer ended in time."""

    def grant(self, lease: str, records: Iterable[tuple[int, bytes]]) -> int:
        """Keep these records, by group and name, from eviction. Returns how many of them are in host memory."""
        found = (self._host.find(group, name) for group, name in records)
        slots = [self._host.use(slot) for slot in found if slot is not None]
        with self._lock:
            self._leases[lease] = _Lease(self._clock() + self._lease_s, slots)
        return len(slots)

    def landed(self, lease: str) -> bool:
        """Whether all records of a lease can be lent, but for those that were lost; True once it has ended."""
        found = self._leases.get(lease)
        return found is None or all(
            slot.whole or self._host.find(slot.group, slot.name) is not slot for slot in found.slots
        )

    def keep(self, leases: Sequence[str]) -> None:
        """Begin the time of these leases anew."""
        with self._lock:
            for lease in leases:
                if lease in self._leases:
                    self._leases[lease].until = self._clock() + self._lease_s

    def end(self, lease: str) -> None:
        """The peer has what it needs. A lease that has ended is no error."""
        with self._lock:
            found = self._leases.pop(lease, None)
        for slot in found.slots if found is not None else ():
            self._host.leave(slot)

    def expire(self) -> None:
        now = self._clock()
        with self._lock:
            late = [lease for lease, kept in self._leases.items() if kept.until <= now]
        for lease in late:
            self.expired += 1
            self.end(lease)

    def has(self, group: int, names: Sequence[bytes]) -> list[bool]:
        """Which records can be lent."""
        found = (self._host.find(group, name) for name in names)
        return [slot is not None and slot.whole for slot in found]

    def lend(self, group: int, name: bytes) -> Slot | None:
        """A record with one user more, which `back` takes away."""
        slot = self._host.lend(group, name)
        self.lent += slot is not None
        return slot

    def back(self, slot: Slot) -> None:
        """A peer has read the record, or is lost."""
        self._host.leave(slot)

    def clear(self) -> None:
        for lease in list(self._leases):
            self.end(lease)

    def __len__(self) -> int:
        return len(self._leases)
