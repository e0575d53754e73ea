import asyncio
import time

import grpc
import pytest

from extproc.adapters import peer_link
from extproc.adapters.peer_codec import MAX_SIGNALS, Completed, FirstBody
from extproc.adapters.peer_link import PeerLink, fetch_index
from extproc.adapters.peer_security import PeerSecurity
from extproc.adapters.peer_server import SERVICE
from extproc.core.errors import WarmrouteError
from extproc.core.types import Completion, Outcome
from extproc.pb import peer_exchange_pb2 as pb
from tests.support.ports import free_port
from tests.support.waiting import until


class Peer:
    """A server that says what a test wants it to say."""

    def __init__(self, *updates, port=0, refuse=()):
        self.updates, self.delivered, self._port, self._refuse = list(updates), [], port, list(refuse)
        self.most = 0  # signals in one delivery

    async def watch(self, _request, context):
        for update in self.updates:
            await context.write(update)
        await asyncio.sleep(3600)

    async def deliver(self, request, context):
        if self._refuse:
            await context.abort(self._refuse.pop(0), "not now")
        self.delivered += [signal.ticket for signal in request.signals]
        self.most = max(self.most, len(request.signals))
        return pb.DeliveryReply()

    async def __aenter__(self):
        self.server = grpc.aio.server()
        handlers = {
            "Watch": grpc.unary_stream_rpc_method_handler(
                self.watch, pb.WatchRequest.FromString, pb.Update.SerializeToString
            ),
            "Deliver": grpc.unary_unary_rpc_method_handler(
                self.deliver, pb.Delivery.FromString, pb.DeliveryReply.SerializeToString
            ),
        }
        self.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        self.address = f"127.0.0.1:{self.server.add_insecure_port(f'127.0.0.1:{self._port}')}"
        await self.server.start()
        return self

    async def __aexit__(self, *_):
        await self.server.stop(0)


class Linked:
    def __init__(self, address):
        self.news = []
        self.link = PeerLink(
            address,
            name="me",
            security=PeerSecurity(),
            take=lambda _, news: self.news.append(news),
            clock=time.monotonic,
        )

    async def __aenter__(self):
        self.task = asyncio.create_task(self.link.run())
        return self

    async def __aexit__(self, *_):
        while not self.task.done():
            self.task.cancel()
            await asyncio.wait([self.task], timeout=0.5)


def update(number=1, **fields):
    return pb.Update(replica="p", epoch=1, number=number, owner="o", access_log_open=True, **fields)


async def test_it_hears_what_the_peer_tells():
    async with Peer(update(1), update(2)) as peer, Linked(peer.address) as it:
        await until(lambda: [news.number for news in it.news] == [1, 2])
        link = it.link
        assert (link.replica, link.owner, link.connected, link.access_log_open) == ("p", "o", True, True)


async def test_nonsense_ends_the_connection_and_changes_nothing():
    bad = update(2, loads=[pb.WorkerLoad(endpoint="a:1", queued_prefill_ms=float("nan"))])
    async with Peer(update(1), bad) as peer, Linked(peer.address) as it:
        await until(lambda: it.link.counters.refused >= 1 and it.link.error)
        assert "no size or time" in it.link.error
        assert {news.number for news in it.news} == {1}


async def test_a_peer_that_says_nothing_is_left_and_tried_again(monkeypatch):
    monkeypatch.setattr(peer_link, "_SILENCE_S", 0.1)
    async with Peer(update(1)) as peer, Linked(peer.address) as it:
        await until(lambda: it.link.counters.connects >= 2)
        assert len(it.news) >= 2


async def test_a_cancellation_that_is_swallowed_does_not_keep_it_from_coming_back(monkeypatch):
    monkeypatch.setattr(peer_link, "_CANCEL_S", 0.01)
    monkeypatch.setattr(peer_link, "_SILENCE_S", 0.1)
    swallowed = []

    async def deliver(_link, _channel):
        before = len(swallowed)
        while len(swallowed) < before + 2:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                swallowed.append(True)

    monkeypatch.setattr(PeerLink, "_deliver", deliver)
    async with Peer(update(1)) as peer, Linked(peer.address) as it:
        await until(lambda: it.link.counters.connects >= 2)


