"""What one request costs beside the transport: `python -m tests.bench.bench_ext_proc`.

Messages as Envoy sends them (headers, then the whole body) go through the servicer and a whole routing
service, and the request's end through the access log; only gRPC itself is left out. Processor time is
measured, which others on the machine do not take; medians over rounds. `bare` is the same servicer with a
routing service that answers at once, so the difference is what deciding costs.
"""

import asyncio
import itertools
import json
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc

from extproc.adapters.access_log_server import AccessLogService
from extproc.adapters.decision_writer import DecisionLog
from extproc.adapters.ext_proc_server import ExtProcService
from extproc.adapters.recent_decisions import RecentDecisions
from extproc.adapters.routing import HttpRequest
from extproc.core.types import Completion
from extproc.demo.workload import prose
from extproc.pb import access_log_pb2, ext_proc_pb2
from extproc.pb import ext_proc_pb2 as pb
from extproc.prompt.encoder import PromptEncoder
from extproc.prompt.tiny import tiny_model_path
from extproc.protocol.endpoint_picker import TICKET_KEY, TICKET_NAMESPACE
from extproc.protocol.ext_proc_messages import Route
from tests.bench.bench_telemetry import service

ROUNDS, REQUESTS, SIZE = 30, 40, 2048
HEADERS = {
    ":authority": "127.0.0.1:10000",
    ":path": "/v1/chat/completions",
    ":method": "POST",
    ":scheme": "http",
    "content-type": "application/json",
    "content-length": "2300",
    "user-agent": "OpenAI/Python 2.20.0",
    "accept": "application/json",
    "x-forwarded-proto": "http",
    "x-request-id": "a1f6f4f0-0d0e-4a54-9d3c-0b3d6b6f2b77",
    "x-envoy-expected-rq-timeout-ms": "15000",
}


class AnswersAtOnce:
    """A routing service that does nothing."""

    async def route(self, _request: HttpRequest) -> Route:
        return Route(("10.0.0.1:8000", "10.0.0.2:8000"), "lease-1")

    def first_body(self, lease_id: str) -> None: ...

    def served(self, lease_id: str, endpoint: str) -> None: ...

    def stream_ended(self, lease_id: str, *, cancelled: bool) -> None: ...

    def completed(self, lease_id: str, completion: Completion) -> None: ...

    def left_early(self, request_id: str, completion: Completion) -> bool: ...

    def access_log_streams(self, open_streams: int) -> None: ...


class Stream:
    """What the servicer needs of a call's context."""

    def __init__(self, messages: list[bytes]) -> None:
        self._messages = iter(messages)
        self.written: list[bytes] = []

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return (("te", "trailers"), ("x-envoy-internal", "true"))

    async def write(self, message: bytes) -> None:
        self.written.append(message)

    async def read(self) -> pb.ProcessingRequest | object:
        data = next(self._messages, None)
        return grpc.aio.EOF if data is None else pb.ProcessingRequest.FromString(data)


def header_message() -> bytes:
    message = pb.ProcessingRequest()
    for name, value in HEADERS.items():
        header = message.request_headers.headers.headers.add()
        header.key = name
        header.raw_value = value.encode()
    message.protocol_config.request_body_mode = pb.ProcessingMode.BUFFERED
    message.metadata_context.SetInParent()
    return message.SerializeToString()


def body_message(number: int, rng: random.Random) -> bytes:
    message = pb.ProcessingRequest()
    content = f"{rng.getrandbits(64):x} {prose(rng, SIZE)[:SIZE]}"
    messages = [{"role": "system", "content": content}, {"role": "user", "content": f"Question {number}"}]
    body = {"model": "tiny", "messages": messages, "max_tokens": 1, "temperature": 0}
    message.request_body.body = json.dumps(body).encode()
    message.request_body.end_of_stream = True
    message.metadata_context.SetInParent()
    return message.SerializeToString()


def log_entry(ticket: str) -> access_log_pb2.HTTPAccessLogEntry:
    entry = access_log_pb2.HTTPAccessLogEntry()
    entry.common_properties.access_log_type = access_log_pb2.AccessLogType.DownstreamEnd
    entry.common_properties.metadata.filter_metadata[TICKET_NAMESPACE].update({TICKET_KEY: ticket})
    entry.common_properties.metadata.filter_metadata["llm.usage"].update(
        {"prompt_tokens": 600, "completion_tokens": 1, "cached_tokens": 0}
    )
    entry.common_properties.duration.nanos = 5_000_000
    entry.common_properties.upstream_remote_address.socket_address.address = "10.0.0.1"
    entry.common_properties.upstream_remote_address.socket_address.port_value = 8000
    entry.response.response_code.value = 200
    return entry


def ticket_of(written: bytes) -> str:
    reply = ext_proc_pb2.ProcessingResponse.FromString(written)
    fields = reply.dynamic_metadata.fields[TICKET_NAMESPACE].struct_value.fields
    return fields[TICKET_KEY].string_value


async def one_round(
    servicer: ExtProcService, log: AccessLogService, headers: bytes, bodies: list[bytes]
) -> tuple[float, float]:
    """Microseconds of processor time per request: until its answer, and for its end."""
    streams = [Stream([headers, body]) for body in bodies]
    began = time.process_time()
    for stream in streams:
        await servicer.process(None, stream)  # type: ignore[arg-type]  # all it uses of a stream
    decided = time.process_time() - began
    batch = access_log_pb2.StreamAccessLogsMessage()
    batch.http_logs.log_entry.extend(log_entry(ticket_of(stream.written[-1])) for stream in streams)
    data = batch.SerializeToString()

    async def batches() -> AsyncIterator[access_log_pb2.StreamAccessLogsMessage]:
        yield access_log_pb2.StreamAccessLogsMessage.FromString(data)

    began = time.process_time()
    await log.stream_access_logs(batches(), None)  # type: ignore[arg-type]  # it never looks at the context
    ended = time.process_time() - began
    return decided / len(bodies) * 1e6, ended / len(bodies) * 1e6


async def main() -> None:
    """Print a table."""
    encoder = PromptEncoder.load(tiny_model_path())
    rng, numbers = random.Random(1), itertools.count()
    headers = header_message()
    with tempfile.TemporaryDirectory() as folder:
        written = DecisionLog(str(Path(folder) / "decisions.jsonl"), print, recent=RecentDecisions())
        routings: dict[str, Callable[[], Any]] = {
            "bare": AnswersAtOnce,
            "whole": lambda: service(None, encoder, written),
        }
        made = {name: make() for name, make in routings.items()}
        servers = {name: (ExtProcService(one), AccessLogService(one)) for name, one in made.items()}
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in servers}
        for round_number in range(ROUNDS):
            for name, (servicer, log) in servers.items():
                bodies = [body_message(next(numbers), rng) for _ in range(REQUESTS)]
                took = await one_round(servicer, log, headers, bodies)
                if round_number >= ROUNDS // 10:
                    times[name].append(took)
    print(f"{REQUESTS * ROUNDS} requests of {SIZE} bytes, processor time in µs, medians of rounds")
    for name, taken in times.items():
        until, end = (statistics.median(column) for column in zip(*taken, strict=True))
        print(f"  {name:6s} until answered {until:7.0f}   end {end:7.0f}")


if __name__ == "__main__":
    asyncio.run(main())
