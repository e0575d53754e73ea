"""Our protocol buffers against two independent implementations of the same wire format."""

import dataclasses
import enum
import runpy
import warnings
from pathlib import Path

import betterproto2
import pytest
from google.protobuf import descriptor
from google.protobuf.descriptor import FieldDescriptor

from extproc.pb import access_log_pb2, discovery_pb2, envoy_common_pb2, ext_proc_pb2, health_pb2

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from envoy_data_plane.envoy.config.core import v3 as core
    from envoy_data_plane.envoy.config.endpoint import v3 as endpoint
    from envoy_data_plane.envoy.data.accesslog import v3 as log_data
    from envoy_data_plane.envoy.extensions.filters.http.ext_proc import v3 as filters
    from envoy_data_plane.envoy.service.accesslog import v3 as log_service
    from envoy_data_plane.envoy.service.discovery import v3 as discovery
    from envoy_data_plane.envoy.service.ext_proc import v3 as ext_proc
    from envoy_data_plane.envoy.type import v3 as types
    from envoy_data_plane.google import rpc
    from grpclib.health.v1 import health_pb2 as peer_health

OURS = (envoy_common_pb2, ext_proc_pb2, access_log_pb2, discovery_pb2)
SEARCHED = (ext_proc, log_service, log_data, filters, discovery, endpoint, core, types, rpc)

KIND = {
    FieldDescriptor.TYPE_DOUBLE: "double",
    FieldDescriptor.TYPE_UINT64: "uint64",
    FieldDescriptor.TYPE_INT32: "int32",
    FieldDescriptor.TYPE_BOOL: "bool",
    FieldDescriptor.TYPE_STRING: "string",
    FieldDescriptor.TYPE_MESSAGE: "message",
    FieldDescriptor.TYPE_BYTES: "bytes",
    FieldDescriptor.TYPE_UINT32: "uint32",
    FieldDescriptor.TYPE_ENUM: "enum",
}

# An enum and an int32 are the same varint on the wire.
INT32_FOR_ENUM = {("HttpStatus", "code")}

# We serve and read HTTP only: members of Envoy's oneofs that we leave out.
LEFT_OUT_OF_ONEOFS = {("StreamAccessLogsMessage", "log_entries"): {"tcp_logs"}}


def messages(parent) -> list[descriptor.Descriptor]:
    nested = parent.message_types_by_name if hasattr(parent, "package") else parent.nested_types_by_name
    found = []
    for message in nested.values():
        if not message.GetOptions().map_entry:
            found += [message, *messages(message)]
    return found


def enums() -> list[descriptor.EnumDescriptor]:
    found = [e for module in OURS for e in module.DESCRIPTOR.enum_types_by_name.values()]
    return found + [e for message in ALL for e in message.enum_types]


def local_name(item) -> str:
    """`Outer.Inner` as betterproto2 spells it: `OuterInner`, acronyms in title case."""
    name = item.full_name.removeprefix(item.file.package + ".").replace(".", "")
    return name.replace("HTTP", "Http")


def theirs(item):
    name = local_name(item)
    for module in SEARCHED:
        if name in module.__all__:
            return getattr(module, name)
    raise AssertionError(f"envoy-data-plane has no {name}")


ALL = [message for module in OURS for message in messages(module.DESCRIPTOR)]


def signature(field: FieldDescriptor) -> tuple:
    """(number, type, repeated, oneof, map key and value types, name of the message type) of our field."""
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        key, value = (field.message_type.fields_by_name[part] for part in ("key", "value"))
        return (field.number, "map", False, None, (KIND[key.type], KIND[value.type]), type_name(value))
    oneof = field.containing_oneof.name if field.containing_oneof else None
    return (field.number, KIND[field.type], field.is_repeated, oneof, None, type_name(field))


def type_name(field: FieldDescriptor) -> str | None:
    kind = field.message_type or field.enum_type
    return local_name(kind) if kind is not None else None


def their_signature(message: type, name: str) -> tuple:
    meta = message.__dataclass_fields__[name].metadata["betterproto"]
    if meta.proto_type == "map":
        key, value = meta.map_meta
        entry = message._betterproto.cls_by_field[f"{name}.value"] if value.proto_type == "message" else None
        return (
            meta.number,
            "map",
            False,
            None,
            (key.proto_type, value.proto_type),
            entry.__name__ if entry else None,
        )
    if meta.unwrap is not None:
        kind = meta.unwrap().__name__
    elif meta.proto_type in ("message", "enum"):
        kind = message._betterproto.cls_by_field[name].__name__
    else:
        kind = None
    return (meta.number, meta.proto_type, meta.repeated, meta.group, None, kind)


