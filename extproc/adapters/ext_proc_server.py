"""Envoy's external processor: drives one `ExtProcStream` per HTTP request and the routing service.

Failure has a direction: whatever goes wrong here, the request goes on by Envoy's own balancing.

- `route` raises, or its answer cannot be sent: a plain continue.
- Envoy breaks the protocol: the stream is closed without an error, which means "go on without me".

With `fail_closed` both become errors instead: tenants were promised what Envoy alone cannot keep.

A lease that was answered is reported to `stream_ended` exactly once, however its stream ends.

Streams in observability mode come from a second, optional filter that only shows us the first piece of a
response: the first token while it happens. They are never answered, and we end them as soon as we know.
"""

import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass

import grpc

from extproc.adapters.ext_proc_codec import (
    HEADER_BOUNDS,
    HeaderBounds,
    attributes_of,
    event_of,
    metadata_of,
    modes_of,
    more_time,
    wire,
)
from extproc.adapters.response_observer import ResponseObserver
from extproc.adapters.routing import HttpRequest, RoutingService
from extproc.core.errors import ProtocolError
from extproc.core.types import Completion, Outcome
from extproc.pb import ext_proc_pb2 as pb
from extproc.protocol.endpoint_picker import TEST_SELECTION_HEADER, subset_hint, ticket
from extproc.protocol.ext_proc_messages import (
    Action,
    Answer,
    BodyMode,
    Decide,
    Event,
    PassThrough,
    Reply,
    ResponseBody,
    ResponseHeaders,
    ResponseTrailers,
    Route,
)
from extproc.protocol.ext_proc_stream import ExtProcStream
from extproc.protocol.names import shown
from extproc.protocol.rejections import Reject, routing_failed

_log = logging.getLogger("warmroute.ext_proc")

_RESPONSE_EVENTS = (ResponseHeaders, ResponseBody, ResponseTrailers)
_TRACE_KEYS = ("traceparent", "tracestate")

Context = grpc.aio.ServicerContext[pb.ProcessingRequest, bytes]


@dataclass(slots=True)
class ExtProcCounters:
    """What happened since the start. All but `active` only grow."""

    streams: int = 0
    active: int = 0
    routed: int = 0
    passed_through: int = 0
    rejected: int = 0
    routing_errors: int = 0  # `route` raised
    unsendable_answers: int = 0  # an illegal header, endpoint or body in a `Route`
    protocol_errors: int = 0
    observed: int = 0  # first bodies seen by the observer filter


@dataclass(frozen=True, slots=True)
class ExtProcSettings:
    """How streams are answered.

    Attributes:
        max_body_bytes: a longer request body is refused with 413.
        max_headers: a request with more is not read, and goes on without us.
        max_header_bytes: the same, for all headers together.
        default_mode: body mode when a gateway does not announce one.
        test_mode: honour the headers of conformance tests.
        namespaces: metadata namespaces that `HttpRequest.metadata` shows.
        fail_closed: whatever goes wrong here fails the request.
    """

    max_body_bytes: int = 64 << 20
    max_headers: int = HEADER_BOUNDS.headers
    max_header_bytes: int = HEADER_BOUNDS.characters
    default_mode: BodyMode = BodyMode.BUFFERED
    test_mode: bool = False
    namespaces: tuple[str, ...] = ()
    fail_closed: bool = False


