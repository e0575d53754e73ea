"""Speaks ext_proc to a router as Envoy does, in an open loop; a process of its own.

`python -m loadtests.decisions.generator` reads a plan as JSON on standard input, sends one line when its
first requests are through and it waits for the word to begin (any line), and ends with its figures as JSON.
Latency counts from when a request should have been sent until its answer is there, so a router that stalls is
charged for every request that waited. Requests end after a while, as the access log says; else the router
would see ever more of them under way.
"""

import asyncio
import gc
import json
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

import grpc

from extproc.pb import access_log_pb2, ext_proc_pb2
from extproc.protocol.endpoint_picker import (
    ACCESS_LOG_SERVICE,
    DESTINATION,
    EXTERNAL_PROCESSOR_SERVICE,
    LB_NAMESPACE,
    TICKET_KEY,
    TICKET_NAMESPACE,
)
from loadtests.decisions.workload import SHAPES, Bodies
from loadtests.live.schedule import arrivals

_HEADERS = {
    ":authority": "llm.example.com",
    ":path": "/v1/chat/completions",
    ":method": "POST",
    ":scheme": "https",
    "content-type": "application/json",
    "user-agent": "OpenAI/Python 2.20.0",
    "accept": "application/json",
    "x-forwarded-proto": "https",
    "x-request-id": "",
}
_SERVED_S = 0.5
_FLUSH_S = 0.02
_TIMEOUT_S = 30.0
_CHANNELS = 2  # Envoy has a connection for each of its threads


@dataclass(slots=True)
class Figures:
    """Milliseconds until each answer; requests that got none, or one without a worker."""

    times_ms: list[float] = field(default_factory=list)
    failed: int = 0


class Generator:
    """One router's client.

    Args:
        address: `host:port` of the router, or of each of its processes, separated by commas.
        tickets: whether answers name a lease that has to end.
    """

    def __init__(self, address: str, *, tickets: bool) -> None:
        options = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
        self._channels = [
            grpc.aio.insecure_channel(one, options=options)
            for one in address.split(",")
            for _ in range(_CHANNELS)
        ]
        self._process = [
            channel.stream_stream(f"/{EXTERNAL_PROCESSOR_SERVICE}/Process", _as_it_is, _as_it_is)
            for channel in self._channels
        ]
        self._tickets = tickets
        self._ended: list[tuple[float, str, str]] = []  # when, ticket, endpoint
        self._number = 0
        self._log = asyncio.create_task(self._write_log()) if tickets else None

    async def ask(self, body: bytes, due: float, figures: Figures) -> None:
        """Send one request, and take its answer."""
        self._number += 1
        call = self._process[self._number % len(self._process)](None, timeout=_TIMEOUT_S)
        try:
            await call.write(_headers(self._number))
            await call.read()
            await call.write(_body(body))
            answer = await call.read()
            took_ms = (time.perf_counter() - due) * 1000.0
            if not isinstance(answer, bytes) or not self._is_good(answer):
                figures.failed += 1
            else:
                figures.times_ms.append(took_ms)
            await call.done_writing()
            await call.read()
        except grpc.RpcError:
            figures.failed += 1

    async def close(self) -> None:
        """Let what is under way end."""
        if self._log is not None:
            await asyncio.sleep(_SERVED_S + 2 * _FLUSH_S)
            self._log.cancel()
            await asyncio.gather(self._log, return_exceptions=True)
        for channel in self._channels:
            await channel.close(None)

    def _is_good(self, answer: bytes) -> bool:
        if not self._tickets:
            return True
        said = ext_proc_pb2.ProcessingResponse.FromString(answer).dynamic_metadata.fields
        ticket = said[TICKET_NAMESPACE].struct_value.fields[TICKET_KEY].string_value
        endpoints = said[LB_NAMESPACE].struct_value.fields[DESTINATION].string_value
        if not ticket or not endpoints:
            return False
        self._ended.append((time.perf_counter() + _SERVED_S, ticket, endpoints.partition(",")[0]))
        return True

    async def _write_log(self) -> None:
        method = self._channels[0].stream_unary(
            f"/{ACCESS_LOG_SERVICE}/StreamAccessLogs", _as_it_is, _as_it_is
        )
        await method(self._log_messages())

    async def _log_messages(self) -> AsyncIterator[bytes]:
        while True:
            await asyncio.sleep(_FLUSH_S)
            now = time.perf_counter()
            ended = 0
            while ended < len(self._ended) and self._ended[ended][0] <= now:
                ended += 1
            if ended:
                message = access_log_pb2.StreamAccessLogsMessage()
                message.http_logs.log_entry.extend(_entry(*one[1:]) for one in self._ended[:ended])
                del self._ended[:ended]
                yield message.SerializeToString()


