import asyncio
import json

import grpc
import pytest

from extproc.adapters import ext_proc_server
from extproc.adapters.ext_proc_server import ExtProcSettings
from extproc.core.types import Outcome
from extproc.pb import ext_proc_pb2
from extproc.protocol.ext_proc_messages import PassThrough, Route
from extproc.protocol.rejections import empty_body, no_ready_endpoint
from tests.support.grpc_host import (
    BUFFERED,
    DUPLEX,
    MODES,
    POST,
    RecordingRouting,
    request_body,
    request_headers,
    request_trailers,
    response_body,
    response_headers,
    response_trailers,
    running,
    with_metadata,
)
from tests.support.waiting import until

DESTINATION = "x-gateway-destination-endpoint"
LIST = "10.0.0.1:8000,10.0.0.2:8000"
CHAT = b'{"model":"m","messages":[]}'
ENDED = ("stream_ended", "lease-1", False)
CANCELLED = ("stream_ended", "lease-1", True)


@pytest.fixture
def routing():
    return RecordingRouting()


def kinds(replies) -> list[str]:
    return [reply.WhichOneof("response") for reply in replies]


def set_headers(reply) -> dict[str, str]:
    part = getattr(reply, reply.WhichOneof("response"))
    mutation = (
        part.headers if isinstance(part, ext_proc_pb2.ImmediateResponse) else part.response.header_mutation
    )
    for option in mutation.set_headers:
        assert option.append_action == option.OVERWRITE_IF_EXISTS_OR_ADD
        assert option.header.value == ""
    return {option.header.key: option.header.raw_value.decode() for option in mutation.set_headers}


def metadata(reply) -> dict:
    return {
        namespace: dict(value.struct_value.fields.items())
        for namespace, value in reply.dynamic_metadata.fields.items()
    }


def pieces(replies, side="request_body") -> list:
    return [
        reply.request_body.response.body_mutation.streamed_response
        if side == "request_body"
        else reply.response_body.response.body_mutation.streamed_response
        for reply in replies
        if reply.WhichOneof("response") == side
    ]


def in_pieces(body: bytes, size: int = 16 * 1024) -> list:
    starts = range(0, len(body), size)
    return [request_body(body[start : start + size], end=start + size >= len(body)) for start in starts]


# --- requests ----------------------------------------------------------------------------------------


async def test_pitfall_81_header_and_metadata_agree_and_overwrite_the_clients_copy(routing):
    async with running(routing) as host:
        first, second = await host.exchange(
            request_headers({**POST, DESTINATION: "169.254.169.254:80"}), request_body(CHAT, end=True)
        )
    assert first.request_headers.response.header_mutation.remove_headers == [DESTINATION]
    assert set_headers(second) == {DESTINATION: LIST}
    assert second.request_body.response.clear_route_cache
    told = metadata(second)
    assert told["envoy.lb"][DESTINATION].string_value == LIST
    assert told["warmroute"]["ticket"].string_value == "lease-1"
    assert routing.signals == [ENDED]


async def test_the_routing_service_sees_the_request(routing):
    headers = [
        *POST.items(),
        ("x-request-id", "r-1"),
        ("Accept", "a"),
        ("accept", "b"),
        ("cookie", "c=1"),
        ("cookie", "d=2"),
        ("x-name", "Ünï"),
        ("traceparent", "00-client"),
        ("tracestate", "client=1"),
    ]
    async with running(routing) as host:
        await host.exchange(
            request_headers(headers),
            request_body(CHAT, end=True),
            metadata={"traceparent": "00-envoy", "tracestate": "envoy=1"},
        )
        await host.exchange(request_headers(headers, end=True))
    request, other = routing.requests
    assert (request.method, request.path, request.body) == ("POST", "/v1/chat/completions", CHAT)
    assert (request.request_id, request.trace_parent) == ("r-1", "00-envoy")
    assert request.headers["accept"] == "a, b"
    assert request.headers["cookie"] == "c=1; d=2"
    assert request.headers["x-name"] == "Ünï"
    assert request.subset is None
    assert request.override is None
    assert request.body_seen
    assert request.trace_state == "envoy=1"
    assert (other.trace_parent, other.trace_state) == ("00-client", "client=1")


