"""A gateway that speaks the Endpoint Picker Protocol 1.0 as conforming ones do, without an Envoy.

    async with Gateway(app.address) as gateway:
        answer = await gateway.request(body, subset=["10.0.0.1:8000"])
        answer.endpoints, answer.status, answer.response_headers

Every message is sent in FULL_DUPLEX_STREAMED mode with trailers SEND, in both directions, and every reply is
held against the protocol: its kind, its order, its size, and that what passes through comes out unchanged.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import grpc

from extproc.pb import ext_proc_pb2, health_pb2
from tests.support.grpc_host import (
    DUPLEX,
    request_body,
    request_headers,
    request_trailers,
    response_body,
    response_headers,
    response_trailers,
)

LARGEST_PIECE = 62 * 1024
DESTINATION = "x-gateway-destination-endpoint"
SERVED = "x-gateway-destination-endpoint-served"
SUBSET = "x-gateway-destination-endpoint-subset"
REPLY_TIMEOUT_S = 20.0


@dataclass
class Answer:
    """What the endpoint picker made of one request."""

    status: int | None = None  # of an ImmediateResponse
    body: bytes = b""  # of an ImmediateResponse
    endpoints: list[str] = field(default_factory=list)
    sent_headers: dict[str, str] = field(default_factory=dict)  # set on the request
    response_headers: dict[str, str] = field(default_factory=dict)  # set on the response
    held_until_body_end: bool = True


class Gateway:
    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._channel.close()

    async def health(self, service: str) -> str:
        call = self._channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            health_pb2.HealthCheckRequest.SerializeToString,
            health_pb2.HealthCheckResponse.FromString,
        )
        status = (await call(health_pb2.HealthCheckRequest(service=service))).status
        return health_pb2.HealthCheckResponse.ServingStatus.Name(status)

    async def request(
        self,
        body: bytes | None,
        *,
        subset: Any = None,
        headers: dict[str, str] | None = None,
        path: str = "/v1/chat/completions",
        piece: int = 16 * 1024,
        trailers: bool = False,
        served: str | None = None,
        response: Sequence[bytes] = (b'{"id": "x"}',),
    ) -> Answer:
        """One request from its headers to the end of its response. `body` None: there is none.

        `served` is who served it; the gateway tells with the response headers. Default: the first endpoint.
        """
        exchange = _Exchange(self._channel)
        try:
            return await exchange.run(
                body, subset, {":method": "POST", ":path": path, "content-type": "application/json"}
                | (headers or {}), piece, trailers, served, response,
            )  # fmt: skip
        finally:
            exchange.call.cancel()


class _Exchange:
    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.call = channel.stream_stream(
            "/envoy.service.ext_proc.v3.ExternalProcessor/Process",
            ext_proc_pb2.ProcessingRequest.SerializeToString,
            ext_proc_pb2.ProcessingResponse.FromString,
        )()
        self.answer = Answer()

    async def run(
        self,
        body: bytes | None,
        subset: Any,
        headers: dict[str, str],
        piece: int,
        trailers: bool,
        served: str | None,
        response: Sequence[bytes],
    ) -> Answer:
        metadata = {} if subset is None else {"envoy.lb.subset_hint": {SUBSET: subset}}
        await self.call.write(
            request_headers(headers, end=body is None, mode=DUPLEX, response_mode=DUPLEX, metadata=metadata)
        )
        reading = asyncio.ensure_future(self.call.read())
        if body is not None:
            await self._send_body(body, piece, trailers, reading)
        first = await asyncio.wait_for(reading, REPLY_TIMEOUT_S)
        if first.WhichOneof("response") == "immediate_response":
            self.answer.status = first.immediate_response.status.code
            self.answer.body = bytes(first.immediate_response.body)
            return self.answer
        self._take_decision(first)
        if body is not None:
            await self._take_body(body, "request_body", trailers=trailers)
        await self._respond(served, response)
        return self.answer

    async def _send_body(
        self, body: bytes, piece: int, trailers: bool, reading: "asyncio.Future[Any]"
    ) -> None:
        pieces = [body[at : at + piece] for at in range(0, len(body), piece)] or [b""]
        for number, part in enumerate(pieces):
            last = number == len(pieces) - 1
            if last:
                # Everything but the end is there: nothing may be answered yet.
                await asyncio.sleep(0)
                self.answer.held_until_body_end = not reading.done()
            await self.call.write(request_body(part, end=last and not trailers))
        if trailers:
            await self.call.write(request_trailers())

    def _take_decision(self, reply: Any) -> None:
        assert reply.WhichOneof("response") == "request_headers", "the headers reply comes first"
        common = reply.request_headers.response
        assert common.clear_route_cache, "the route must be chosen again"
        for option in common.header_mutation.set_headers:
            self.answer.sent_headers[option.header.key] = option.header.raw_value.decode()
        value = self.answer.sent_headers[DESTINATION]
        told = reply.dynamic_metadata.fields["envoy.lb"].struct_value.fields[DESTINATION].string_value
        assert told == value, "header and metadata must agree"
        self.answer.endpoints = value.split(",")

    async def _take_body(self, body: bytes, kind: str, *, trailers: bool) -> None:
        got, ended = b"", False
        while not ended:
            reply = await asyncio.wait_for(self.call.read(), REPLY_TIMEOUT_S)
            if trailers and reply.WhichOneof("response") == kind.replace("body", "trailers"):
                break
            assert reply.WhichOneof("response") == kind, reply
            streamed = getattr(reply, kind).response.body_mutation.streamed_response
            assert len(streamed.body) <= LARGEST_PIECE
            got += streamed.body
            ended = streamed.end_of_stream
            assert not (ended and trailers), "trailers end the body, not end_of_stream"
        assert got == body, "the body must pass unchanged"

    async def _respond(self, served: str | None, pieces: Sequence[bytes]) -> None:
        who = served or self.answer.endpoints[0]
        await self.call.write(response_headers(metadata={"envoy.lb": {SERVED: who}}))
        reply = await asyncio.wait_for(self.call.read(), REPLY_TIMEOUT_S)
        assert reply.WhichOneof("response") == "response_headers", reply
        for option in reply.response_headers.response.header_mutation.set_headers:
            self.answer.response_headers[option.header.key] = option.header.raw_value.decode()
        for part in pieces:
            await self.call.write(response_body(part))
        await self.call.write(response_trailers())
        await self._take_body(b"".join(pieces), "response_body", trailers=True)
        await self.call.done_writing()
