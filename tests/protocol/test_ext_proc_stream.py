import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.core.errors import ProtocolError
from extproc.protocol.endpoint_picker import DESTINATION, TEST_SERVED_HEADER
from extproc.protocol.ext_proc_messages import (
    BodyMode,
    BodyReply,
    Decide,
    HeadersReply,
    ImmediateReply,
    PassThrough,
    PieceReply,
    RequestBody,
    RequestHeaders,
    RequestTrailers,
    ResponseBody,
    ResponseHeaders,
    ResponseTrailers,
    Route,
    Side,
    TrailersReply,
)
from extproc.protocol.ext_proc_stream import ExtProcStream
from extproc.protocol.rejections import malformed
from tests.support.ext_proc_peer import EnvoyPeer

LIMIT = 400_000
BUFFERED, DUPLEX = BodyMode.BUFFERED, BodyMode.FULL_DUPLEX_STREAMED
POST = {":method": "POST", ":path": "/v1/completions"}
ROUTE = Route(("10.0.0.1:8000", "10.0.0.2:8000"), "lease-1", {"x-pool": "p"})
METADATA = {
    "envoy.lb": {DESTINATION: "10.0.0.1:8000,10.0.0.2:8000"},
    "warmroute": {"ticket": "lease-1"},
}


def stream(request=BUFFERED, response=BodyMode.NONE, **options) -> ExtProcStream:
    machine = ExtProcStream(**({"max_body_bytes": LIMIT} | options))
    machine.configure(request, response)
    return machine


# --- properties ---------------------------------------------------------------------------------------

MODES = st.sampled_from([mode for mode in BodyMode if mode is not BodyMode.GRPC])
BODIES = st.one_of(
    st.binary(max_size=8),
    st.integers(0, 3).flatmap(lambda n: st.sampled_from([b"x" * (n * 62 * 1024 + d) for d in (0, 1, 5000)])),
)
EVENTS = st.one_of(
    st.builds(RequestHeaders, st.just(POST), st.booleans()),
    st.builds(RequestBody, BODIES, st.booleans()),
    st.just(RequestTrailers()),
    st.builds(ResponseHeaders, st.just({":status": "200"}), st.booleans()),
    st.builds(ResponseBody, BODIES, st.booleans()),
    st.just(ResponseTrailers()),
)
ANSWERS = st.sampled_from([ROUTE, PassThrough(), malformed("no")])


def perform(machine, peer, events, answer) -> list[Decide]:
    """Drive the machine as a host does; every reply goes to the peer. Returns the decisions asked for."""
    decisions = []
    for event in events:
        peer.sent(event)
        actions = machine.receive(event)
        for action in actions:
            if isinstance(action, Decide):
                assert machine.deciding
                decisions.append(action)
                for reply in machine.decided(answer):
                    peer.got(reply)
            else:
                peer.got(action)
        assert not machine.deciding
    return decisions


@given(st.lists(EVENTS, max_size=9), MODES, MODES, ANSWERS)
def test_any_event_order_gives_legal_replies_or_a_protocol_error(events, request_mode, response_mode, answer):
    machine, peer = stream(request_mode, response_mode), EnvoyPeer(request_mode, response_mode)
    with contextlib.suppress(ProtocolError):
        assert len(perform(machine, peer, events, answer)) <= 1


@st.composite
def legal_requests(draw):
    """A whole request as Envoy shows it in some mode, with the last body message perhaps delivered twice."""
    mode = draw(MODES)
    pieces = draw(st.lists(BODIES, min_size=1, max_size=6))
    end = draw(st.sampled_from(["headers", "eos", "eos twice", "trailers", "trailers only"]))
    if end == "headers":
        return mode, [RequestHeaders(POST, end_of_stream=True)], b""
    if end == "trailers only":
        return mode, [RequestHeaders(POST), RequestTrailers()], b""
    if mode in (BUFFERED, BodyMode.BUFFERED_PARTIAL):
        pieces = [b"".join(pieces)]
    last = end != "trailers"
    bodies = [] if mode is BodyMode.NONE else [RequestBody(piece) for piece in pieces[:-1]]
    if mode is not BodyMode.NONE:
        bodies += [RequestBody(pieces[-1], last)] * (2 if end == "eos twice" else 1)
    trailers = [] if last else [RequestTrailers()]
    return mode, [RequestHeaders(POST), *bodies, *trailers], b"".join(pieces)