async def test_a_request_without_an_id_gets_one(routing):
    async with running(routing) as host:
        await host.exchange(request_headers(end=True))
        await host.exchange(request_headers(end=True))
    assert len({request.request_id for request in routing.requests} - {""}) == 2


async def test_header_values_that_are_not_utf8_survive(routing):
    message = request_headers(end=True)
    message.request_headers.headers.headers.add(key="x-raw", raw_value=b"\xff\xfe")
    message.request_headers.headers.headers.add(key="x-plain", value="v")
    async with running(routing) as host:
        await host.exchange(message)
    assert routing.requests[0].headers["x-raw"] == "ÿþ"
    assert routing.requests[0].headers["x-plain"] == "v"


async def test_pitfall_01_a_long_duplex_body_comes_back_in_pieces(routing):
    body = bytes(range(250)) * 800
    async with running(routing) as host:
        replies = await host.exchange(request_headers(mode=DUPLEX), *in_pieces(body))
    assert kinds(replies)[0] == "request_headers"
    assert metadata(replies[0])["envoy.lb"][DESTINATION].string_value == LIST
    assert replies[0].request_headers.response.clear_route_cache
    sent = pieces(replies)
    assert b"".join(piece.body for piece in sent) == body
    assert max(len(piece.body) for piece in sent) <= 62 * 1024
    assert [piece.end_of_stream for piece in sent] == [False] * (len(sent) - 1) + [True]
    assert len(sent) == len(replies) - 1


async def test_pitfall_02_no_message_exceeds_a_64_kib_receive_limit(routing):
    body = json.dumps({"prompt": "x" * 300_001}).encode()
    async with running(routing, receive_limit=64 * 1024) as host:
        replies = await host.exchange(request_headers(mode=DUPLEX), *in_pieces(body))
    assert b"".join(piece.body for piece in pieces(replies)) == body


@pytest.mark.parametrize("mode", [BUFFERED, DUPLEX])
async def test_pitfall_03_duplicated_last_chunk(routing, mode):
    last = request_body(CHAT, end=True)
    async with running(routing) as host:
        replies = await host.exchange(request_headers(mode=mode), last, last)
    assert kinds(replies) == ["request_headers", "request_body"]
    assert [request.body for request in routing.requests] == [CHAT]


async def test_pitfall_05_trailers_end_the_body(routing):
    async with running(routing) as host:
        replies = await host.exchange(
            request_headers(mode=DUPLEX), request_body(b"a"), request_body(b"b"), request_trailers()
        )
    assert kinds(replies) == ["request_headers", "request_body", "request_trailers"]
    assert routing.requests[0].body == b"ab"
    assert not pieces(replies)[0].end_of_stream


async def test_pitfall_16_trailers_of_a_buffered_request_are_answered(routing):
    async with running(routing) as host:
        replies = await host.exchange(request_headers(), request_body(CHAT), request_trailers())
    assert kinds(replies) == ["request_headers", "request_body", "request_trailers"]


async def test_pitfall_07_the_headers_reply_comes_first_and_only_after_the_body(routing):
    async with running(routing) as host:
        call = host.stream()
        await call.write(request_headers(mode=DUPLEX))
        await call.write(request_body(b"a"))
        await call.write(request_body(b"b"))
        reading = asyncio.ensure_future(call.read())
        await until(lambda: host.ext_proc.counters.active == 1)
        assert routing.requests == []
        assert not reading.done()
        await call.write(request_body(b"c", end=True))
        assert (await reading).WhichOneof("response") == "request_headers"
        assert pieces([await call.read()])[0].body == b"abc"
        await call.done_writing()
        await call.code()


