import asyncio
import re
import time

import grpc
import pytest

from extproc.adapters import peer_server
from extproc.adapters.peer_codec import MAX_SIGNALS
from extproc.adapters.peer_security import PeerSecurity
from extproc.adapters.peer_server import SERVICE, PeerService, start_peer_server
from extproc.core.errors import WarmrouteError
from extproc.core.peer_loads import ToldLoad
from extproc.core.peer_teller import LoadTeller
from extproc.pb import peer_exchange_pb2 as pb
from tests.support.core import worker
from tests.support.ports import free_port
from tests.support.waiting import until

LOAD = ToldLoad(1, 1, 10, 10, 0.0, 0.0, 5.0)


class Host:
    def __init__(self):
        self.teller, self.load, self.taken, self.looks = LoadTeller("a", 1), LOAD, [], 0
        self.service = PeerService(
            self.tell,
            owner="me",
            access_log_open=lambda: False,
            take=self.taken.extend,
            index=self.index,
            security=PeerSecurity(),
            interval_s=0.01,
            clock=time.monotonic,
        )

    def tell(self):
        self.looks += 1
        self.teller.look([(worker(), self.load)], time.monotonic())
        return self.teller

    async def index(self):
        for piece in (b"one", b"two"):
            yield piece

    async def __aenter__(self):
        self.server = await start_peer_server(["127.0.0.1:0"], self.service, PeerSecurity())
        self.channel = grpc.aio.insecure_channel(self.server.addresses[0])
        return self

    async def __aexit__(self, *_):
        await self.channel.close()
        await self.server.stop()

    def watch(self):
        method = self.channel.unary_stream(
            f"/{SERVICE}/Watch", pb.WatchRequest.SerializeToString, pb.Update.FromString
        )
        return method(pb.WatchRequest(replica="b"))

    def deliver(self, *signals):
        method = self.channel.unary_unary(
            f"/{SERVICE}/Deliver", pb.Delivery.SerializeToString, pb.DeliveryReply.FromString
        )
        return method(pb.Delivery(replica="b", signals=signals))


async def test_a_listener_is_told_everything_then_changes_then_signs_of_life():
    async with Host() as host:
        watch = host.watch()
        first = await watch.read()
        assert (first.whole, first.owner, len(first.loads)) == (True, "me", 1)
        host.load = LOAD._replace(sequences=7)
        while not (update := await watch.read()).loads or update.whole:
            pass
        assert update.loads[0].sequences == 7
        quiet = await watch.read()  # nothing changes any more
        assert not quiet.loads or quiet.whole
        assert quiet.number > update.number
        watch.cancel()
        await until(lambda: host.service.counters.listeners == 0)


async def test_a_listener_that_does_not_read_costs_one_message_and_holds_up_nobody():
    async with Host() as host:
        big = {worker(n): LOAD for n in range(250)}

        def tell():
            for who, load in big.items():
                big[who] = load._replace(sequences=3 - load.sequences)  # worth telling each time
            host.teller.look(big.items(), time.monotonic())
            return host.teller

        host.service._tell = tell
        host.service._interval_s = 0.0005
        stuck = host.watch()
        await stuck.read()
        told, same = -1, 0
        async with asyncio.timeout(60):
            while same < 20:  # until its window is full, nothing is written to it any more
                same = same + 1 if told == host.teller.number else 0
                told = host.teller.number
                await asyncio.sleep(0.01)
        async with grpc.aio.insecure_channel(host.server.addresses[0]) as channel:
            method = channel.unary_stream(
                f"/{SERVICE}/Watch", pb.WatchRequest.SerializeToString, pb.Update.FromString
            )
            reading = method(pb.WatchRequest(replica="c"))
            numbers = [(await reading.read()).number for _ in range(5)]
            assert numbers == sorted(numbers)
            reading.cancel()
        stuck.cancel()
        await until(lambda: host.service.counters.listeners == 0)


async def test_signals_are_taken_and_nonsense_is_left_out():
    async with Host() as host:
        signal, bad = pb.Signal(ticket="me.1", kind=pb.Signal.KIND_FIRST_BODY), pb.Signal(ticket="")
        assert (await host.deliver(signal, bad, signal, bad)).taken == 2
        assert [one.ticket for one in host.taken] == ["me.1", "me.1"]
        assert (host.service.counters.implausible, host.service.counters.refused) == (2, 0)


async def test_a_delivery_of_too_many_signals_is_refused():
    async with Host() as host:
        signal = pb.Signal(ticket="me.1", kind=pb.Signal.KIND_FIRST_BODY)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await host.deliver(*[signal] * (MAX_SIGNALS + 1))
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert (host.taken, host.service.counters.refused) == ([], 1)


async def test_the_number_of_listeners_is_bounded(monkeypatch):
    monkeypatch.setattr(peer_server, "MAX_LISTENERS", 1)
    async with Host() as host:
        one = host.watch()
        await one.read()
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await host.watch().read()
        assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert host.service.counters.refused == 1
        one.cancel()


async def test_listeners_do_not_hold_up_a_shutdown():
    async with Host() as host:
        watch = host.watch()
        await watch.read()
        async with asyncio.timeout(10):
            await host.server.stop()
        assert host.service.counters.listeners == 0
        watch.cancel()


def read_index(host):
    method = host.channel.unary_stream(
        f"/{SERVICE}/Index", pb.IndexRequest.SerializeToString, pb.IndexPart.FromString
    )
    return method(pb.IndexRequest())


async def test_the_index_is_told_in_pieces():
    async with Host() as host:
        assert [part.content async for part in read_index(host)] == [b"one", b"two"]
        assert host.service.counters.indexes == 1


async def test_readers_of_the_index_are_bounded_and_one_that_leaves_makes_place(monkeypatch):
    monkeypatch.setattr(peer_server, "MAX_INDEX_READERS", 1)
    ended = []

    async def endless():
        try:
            while True:
                yield bytes(1 << 16)
        finally:
            ended.append(True)

    async with Host() as host:
        host.service._index = endless
        one = read_index(host)
        await one.read()
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await read_index(host).read()
        assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert not ended
        one.cancel()
        await until(lambda: ended == [True])
        two = read_index(host)
        assert len((await two.read()).content) == 1 << 16
        two.cancel()


async def test_an_address_in_use_is_named():
    async with Host() as host:
        with pytest.raises(WarmrouteError, match=r"peers: cannot listen on 127.0.0.1:\d+"):
            await start_peer_server(list(host.server.addresses), host.service, PeerSecurity())


async def test_where_the_second_address_cannot_be_had_the_first_is_given_back():
    first = f"127.0.0.1:{free_port()}"
    async with Host() as host:
        with pytest.raises(WarmrouteError, match=re.escape(f"cannot listen on {host.server.addresses[0]}")):
            await start_peer_server([first, host.server.addresses[0]], host.service, PeerSecurity())
        again = await start_peer_server([first], host.service, PeerSecurity())
        await again.stop()
