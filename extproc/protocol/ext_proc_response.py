"""The response half of an ext_proc stream: everything passes unchanged. No I/O.

Every message is answered at once and plainly. In FULL_DUPLEX_STREAMED what we send *is* the body the client
gets, so each piece is sent back as it came; in the other modes each body message gets one reply. The half
may begin with any part (Envoy can be told to skip response headers) and at any time: an answer made by
Envoy itself shows its headers while the request is still being read.
"""

from enum import Enum, auto

from extproc.core.errors import ProtocolError
from extproc.protocol.ext_proc_body import cut
from extproc.protocol.ext_proc_messages import (
    BodyMode,
    BodyReply,
    HeadersReply,
    Reply,
    ResponseBody,
    ResponseEvent,
    ResponseHeaders,
    ResponseTrailers,
    Side,
    TrailersReply,
)


class ResponseState(Enum):
    """Where the response half stands."""

    IDLE = auto()
    OPEN = auto()
    ENDED = auto()
    CLOSED = auto()


class ResponseSignal(Enum):
    """A response event. `BODY` may be sent without `HEADERS`: Envoy can skip them."""

    HEADERS = auto()
    HEADERS_ALONE = auto()
    BODY = auto()
    LAST = auto()
    TRAILERS = auto()


_P, _Q = ResponseState, ResponseSignal

RESPONSE_TABLE: dict[tuple[ResponseState, ResponseSignal], ResponseState] = {
    (_P.IDLE, _Q.HEADERS): _P.OPEN,
    (_P.IDLE, _Q.HEADERS_ALONE): _P.ENDED,
    (_P.IDLE, _Q.BODY): _P.OPEN,
    (_P.IDLE, _Q.LAST): _P.ENDED,
    (_P.IDLE, _Q.TRAILERS): _P.CLOSED,
    (_P.OPEN, _Q.BODY): _P.OPEN,
    (_P.OPEN, _Q.LAST): _P.ENDED,
    (_P.OPEN, _Q.TRAILERS): _P.CLOSED,
    (_P.ENDED, _Q.LAST): _P.ENDED,  # delivered twice
}


class ResponseHalf:
    """See the module's docstring. `mode`: the response's body mode; set it before the first event."""

    def __init__(self, mode: BodyMode) -> None:
        self.mode = mode
        self.state = ResponseState.IDLE

    def receive(self, event: ResponseEvent, headers: dict[str, str]) -> list[Reply]:
        """Replies to one part; `headers` are set on the response if the part is its headers.

        Raises:
            ProtocolError: this part is not legal now.
        """
        signal = _signal(event)
        before, after = self.state, RESPONSE_TABLE.get((self.state, signal))
        if after is None:
            raise ProtocolError(f"{type(event).__name__} ({signal.name}) is illegal: response {before.name}")
        self.state = after
        match event:
            case ResponseHeaders():
                return [HeadersReply(Side.RESPONSE, headers)]
            case ResponseTrailers():
                return [TrailersReply(Side.RESPONSE)]
            case ResponseBody() if before is ResponseState.ENDED:
                return []
            case ResponseBody() if self.mode is BodyMode.FULL_DUPLEX_STREAMED:
                return list(cut(event.body, Side.RESPONSE, last=event.end_of_stream))
            case ResponseBody():
                return [BodyReply(Side.RESPONSE)]


def _signal(event: ResponseEvent) -> ResponseSignal:
    match event:
        case ResponseHeaders():
            return ResponseSignal.HEADERS_ALONE if event.end_of_stream else ResponseSignal.HEADERS
        case ResponseBody():
            return ResponseSignal.LAST if event.end_of_stream else ResponseSignal.BODY
        case ResponseTrailers():
            return ResponseSignal.TRAILERS