async def test_pitfall_08_metadata_of_the_first_message_is_kept(routing):
    hint = {"envoy.lb.subset_hint": {f"{DESTINATION}-subset": ["10.0.0.1:8000", " "]}}
    async with running(routing) as host:
        await host.exchange(
            request_headers(metadata=hint),
            with_metadata(request_body(CHAT, end=True), {"envoy.lb": {"other": 1}}),
        )
        await host.exchange(
            request_headers(end=True, metadata={"envoy.lb.subset_hint": {f"{DESTINATION}-subset": ""}})
        )
    assert [request.subset for request in routing.requests] == [{"10.0.0.1:8000"}, frozenset()]


@pytest.mark.parametrize("mode", [BUFFERED, DUPLEX, MODES.STREAMED, MODES.NONE])
async def test_pitfall_10_a_post_without_a_body_is_answered_on_headers(routing, mode):
    async with running(routing) as host:
        call = host.stream()
        await call.write(request_headers({**POST, "content-length": "0"}, end=True, mode=mode))
        reply = await call.read()
        assert set_headers(reply) == {DESTINATION: LIST}
        await call.done_writing()
        await call.code()
    assert routing.requests[0].body_seen


async def test_bodies_that_are_not_shown_are_not_empty_bodies(routing):
    async with running(routing) as host:
        replies = await host.exchange(
            request_headers(mode=MODES.STREAMED), request_body(b"a"), request_body(b"b", end=True)
        )
    assert kinds(replies) == ["request_headers", "request_body", "request_body"]
    assert not routing.requests[0].body_seen


async def test_a_gateway_that_does_not_announce_its_modes_gets_the_configured_one(routing):
    message = request_headers()
    message.ClearField("protocol_config")
    async with running(routing) as host:
        assert kinds(await host.exchange(message, request_body(CHAT, end=True)))[0] == "request_headers"
    assert routing.requests[0].body == CHAT


async def test_pitfall_13_a_large_body_in_one_message_and_a_clean_413_above_the_limit(routing):
    async with running(routing) as host:
        body = bytes(6 << 20)
        assert len(await host.exchange(request_headers(), request_body(body, end=True))) == 2
        assert len(routing.requests[0].body) == len(body)
        replies = await host.exchange(request_headers(), request_body(bytes(12 << 20), end=True))
    assert kinds(replies) == ["request_headers", "immediate_response"]
    answer = replies[1].immediate_response
    assert answer.status.code == 413
    assert answer.details == "warmroute_body_too_large"
    assert set_headers(replies[1]) == {"content-type": "application/json"}
    assert json.loads(answer.body)["error"]["code"] == "request_too_large"
    assert len(routing.requests) == 1


@pytest.mark.parametrize("mode", [BUFFERED, DUPLEX])
async def test_pitfall_14_content_length_is_never_believed(routing, mode):
    headers = {**POST, "content-length": "3"}
    async with running(routing) as host:
        replies = await host.exchange(request_headers(headers, mode=mode), request_body(CHAT, end=True))
    assert routing.requests[0].body == CHAT
    assert "content-length" not in set_headers(replies[0]) | set_headers(replies[-1])


@pytest.mark.parametrize("mode", [BUFFERED, DUPLEX])
async def test_pitfall_15_a_replaced_body_has_its_own_length(routing, mode):
    longer = b"y" * 150_000
    routing.answer = Route(("10.0.0.1:8000",), "lease-1", {"x-a": "b"}, body=longer)
    async with running(routing) as host:
        replies = await host.exchange(request_headers(mode=mode), request_body(CHAT, end=True))
    decision = replies[1] if mode == BUFFERED else replies[0]
    assert set_headers(decision) == {
        DESTINATION: "10.0.0.1:8000",
        "content-length": str(len(longer)),
        "x-a": "b",
    }
    if mode == BUFFERED:
        assert replies[1].request_body.response.body_mutation.body == longer
    else:
        assert b"".join(piece.body for piece in pieces(replies)) == longer


