"""The response half of an ext_proc stream: everything passes unchanged. No I/O.

Every message is answered at once and plainly. In FULL_DUPLEX_STREAMED what we send *is* the body the client
gets, so each piece is sent back as it came; in the other modes each body message gets one reply. A body
delivered twice (the last piece, or in BUFFERED modes the only one) is answered once. The half may begin
with any part (Envoy can be told to skip response headers) and at any time: an answer made by Envoy itself
shows its headers while the request is still being read.
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
    WHOLE = auto()  # the one message of a buffered body has come, trailers follow
    ENDED = auto()
    CLOSED = auto()


class ResponseSignal(Enum):
    """A response event. `BODY` may be sent without `HEADERS`: Envoy can skip them."""

    HEADERS = auto()
    HEADERS_ALONE = auto()
    BODY = auto()
    WHOLE = auto()  # a whole buffered body, not the end
    LAST = auto()
    TRAILERS = auto()


_P, _Q = ResponseState, ResponseSignal

RESPONSE_TABLE: dict[tuple[ResponseState, ResponseSignal], ResponseState] = {
    (_P.IDLE, _Q.HEADERS): _P.OPEN,
    (_P.IDLE, _Q.HEADERS_ALONE): _P.ENDED,
    (_P.IDLE, _Q.BODY): _P.OPEN,
    (_P.IDLE, _Q.WHOLE): _P.WHOLE,
    (_P.IDLE, _Q.LAST): _P.ENDED,
    (_P.IDLE, _Q.TRAILERS): _P.CLOSED,
    (_P.OPEN, _Q.BODY): _P.OPEN,
    (_P.OPEN, _Q.WHOLE): _P.WHOLE,
    (_P.OPEN, _Q.LAST): _P.ENDED,
    (_P.OPEN, _Q.TRAILERS): _P.CLOSED,
    (_P.WHOLE, _Q.TRAILERS): _P.CLOSED,
    (_P.WHOLE, _Q.WHOLE): _P.WHOLE,  # delivered twice
    (_P.WHOLE, _Q.LAST): _P.WHOLE,  # delivered twice
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
        signal = _signal(event, self.mode)
        before, after = self.state, RESPONSE_TABLE.get((self.state, signal))
        if after is None:
            raise ProtocolError(f"{type(event).__name__} ({signal.name}) is illegal: response {before.name}")
        self.state = after
        match event:
            case ResponseHeaders():
                return [HeadersReply(Side.RESPONSE, headers)]
            case ResponseTrailers():
                return [TrailersReply(Side.RESPONSE)]
            case ResponseBody() if before in (ResponseState.WHOLE, ResponseState.ENDED):
                return []
            case ResponseBody() if self.mode is BodyMode.FULL_DUPLEX_STREAMED:
                return list(cut(event.body, Side.RESPONSE, last=event.end_of_stream))
            case ResponseBody():
                return [BodyReply(Side.RESPONSE)]


def _signal(event: ResponseEvent, mode: BodyMode) -> ResponseSignal:
    match event:
        case ResponseHeaders():
            return ResponseSignal.HEADERS_ALONE if event.end_of_stream else ResponseSignal.HEADERS
        case ResponseBody():
            if event.end_of_stream:
                return ResponseSignal.LAST
            buffered = mode in (BodyMode.BUFFERED, BodyMode.BUFFERED_PARTIAL)
            return ResponseSignal.WHOLE if buffered else ResponseSignal.BODY
        case ResponseTrailers():
            return ResponseSignal.TRAILERS