def _as_it_is(message: bytes) -> bytes:
    return message


def _headers(number: int) -> bytes:
    message = ext_proc_pb2.ProcessingRequest()
    for name, value in _HEADERS.items():
        header = message.request_headers.headers.headers.add()
        header.key = name
        header.raw_value = value.encode() or f"request-{number}".encode()
    message.protocol_config.request_body_mode = ext_proc_pb2.ProcessingMode.BUFFERED
    return message.SerializeToString()


def _body(body: bytes) -> bytes:
    message = ext_proc_pb2.ProcessingRequest()
    message.request_body.body = body
    message.request_body.end_of_stream = True
    return message.SerializeToString()


def _entry(ticket: str, endpoint: str) -> access_log_pb2.HTTPAccessLogEntry:
    entry = access_log_pb2.HTTPAccessLogEntry()
    properties = entry.common_properties
    properties.access_log_type = access_log_pb2.AccessLogType.DownstreamEnd
    properties.metadata.filter_metadata[TICKET_NAMESPACE].update({TICKET_KEY: ticket})
    properties.metadata.filter_metadata["llm.usage"].update({"completion_tokens": 16})
    properties.custom_tags.update({"first_body_us": "100000", "prefill_us": "99000"})
    served = properties.upstream_remote_address.socket_address
    served.address, _, port = endpoint.rpartition(":")
    served.port_value = int(port)
    properties.duration.FromMilliseconds(round(_SERVED_S * 1000))
    entry.response.response_code.value = 200
    return entry


async def run(plan: dict[str, Any]) -> dict[str, Any]:
    """Carry out a plan: `address`, `shape`, `rate`, `seconds`, `seed`, `tickets`."""
    shape, rng = SHAPES[plan["shape"]], Random(plan["seed"])
    bodies = Bodies(shape, plan["seed"])
    generator = Generator(plan["address"], tickets=plan["tickets"])
    first = Figures()
    for body in bodies.first() or [bodies.next() for _ in range(50)]:
        await generator.ask(body, time.perf_counter(), first)
    times = arrivals(plan["rate"], plan["seconds"], rng)
    print(json.dumps({"ready": len(first.times_ms), "failed": first.failed}), flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    gc.collect()
    gc.disable()  # a collection here would be charged to the router
    figures = Figures()
    began = time.perf_counter() + 0.01
    cpu = time.process_time()
    async with asyncio.TaskGroup() as group:
        for at in times:
            body = bodies.next()
            await asyncio.sleep(began + at - time.perf_counter())
            group.create_task(generator.ask(body, began + at, figures))
    took, cpu = time.perf_counter() - began, time.process_time() - cpu
    await generator.close()
    return {
        "times_ms": figures.times_ms,
        "failed": figures.failed + first.failed,
        "first_ms": first.times_ms,
        "seconds": took,
        "cores": cpu / took,
        "body_bytes": len(bodies.next()),
    }


def main() -> None:
    """See the module's docstring."""
    plan = json.loads(sys.stdin.readline())
    print(json.dumps(asyncio.run(run(plan))), flush=True)


if __name__ == "__main__":
    main()
