"""News about requests reaches the replica that has routed them, wherever Envoy sent it.

Envoy spreads its streams over replicas and processes as it likes: the access log stream that tells how a
request ended need not end where its ext_proc stream did. So every ticket begins with its replica's `owner`,
and what is about others' requests is handed on (see `peer_link`). Tickets of replicas that are gone, or not
linked yet, are counted and dropped: their leases are gone too, or end by themselves. A request that ended
without a ticket may be anybody's: where it is not known to be ours, everybody is told.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from extproc.adapters.deferred import Deferred
from extproc.adapters.peer_codec import Completed, FirstBody, LeftEarly, Served, Signal
from extproc.adapters.routing import HttpRequest, RoutingService
from extproc.core.types import Completion
from extproc.protocol.ext_proc_messages import Answer

_log = logging.getLogger("warmroute.peers")

SEPARATOR = "."  # in no random part of a ticket, which is URL-safe base64


def owner_of(ticket: str) -> str:
    """How the tickets of the replica that gave this one begin; empty: it has no such beginning."""
    owner, separator, _ = ticket.partition(SEPARATOR)
    return owner if separator else ""


@dataclass(slots=True)
class ForwardingCounters:
    """What happened since the start; all only grow."""

    forwarded: int = 0
    unknown: int = 0  # of replicas that are not linked
    taken: int = 0  # from others


class ForwardingService:
    """A `RoutingService` that keeps what is ours and hands on the rest.

    Args:
        inner: takes what is about our own requests.
        owner: how our tickets begin.
        send: hands a signal to the replica whose tickets begin so; False when there is none.
        send_all: hands a signal to all replicas that are linked.
        on_access_log: told how many access log streams reach us.
        later: puts off ends that others tell of, as it does those of our own access log: after a pause they
            come by the hundred; None: they are taken at once.
    """

    def __init__(
        self,
        inner: RoutingService,
        owner: str,
        send: Callable[[str, Signal], bool],
        send_all: Callable[[Signal], None],
        on_access_log: Callable[[int], None],
        later: Deferred | None = None,
    ) -> None:
        self._inner = inner
        self._owner = owner
        self._send = send
        self._send_all = send_all
        self._on_access_log = on_access_log
        self._later = later
        self.counters = ForwardingCounters()

    async def route(self, request: HttpRequest) -> Answer:
        """See `RoutingService`."""
        return await self._inner.route(request)

    def first_body(self, lease_id: str) -> None:
        """See `RoutingService`."""
        if self._is_ours(lease_id):
            self._inner.first_body(lease_id)
        else:
            self._forward(lease_id, FirstBody(lease_id))

    def served(self, lease_id: str, endpoint: str) -> None:
        """See `RoutingService`."""
        if self._is_ours(lease_id):
            self._inner.served(lease_id, endpoint)
        else:
            self._forward(lease_id, Served(lease_id, endpoint))

    def stream_ended(self, lease_id: str, *, cancelled: bool) -> None:
        """See `RoutingService`. The stream of a request is always its owner's."""
        self._inner.stream_ended(lease_id, cancelled=cancelled)

    def completed(self, lease_id: str, completion: Completion) -> None:
        """See `RoutingService`."""
        if self._is_ours(lease_id):
            self._inner.completed(lease_id, completion)
        else:
            self._forward(lease_id, Completed(lease_id, completion))

    def left_early(self, request_id: str, completion: Completion) -> bool:
        """See `RoutingService`."""
        if self._inner.left_early(request_id, completion):
            return True
        self._send_all(LeftEarly(request_id, completion))
        return False

    def access_log_streams(self, open_streams: int) -> None:
        """See `RoutingService`. Streams that reach other replicas are as good as ours."""
        self._on_access_log(open_streams)

    def take(self, signals: Iterable[Signal]) -> None:
        """What others were told of our requests. Nothing is handed on twice."""
        for signal in signals:
            if self._later is not None and isinstance(signal, Completed | LeftEarly):
                self._later.add(partial(self._take, signal))
            else:
                self._take(signal)

    def _take(self, signal: Signal) -> None:
        try:
            self._tell(signal)
        except Exception:
            _log.exception("news of a request failed; others are not affected")

    def _tell(self, signal: Signal) -> None:
        if isinstance(signal, LeftEarly):
            self._inner.left_early(signal.request_id, signal.completion)
            return
        if not self._is_ours(signal.ticket):
            self.counters.unknown += 1
            return
        self.counters.taken += 1
        match signal:
            case FirstBody(ticket):
                self._inner.first_body(ticket)
            case Served(ticket, endpoint):
                self._inner.served(ticket, endpoint)
            case Completed(ticket, completion):
                self._inner.completed(ticket, completion)

    def _is_ours(self, ticket: str) -> bool:
        return owner_of(ticket) in ("", self._owner)

    def _forward(self, ticket: str, signal: Signal) -> None:
        if self._send(owner_of(ticket), signal):
            self.counters.forwarded += 1
        else:
            self.counters.unknown += 1
