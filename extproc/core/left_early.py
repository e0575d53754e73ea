"""Requests whose client left before the gateway took our answer: which leases were theirs.

The ticket travels with our answer, so where the gateway never took that, its access log entry has no ticket,
and names no worker. All that leads from there to the lease is the request id. Clients may choose it, and may
send it twice; so an entry only ends a lease when everything else agrees:

* exactly one open lease of that id was taken within the time of the entry's request, `SLACK_S` more or less,
* nothing was heard from a worker about it, and
* its ext_proc stream has ended, or ends within `WAIT_S`: the entry may overtake that.
"""

from extproc.core.leases import Lease
from extproc.core.types import Completion

SLACK_S = 2.0  # entries are flushed, handed on and handled late
WAIT_S = 1.0


class LeftEarly:
    """Open leases by request id, and ends that wait for the end of a stream."""

    def __init__(self) -> None:
        self._open: dict[str, list[Lease]] = {}
        self._waiting: dict[str, tuple[float, Completion]] = {}

    def begin(self, lease: Lease) -> None:
        """A lease was taken."""
        self._open.setdefault(lease.decision.request.request_id, []).append(lease)

    def end(self, lease: Lease) -> None:
        """A lease has ended, however that was."""
        request_id = lease.decision.request.request_id
        left = [other for other in self._open.get(request_id, ()) if other is not lease]
        if left:
            self._open[request_id] = left
        else:
            self._open.pop(request_id, None)
        self._waiting.pop(lease.id, None)

    def told(self, request_id: str, completion: Completion, now: float) -> Lease | None:
        """A request without a ticket has ended so; the lease that is over with it."""
        began = now - (completion.duration_ms or 0.0) / 1000.0 - SLACK_S
        meant = [
            lease
            for lease in self._open.get(request_id, ())
            if lease.admitted_at >= began and not _was_served(lease)
        ]
        if len(meant) != 1:
            return None
        lease = meant[0]
        if lease.stream_ended_at is not None:
            return lease
        self._waiting[lease.id] = (now + WAIT_S, completion)
        return None

    def stream_ended(self, lease: Lease, now: float) -> Completion | None:
        """The stream of an open lease ended; how its request did, where that was told before."""
        until, completion = self._waiting.pop(lease.id, (now, None))
        return None if now > until or _was_served(lease) else completion


def _was_served(lease: Lease) -> bool:
    return lease.served_by is not None or lease.first_token_at is not None