class ExtProcService:
    """The servicer. One event loop; `counters` may be read at any time.

    Args:
        routing: decides.
        settings: how streams are answered.
        clock: monotonic seconds.
        replied: called when a decision has been written.
    """

    def __init__(
        self,
        routing: RoutingService,
        settings: ExtProcSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
        replied: Callable[[], None] = lambda: None,
    ) -> None:
        self._routing = routing
        self._settings = settings or ExtProcSettings()
        self._bounds = HeaderBounds(self._settings.max_headers, self._settings.max_header_bytes)
        self._clock = clock
        self._replied = replied
        self.counters = ExtProcCounters()

    async def process(self, _requests: AsyncIterator[pb.ProcessingRequest], context: Context) -> None:
        """`ExternalProcessor/Process`: one call per HTTP request. Replies are written as bytes."""
        counters = self.counters
        counters.streams += 1
        counters.active += 1
        exchange = _Exchange(self._routing, self._settings, self._bounds, self._clock, counters, context)
        try:
            # Reading from the context costs less than iterating over the messages, which reads from it too.
            while isinstance(message := await context.read(), pb.ProcessingRequest):
                if message.observability_mode:
                    if self._observe(message):
                        break
                    continue
                for reply in await exchange.replies(message):
                    await context.write(wire(reply))
                if exchange.undelivered:
                    exchange.undelivered = False
                    self._replied()
        except ProtocolError as error:
            counters.protocol_errors += 1
            _log.warning("closing an ext_proc stream: %s", error)
            if self._settings.fail_closed:
                await context.abort(grpc.StatusCode.INTERNAL, "the ext_proc protocol was broken")
        except Exception:
            counters.routing_errors += 1
            _log.exception("an ext_proc stream failed")
            if self._settings.fail_closed:
                await context.abort(grpc.StatusCode.INTERNAL, "the request could not be handled")
        finally:
            counters.active -= 1
            exchange.close()

    def _observe(self, message: pb.ProcessingRequest) -> bool:
        """Whether this message of an observer stream told all there is to know."""
        part = message.WhichOneof("request")
        if part == "response_body" and message.response_body.body:
            lease_id = ticket(metadata_of(message.metadata_context))
            if lease_id is not None:
                self.counters.observed += 1
                _tell(self._routing.first_body, lease_id)
            return True
        return part == "response_body" and message.response_body.end_of_stream


