"""Requests whose worker has left the membership, and that it may still finish: a draining worker does.

Their load was dropped with the worker; what is kept here is only what their end will be reported with. It is
no load, gives nothing back, and ends once: by a completion, by its own expiry, or as the oldest of too many.
"""

from collections.abc import Iterator

from extproc.core.leases import Lease

MOST = 10_000


class Departed:
    """Leases that are load no more, by id, in the order in which they were put aside."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._leases: dict[str, Lease] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[Lease]:
        return iter(tuple(self._leases.values()))

    def get(self, lease_id: str) -> Lease | None:
        """The lease of this id, if it is here."""
        return self._leases.get(lease_id)

    def keep(self, lease: Lease) -> Lease | None:
        """Put one aside; returns the oldest where there are too many now. It is here until it is taken."""
        self._leases[lease.id] = lease
        return next(iter(self._leases.values())) if len(self._leases) > self._most else None

    def take(self, lease_id: str) -> Lease | None:
        """The lease of this id the first time, None ever after."""
        return self._leases.pop(lease_id, None)