@given(legal_requests(), ANSWERS, st.booleans())
def test_every_legal_request_is_answered_completely(exchange, answer, replace):
    mode, events, body = exchange
    total = len(body)
    read = mode in (BUFFERED, DUPLEX) and len(events) > 1 and not isinstance(events[1], RequestTrailers)
    if replace and read and isinstance(answer, Route):
        answer = Route(ROUTE.endpoints, "lease-1", {}, body=b"replaced" * 20_000)
    peer = EnvoyPeer(mode, BodyMode.NONE)
    decisions = perform(stream(mode, max_body_bytes=2_000_000), peer, events, answer)
    assert len(decisions) == 1
    assert total < 2_000_000
    if read:
        assert decisions[0].body == body
    if isinstance(answer, Route | PassThrough):
        peer.request.assert_complete(replaced=getattr(answer, "body", None))
    else:
        assert peer.refused


@given(st.lists(BODIES, max_size=6), st.booleans(), MODES)
def test_responses_pass_unchanged(pieces, trailers, mode):
    machine, peer = stream(BUFFERED, mode), EnvoyPeer(BUFFERED, mode)
    if mode in (BUFFERED, BodyMode.BUFFERED_PARTIAL):
        pieces = [b"".join(pieces)] if trailers else []
    events = [ResponseHeaders({":status": "200"}), *(ResponseBody(piece) for piece in pieces)]
    events.append(ResponseTrailers() if trailers else ResponseBody(b"end", end_of_stream=True))
    perform(machine, peer, events, ROUTE)
    assert not machine.response_open
    peer.response.assert_complete()


@given(st.lists(BODIES, min_size=1, max_size=5), st.data())
def test_events_that_overtake_the_decision_are_answered_after_it(pieces, data):
    """A host may read on while it decides (STREAMED with send_body_without_waiting_for_header_response)."""
    machine, peer = stream(BodyMode.STREAMED), EnvoyPeer(BodyMode.STREAMED, BodyMode.NONE)
    events = [RequestHeaders(POST), *(RequestBody(piece) for piece in pieces), RequestTrailers()]
    decide_after = data.draw(st.integers(1, len(events)))
    for position, event in enumerate(events, 1):
        peer.sent(event)
        for action in machine.receive(event):
            if not isinstance(action, Decide):
                peer.got(action)
        if position == decide_after:
            for reply in machine.decided(ROUTE):
                peer.got(reply)
    peer.request.assert_complete()


# --- BUFFERED ---------------------------------------------------------------------------------------------


def test_buffered_puts_the_decision_on_the_body_reply():
    machine = stream()
    assert machine.receive(RequestHeaders(POST)) == [HeadersReply(Side.REQUEST)]
    assert machine.receive(RequestBody(b"{}", end_of_stream=True)) == [Decide(POST, b"{}")]
    assert machine.decided(ROUTE) == [
        BodyReply(
            Side.REQUEST,
            {"x-pool": "p", DESTINATION: "10.0.0.1:8000,10.0.0.2:8000"},
            METADATA,
            clear_route_cache=True,
        )
    ]


def test_pitfall_05_trailers_end_a_buffered_body():
    machine = stream()
    machine.receive(RequestHeaders(POST))
    assert machine.receive(RequestBody(b"{}")) == [Decide(POST, b"{}")]
    machine.decided(ROUTE)
    assert machine.receive(RequestTrailers()) == [TrailersReply(Side.REQUEST)]


def test_a_buffered_request_with_trailers_but_no_body_is_decided_by_metadata():
    machine = stream()
    machine.receive(RequestHeaders(POST))
    assert machine.receive(RequestTrailers()) == [Decide(POST, b"")]
    assert machine.decided(ROUTE) == [TrailersReply(Side.REQUEST, METADATA)]