class _Exchange:
    """One HTTP request on its ext_proc stream."""

    def __init__(
        self,
        routing: RoutingService,
        settings: ExtProcSettings,
        bounds: HeaderBounds,
        clock: Callable[[], float],
        counters: ExtProcCounters,
        context: Context,
    ) -> None:
        self._routing = routing
        self._settings = settings
        self._bounds = bounds
        self._clock = clock
        self._counters = counters
        self._context = context
        self._stream = ExtProcStream(
            max_body_bytes=settings.max_body_bytes,
            default_mode=settings.default_mode,
            test_mode=settings.test_mode,
        )
        self._begun = clock()
        self._lease_id: str | None = None
        self.undelivered = False  # a route was chosen and its replies are not all written
        self._observer: ResponseObserver | None = None
        self._attributes: dict[str, object] = {}

    async def replies(self, message: pb.ProcessingRequest) -> list[Reply]:
        """Everything to be answered to one message, in order."""
        replies: list[Reply] = []
        actions = self._receive(message)
        while actions:
            action = actions.pop(0)
            if isinstance(action, Decide):
                actions += await self._decide(action)
            else:
                replies.append(action)
        return replies

    def _receive(self, message: pb.ProcessingRequest) -> list[Action]:
        modes = modes_of(message)
        if modes is not None:
            self._stream.configure(*modes)
        if message.HasField("metadata_context"):
            self._stream.add_metadata(metadata_of(message.metadata_context, self._settings.namespaces))
        if message.attributes:
            self._attributes.update(attributes_of(message))
        event = event_of(message, self._bounds)
        if event is None:
            raise ProtocolError("a ProcessingRequest without a part")
        actions = self._stream.receive(event)
        # No action: an empty piece, or one delivered twice.
        if actions and self._observer is not None and isinstance(event, _RESPONSE_EVENTS):
            self._show(self._observer, event)
        return actions

    async def _decide(self, decide: Decide) -> list[Action]:
        """The routing service's answer as replies."""
        counters = self._counters
        try:
            answer = await self._routing.route(self._http_request(decide))
        except Exception:
            counters.routing_errors += 1
            _log.exception("routing failed")
            return self._stream.decided(self._instead())
        if isinstance(answer, Route):
            self._lease_id = answer.lease_id
        try:
            replies = self._stream.decided(answer)
        except Exception:
            counters.unsendable_answers += 1
            _log.exception("an answer cannot be sent")
            self._abandon()
            return self._stream.decided(self._instead())
        self._count(answer)
        if self._lease_id is not None:
            self.undelivered = True
            self._observer = ResponseObserver(self._begun, self._clock())
        return replies

    def _instead(self) -> Answer:
        """What becomes of a request that we failed."""
        return routing_failed() if self._settings.fail_closed else PassThrough()

    def close(self) -> None:
        """The stream is over. Envoy ends all streams alike, so what was cut short shows in our state only."""
        if self._lease_id is not None:
            cancelled = self.undelivered or self._stream.response_open
            _tell(lambda lease: self._routing.stream_ended(lease, cancelled=cancelled), self._lease_id)

    def _http_request(self, decide: Decide) -> HttpRequest:
        headers = decide.headers
        parent, state = self._trace_context(headers)
        return HttpRequest(
            method=headers.get(":method", ""),
            path=headers.get(":path", ""),
            headers=headers,
            body=decide.body or b"",
            subset=subset_hint(self._stream.metadata),
            trace_parent=parent,
            trace_state=state,
            request_id=shown(headers.get("x-request-id", "")) or uuid.uuid4().hex,
            override=headers.get(TEST_SELECTION_HEADER) if self._settings.test_mode else None,
            body_seen=decide.body is not None,
            metadata=self._stream.metadata,
            attributes=self._attributes,
            more_time=self._more_time,
        )

    async def _more_time(self, seconds: float) -> None:
        """Envoy takes this once for each message, and has no timeout where it streams bodies both ways."""
        if self._stream.timed:
            await self._context.write(more_time(seconds))

    def _trace_context(self, headers: Mapping[str, str]) -> tuple[str | None, str | None]:
        """`traceparent`, `tracestate`: Envoy's own come with the gRPC call, the client's in its headers."""
        found: dict[str, str] = {}
        for key, value in self._context.invocation_metadata() or ():
            if key in _TRACE_KEYS:
                found[key] = value.decode("ascii", "replace") if isinstance(value, bytes) else value
        source = found if "traceparent" in found else headers
        return source.get("traceparent"), source.get("tracestate")

    def _count(self, answer: Answer) -> None:
        match answer:
            case Route():
                self._counters.routed += 1
            case Reject():
                self._counters.rejected += 1
            case PassThrough():
                self._counters.passed_through += 1

    def _abandon(self) -> None:
        """Give back a lease whose ticket never left: no log entry will ever name it."""
        if self._lease_id is not None:
            lease_id, self._lease_id = self._lease_id, None
            completion = Completion(Outcome.REJECTED, details="warmroute_unsendable_answer")
            _tell(lambda lease: self._routing.completed(lease, completion), lease_id)

    def _show(self, observer: ResponseObserver, event: Event) -> None:
        """Tell the routing service what a part of the response reveals."""
        lease_id = self._lease_id
        if lease_id is None:
            return
        seen = observer.see(event, self._stream.metadata, self._clock())
        if seen.served is not None:
            served = seen.served
            _tell(lambda lease: self._routing.served(lease, served), lease_id)
        if seen.first_body:
            _tell(self._routing.first_body, lease_id)
        if seen.completion is not None:
            completion = seen.completion
            _tell(lambda lease: self._routing.completed(lease, completion), lease_id)


def _tell(signal: Callable[[str], None], lease_id: str) -> None:
    """Pass a signal on; an error of the receiver is not the request's."""
    try:
        signal(lease_id)
    except Exception:
        _log.exception("a signal about lease %s was not taken", lease_id)
