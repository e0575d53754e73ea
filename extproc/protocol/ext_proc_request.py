"""The request half of an ext_proc stream: read, decide once, answer. No I/O.

Theory of operation
===================

A *signal* is an event seen through the body mode:

- FULL_DUPLEX_STREAMED: headers are held (`HELD`) until the body has been read (`PIECE`… `LAST`, or
  `TRAILERS`). Then everything is owed at once: headers, body pieces, trailers, in that order.
- BUFFERED: headers are answered at once (`BUFFERED`), or the body would never come. The body is one message,
  `WHOLE_LAST`, or `WHOLE` when trailers follow, and its reply carries the decision.
- STREAMED, NONE: the body passes by without waiting for us, so the decision is made on headers alone
  (`UNREAD`) and each later body message is acknowledged.
- No body (`ALONE`, end_of_stream on headers): decide on headers, whatever the mode.

*Owed* replies are those for messages not answered yet. The decision rides on the first of them: the headers
reply, the body reply (BUFFERED), or, when a BUFFERED request had trailers but no body, the trailers reply
(its metadata is enough for Envoy to choose). The others are plain.

Deliberate tolerance: Envoy may deliver the last piece of a body twice, and the second one is ignored.
After a refusal whatever was still in flight is ignored, for Envoy has stopped listening.
"""

from collections.abc import Iterator, Mapping
from enum import Enum, auto

from extproc.core.errors import ProtocolError
from extproc.protocol.endpoint_picker import (
    DESTINATION,
    LB_NAMESPACE,
    Metadata,
    check_header,
    decision_metadata,
)
from extproc.protocol.ext_proc_body import BodyBuffer, cut
from extproc.protocol.ext_proc_messages import (
    Action,
    Answer,
    BodyMode,
    BodyReply,
    Decide,
    HeadersReply,
    ImmediateReply,
    PassThrough,
    Reply,
    RequestBody,
    RequestEvent,
    RequestHeaders,
    RequestTrailers,
    Route,
    Side,
    TrailersReply,
)
from extproc.protocol.rejections import Reject, body_too_large


class RequestState(Enum):
    """Where the request half stands."""

    __hash__ = object.__hash__  # members are singletons; Enum's own hash is a call into Python

    START = auto()
    READING = auto()
    DECIDE_OPEN = auto()  # the host is deciding; more of the request may follow
    DECIDE_ENDED = auto()  # the host is deciding; the request ended with end_of_stream
    DECIDE_CLOSED = auto()  # the host is deciding; the request ended with trailers
    PASSING = auto()  # decided; more of the request may follow
    ENDED = auto()  # decided; the request ended with end_of_stream
    CLOSED = auto()  # decided; the request ended with trailers
    REFUSED = auto()


class Signal(Enum):
    """A request event seen through the body mode, or the host's answer."""

    __hash__ = object.__hash__

    HELD = auto()
    BUFFERED = auto()
    UNREAD = auto()
    ALONE = auto()
    PIECE = auto()
    LAST = auto()
    WHOLE = auto()
    WHOLE_LAST = auto()
    EXCESS = auto()  # a body message that exceeds the body limit
    TRAILERS = auto()
    ANSWER = auto()
    REFUSAL = auto()


class Step(Enum):
    """What a request transition does."""

    READ = auto()  # and hold the reply
    ANSWER_HEADERS = auto()
    DECIDE = auto()
    REPLY = auto()
    REFUSE = auto()
    ACKNOWLEDGE = auto()
    ACKNOWLEDGE_TRAILERS = auto()
    DEFER = auto()  # until the decision
    IGNORE = auto()


_R, _S, _X = RequestState, Signal, Step