FIELDS = [(message, field) for message in ALL for field in message.fields]


@pytest.mark.parametrize(("message", "field"), FIELDS, ids=lambda item: item.full_name.split(".v1.")[-1])
def test_every_field_is_envoys_field(message, field):
    peer = theirs(message)
    assert field.name in peer.__dataclass_fields__, f"{peer.__name__} has no field {field.name}"
    expected = their_signature(peer, field.name)
    if (local_name(message), field.name) in INT32_FOR_ENUM:
        assert expected[1] == "enum"
        expected = (expected[0], "int32", *expected[2:5], None)
    assert signature(field) == expected


@pytest.mark.parametrize("message", ALL, ids=local_name)
def test_every_oneof_lists_all_of_envoys_members(message):
    peer = theirs(message)
    groups: dict[str, set[str]] = {}
    for field in dataclasses.fields(peer):
        group = field.metadata["betterproto"].group
        if group is not None:
            groups.setdefault(group, set()).add(field.name)
    for oneof in message.oneofs:
        left_out = LEFT_OUT_OF_ONEOFS.get((local_name(message), oneof.name), set())
        assert {field.name for field in oneof.fields} == groups[oneof.name] - left_out


@pytest.mark.parametrize("ours", enums(), ids=lambda item: item.full_name)
def test_every_enum_value_is_envoys(ours):
    peer = theirs(ours)
    assert issubclass(peer, enum.IntEnum)
    assert {value.name: value.number for value in ours.values} == {value.name: value.value for value in peer}


def test_the_messages_we_use_whole_are_whole():
    whole = {
        "ProcessingRequest", "ProcessingResponse", "ProcessingMode", "ProtocolConfiguration", "ResponseFlags",
        "HttpAccessLogEntry", "HttpRequestProperties", "HttpResponseProperties", "CommonResponse",
        "ImmediateResponse", "HeaderMutation", "HeaderValueOption", "StreamedBodyResponse", "HttpBody",
    }  # fmt: skip
    by_name = {local_name(message): message for message in ALL}
    for name in sorted(whole):
        names = {field.name for field in by_name[name].fields}
        assert names == {field.name for field in dataclasses.fields(theirs(by_name[name]))}, name


def test_health_messages_are_grpcs():
    for name in ("HealthCheckRequest", "HealthCheckResponse"):
        ours, peer = (module.DESCRIPTOR.message_types_by_name[name] for module in (health_pb2, peer_health))
        assert {(f.name, f.number, f.type) for f in ours.fields} == {
            (f.name, f.number, f.type) for f in peer.fields
        }
    ours, peer = health_pb2.HealthCheckResponse, peer_health.HealthCheckResponse
    assert ours.ServingStatus.items() == peer.ServingStatus.items()


def test_a_request_survives_the_other_implementation():
    ours = ext_proc_pb2.ProcessingRequest()
    header = ours.request_headers.headers.headers.add(key=":path", raw_value=b"/v1/x")
    ours.request_headers.end_of_stream = True
    ours.metadata_context.filter_metadata["envoy.lb"].update({"k": "v"})
    ours.protocol_config.request_body_mode = ext_proc_pb2.ProcessingMode.FULL_DUPLEX_STREAMED
    peer = ext_proc.ProcessingRequest.parse(ours.SerializeToString())
    assert betterproto2.which_one_of(peer, "request")[0] == "request_headers"
    assert peer.request_headers.headers.headers[0].raw_value == header.raw_value
    assert peer.protocol_config.request_body_mode == filters.ProcessingModeBodySendMode.FULL_DUPLEX_STREAMED
    assert ext_proc_pb2.ProcessingRequest.FromString(bytes(peer)) == ours


def test_generated_code_is_up_to_date(monkeypatch, capfd):
    script = Path(__file__).parents[2] / "proto" / "generate.py"
    monkeypatch.setattr("sys.argv", [str(script), "--check"])
    with pytest.raises(SystemExit) as exit_:
        runpy.run_path(str(script), run_name="__main__")
    assert exit_.value.code == 0, capfd.readouterr().err
