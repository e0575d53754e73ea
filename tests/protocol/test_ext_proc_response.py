import pytest

from extproc.core.errors import ProtocolError
from extproc.protocol.ext_proc_messages import (
    BodyMode,
    BodyReply,
    HeadersReply,
    PieceReply,
    ResponseBody,
    ResponseHeaders,
    ResponseTrailers,
    Side,
)
from extproc.protocol.ext_proc_response import RESPONSE_TABLE, ResponseHalf, ResponseSignal, ResponseState

HEADERS = ResponseHeaders({":status": "200"})
LAST = ResponseBody(b"end", end_of_stream=True)


def test_the_table_uses_every_state_and_signal():
    assert {signal for _, signal in RESPONSE_TABLE} == set(ResponseSignal)
    assert set(RESPONSE_TABLE.values()) == set(ResponseState) - {ResponseState.IDLE}


@pytest.mark.parametrize("mode", [BodyMode.STREAMED, BodyMode.FULL_DUPLEX_STREAMED])
def test_the_last_piece_delivered_twice_is_answered_once(mode):
    half = ResponseHalf(mode)
    assert half.receive(HEADERS, {"a": "b"}) == [HeadersReply(Side.RESPONSE, {"a": "b"})]
    assert len(half.receive(LAST, {})) == 1
    assert half.receive(LAST, {}) == []


def test_headers_may_be_skipped():
    assert ResponseHalf(BodyMode.STREAMED).receive(LAST, {}) == [BodyReply(Side.RESPONSE)]


def test_duplex_pieces_go_back_as_they_came():
    half = ResponseHalf(BodyMode.FULL_DUPLEX_STREAMED)
    half.receive(HEADERS, {})
    (piece,) = half.receive(event := ResponseBody(b"data: x\n\n"), {})
    assert piece == PieceReply(Side.RESPONSE, b"data: x\n\n", end_of_stream=False)
    assert piece.body is event.body
    assert half.receive(ResponseBody(b""), {}) == []


@pytest.mark.parametrize(
    "events",
    [
        [HEADERS, HEADERS],
        [LAST, ResponseTrailers()],
        [LAST, ResponseBody(b"more")],
        [ResponseTrailers(), LAST],
        [ResponseHeaders({}, end_of_stream=True), ResponseBody(b"x")],
    ],
)
def test_illegal_orders(events):
    half = ResponseHalf(BodyMode.STREAMED)
    half.receive(events[0], {})
    with pytest.raises(ProtocolError, match="illegal"):
        half.receive(events[1], {})