async def test_pitfall_19_an_empty_body_is_a_400_in_openais_shape(routing):
    routing.answer = lambda request: empty_body() if request.body_seen and not request.body else PassThrough()
    async with running(routing) as host:
        replies = await host.exchange(request_headers(), request_body(b"", end=True))
        assert host.ext_proc.counters.rejected == 1
    assert kinds(replies) == ["request_headers", "immediate_response"]
    assert replies[1].immediate_response.status.code == 400
    assert set(json.loads(replies[1].immediate_response.body)["error"]) == {
        "message",
        "type",
        "param",
        "code",
    }
    assert routing.signals == []


async def test_no_ready_endpoint_is_a_503(routing):
    routing.answer = no_ready_endpoint()
    async with running(routing) as host:
        (reply,) = await host.exchange(request_headers(end=True))
    assert reply.immediate_response.status.code == 503


# --- when we fail ------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [BUFFERED, DUPLEX])
async def test_an_exception_in_routing_lets_the_request_go_on(routing, mode, caplog):
    routing.answer = RuntimeError("a bug")
    async with running(routing) as host:
        replies = await host.exchange(request_headers(mode=mode), request_body(CHAT, end=True))
        assert host.ext_proc.counters.routing_errors == 1
    assert kinds(replies) == ["request_headers", "request_body"]
    assert not any(reply.HasField("dynamic_metadata") for reply in replies)
    assert routing.signals == []
    assert "a bug" in caplog.text


@pytest.mark.parametrize(
    "answer", [Route((), "lease-1"), Route(("10.0.0.1:80",), "lease-1", {"Bad Name": "x"}), None]
)
async def test_pitfall_20_an_answer_that_cannot_be_sent_gives_its_lease_back(routing, answer):
    routing.answer = answer
    async with running(routing) as host:
        replies = await host.exchange(request_headers(), request_body(CHAT, end=True))
        assert host.ext_proc.counters.unsendable_answers == 1
        assert host.ext_proc.counters.routed == 0
    assert kinds(replies) == ["request_headers", "request_body"]
    assert set_headers(replies[1]) == {}
    assert routing.signals == ([] if answer is None else [("completed", "lease-1", "rejected")])


@pytest.mark.parametrize(
    "messages",
    [
        [ext_proc_pb2.ProcessingRequest()],
        [request_trailers()],
        [request_headers(mode=MODES.GRPC)],
        [request_headers(end=True), request_headers(end=True)],
    ],
)
async def test_a_peer_that_breaks_the_protocol_is_let_go_without_an_error(routing, messages):
    async with running(routing) as host:
        call = host.stream()
        for message in messages:
            await call.write(message)
        replies = [reply async for reply in call]
        assert (await call.code()).name == "OK"
        assert host.ext_proc.counters.protocol_errors == 1
        assert host.ext_proc.counters.active == 0
    assert all(reply.WhichOneof("response") for reply in replies)


async def test_where_going_on_would_break_a_promise_our_failures_fail_the_request(routing, caplog):
    settings = ExtProcSettings(fail_closed=True)
    for answer in (RuntimeError("a bug"), Route((), "lease-1")):
        routing.answer = answer
        async with running(routing, settings=settings) as host:
            replies = await host.exchange(request_headers(), request_body(CHAT, end=True))
        assert kinds(replies) == ["request_headers", "immediate_response"]
        assert replies[1].immediate_response.status.code == 503
        assert json.loads(replies[1].immediate_response.body)["error"]["type"] == "server_error"
    async with running(routing, settings=settings) as host:
        call = host.stream()
        await call.write(request_trailers())
        with pytest.raises(grpc.aio.AioRpcError, match="the ext_proc protocol was broken"):
            [reply async for reply in call]
        assert host.ext_proc.counters.protocol_errors == 1


async def test_what_other_filters_say_is_shown_where_it_is_asked_for(routing):
    headers = request_headers(metadata={"jwt": {"payload": {"org": "acme"}}, "other": {"a": "b"}})
    headers.attributes["envoy.filters.http.ext_proc"].update({"source.address": "10.0.0.9:1"})
    async with running(routing, settings=ExtProcSettings(namespaces=("jwt",))) as host:
        await host.exchange(headers, request_body(CHAT, end=True))
    (request,) = routing.requests
    assert request.metadata["jwt"] == {"payload": {"org": "acme"}}
    assert "other" not in request.metadata
    assert request.attributes == {"source.address": "10.0.0.9:1"}