async def test_signals_are_delivered_once_the_peer_is_there():
    port = free_port()
    async with Linked(f"127.0.0.1:{port}") as it:
        await until(lambda: it.link.error is not None)
        it.link.send(FirstBody("o.1"))
        it.link.send(FirstBody("o.2"))
        async with Peer(update(1), port=port) as peer:
            await until(lambda: peer.delivered == ["o.1", "o.2"])
            await until(lambda: it.link.waiting == 0)


async def test_a_delivery_that_fails_is_made_again_and_one_that_is_refused_is_not():
    refuse = [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INVALID_ARGUMENT]
    async with Peer(update(1), refuse=refuse) as peer, Linked(peer.address) as it:
        it.link.send(FirstBody("o.1"))
        await until(lambda: it.link.counters.dropped == 1)
        it.link.send(FirstBody("o.2"))
        await until(lambda: peer.delivered == ["o.2"])


async def test_a_signal_that_cannot_be_told_costs_no_other(caplog):
    huge = Completion(Outcome.FINISHED, prompt_tokens=1 << 70)
    async with Peer(update(1)) as peer, Linked(peer.address) as it:
        for signal in (FirstBody("o.1"), Completed("o.2", huge), FirstBody("o.3")):
            it.link.send(signal)
        await until(lambda: peer.delivered == ["o.1", "o.3"])
        await until(lambda: it.link.waiting == 0)
        it.link.send(Completed("o.4", huge))  # alone
        await until(lambda: it.link.counters.dropped == 2)
        it.link.send(FirstBody("o.5"))
        await until(lambda: peer.delivered == ["o.1", "o.3", "o.5"])
    assert "cannot be told" in caplog.text


async def test_deliveries_are_no_larger_than_what_is_received():
    """Ends with long details, as many as one message may have: none of them is lost."""
    async with Peer(update(1)) as peer, Linked(peer.address) as it:
        for n in range(MAX_SIGNALS):
            it.link.send(Completed(f"o.{n}", Completion(Outcome.FAILED, details="\U0001f600" * 2000)))
        await until(lambda: len(peer.delivered) == MAX_SIGNALS)
        assert it.link.counters.dropped == 0
        assert peer.most <= 100  # to read more would hold up the event loop over there


async def test_an_error_of_deliveries_is_forgotten_when_they_go_on(monkeypatch):
    monkeypatch.setattr(peer_link, "_SILENCE_S", 3600.0)
    async with Peer(update(1), refuse=[grpc.StatusCode.UNAVAILABLE] * 3) as peer, Linked(peer.address) as it:
        await until(lambda: it.link.connected)
        it.link.send(FirstBody("o.1"))
        await until(lambda: it.link.error is not None)
        await until(lambda: peer.delivered == ["o.1"])
        await until(lambda: it.link.error is None)


async def test_what_waits_is_bounded_and_does_not_wait_for_ever(monkeypatch):
    monkeypatch.setattr(peer_link, "MAX_WAITING", 5)
    link = Linked("127.0.0.1:1").link
    for n in range(8):
        link.send(FirstBody(f"o.{n}"))
    assert (link.waiting, link.counters.dropped) == (5, 3)
    monkeypatch.setattr(peer_link, "_SIGNAL_LIFE_S", -1.0)
    link._drop_old()
    assert (link.waiting, link.counters.dropped) == (0, 8)


async def test_an_index_that_cannot_be_had_says_why():
    with pytest.raises(WarmrouteError, match="unavailable"):
        async for _ in fetch_index(f"127.0.0.1:{free_port()}", "me", PeerSecurity(), 5.0):
            pass
