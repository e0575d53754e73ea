"""What the gRPC services ask of the application: choose, and be told what became of it.

All but `route` are synchronous and quick; signals may come more than once, in any order, and after the end
of a request: the implementation releases each lease exactly once.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from extproc.core.types import Completion
from extproc.protocol.endpoint_picker import Metadata
from extproc.protocol.ext_proc_messages import Answer


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """One HTTP request as Envoy shows it. Header names are lower-case, repeated ones joined with `, `.

    `path` includes the query. `body_seen` is False when the gateway does not show bodies to us (or not
    whole): `body` is then empty, which says nothing. `subset`: endpoints the gateway restricts us to, None =
    all; an entry may lack the port (see `endpoint_picker.match_subset`). `trace_parent`: W3C traceparent
    of the span ours belongs under, `trace_state` what came with it. `override`: wanted endpoints,
    comma-separated; only in test mode.
    `metadata` and `attributes`: what the gateway's own filters say, as far as it is configured.
    `more_time`: asks the gateway to wait so many seconds for the answer, from now on; None: it cannot be.
    """

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes
    subset: frozenset[str] | None
    trace_parent: str | None
    request_id: str
    override: str | None = None
    body_seen: bool = True
    trace_state: str | None = None
    metadata: Metadata = field(default_factory=dict)
    attributes: Mapping[str, object] = field(default_factory=dict)
    more_time: Callable[[float], Awaitable[None]] | None = None


class RoutingService(Protocol):
    """Implemented by the application around its `Router`."""

    async def route(self, request: HttpRequest) -> Answer:
        """Choose a worker and reserve it.

        An exception makes the request go on by Envoy's own balancing, or be refused where that would break
        a promise to tenants.
        """
        ...

    def first_body(self, lease_id: str) -> None:
        """The response body of this request has begun."""
        ...

    def served(self, lease_id: str, endpoint: str) -> None:
        """The gateway says which endpoint really served this request."""
        ...

    def stream_ended(self, lease_id: str, *, cancelled: bool) -> None:
        """The ext_proc stream of this request is over; exactly once for each `Route` that was answered.

        Envoy 1.36, 1.39 and 1.40 keep it open until the HTTP request ends; 1.37 and 1.38 close it at the
        response's headers. Envoy ends streams alike whatever happened to the request, so `cancelled` is True
        only where it shows: the decision was not taken, or a response we were shown broke off.
        """
        ...

    def completed(self, lease_id: str, completion: Completion) -> None:
        """How this request ended: from the access log, or from the response if the gateway shows it."""
        ...

    def left_early(self, request_id: str, completion: Completion) -> bool:
        """How a request ended that has no ticket: its client left before the gateway took our answer.

        Returns whether a request of ours has ended with it.
        """
        ...

    def access_log_streams(self, open_streams: int) -> None:
        """How many access-log streams are open now. At 0 completions get lost."""
        ...