REQUEST_TABLE: dict[tuple[RequestState, Signal], tuple[RequestState, Step]] = {
    (_R.START, _S.HELD): (_R.READING, _X.READ),
    (_R.START, _S.BUFFERED): (_R.READING, _X.ANSWER_HEADERS),
    (_R.START, _S.UNREAD): (_R.DECIDE_OPEN, _X.DECIDE),
    (_R.START, _S.ALONE): (_R.DECIDE_ENDED, _X.DECIDE),
    (_R.READING, _S.PIECE): (_R.READING, _X.READ),
    (_R.READING, _S.LAST): (_R.DECIDE_ENDED, _X.DECIDE),
    (_R.READING, _S.WHOLE): (_R.DECIDE_OPEN, _X.DECIDE),
    (_R.READING, _S.WHOLE_LAST): (_R.DECIDE_ENDED, _X.DECIDE),
    (_R.READING, _S.EXCESS): (_R.REFUSED, _X.REFUSE),
    (_R.READING, _S.TRAILERS): (_R.DECIDE_CLOSED, _X.DECIDE),
    (_R.DECIDE_OPEN, _S.PIECE): (_R.DECIDE_OPEN, _X.DEFER),
    (_R.DECIDE_OPEN, _S.LAST): (_R.DECIDE_OPEN, _X.DEFER),
    (_R.DECIDE_OPEN, _S.TRAILERS): (_R.DECIDE_OPEN, _X.DEFER),
    (_R.DECIDE_OPEN, _S.WHOLE): (_R.DECIDE_OPEN, _X.IGNORE),
    (_R.DECIDE_OPEN, _S.WHOLE_LAST): (_R.DECIDE_OPEN, _X.IGNORE),
    (_R.DECIDE_OPEN, _S.ANSWER): (_R.PASSING, _X.REPLY),
    (_R.DECIDE_OPEN, _S.REFUSAL): (_R.REFUSED, _X.REFUSE),
    (_R.DECIDE_ENDED, _S.LAST): (_R.DECIDE_ENDED, _X.IGNORE),
    (_R.DECIDE_ENDED, _S.WHOLE_LAST): (_R.DECIDE_ENDED, _X.IGNORE),
    (_R.DECIDE_ENDED, _S.ANSWER): (_R.ENDED, _X.REPLY),
    (_R.DECIDE_ENDED, _S.REFUSAL): (_R.REFUSED, _X.REFUSE),
    (_R.DECIDE_CLOSED, _S.ANSWER): (_R.CLOSED, _X.REPLY),
    (_R.DECIDE_CLOSED, _S.REFUSAL): (_R.REFUSED, _X.REFUSE),
    (_R.PASSING, _S.PIECE): (_R.PASSING, _X.ACKNOWLEDGE),
    (_R.PASSING, _S.LAST): (_R.ENDED, _X.ACKNOWLEDGE),
    (_R.PASSING, _S.WHOLE): (_R.PASSING, _X.IGNORE),
    (_R.PASSING, _S.WHOLE_LAST): (_R.PASSING, _X.IGNORE),
    (_R.PASSING, _S.TRAILERS): (_R.CLOSED, _X.ACKNOWLEDGE_TRAILERS),
    (_R.ENDED, _S.LAST): (_R.ENDED, _X.IGNORE),
    (_R.ENDED, _S.WHOLE_LAST): (_R.ENDED, _X.IGNORE),
    (_R.REFUSED, _S.PIECE): (_R.REFUSED, _X.IGNORE),
    (_R.REFUSED, _S.LAST): (_R.REFUSED, _X.IGNORE),
    (_R.REFUSED, _S.WHOLE): (_R.REFUSED, _X.IGNORE),
    (_R.REFUSED, _S.WHOLE_LAST): (_R.REFUSED, _X.IGNORE),
    (_R.REFUSED, _S.TRAILERS): (_R.REFUSED, _X.IGNORE),
}


class _Owed(Enum):
    __hash__ = object.__hash__

    HEADERS = auto()
    BODY = auto()
    PIECES_THEN_END = auto()
    PIECES_THEN_TRAILERS = auto()
    TRAILERS = auto()


