import warnings

import betterproto2
import pytest

from extproc.adapters.ext_proc_codec import (
    HeaderBounds,
    encode,
    event_of,
    headers_of,
    metadata_of,
    modes_of,
    plain,
    wire,
)
from extproc.core.errors import ProtocolError
from extproc.pb import envoy_common_pb2 as common
from extproc.pb import ext_proc_pb2 as pb
from extproc.protocol.ext_proc_messages import (
    BodyMode,
    BodyReply,
    HeadersReply,
    ImmediateReply,
    PieceReply,
    RequestTrailers,
    Side,
    TrailersReply,
)
from extproc.protocol.rejections import overloaded
from tests.support.grpc_host import DUPLEX, request_headers, request_trailers

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from envoy_data_plane.envoy.config.core.v3 import HeaderValueOptionHeaderAppendAction as AppendAction
    from envoy_data_plane.envoy.service.ext_proc import v3 as envoy

METADATA = {"envoy.lb": {"a": "b"}}


def as_envoy_reads(reply) -> envoy.ProcessingResponse:
    return envoy.ProcessingResponse.parse(encode(reply).SerializeToString())


@pytest.mark.parametrize("side", Side)
@pytest.mark.parametrize(
    ("reply", "part"),
    [
        (HeadersReply, "headers"),
        (BodyReply, "body"),
        (lambda side: PieceReply(side, b"", end_of_stream=True), "body"),
        (TrailersReply, "trailers"),
    ],
)
def test_the_plainest_reply_is_never_empty_on_the_wire(side, reply, part):
    name, value = betterproto2.which_one_of(as_envoy_reads(reply(side)), "response")
    assert name == f"{side.value}_{part}"
    assert value is not None


def test_headers_as_envoy_reads_them():
    reply = HeadersReply(Side.REQUEST, {"x-a": "ü"}, ("x-b",), METADATA, clear_route_cache=True)
    seen = as_envoy_reads(reply)
    response = seen.request_headers.response
    (option,) = response.header_mutation.set_headers
    assert (option.header.key, option.header.raw_value) == ("x-a", "ü".encode())
    assert option.append_action == AppendAction.OVERWRITE_IF_EXISTS_OR_ADD
    assert response.header_mutation.remove_headers == ["x-b"]
    assert response.clear_route_cache
    assert seen.dynamic_metadata.fields["envoy.lb"].struct_value.fields["a"].string_value == "b"


def test_bodies_as_envoy_reads_them():
    seen = as_envoy_reads(BodyReply(Side.REQUEST, {"content-length": "3"}, METADATA, body=b"new"))
    assert seen.request_body.response.body_mutation.body == b"new"
    piece = as_envoy_reads(PieceReply(Side.RESPONSE, memoryview(b"abcdef")[2:4], end_of_stream=False))
    assert piece.response_body.response.body_mutation.streamed_response.body == b"cd"
    empty = as_envoy_reads(BodyReply(Side.REQUEST, body=b""))
    assert betterproto2.which_one_of(empty.request_body.response.body_mutation, "mutation") == ("body", b"")


def test_an_immediate_response_as_envoy_reads_it():
    seen = as_envoy_reads(ImmediateReply(overloaded(7))).immediate_response
    assert (int(seen.status.code), seen.details) == (429, "warmroute_overloaded")
    headers = {option.header.key: option.header.raw_value for option in seen.headers.set_headers}
    assert headers == {"content-type": b"application/json", "retry-after": b"7"}


def test_trailers_may_carry_metadata():
    assert encode(TrailersReply(Side.REQUEST, METADATA)).dynamic_metadata.fields["envoy.lb"]


def test_modes():
    assert modes_of(request_headers(mode=DUPLEX)) == (BodyMode.FULL_DUPLEX_STREAMED, BodyMode.NONE)
    assert modes_of(request_trailers()) is None


def test_events_without_a_part_are_none():
    assert event_of(pb.ProcessingRequest()) is None
    assert event_of(request_trailers()) == RequestTrailers()


def test_body_mode_numbers_are_envoys():
    assert {mode.name: mode.value for mode in BodyMode} == dict(pb.ProcessingMode.BodySendMode.items())


def test_repeated_headers_are_joined():
    headers = common.HeaderMap()
    for name, value in [("a", b"1"), ("A", b"2"), ("cookie", b"x=1"), ("cookie", b"y=2"), ("empty", b"")]:
        headers.headers.add(key=name, raw_value=value)
    assert headers_of(headers) == {"a": "1, 2", "cookie": "x=1; y=2", "empty": ""}


def test_header_bytes_that_are_not_utf8_are_read_as_latin1():
    headers = common.HeaderMap()
    headers.headers.add(key="X-Name", raw_value=b"caf\xe9")
    headers.headers.add(key="X-Other", raw_value="caf\u00e9".encode())
    assert headers_of(headers) == {"x-name": "caf\u00e9", "x-other": "caf\u00e9"}


def test_only_namespaces_that_concern_us_are_read():
    metadata = common.Metadata()
    value = {"s": "t", "n": 1.5, "b": True, "l": ["x", {"y": None}], "none": None}
    metadata.filter_metadata["warmroute"].update(value)
    metadata.filter_metadata["other"].update({"a": 1})
    assert metadata_of(metadata) == {"warmroute": value}
    assert plain(metadata.filter_metadata["warmroute"]) == value


@pytest.mark.parametrize(
    "reply",
    [
        HeadersReply(Side.REQUEST),
        HeadersReply(Side.RESPONSE),
        HeadersReply(Side.REQUEST, remove_headers=("x-b",)),
        HeadersReply(Side.REQUEST, {"x-a": "1"}),
        HeadersReply(Side.REQUEST, metadata=METADATA),
        HeadersReply(Side.REQUEST, clear_route_cache=True),
        BodyReply(Side.REQUEST),
        BodyReply(Side.REQUEST, {"x-a": "1"}, METADATA, clear_route_cache=True, body=b"new"),
        TrailersReply(Side.REQUEST),
        ImmediateReply(overloaded(7)),
    ],
)
def test_replies_that_are_made_once_say_what_they_would_say_made_anew(reply):
    assert pb.ProcessingResponse.FromString(wire(reply)) == encode(reply)


def test_headers_are_bounded_in_number_and_length():
    message = pb.ProcessingRequest()
    for number in range(10):
        message.request_headers.headers.headers.add(key=f"n{number}", raw_value=b"v" * 8)
    assert len(event_of(message, HeaderBounds(10, 100)).headers) == 10
    with pytest.raises(ProtocolError, match="more than 9 headers"):
        event_of(message, HeaderBounds(9, 100))
    with pytest.raises(ProtocolError, match="headers of more than 99 bytes"):
        event_of(message, HeaderBounds(10, 99))
    message.response_headers.headers.CopyFrom(message.request_headers.headers)
    with pytest.raises(ProtocolError):
        event_of(message, HeaderBounds(9, 100))


def test_a_body_mode_that_does_not_exist_breaks_the_protocol():
    message = pb.ProcessingRequest()
    message.protocol_config.request_body_mode = 77
    with pytest.raises(ProtocolError, match="no body mode 77"):
        modes_of(message)