def test_pitfall_15_a_replaced_body_carries_its_length():
    machine = stream()
    machine.receive(RequestHeaders({**POST, "content-length": "2"}))
    machine.receive(RequestBody(b"{}", end_of_stream=True))
    (reply,) = machine.decided(Route(("10.0.0.1:80",), "l", {}, body=b'{"longer":1}'))
    assert reply.body == b'{"longer":1}'
    assert reply.set_headers["content-length"] == "12"


def test_pitfall_14_no_length_is_set_when_the_body_is_left_alone():
    machine = stream(DUPLEX)
    machine.receive(RequestHeaders({**POST, "content-length": "999"}))
    machine.receive(RequestBody(b"{}", end_of_stream=True))
    headers, piece = machine.decided(ROUTE)
    assert "content-length" not in headers.set_headers
    assert piece.body == b"{}"


@pytest.mark.parametrize("mode", [BodyMode.BUFFERED, DUPLEX])
def test_the_gateway_may_be_left_to_choose_while_the_rest_of_an_answer_holds(mode):
    machine = stream(mode)
    replies = machine.receive(RequestHeaders({**POST, DESTINATION: "169.254.169.254:80"}))
    machine.receive(RequestBody(b"{}", end_of_stream=True))
    replies += machine.decided(Route(None, "l", {"x-pool": "p"}, body=b"[1]"))
    removed = {name for reply in replies for name in getattr(reply, "remove_headers", ())}
    headers = {name: v for reply in replies for name, v in getattr(reply, "set_headers", {}).items()}
    metadata = [reply.metadata for reply in replies if getattr(reply, "metadata", None)]
    assert removed == {DESTINATION}
    assert headers == {"x-pool": "p", "content-length": "3"}
    assert metadata == [{"warmroute": {"ticket": "l"}}]
    assert b"".join(bytes(reply.body) for reply in replies if getattr(reply, "body", None)) == b"[1]"


def test_a_partly_buffered_body_is_not_taken_for_the_whole():
    machine = stream(BodyMode.BUFFERED_PARTIAL)
    machine.receive(RequestHeaders(POST))
    assert machine.receive(RequestBody(b'{"prompt": "cut o')) == [Decide(POST, None)]
    with pytest.raises(ValueError, match="cannot be replaced"):
        machine.decided(Route(("10.0.0.1:80",), "l", {}, body=b"x"))
    assert machine.decided(PassThrough()) == [BodyReply(Side.REQUEST)]


# --- FULL_DUPLEX_STREAMED ---------------------------------------------------------------------------------


def test_pitfall_07_duplex_headers_wait_for_the_body_and_come_first():
    machine = stream(DUPLEX)
    assert machine.receive(RequestHeaders(POST)) == []
    assert machine.receive(RequestBody(b"ab")) == []
    assert machine.receive(RequestBody(b"cd")) == []
    assert machine.receive(RequestBody(b"ef", end_of_stream=True)) == [Decide(POST, b"abcdef")]
    headers, piece = machine.decided(ROUTE)
    assert isinstance(headers, HeadersReply)
    assert headers.metadata == METADATA
    assert headers.clear_route_cache
    assert piece == PieceReply(Side.REQUEST, b"abcdef", end_of_stream=True)


def test_pitfall_05_duplex_trailers_end_the_body_and_are_answered_last():
    machine = stream(DUPLEX)
    machine.receive(RequestHeaders(POST))
    machine.receive(RequestBody(b"ab"))
    assert machine.receive(RequestTrailers()) == [Decide(POST, b"ab")]
    headers, piece, trailers = machine.decided(ROUTE)
    assert headers.set_headers[DESTINATION] == "10.0.0.1:8000,10.0.0.2:8000"
    assert piece == PieceReply(Side.REQUEST, b"ab", end_of_stream=False)
    assert trailers == TrailersReply(Side.REQUEST)


