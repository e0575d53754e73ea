import pytest

from extproc.adapters.access_log_server import AccessLogService, address_text, view
from extproc.adapters.deferred import Deferred
from extproc.core.types import Outcome
from extproc.pb import access_log_pb2 as pb
from extproc.pb import envoy_common_pb2 as common
from tests.support.grpc_host import RecordingRouting, running
from tests.support.waiting import until


async def test_entries_may_be_put_off_and_count_though_their_stream_is_cut(routing):
    later = Deferred()
    service = AccessLogService(routing, later)
    entries = [log_entry(f"lease-{number}") for number in range(50)]
    await service.stream_access_logs(one_message(entries), None)
    assert routing.completions == []
    assert routing.log_streams == 0
    later.flush()
    assert [lease for lease, _ in routing.completions] == [f"lease-{number}" for number in range(50)]
    later.close()


async def one_message(entries):
    yield message(*entries)


@pytest.fixture
def routing():
    return RecordingRouting()


def log_entry(
    ticket: str | None = "lease-1", *, log_type: int = pb.DownstreamEnd, **flags
) -> pb.HTTPAccessLogEntry:
    """A finished streamed chat as Envoy 1.40 reports it."""
    entry = pb.HTTPAccessLogEntry()
    properties = entry.common_properties
    if ticket is not None:
        properties.metadata.filter_metadata["warmroute"].update({"ticket": ticket})
    properties.metadata.filter_metadata["llm.usage"].update(
        {"prompt_tokens": 90, "completion_tokens": 4, "cached_tokens": 64}
    )
    address = properties.upstream_remote_address.socket_address
    address.address, address.port_value = "10.0.0.1", 8000
    properties.custom_tags.update({"first_body_us": "2500", "prefill_us": "1500"})
    properties.duration.FromMilliseconds(53_250)
    properties.upstream_request_attempt_count = 1
    properties.access_log_type = log_type
    for name, value in flags.items():
        setattr(properties.response_flags, name, value)
    entry.response.response_code.value = 200
    entry.response.response_code_details = "via_upstream"
    entry.response.response_body_bytes = 500
    return entry


def message(*entries: pb.HTTPAccessLogEntry) -> pb.StreamAccessLogsMessage:
    return pb.StreamAccessLogsMessage(
        http_logs=pb.StreamAccessLogsMessage.HTTPAccessLogEntries(log_entry=entries)
    )


async def test_completions_reach_the_routing_service_while_the_stream_stays_open(routing):
    async with running(routing) as host:
        log = host.log()
        await log.write(message(log_entry()))
        await until(lambda: routing.completions)
        assert routing.log_streams == 1
        log.cancel()
        await until(lambda: routing.log_streams == 0)
    ((lease, done),) = routing.completions
    assert lease == "lease-1"
    assert (done.outcome, done.served_by, done.status, done.attempts) == (
        Outcome.FINISHED,
        "10.0.0.1:8000",
        200,
        1,
    )
    assert (done.first_body_ms, done.upstream_first_body_ms, done.duration_ms) == (2.5, 1.5, 53_250)
    assert (done.prompt_tokens, done.cached_tokens, done.output_tokens) == (90, 64, 4)


async def test_streams_are_counted_and_closed_cleanly(routing):
    async with running(routing) as host:
        first, second = host.log(), host.log()
        await first.write(message())
        await second.write(message())
        await until(lambda: routing.log_streams == 2)
        await first.done_writing()
        assert await first == pb.StreamAccessLogsResponse()
        assert routing.log_streams == 1
        second.cancel()


async def test_a_batch_holds_everything_and_one_bad_apple_spoils_nothing(routing):
    def picky(lease_id, completion):
        if lease_id == "bad":
            raise RuntimeError("not taken")
        RecordingRouting.completed(routing, lease_id, completion)

    routing.completed = picky
    async with running(routing) as host:
        log = host.log()
        entries = [
            log_entry(None),
            log_entry("bad"),
            log_entry("gone", downstream_connection_termination=True),
            log_entry("died", upstream_protocol_error=True),
        ]
        await log.write(message(*entries))
        await log.done_writing()
        await log
        counters = host.access_log.counters
        assert (counters.entries, counters.foreign, counters.errors) == (4, 1, 1)
    assert [(lease, done.outcome) for lease, done in routing.completions] == [
        ("gone", Outcome.CANCELLED),
        ("died", Outcome.FAILED),
    ]


async def test_periodic_entries_tell_that_the_answer_has_begun(routing):
    silent = log_entry("silent", log_type=pb.DownstreamPeriodic)
    silent.common_properties.custom_tags["first_body_us"] = "-"
    silent.response.response_body_bytes = 0
    async with running(routing) as host:
        log = host.log()
        await log.write(message(silent, log_entry("talking", log_type=pb.DownstreamPeriodic)))
        await log.done_writing()
        await log
    assert routing.signals == [("first_body", "talking")]


async def test_a_client_that_left_before_the_ticket_is_told_by_request_id(routing):
    entry = log_entry(None, downstream_connection_termination=True)
    entry.common_properties.ClearField("upstream_remote_address")
    entry.request.request_id = "request-1"
    served = log_entry(None, downstream_connection_termination=True)
    served.request.request_id = "request-2"
    async with running(routing) as host:
        log = host.log()
        await log.write(message(entry, served))
        await log.done_writing()
        await log
        assert host.access_log.counters.errors == 0
    assert routing.signals == [("left_early", "request-1", "cancelled")]


async def test_tcp_logs_and_unknown_fields_are_skipped(routing):
    async with running(routing) as host:
        log = host.log()
        # Field 3 is tcp_logs, which we leave out.
        await log.write(pb.StreamAccessLogsMessage.FromString(b"\x1a\x02\x0a\x00"))
        await log.done_writing()
        await log
        assert host.access_log.counters.entries == 0


def test_an_empty_entry_is_all_unknown():
    seen = view(pb.HTTPAccessLogEntry())
    assert (seen.ticket, seen.status, seen.upstream, seen.attempts, seen.duration_ms) == (None,) * 5
    assert seen.flags == frozenset()


def test_flags_are_named():
    entry = log_entry(downstream_remote_reset=True)
    entry.common_properties.response_flags.unauthorized_details.reason = 1
    assert view(entry).flags == {"downstream_remote_reset", "unauthorized_details"}


@pytest.mark.parametrize(
    ("address", "text"),
    [
        (common.Address(), None),
        (common.Address(pipe=common.Pipe(path="/run/x")), None),
        (common.Address(socket_address=common.SocketAddress(address="10.0.0.1")), None),
        (
            common.Address(socket_address=common.SocketAddress(address="10.0.0.1", port_value=80)),
            "10.0.0.1:80",
        ),
        (
            common.Address(socket_address=common.SocketAddress(address="fd00::7", port_value=80)),
            "[fd00::7]:80",
        ),
    ],
)
def test_address_text(address, text):
    assert address_text(address) == text