async def test_a_signal_that_is_not_taken_does_not_hurt_the_request(routing):
    def broken(lease_id):
        raise RuntimeError(lease_id)

    routing.first_body = broken
    async with running(routing) as host:
        replies = await host.exchange(
            request_headers(end=True, response_mode=MODES.STREAMED),
            response_headers(),
            response_body(b"x", end=True),
        )
    assert kinds(replies) == ["request_headers", "response_headers", "response_body"]


# --- cancellation ------------------------------------------------------------------------------------


async def cancelled_after(host, *messages, replies: int) -> None:
    call = host.stream()
    for message in messages:
        await call.write(message)
    for _ in range(replies):
        await call.read()
    await until(lambda: host.ext_proc.counters.active == 1)
    call.cancel()
    await until(lambda: host.ext_proc.counters.active == 0)


@pytest.mark.parametrize("mode", [BUFFERED, DUPLEX])
async def test_pitfall_58_cancelled_while_the_body_is_read(routing, mode):
    async with running(routing) as host:
        await cancelled_after(host, request_headers(mode=mode), replies=1 if mode == BUFFERED else 0)
    assert (routing.requests, routing.signals) == ([], [])


async def test_pitfall_58_cancelled_while_we_decide(routing):
    routing.gate = asyncio.Event()
    async with running(routing) as host:
        call = host.stream()
        await call.write(request_headers(end=True))
        await until(lambda: len(routing.requests) == 1)
        call.cancel()
        await until(lambda: routing.cancelled_routes == 1 and host.ext_proc.counters.active == 0)
    assert routing.signals == []


@pytest.mark.parametrize("mode", [BUFFERED, DUPLEX])
async def test_pitfall_58_cancelled_after_the_decision(routing, mode):
    async with running(routing) as host:
        messages = [request_headers(mode=mode), request_body(CHAT, end=True)]
        await cancelled_after(host, *messages, replies=2)
    assert routing.signals == [ENDED]


async def test_pitfall_58_cancelled_while_the_decision_is_on_its_way(routing):
    """The peer never reads: replies pile up in the transport until it leaves."""
    async with running(routing) as host:
        call = host.stream()
        for message in (request_headers(mode=DUPLEX), *in_pieces(bytes(4 << 20))):
            await call.write(message)
        await until(lambda: host.ext_proc.counters.routed == 1)
        call.cancel()
        await until(lambda: host.ext_proc.counters.active == 0)
    assert routing.signals == [CANCELLED]


async def test_pitfall_58_cancelled_in_the_middle_of_the_response(routing):
    async with running(routing) as host:
        messages = [
            request_headers(end=True, response_mode=DUPLEX),
            response_headers(),
            response_body(b"data: 1\n\n"),
        ]
        await cancelled_after(host, *messages, replies=3)
    assert routing.signals == [("first_body", "lease-1"), CANCELLED]


async def test_pitfall_58_cancelled_after_the_response(routing):
    async with running(routing) as host:
        messages = [
            request_headers(end=True, response_mode=DUPLEX),
            response_headers(),
            response_body(b"x", end=True),
        ]
        await cancelled_after(host, *messages, replies=3)
    assert routing.signals == [("first_body", "lease-1"), ("completed", "lease-1", "finished"), ENDED]


async def test_pitfall_58_the_server_stops_while_a_request_is_open(routing):
    async with running(routing) as host:
        call = host.stream()
        await call.write(request_headers(end=True))
        await call.read()
        await host.server.stop(0)
        await until(lambda: routing.signals == [ENDED])
        call.cancel()


# --- responses ---------------------------------------------------------------------------------------

SSE = {"content-type": "text/event-stream"}
USAGE = (
    b'data: {"choices":[],"usage":{"prompt_tokens":90,"completion_tokens":4,'
    b'"prompt_tokens_details":{"cached_tokens":64}}}\n\ndata: [DONE]\n\n'
)


