import asyncio
import json

import pytest

from loadtests.live.http1 import HttpError, Pool, encode, parse_head, post_json


async def serve(*answers):
    """A server that gives these raw answers in turn, over all connections; its address and what it got."""
    left, seen, connections = list(answers), [], []

    async def handle(reader, writer):
        connections.append(writer)
        try:
            while left:
                head = await reader.readuntil(b"\r\n\r\n")
                length = parse_head(b"HTTP/1.1 200 -\r\n" + head.split(b"\r\n", 1)[1])[1]["content-length"]
                seen.append(head + await reader.readexactly(int(length)))
                answer = left.pop(0)
                for piece in answer if isinstance(answer, list) else [answer]:
                    if isinstance(piece, asyncio.Event):
                        await piece.wait()
                    else:
                        writer.write(piece)
                        await writer.drain()
        except asyncio.IncompleteReadError:
            pass
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    return server, address, seen, connections


async def test_answers_with_a_length_share_one_connection():
    reply = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"
    server, address, seen, connections = await serve(reply, reply)
    async with server, Pool(address) as pool:
        for _ in range(2):
            answer = await post_json(pool, "/x", json.dumps({"a": 1}).encode())
            assert (answer.status, answer.body, len(answer.pieces)) == (200, b"hi", 1)
            assert answer.sent_at <= answer.first_at <= answer.ended_at
    assert len(connections) == 1
    assert seen[0].endswith(b'\r\n\r\n{"a": 1}')


async def test_pieces_of_a_chunked_answer_are_timed_one_by_one():
    gate = asyncio.Event()
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    server, address, *_ = await serve([head + b"3\r\nabc\r\n", gate, b"2\r\nde\r\n0\r\nx: y\r\n\r\n"])
    async with server, Pool(address) as pool:
        asking = asyncio.create_task(pool.request(encode("GET", "/", address)))
        await asyncio.sleep(0)
        asyncio.get_running_loop().call_later(0.02, gate.set)
        answer = await asking
    assert answer.body == b"abcde"
    assert len(answer.pieces) == 2
    assert answer.first_at == answer.pieces[0] < answer.pieces[1] <= answer.ended_at


async def test_an_answer_that_breaks_off_is_an_error():
    server, address, *_ = await serve([b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf"])
    async with server, Pool(address) as pool:
        with pytest.raises(HttpError):
            await pool.request(encode("GET", "/", address))


async def test_a_closed_connection_is_opened_again():
    reply = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
    server, address, _, connections = await serve(reply, reply)
    async with server, Pool(address) as pool:
        first = await pool.request(encode("GET", "/", address))
        assert first.first_at == first.ended_at
        await pool.request(encode("GET", "/", address))
    assert len(connections) == 2


def test_heads():
    assert parse_head(b"HTTP/1.1 404 Not Found\r\nA: b\r\n\r\n") == (404, {"a": "b"})
    with pytest.raises(ValueError, match="not an HTTP/1"):
        parse_head(b"SSH-2.0\r\n\r\n")
