"""One HTTP/2 request with trailers, which ordinary clients cannot send."""

import asyncio

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, ResponseReceived, StreamEnded, WindowUpdated


async def post_with_trailers(
    address: str, path: str, body: bytes, trailers: dict[str, str], headers: dict[str, str] | None = None
) -> tuple[int, bytes]:
    """Status and body of the answer."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    connection = H2Connection(H2Configuration(client_side=True, header_encoding="utf-8"))
    connection.initiate_connection()
    stream = connection.get_next_available_stream_id()
    names = {":method": "POST", ":path": path, ":scheme": "http", ":authority": address, **(headers or {})}
    connection.send_headers(stream, list(names.items()))
    status, answer, rest, ended, trailed = 0, b"", body, False, False
    try:
        while not ended:
            while rest and (room := connection.local_flow_control_window(stream)) > 0:
                piece = rest[: min(room, connection.max_outbound_frame_size)]
                connection.send_data(stream, piece)
                rest = rest[len(piece) :]
            if not rest and not trailed:
                connection.send_headers(stream, list(trailers.items()), end_stream=True)
                trailed = True
            writer.write(connection.data_to_send())
            await writer.drain()
            received = await reader.read(65_536)
            if not received:
                raise ConnectionError("the server closed the connection")
            for event in connection.receive_data(received):
                match event:
                    case ResponseReceived():
                        status = int(dict(event.headers)[":status"])
                    case DataReceived():
                        answer += event.data
                        connection.acknowledge_received_data(event.flow_controlled_length, stream)
                    case StreamEnded():
                        ended = True
                    case WindowUpdated():
                        pass
    finally:
        writer.close()
        await writer.wait_closed()
    return status, answer