async def test_pitfall_76_and_78_usage_is_read_from_any_split_and_no_byte_changes(routing):
    body = b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n' + USAGE
    async with running(routing) as host:
        for cut in range(0, len(USAGE), 7):
            cut_at = len(body) - len(USAGE) + cut
            replies = await host.exchange(
                request_headers(end=True, response_mode=DUPLEX),
                response_headers(SSE),
                response_body(body[:cut_at]),
                response_body(body[cut_at:]),
                response_body(b"", end=True),
            )
            sent = pieces(replies, "response_body")
            assert b"".join(piece.body for piece in sent) == body
            assert [piece.end_of_stream for piece in sent].count(True) == 1
    assert len(routing.completions) == len(range(0, len(USAGE), 7))
    for _, done in routing.completions:
        assert (done.prompt_tokens, done.cached_tokens, done.output_tokens) == (90, 64, 4)
        assert done.outcome is Outcome.FINISHED


async def test_the_response_tells_who_served_when_it_began_and_how_it_ended(routing):
    served = {"envoy.lb": {f"{DESTINATION}-served": "10.0.0.2:8000"}}
    async with running(routing) as host:
        await host.exchange(
            request_headers(end=True, response_mode=MODES.STREAMED),
            response_headers({":status": "206"}, metadata=served),
            response_body(b""),
            response_body(b"a"),
            response_body(b"b", end=True),
        )
    assert routing.signals == [
        ("served", "lease-1", "10.0.0.2:8000"),
        ("first_body", "lease-1"),
        ("completed", "lease-1", "finished"),
        ENDED,
    ]
    done = routing.completions[0][1]
    assert (done.status, done.served_by) == (206, "10.0.0.2:8000")
    assert done.first_body_ms is not None
    assert done.duration_ms is not None
    assert done.first_body_ms <= done.duration_ms


async def test_pitfall_06_empty_response_trailers_end_the_response_once(routing):
    async with running(routing) as host:
        replies = await host.exchange(
            request_headers(end=True, response_mode=DUPLEX),
            response_headers(SSE),
            response_body(USAGE),
            response_trailers(),
        )
    assert kinds(replies)[-1] == "response_trailers"
    assert [signal[0] for signal in routing.signals] == ["first_body", "completed", "stream_ended"]
    assert routing.completions[0][1].cached_tokens == 64


async def test_pitfall_03_the_last_response_piece_twice_is_counted_once(routing):
    last = response_body(USAGE, end=True)
    async with running(routing) as host:
        replies = await host.exchange(
            request_headers(end=True, response_mode=DUPLEX), response_headers(SSE), last, last
        )
    assert len(pieces(replies, "response_body")) == 1
    assert [signal[0] for signal in routing.signals].count("completed") == 1


async def test_pitfall_03_a_buffered_response_delivered_twice_is_read_once(routing):
    whole = response_body(b'{"usage":{"prompt_tokens":1}}')
    async with running(routing) as host:
        replies = await host.exchange(
            request_headers(end=True, response_mode=BUFFERED),
            response_headers(),
            whole,
            whole,
            response_trailers(),
        )
    assert kinds(replies)[1:] == ["response_headers", "response_body", "response_trailers"]
    assert routing.completions[0][1].prompt_tokens == 1


async def test_a_compressed_response_is_passed_and_not_read(routing):
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    async with running(routing) as host:
        await host.exchange(
            request_headers(end=True, response_mode=DUPLEX),
            response_headers(headers),
            response_body(b'{"usage":{"prompt_tokens":1}}', end=True),
        )
    assert routing.completions[0][1].prompt_tokens is None


async def test_pitfall_11_a_get_that_shows_its_response(routing):
    routing.answer = PassThrough()
    async with running(routing) as host:
        replies = await host.exchange(
            request_headers(
                {":method": "GET", ":path": "/v1/models"}, end=True, response_mode=MODES.STREAMED
            ),
            response_headers(),
            response_body(b"{"),
            response_body(b"}", end=True),
        )
        assert host.ext_proc.counters.passed_through == 1
    assert kinds(replies) == ["request_headers", "response_headers", "response_body", "response_body"]
    assert routing.signals == []


