"""The other end of an ext_proc stream: what Envoy accepts as replies to what it has sent."""

from extproc.protocol.ext_proc_body import PIECE_BYTES
from extproc.protocol.ext_proc_messages import (
    BodyMode,
    BodyReply,
    Event,
    HeadersReply,
    ImmediateReply,
    PieceReply,
    Reply,
    RequestBody,
    RequestHeaders,
    RequestTrailers,
    ResponseBody,
    ResponseHeaders,
    Side,
    TrailersReply,
)


class _Half:
    """One direction. Replies must match the messages sent, in order."""

    def __init__(self, mode: BodyMode):
        self.mode = mode
        self.due: list[type] = []
        self.sent = b""
        self.got = b""
        self.ended = False  # end_of_stream was sent
        self.whole_sent = False
        self.eos_replies = 0
        self.trailers_sent = False

    @property
    def duplex(self) -> bool:
        return self.mode is BodyMode.FULL_DUPLEX_STREAMED

    def send_headers(self, *, end_of_stream: bool) -> None:
        self.due.append(HeadersReply)
        self.ended = end_of_stream

    def send_body(self, body: bytes, *, end_of_stream: bool) -> None:
        buffered = self.mode in (BodyMode.BUFFERED, BodyMode.BUFFERED_PARTIAL)
        if self.ended or (buffered and self.whole_sent):
            return  # delivered twice: no further reply is expected
        self.whole_sent = True
        self.ended = end_of_stream
        self.sent += body
        if not self.duplex:
            self.due.append(BodyReply)

    def send_trailers(self) -> None:
        self.trailers_sent = True
        self.due.append(TrailersReply)

    def take(self, reply: Reply) -> None:
        if isinstance(reply, PieceReply):
            assert self.duplex, "a streamed piece outside of FULL_DUPLEX_STREAMED"
            assert HeadersReply not in self.due, "body before headers"
            assert self.eos_replies == 0, "a piece after the last one"
            assert len(reply.body) <= PIECE_BYTES
            assert len(reply.body) > 0 or reply.end_of_stream, "a piece that says nothing"
            self.got += bytes(reply.body)
            if reply.end_of_stream:
                assert self.ended, "end_of_stream was not sent"
                self.eos_replies += 1
            return
        assert not (self.duplex and isinstance(reply, BodyReply)), "not a streamed piece"
        assert self.due, f"spurious {reply}"
        assert isinstance(reply, self.due[0]), f"{reply} where {self.due[0].__name__} is due"
        self.due.pop(0)

    def assert_complete(self, *, replaced: bytes | None = None) -> None:
        assert self.due == []
        if self.duplex and (self.whole_sent or self.trailers_sent):
            assert self.got == (self.sent if replaced is None else replaced)
            assert self.eos_replies == (0 if self.trailers_sent else 1)


class EnvoyPeer:
    """Feed it what is sent and what is answered; it fails on the first reply Envoy would not accept."""

    def __init__(self, request_mode: BodyMode, response_mode: BodyMode):
        self.request = _Half(request_mode)
        self.response = _Half(response_mode)
        self.refused = False

    def sent(self, event: Event) -> None:
        half = (
            self.request
            if isinstance(event, RequestHeaders | RequestBody | RequestTrailers)
            else self.response
        )
        match event:
            case RequestHeaders() | ResponseHeaders():
                half.send_headers(end_of_stream=event.end_of_stream)
            case RequestBody() | ResponseBody():
                half.send_body(event.body, end_of_stream=event.end_of_stream)
            case _:
                half.send_trailers()

    def got(self, reply: Reply) -> None:
        assert not self.refused, f"{reply} after an immediate response"
        if isinstance(reply, ImmediateReply):
            self.refused = True
        else:
            (self.request if reply.side is Side.REQUEST else self.response).take(reply)
