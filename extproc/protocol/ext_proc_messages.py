"""Values of one ext_proc stream: what arrives, what the host decides, what is answered.

Plain values without protobuf: adapters translate them, tests compare them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum

from extproc.protocol.endpoint_picker import Metadata
from extproc.protocol.rejections import Reject


class BodyMode(IntEnum):
    """Envoy's `ProcessingMode.BodySendMode`: how a body is shown to us."""

    NONE = 0
    STREAMED = 1
    BUFFERED = 2
    BUFFERED_PARTIAL = 3
    FULL_DUPLEX_STREAMED = 4
    GRPC = 5


class Side(Enum):
    """Which half of the exchange a reply is about."""

    REQUEST = "request"
    RESPONSE = "response"


# --- events: what Envoy says -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RequestHeaders:
    """Names in lower case, pseudo-headers included. `end_of_stream`: the request has no body."""

    headers: Mapping[str, str]
    end_of_stream: bool = False


@dataclass(frozen=True, slots=True)
class RequestBody:
    """A piece of the body, or all of it."""

    body: bytes
    end_of_stream: bool = False


@dataclass(frozen=True, slots=True)
class RequestTrailers:
    """The end of a request that has trailers."""


@dataclass(frozen=True, slots=True)
class ResponseHeaders:
    """As `RequestHeaders`, for the answer."""

    headers: Mapping[str, str]
    end_of_stream: bool = False


@dataclass(frozen=True, slots=True)
class ResponseBody:
    """A piece of the answer."""

    body: bytes
    end_of_stream: bool = False


@dataclass(frozen=True, slots=True)
class ResponseTrailers:
    """The end of an answer that has trailers."""


RequestEvent = RequestHeaders | RequestBody | RequestTrailers
ResponseEvent = ResponseHeaders | ResponseBody | ResponseTrailers
Event = RequestEvent | ResponseEvent


# --- the host's answers to `Decide` ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Route:
    """Send the request to `endpoints[0]`; the others are fallbacks, in order.

    None: the gateway chooses by its own balancing, and the rest of the answer holds.

    `set_headers` overwrite the request's. `body` replaces the request's body (None: leave it alone); it is
    legal only if there was one and it was read whole.
    """

    endpoints: Sequence[str] | None
    lease_id: str
    set_headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None


@dataclass(frozen=True, slots=True)
class PassThrough:
    """Let the gateway choose by its own balancing."""


Answer = Route | Reject | PassThrough


# --- actions: what the host must do, in order -------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Decide:
    """Choose, then call `ExtProcStream.decided`. `body` is None when the body is not shown to us whole."""

    headers: Mapping[str, str]
    body: bytes | None


@dataclass(frozen=True, slots=True)
class HeadersReply:
    """Continue after headers."""

    side: Side
    set_headers: Mapping[str, str] = field(default_factory=dict)
    remove_headers: tuple[str, ...] = ()
    metadata: Metadata = field(default_factory=dict)
    clear_route_cache: bool = False


@dataclass(frozen=True, slots=True)
class BodyReply:
    """Continue after a body message (any mode but FULL_DUPLEX_STREAMED). `body`: its replacement."""

    side: Side
    set_headers: Mapping[str, str] = field(default_factory=dict)
    metadata: Metadata = field(default_factory=dict)
    clear_route_cache: bool = False
    body: bytes | None = None


@dataclass(frozen=True, slots=True)
class PieceReply:
    """One piece of the body that goes on (FULL_DUPLEX_STREAMED). A view shares the body's memory."""

    side: Side
    body: bytes | memoryview
    end_of_stream: bool


@dataclass(frozen=True, slots=True)
class TrailersReply:
    """Continue after trailers."""

    side: Side
    metadata: Metadata = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ImmediateReply:
    """Answer the client now; nothing else follows on this stream."""

    reject: Reject


Reply = HeadersReply | BodyReply | PieceReply | TrailersReply | ImmediateReply
Action = Decide | Reply
