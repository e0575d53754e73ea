"""The least an external processor in Python can do: read each message and say "go on".

Its distance to Envoy alone is the price of asking a Python process at all; Warmroute's distance to it is
the price of deciding. Run as `python -m loadtests.live.trivial_processor`; prints `listening on HOST:PORT`.
"""

import asyncio
import signal
from collections.abc import AsyncIterator

import grpc

from extproc.pb import ext_proc_pb2 as pb
from extproc.protocol.endpoint_picker import EXTERNAL_PROCESSOR_SERVICE


async def process(
    requests: AsyncIterator[pb.ProcessingRequest], _context: object
) -> AsyncIterator[pb.ProcessingResponse]:
    """One ext_proc stream: one empty reply of the right kind per message."""
    async for request in requests:
        reply = pb.ProcessingResponse()
        if request.WhichOneof("request") == "request_headers":
            reply.request_headers.response.SetInParent()
        else:
            reply.request_body.response.SetInParent()
        yield reply


async def serve() -> None:
    """Serve on a free port until SIGTERM or SIGINT."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", 130 << 20)])
    handler = grpc.stream_stream_rpc_method_handler(
        process,
        request_deserializer=pb.ProcessingRequest.FromString,
        response_serializer=pb.ProcessingResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(EXTERNAL_PROCESSOR_SERVICE, {"Process": handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"listening on 127.0.0.1:{port}", flush=True)
    await stop.wait()
    await server.stop(0.2)


if __name__ == "__main__":
    asyncio.run(serve())