def test_pieces_share_the_bodys_memory():
    machine = stream(DUPLEX)
    machine.receive(RequestHeaders(POST))
    body = bytes(200_000)
    machine.receive(RequestBody(body, end_of_stream=True))
    pieces = machine.decided(ROUTE)[1:]
    assert all(piece.body.obj is body for piece in pieces)


@pytest.mark.parametrize("mode", [BUFFERED, DUPLEX])
def test_pitfall_03_duplicated_last_chunk(mode):
    machine = stream(mode)
    machine.receive(RequestHeaders(POST))
    last = RequestBody(b"{}", end_of_stream=True)
    assert len(machine.receive(last)) == 1
    assert machine.receive(last) == []
    assert sum(isinstance(reply, PieceReply | BodyReply) for reply in machine.decided(ROUTE)) == 1
    assert machine.receive(last) == []


# --- whatever the mode ---------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [mode for mode in BodyMode if mode is not BodyMode.GRPC])
def test_pitfall_10_bodiless_requests_are_decided_on_headers(mode):
    machine = stream(mode)
    assert machine.receive(RequestHeaders(POST, end_of_stream=True)) == [Decide(POST, b"")]
    (reply,) = machine.decided(ROUTE)
    assert isinstance(reply, HeadersReply)
    assert reply.metadata == METADATA


@pytest.mark.parametrize("mode", [BodyMode.NONE, BodyMode.STREAMED])
def test_bodies_that_pass_by_are_not_seen(mode):
    machine = stream(mode)
    assert machine.receive(RequestHeaders(POST)) == [Decide(POST, None)]
    with pytest.raises(ValueError, match="cannot be replaced"):
        machine.decided(Route(("10.0.0.1:80",), "l", {}, body=b"x"))
    assert len(machine.decided(ROUTE)) == 1
    assert machine.receive(RequestBody(b"a")) == [BodyReply(Side.REQUEST)]
    assert machine.receive(RequestBody(b"b", end_of_stream=True)) == [BodyReply(Side.REQUEST)]


@pytest.mark.parametrize("mode", [BUFFERED, DUPLEX])
def test_pitfall_13_a_body_over_the_limit_is_a_clean_413(mode):
    machine = stream(mode, max_body_bytes=10)
    machine.receive(RequestHeaders(POST))
    if mode is DUPLEX:
        assert machine.receive(RequestBody(b"x" * 10)) == []
        (reply,) = machine.receive(RequestBody(b"y"))
    else:
        (reply,) = machine.receive(RequestBody(b"x" * 11, end_of_stream=True))
    assert isinstance(reply, ImmediateReply)
    assert reply.reject.status == 413
    assert machine.receive(RequestBody(b"z", end_of_stream=True)) == []
    assert machine.receive(ResponseHeaders({":status": "413"})) == []


def test_a_body_of_exactly_the_limit_is_read():
    machine = stream(max_body_bytes=10)
    machine.receive(RequestHeaders(POST))
    assert machine.receive(RequestBody(b"x" * 10, end_of_stream=True)) == [Decide(POST, b"x" * 10)]


@pytest.mark.parametrize("mode", [BUFFERED, DUPLEX])
def test_pitfall_81_a_clients_own_destination_does_not_survive_a_pass_through(mode):
    machine = stream(mode)
    replies = machine.receive(RequestHeaders({**POST, DESTINATION: "169.254.169.254:80"}))
    machine.receive(RequestBody(b"", end_of_stream=True))
    replies += machine.decided(PassThrough())
    assert isinstance(replies[0], HeadersReply)
    assert replies[0].remove_headers == (DESTINATION,)


def test_pitfall_11_a_get_with_response_parts():
    machine = stream(BUFFERED, BodyMode.STREAMED)
    machine.receive(RequestHeaders({":method": "GET", ":path": "/v1/models"}, end_of_stream=True))
    assert machine.decided(PassThrough()) == [HeadersReply(Side.REQUEST)]
    assert machine.receive(ResponseHeaders({":status": "200"})) == [HeadersReply(Side.RESPONSE)]
    assert machine.receive(ResponseBody(b"a")) == [BodyReply(Side.RESPONSE)]
    assert machine.receive(ResponseBody(b"b", end_of_stream=True)) == [BodyReply(Side.RESPONSE)]