class RequestHalf:
    """See the module's docstring. `mode`: the request's body mode; set it before the first event."""

    def __init__(self, mode: BodyMode, max_body_bytes: int) -> None:
        self.mode = mode
        self.state = RequestState.START
        self._limit = max_body_bytes
        self._headers: Mapping[str, str] = {}
        self._buffer = BodyBuffer()
        self._body: bytes | None = None  # as given to the host with `Decide`
        self._owed: list[_Owed] = []
        self._deferred: list[RequestEvent] = []

    @property
    def deciding(self) -> bool:
        """Whether `decided` must be called next."""
        return Signal.ANSWER in _TRANSITIONS[self.state]

    def receive(self, event: RequestEvent) -> list[Action]:
        """What to do about one part.

        Raises:
            ProtocolError: this part is not legal now.
        """
        signal = self._signal(event)
        transition = _TRANSITIONS[self.state].get(signal)
        if transition is None:
            raise ProtocolError(
                f"{type(event).__name__} ({signal.name}) is illegal: request {self.state.name}"
            )
        self.state, step = transition
        return self._perform(step, event)

    def decided(self, answer: Answer) -> list[Action]:
        """The replies that carry the host's answer, and those that waited for it.

        Raises:
            ProtocolError: nothing is to be decided.
            ValueError: the answer cannot be sent. The stream is unchanged.
        """
        if not self.deciding:
            raise ProtocolError(f"no decision is due: request {self.state.name}")
        if isinstance(answer, Reject):
            replies: list[Action] = [ImmediateReply(answer)]
            signal = Signal.REFUSAL
        else:
            replies = list(self._replies(answer))
            signal = Signal.ANSWER
        self.state, _ = _TRANSITIONS[self.state][signal]
        self._owed, self._body = [], None
        if self._deferred:
            deferred, self._deferred = self._deferred, []
            for event in deferred:
                replies += self.receive(event)
        return replies

    def _signal(self, event: RequestEvent) -> Signal:
        if isinstance(event, RequestBody):
            if self.state is RequestState.READING and self._buffer.size + len(event.body) > self._limit:
                return Signal.EXCESS
            last, more = _BODY_SIGNALS[self.mode]
            return last if event.end_of_stream else more
        if isinstance(event, RequestHeaders):
            return Signal.ALONE if event.end_of_stream else _HEADERS_SIGNAL[self.mode]
        return Signal.TRAILERS

    def _perform(self, step: Step, event: RequestEvent) -> list[Action]:
        match step:
            case Step.DECIDE:
                self._read(event)
                self._body = self._buffer.take() if self._is_whole(event) else None
                return [Decide(self._headers, self._body)]
            case Step.ANSWER_HEADERS:
                self._read(event)
                self._owed.clear()
                copies = self._client_copies()
                return [HeadersReply(Side.REQUEST, remove_headers=copies) if copies else _GO_ON]
            case Step.READ:
                self._read(event)
            case Step.ACKNOWLEDGE:
                return [BodyReply(Side.REQUEST)]
            case Step.ACKNOWLEDGE_TRAILERS:
                return [TrailersReply(Side.REQUEST)]
            case Step.DEFER:
                self._deferred.append(event)
            case Step.REFUSE:
                self._buffer.clear()
                return [ImmediateReply(body_too_large(self._limit))]
            case Step.IGNORE | Step.REPLY:
                pass
        return []

    def _read(self, event: RequestEvent) -> None:
        """Take in a part, and note what is owed for it."""
        duplex = self.mode is BodyMode.FULL_DUPLEX_STREAMED
        if isinstance(event, RequestHeaders):
            self._headers = event.headers
            self._owed.append(_Owed.HEADERS)
        elif isinstance(event, RequestBody):
            self._buffer.add(event.body)
            if not duplex:
                self._owed.append(_Owed.BODY)
            elif event.end_of_stream:
                self._owed.append(_Owed.PIECES_THEN_END)
        else:
            if duplex:
                self._owed.append(_Owed.PIECES_THEN_TRAILERS)
            self._owed.append(_Owed.TRAILERS)

    def _is_whole(self, event: RequestEvent) -> bool:
        """Whether what was read up to `event` is the whole body."""
        match event:
            case RequestHeaders():
                return event.end_of_stream
            case RequestBody():
                # A partly buffered body that has not ended is cut off at Envoy's buffer limit.
                return event.end_of_stream or self.mode is not BodyMode.BUFFERED_PARTIAL
            case RequestTrailers():
                return True

    def _client_copies(self) -> tuple[str, ...]:
        """Headers only we may set: a client's own must not survive when we leave the choice to Envoy."""
        return (DESTINATION,) if DESTINATION in self._headers else ()

    def _replies(self, answer: Route | PassThrough) -> Iterator[Reply]:
        headers, metadata, body = self._mutation(answer)
        clear = isinstance(answer, Route)
        remove = () if DESTINATION in headers else self._client_copies()
        for position, owed in enumerate(self._owed):
            if position > 0:
                headers, metadata, clear = {}, {}, False
            match owed:
                case _Owed.HEADERS:
                    yield HeadersReply(Side.REQUEST, headers, remove, metadata, clear)
                case _Owed.BODY:
                    yield BodyReply(Side.REQUEST, headers, metadata, clear, body)
                case _Owed.PIECES_THEN_END | _Owed.PIECES_THEN_TRAILERS:
                    content = body if body is not None else self._body or b""
                    yield from cut(content, Side.REQUEST, last=owed is _Owed.PIECES_THEN_END)
                case _Owed.TRAILERS:
                    yield TrailersReply(Side.REQUEST, metadata)

    def _mutation(self, answer: Route | PassThrough) -> tuple[Mapping[str, str], Metadata, bytes | None]:
        if isinstance(answer, PassThrough):
            return {}, {}, None
        metadata = decision_metadata(answer.endpoints, answer.lease_id)
        headers = dict(answer.set_headers)
        if answer.endpoints is not None:
            headers[DESTINATION] = str(metadata[LB_NAMESPACE][DESTINATION])
        if answer.body is not None:
            if self._body is None or not _REPLACEABLE.intersection(self._owed):
                raise ValueError("a body that was not read cannot be replaced")
            headers["content-length"] = str(len(answer.body))
        for name, value in headers.items():
            check_header(name, value)
        return headers, metadata, answer.body