async def test_a_response_without_a_body_is_complete_at_its_headers(routing):
    async with running(routing) as host:
        await host.exchange(request_headers(end=True), response_headers({":status": "204"}, end=True))
    assert [signal[0] for signal in routing.signals] == ["completed", "stream_ended"]
    assert routing.completions[0][1].first_body_ms is None


# --- observer filter and test mode -------------------------------------------------------------------


def observed(body: bytes, *, end: bool = False, ticket: str | None = "lease-9"):
    message = response_body(body, end=end)
    message.observability_mode = True
    return with_metadata(message, {"warmroute": {"ticket": ticket}} if ticket else None)


async def test_the_observer_stream_ends_with_the_first_piece_of_the_body(routing):
    headers = response_headers()
    headers.observability_mode = True
    async with running(routing) as host:
        call = host.stream()
        for message in (headers, observed(b""), observed(b"data: x")):
            await call.write(message)
        assert [reply async for reply in call] == []
        assert (await call.code()).name == "OK"
        assert host.ext_proc.counters.observed == 1
    assert routing.signals == [("first_body", "lease-9")]


@pytest.mark.parametrize("message", [observed(b"x", ticket=None), observed(b"", end=True)])
async def test_an_observer_stream_with_nothing_to_tell_ends_too(routing, message):
    async with running(routing) as host:
        call = host.stream()
        await call.write(message)
        assert [reply async for reply in call] == []
    assert routing.signals == []


async def test_conformance_headers_work_in_test_mode_only(routing):
    request = request_headers(
        {**POST, "test-epp-endpoint-selection": "10.0.0.9:80"}, end=True, response_mode=MODES.STREAMED
    )
    response = response_headers(metadata={"envoy.lb": {f"{DESTINATION}-served": "10.0.0.2:8000"}})
    for test_mode in (False, True):
        settings = ExtProcSettings(max_body_bytes=1000, test_mode=test_mode)
        async with running(routing, settings=settings) as host:
            _, reply = await host.exchange(request, response)
        assert routing.requests[-1].override == ("10.0.0.9:80" if test_mode else None)
        assert set_headers(reply) == (
            {"x-conformance-test-served-endpoint": "10.0.0.2:8000"} if test_mode else {}
        )


@pytest.mark.parametrize(
    "headers", [[(f"x-{number}", "v") for number in range(1001)], [("x", "v" * 70_000)] * 16], ids=len
)
async def test_a_flood_of_headers_is_not_read_and_goes_on_without_us(routing, headers):
    async with running(routing) as host:
        assert await host.exchange(request_headers(headers)) == []
        assert host.ext_proc.counters.protocol_errors == 1
    assert routing.requests == []


async def test_a_long_request_id_is_cut(routing):
    async with running(routing) as host:
        await host.exchange(request_headers({**POST, "x-request-id": "i" * 5000}, end=True))
    assert routing.requests[0].request_id == "i" * 256


async def test_an_error_of_ours_in_a_stream_ends_it_without_one(routing, monkeypatch, caplog):
    def fail(*_):
        raise RuntimeError("of ours")

    monkeypatch.setattr(ext_proc_server, "attributes_of", fail)
    message = request_headers()
    message.attributes["envoy.filters.http.ext_proc"].update({"a": "b"})
    async with running(routing) as host:
        assert await host.exchange(message) == []
        assert host.ext_proc.counters.routing_errors == 1
    closed = ExtProcSettings(fail_closed=True)
    async with running(routing, settings=closed) as host:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await host.exchange(message)
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        assert "of ours" not in (caught.value.details() or "")


async def test_it_says_when_a_decision_has_been_written_and_only_then(routing):
    said = []
    async with running(routing) as host:
        host.ext_proc._replied = lambda: said.append(len(routing.requests))
        await host.exchange(request_headers(end=True))
        assert said == [1]
        routing.answer = PassThrough()
        await host.exchange(request_headers(end=True))
    assert said == [1]
