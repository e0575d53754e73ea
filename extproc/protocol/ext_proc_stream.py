"""One ext_proc stream: legal replies in legal order, whatever the body mode. No I/O.

Theory of operation
===================

Envoy opens one stream per HTTP request and shows us its parts. The host feeds each part to `receive` and
performs the actions it gets back, in order. One of them, at most, is `Decide`; the host then calls `decided`
with its answer, which again gives actions.

The two halves of the exchange are two machines, because they may interleave: a request refused by another
filter shows us response headers before its body has ended. Each is a table: `REQUEST_TABLE` in
`ext_proc_request.py` and `RESPONSE_TABLE` in `ext_proc_response.py`. A pair (state, signal) that is not in
its table is a peer that breaks the protocol: `ProtocolError`, never an empty reply (Envoy counts a reply it
did not expect as spurious and stops listening).
"""

from extproc.core.errors import ProtocolError
from extproc.protocol.endpoint_picker import TEST_SERVED_HEADER, Metadata, merge_metadata, served_endpoint
from extproc.protocol.ext_proc_messages import (
    Action,
    Answer,
    BodyMode,
    Event,
    ResponseBody,
    ResponseHeaders,
    ResponseTrailers,
)
from extproc.protocol.ext_proc_request import RequestHalf, RequestState
from extproc.protocol.ext_proc_response import ResponseHalf, ResponseState

_RESPONSE_EVENTS = (ResponseHeaders, ResponseBody, ResponseTrailers)


class ExtProcStream:
    """Both halves of one stream, and the metadata said on it so far. Not reusable.

    Args:
        max_body_bytes: a longer request body is refused with 413.
        default_mode: body mode of both halves when the gateway does not announce one.
        test_mode: echo the served endpoint in a response header (conformance tests).
    """

    def __init__(
        self,
        *,
        max_body_bytes: int,
        default_mode: BodyMode = BodyMode.BUFFERED,
        test_mode: bool = False,
    ) -> None:
        self._request = RequestHalf(default_mode, max_body_bytes)
        self._response = ResponseHalf(default_mode)
        self._test_mode = test_mode
        self.metadata: dict[str, dict[str, object]] = {}

    def __repr__(self) -> str:
        return f"<ExtProcStream request={self._request.state.name} response={self._response.state.name}>"

    @property
    def deciding(self) -> bool:
        """Whether `decided` must be called next."""
        return self._request.deciding

    @property
    def timed(self) -> bool:
        """Whether the gateway waits a limited time for each answer, which it may be asked to extend."""
        return self._request.mode is not BodyMode.FULL_DUPLEX_STREAMED

    @property
    def response_open(self) -> bool:
        """Whether the gateway is showing us a response body whose end we have not seen."""
        shown = self._response.mode is not BodyMode.NONE
        return shown and self._response.state in (ResponseState.OPEN, ResponseState.WHOLE)

    def configure(self, request_mode: BodyMode, response_mode: BodyMode) -> None:
        """Body modes, as announced with the first message.

        Raises:
            ProtocolError: they changed after the stream began, or a mode is GRPC, which is not spoken.
        """
        if BodyMode.GRPC in (request_mode, response_mode):
            raise ProtocolError("body mode GRPC is not supported: use BUFFERED or FULL_DUPLEX_STREAMED")
        request, response = self._request, self._response
        begun = request.state is not RequestState.START or response.state is not ResponseState.IDLE
        if begun and (request_mode is not request.mode or response_mode is not response.mode):
            raise ProtocolError("the body modes changed after the stream began")
        request.mode, response.mode = request_mode, response_mode

    def add_metadata(self, update: Metadata) -> None:
        """Merge the metadata of a message into the stream's; call it before `receive`."""
        merge_metadata(self.metadata, update)

    def receive(self, event: Event) -> list[Action]:
        """What to do about one part of the exchange, in order.

        Raises:
            ProtocolError: this part is not legal now.
        """
        if isinstance(event, _RESPONSE_EVENTS):
            if self._request.state is RequestState.REFUSED:
                return []
            return [*self._response.receive(event, self._served_echo())]
        return self._request.receive(event)

    def decided(self, answer: Answer) -> list[Action]:
        """The replies that carry the host's answer to `Decide`, and those that waited for it.

        Raises:
            ProtocolError: nothing is to be decided.
            ValueError: the answer cannot be sent (illegal header or endpoint, a body in the place of one
                that was not read). The stream is unchanged: give another answer.
        """
        return self._request.decided(answer)

    def _served_echo(self) -> dict[str, str]:
        served = served_endpoint(self.metadata) if self._test_mode else None
        return {TEST_SERVED_HEADER: served} if served else {}