_TRANSITIONS: dict[RequestState, dict[Signal, tuple[RequestState, Step]]] = {
    state: {signal: step for (other, signal), step in REQUEST_TABLE.items() if other is state}
    for state in RequestState
}
"""`REQUEST_TABLE`, by state: one lookup less for each message."""

_GO_ON = HeadersReply(Side.REQUEST)
_REPLACEABLE = frozenset({_Owed.BODY, _Owed.PIECES_THEN_END, _Owed.PIECES_THEN_TRAILERS})

_HEADERS_SIGNAL = {
    BodyMode.NONE: Signal.UNREAD,
    BodyMode.STREAMED: Signal.UNREAD,
    BodyMode.BUFFERED: Signal.BUFFERED,
    BodyMode.BUFFERED_PARTIAL: Signal.BUFFERED,
    BodyMode.FULL_DUPLEX_STREAMED: Signal.HELD,
}

_BODY_SIGNALS = {
    BodyMode.NONE: (Signal.LAST, Signal.PIECE),
    BodyMode.STREAMED: (Signal.LAST, Signal.PIECE),
    BodyMode.BUFFERED: (Signal.WHOLE_LAST, Signal.WHOLE),
    BodyMode.BUFFERED_PARTIAL: (Signal.WHOLE_LAST, Signal.WHOLE),
    BodyMode.FULL_DUPLEX_STREAMED: (Signal.LAST, Signal.PIECE),
}
