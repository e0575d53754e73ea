"""ext_proc messages to plain values and back. Field accesses are what they cost here: few, and no copies."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from google.protobuf.struct_pb2 import Struct, Value

from extproc.core.errors import ProtocolError
from extproc.pb import envoy_common_pb2 as common
from extproc.pb import ext_proc_pb2 as pb
from extproc.protocol.endpoint_picker import READ_NAMESPACES, Metadata
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
    ResponseTrailers,
    Side,
    TrailersReply,
)

_MODES = {int(mode): mode for mode in BodyMode}
_OVERWRITE = common.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD


class HeaderBounds(NamedTuple):
    """Most headers of one request or response, and their length with their names, all together."""

    headers: int = 1000
    characters: int = 1 << 20


HEADER_BOUNDS = HeaderBounds()


def event_of(  # noqa: PLR0911  one return per kind of part
    message: pb.ProcessingRequest, bounds: HeaderBounds = HEADER_BOUNDS
) -> Event | None:
    """The part of the exchange in a message; None if it holds none that we know.

    Raises:
        ProtocolError: there are more headers than `bounds` allows.
    """
    match message.WhichOneof("request"):
        case "request_headers":
            part = message.request_headers
            return RequestHeaders(headers_of(part.headers, bounds), part.end_of_stream)
        case "request_body":
            return RequestBody(message.request_body.body, message.request_body.end_of_stream)
        case "request_trailers":
            return RequestTrailers()
        case "response_headers":
            part = message.response_headers
            return ResponseHeaders(headers_of(part.headers, bounds), part.end_of_stream)
        case "response_body":
            return ResponseBody(message.response_body.body, message.response_body.end_of_stream)
        case "response_trailers":
            return ResponseTrailers()
        case None:
            return None


def modes_of(message: pb.ProcessingRequest) -> tuple[BodyMode, BodyMode] | None:
    """Body modes of request and response, if the message announces them.

    Raises:
        ProtocolError: one of them is not known.
    """
    if not message.HasField("protocol_config"):
        return None
    config = message.protocol_config
    return _mode(config.request_body_mode), _mode(config.response_body_mode)


def _mode(number: int) -> BodyMode:
    mode = _MODES.get(number)
    if mode is None:
        raise ProtocolError(f"there is no body mode {number}")
    return mode


def headers_of(headers: common.HeaderMap, bounds: HeaderBounds = HEADER_BOUNDS) -> dict[str, str]:
    """Headers by lower-case name; repeated ones joined as RFC 9110 says.

    Raises:
        ProtocolError: there are more of them, or longer ones, than `bounds` allows.
    """
    if len(headers.headers) > bounds.headers:
        raise ProtocolError(f"more than {bounds.headers} headers")
    found: dict[str, str] = {}
    room = bounds.characters
    for header in headers.headers:
        name = header.key.lower()
        raw = header.raw_value
        try:
            value = raw.decode() if raw else header.value
        except UnicodeDecodeError:
            value = raw.decode("latin-1")
        room -= len(name) + len(value)
        if room < 0:
            raise ProtocolError(f"headers of more than {bounds.characters} bytes")
        if name in found:
            value = found[name] + ("; " if name == "cookie" else ", ") + value
        found[name] = value
    return found


def metadata_of(metadata: common.Metadata, also: Iterable[str] = ()) -> Metadata:
    """The namespaces that concern us, and those in `also`, as plain values."""
    namespaces = metadata.filter_metadata
    if not namespaces:
        return {}
    return {name: plain(namespaces[name]) for name in (*READ_NAMESPACES, *also) if name in namespaces}


def attributes_of(message: pb.ProcessingRequest) -> dict[str, object]:
    """Attributes that came with a message, by their full names."""
    found: dict[str, object] = {}
    for struct in message.attributes.values():
        found.update(plain(struct))
    return found


def plain(struct: Struct) -> dict[str, object]:
    """A protobuf struct as a dict."""
    return {key: _plain_value(value) for key, value in struct.fields.items()}


def _plain_value(value: Value) -> object:
    match value.WhichOneof("kind"):
        case "string_value":
            return value.string_value
        case "number_value":
            return value.number_value
        case "bool_value":
            return value.bool_value
        case "list_value":
            return [_plain_value(item) for item in value.list_value.values]
        case "struct_value":
            return plain(value.struct_value)
        case _:
            return None


def wire(reply: Reply) -> bytes:
    """A reply as bytes. The plain ones, which are most, are made once."""
    return _GO_ON_BYTES if reply == _GO_ON else encode(reply).SerializeToString()


def more_time(seconds: float) -> bytes:
    """A message that is no reply: the gateway waits so long for the next one, from now on."""
    message = pb.ProcessingResponse()
    message.override_message_timeout.FromMilliseconds(max(1, round(seconds * 1000.0)))
    return message.SerializeToString()


def encode(reply: Reply) -> pb.ProcessingResponse:
    """A reply as Envoy's message."""
    message = pb.ProcessingResponse()
    match reply:
        case HeadersReply():
            part = message.request_headers if reply.side is Side.REQUEST else message.response_headers
            common_part = part.response
            common_part.SetInParent()
            _mutate(common_part, reply.set_headers, reply.remove_headers, clear=reply.clear_route_cache)
            _set_metadata(message, reply.metadata)
        case BodyReply():
            body_part = message.request_body if reply.side is Side.REQUEST else message.response_body
            common_part = body_part.response
            common_part.SetInParent()
            _mutate(common_part, reply.set_headers, (), clear=reply.clear_route_cache)
            if reply.body is not None:
                common_part.body_mutation.body = reply.body
            _set_metadata(message, reply.metadata)
        case PieceReply():
            body_part = message.request_body if reply.side is Side.REQUEST else message.response_body
            piece = body_part.response.body_mutation.streamed_response
            piece.body = bytes(reply.body)
            piece.end_of_stream = reply.end_of_stream
        case TrailersReply():
            trailers = message.request_trailers if reply.side is Side.REQUEST else message.response_trailers
            trailers.SetInParent()
            _set_metadata(message, reply.metadata)
        case ImmediateReply():
            _immediate(message.immediate_response, reply)
    return message


def _mutate(
    part: pb.CommonResponse, set_headers: Mapping[str, str], remove: tuple[str, ...], *, clear: bool
) -> None:
    if set_headers:
        _set_headers(part.header_mutation, set_headers)
    if remove:
        part.header_mutation.remove_headers.extend(remove)
    if clear:
        part.clear_route_cache = True


def _set_headers(mutation: pb.HeaderMutation, headers: Mapping[str, str]) -> None:
    for name, value in headers.items():
        option = mutation.set_headers.add(append_action=_OVERWRITE)
        option.header.key = name
        option.header.raw_value = value.encode("utf-8", "replace")


def _set_metadata(message: pb.ProcessingResponse, metadata: Metadata) -> None:
    for namespace, values in metadata.items():
        fields = message.dynamic_metadata.fields[namespace].struct_value.fields
        for key, value in values.items():
            fields[key].string_value = str(value)


def _immediate(part: pb.ImmediateResponse, reply: ImmediateReply) -> None:
    reject = reply.reject
    part.status.code = reject.status
    part.body = reject.body
    part.details = reject.details
    _set_headers(part.headers, {"content-type": "application/json", **reject.headers})


_GO_ON = HeadersReply(Side.REQUEST)
_GO_ON_BYTES = encode(_GO_ON).SerializeToString()