def test_pitfall_06_empty_response_trailers_end_the_response():
    machine = stream(BUFFERED, DUPLEX)
    machine.receive(ResponseHeaders({":status": "200"}))
    assert machine.receive(ResponseBody(b"a")) == [PieceReply(Side.RESPONSE, b"a", end_of_stream=False)]
    assert machine.response_open
    assert machine.receive(ResponseTrailers()) == [TrailersReply(Side.RESPONSE)]
    assert not machine.response_open


def test_an_answer_by_another_filter_may_overtake_the_request():
    machine = stream(BUFFERED, BUFFERED)
    machine.receive(RequestHeaders(POST))
    assert machine.receive(ResponseHeaders({":status": "413"})) == [HeadersReply(Side.RESPONSE)]


def test_pitfall_08_metadata_is_merged_over_the_whole_stream():
    machine = stream(BUFFERED, BUFFERED, test_mode=True)
    machine.add_metadata({"envoy.lb.subset_hint": {"a": 1}})
    machine.add_metadata({})
    machine.add_metadata({"envoy.lb": {"x-gateway-destination-endpoint-served": "10.0.0.1:1"}})
    machine.add_metadata({"envoy.lb": {"other": "x"}})
    assert machine.metadata["envoy.lb.subset_hint"] == {"a": 1}
    (reply,) = machine.receive(ResponseHeaders({":status": "200"}))
    assert reply.set_headers == {TEST_SERVED_HEADER: "10.0.0.1:1"}


def test_a_response_of_which_only_headers_are_shown_is_not_open():
    machine = stream(BUFFERED, BodyMode.NONE)
    machine.receive(ResponseHeaders({":status": "200"}))
    assert not machine.response_open


def test_the_served_endpoint_is_echoed_in_test_mode_only():
    machine = stream(BUFFERED, BUFFERED)
    machine.add_metadata({"envoy.lb": {"x-gateway-destination-endpoint-served": "10.0.0.1:1"}})
    assert machine.receive(ResponseHeaders({":status": "200"})) == [HeadersReply(Side.RESPONSE)]


@pytest.mark.parametrize(
    "route",
    [
        Route((), "l"),
        Route(("10.0.0.1",), "l"),
        Route(("10.0.0.1:80",), "l", {"X-Upper": "v"}),
        Route(("10.0.0.1:80",), "l", {":path": "/"}),
        Route(("10.0.0.1:80",), "l", {"a": "v\r\nb: c"}),
    ],
)
@pytest.mark.parametrize("mode", [BUFFERED, DUPLEX])
def test_pitfall_20_an_illegal_answer_changes_nothing(route, mode):
    machine = stream(mode)
    machine.receive(RequestHeaders(POST))
    machine.receive(RequestBody(b"{}", end_of_stream=True))
    with pytest.raises(ValueError):
        machine.decided(route)
    assert machine.deciding
    assert machine.decided(PassThrough())


def test_a_refusal_is_the_last_word():
    machine = stream()
    machine.receive(RequestHeaders(POST))
    machine.receive(RequestBody(b"{", end_of_stream=True))
    assert machine.decided(malformed("not JSON")) == [ImmediateReply(malformed("not JSON"))]
    assert machine.receive(ResponseHeaders({":status": "400"})) == []
    assert machine.receive(RequestTrailers()) == []
    assert "REFUSED" in repr(machine)


def test_decided_without_a_question():
    with pytest.raises(ProtocolError, match="no decision is due"):
        stream().decided(ROUTE)


def test_modes_are_fixed_once_the_stream_began():
    machine = stream(BUFFERED, DUPLEX)
    machine.receive(RequestHeaders(POST))
    machine.configure(BUFFERED, DUPLEX)
    with pytest.raises(ProtocolError, match="changed"):
        machine.configure(DUPLEX, DUPLEX)
    with pytest.raises(ProtocolError, match="GRPC"):
        stream(BodyMode.GRPC)
