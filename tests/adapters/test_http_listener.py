import asyncio
import contextlib
import socket

import pytest
from aiohttp import web

from extproc.adapters.http_listener import HttpListener
from tests.support.waiting import until

REQUEST = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


@contextlib.asynccontextmanager
async def listening(**bounds):
    held: list[HttpListener] = []

    @web.middleware
    async def note(request, handler):
        reply = await handler(request)
        held[0].answered(request)
        return reply

    async def answer(request):
        return web.Response(text="ok")

    application = web.Application(middlewares=[note])
    application.router.add_get("/", answer)
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    listener = HttpListener(runner, **bounds)
    held.append(listener)
    host, _, port = (await listener.start("127.0.0.1", 0)).rpartition(":")
    writers: list[asyncio.StreamWriter] = []

    async def connect():
        reader, writer = await asyncio.open_connection(host, int(port))
        writers.append(writer)
        return reader, writer

    try:
        yield listener, connect
    finally:
        for writer in writers:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
        listener.close()
        await runner.cleanup()


async def is_cut(reader):
    try:
        return await asyncio.wait_for(reader.read(), 60) == b""
    except ConnectionError:
        return True


@pytest.mark.parametrize("sent", [b"", b"GET / HTT", b"GET / HTTP/1.1\r\nHost: x\r\n"])
async def test_a_connection_without_a_whole_request_is_cut(sent):
    async with listening(silent_s=0.2) as (listener, connect):
        reader, writer = await connect()
        writer.write(sent)
        assert await is_cut(reader)
        assert listener.cut == 1


async def test_a_request_byte_by_byte_gains_no_time():
    async with listening(silent_s=0.3) as (_, connect):
        reader, writer = await connect()
        cut = asyncio.create_task(is_cut(reader))
        with contextlib.suppress(ConnectionError):
            writer.write(b"GET / HTTP/1.1\r\n")
            while not cut.done():
                writer.write(b"x")
                await writer.drain()
                await asyncio.sleep(0.01)
        assert await cut


async def test_the_longest_without_an_answer_makes_place():
    async with listening(most=3) as (listener, connect):
        silent = [await connect() for _ in range(2)]
        reader, writer = await connect()
        await until(lambda: len(listener._answered) == 3)
        writer.write(REQUEST)
        assert await reader.readuntil(b"ok")
        for number in range(2):
            newer, newer_writer = await connect()
            assert await is_cut(silent[number][0])
            newer_writer.write(REQUEST)
            assert await newer.readuntil(b"ok")
        writer.write(REQUEST)
        assert await reader.readuntil(b"ok")


async def test_an_answer_gives_as_much_time_again():
    async with listening(silent_s=600.0) as (listener, connect):
        reader, writer = await connect()
        await until(lambda: listener._answered)
        (handler,) = listener._answered
        listener._answered[handler] -= 599.0
        writer.write(REQUEST)
        assert await reader.readuntil(b"ok")
        listener._look()
        assert handler in listener._answered
        listener._answered[handler] -= 601.0
        listener._look()
        assert await is_cut(reader)


async def test_of_a_crowd_that_comes_at_once_each_is_counted():
    """All are accepted in one turn of the loop; those beyond the bound are cut, none is forgotten."""
    async with listening(most=3, silent_s=600.0) as (listener, _):
        server = listener._runner.server
        crowd = [socket.create_connection(listener._server.sockets[0].getsockname()) for _ in range(20)]
        try:
            await until(lambda: listener.cut == 17 and len(server.connections) == 3)
            assert set(listener._answered) == set(server.connections)
            listener._answered = dict.fromkeys(listener._answered, float("-inf"))
            listener._look()
            await until(lambda: not server.connections)
            assert listener.cut == 20
        finally:
            for one in crowd:
                one.close()


async def test_who_left_takes_the_place_of_nobody():
    async with listening(most=3, silent_s=600.0) as (listener, connect):
        reader, writer = await connect()
        await until(lambda: listener._answered)
        for number in range(30):
            _, other = await connect()
            await until(lambda: len(listener._runner.server.connections) == 2)
            other.close()
            await until(lambda: len(listener._runner.server.connections) == 1)
            assert len(listener._answered) <= 4, number
        writer.write(REQUEST)
        assert await reader.readuntil(b"ok")
        assert listener.cut == 0


async def test_connections_that_went_are_forgotten():
    async with listening(silent_s=0.1) as (listener, connect):
        for _ in range(20):
            _, writer = await connect()
            writer.close()
        await until(lambda: not listener._answered)
