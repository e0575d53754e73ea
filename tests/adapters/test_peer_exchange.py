"""Whole exchanges, in one process, over real connections."""

import asyncio
import contextlib
import itertools
import time
from random import Random

from extproc.adapters import peer_exchange, peer_link
from extproc.adapters.discovery import StaticDiscovery
from extproc.adapters.peer_codec import FirstBody
from extproc.adapters.peer_exchange import PeerExchange, PeerSettings
from extproc.adapters.peer_security import PeerSecurity
from extproc.core.candidates import PoolFacts
from extproc.core.peer_loads import PeerNews
from extproc.core.policies.token_load import TokenLoad
from extproc.core.router import Router, RouterSettings
from extproc.core.types import Completion, Member, Outcome
from tests.support.core import BLOCK, COSTS, NAMESPACE, members, request, worker
from tests.support.ports import free_port
from tests.support.tcp_proxy import TcpProxy
from tests.support.waiting import until

DONE = Completion(Outcome.FINISHED)
OPEN = PeerSecurity()


class Service:
    """What a replica's own requests are told."""

    def __init__(self, router):
        self.router = router
        self.streams = 0

    async def route(self, request):
        raise AssertionError("peers hand on what became of requests, and never ask where to send one")

    def first_body(self, lease_id):
        self.router.on_first_token(lease_id, time.monotonic())

    def served(self, lease_id, endpoint):
        self.router.on_served(lease_id, endpoint, time.monotonic())

    def stream_ended(self, lease_id, *, cancelled):
        pass

    def completed(self, lease_id, completion):
        self.router.release(lease_id, completion, time.monotonic())

    def left_early(self, request_id, completion):
        return self.router.on_left_early(request_id, completion, time.monotonic()) is not None

    def access_log_streams(self, open_streams):
        self.streams = open_streams


class Replica:
    def __init__(self, name, peers=(), *, port=None, security=OPEN, sources=()):
        ids = itertools.count()
        self.name, self.owner = name, f"owner-{name}"
        self.router = Router(
            TokenLoad(COSTS),
            Random(1),
            new_lease_id=lambda: f"{self.owner}.{next(ids)}",
            pools={"default": PoolFacts(NAMESPACE.model_revision, NAMESPACE.tokenizer_revision, BLOCK)},
            costs=COSTS,
            settings=RouterSettings(peer_fade_after_s=1.0, peer_gone_after_s=2.0),
        )
        self.router.on_membership(members(2), time.monotonic())
        self.service, self.said = Service(self.router), []
        self.port = port or free_port()
        settings = PeerSettings(
            name,
            time.time_ns(),
            self.owner,
            (f"127.0.0.1:{self.port}",),
            tuple(f"127.0.0.1:{peer}" for peer in peers),
            interval_s=0.01,
            security=security,
        )
        self.exchange = PeerExchange(
            settings,
            router=self.router,
            service=self.service,
            sources=sources,
            index=self.index,
            clock=time.monotonic,
            report=self.said.append,
        )

    async def index(self):
        yield b"piece"

    async def __aenter__(self):
        await self.exchange.__aenter__()
        return self

    async def __aexit__(self, *how):
        await self.exchange.__aexit__(*how)

    def send(self, tokens=range(800)):
        return self.router.schedule(request(tokens), time.monotonic())

    def told(self):
        now = time.monotonic()
        self.router.tick(now)
        self.exchange.tick()
        return sum(self.router.peers.load(worker(n), now).sequences for n in range(2))


@contextlib.asynccontextmanager
async def pair(**settings):
    ports = free_port(), free_port()
    async with (
        Replica("a", [ports[1]], port=ports[0], **settings) as a,
        Replica("b", [ports[0]], port=ports[1], **settings) as b,
    ):
        yield a, b


async def connected(*replicas):
    await until(lambda: all(link.connected for one in replicas for link in one.exchange.links))


async def test_load_travels_both_ways_and_goes_again():
    async with pair() as (a, b):
        lease = a.send().lease_id
        b.send()
        await until(lambda: a.told() == b.told() == 1)
        a.router.release(lease, DONE, time.monotonic())
        await until(lambda: b.told() == 0)
        assert a.told() == 1


async def test_an_end_without_a_ticket_ends_the_request_at_the_replica_that_has_it():
    left = Completion(Outcome.CANCELLED, duration_ms=10.0)
    async with pair() as (a, b):
        await connected(a, b)
        lease = a.send().lease_id
        a.router.on_stream_ended(lease, time.monotonic(), undelivered=True)
        assert not b.exchange.forwarding.left_early("r", left)
        await until(lambda: len(a.router.ledger) == 0)


async def test_an_end_that_reached_the_wrong_replica_ends_the_request_at_its_own():
    async with pair() as (a, b):
        await connected(a, b)
        lease = a.send().lease_id
        b.exchange.forwarding.first_body(lease)
        await until(lambda: a.router.ledger.get(lease).first_token_at is not None)
        for _ in range(3):  # told more than once: it ends once
            b.exchange.forwarding.completed(lease, DONE)
        await until(lambda: len(a.router.ledger) == 0)
        await until(lambda: a.exchange.forwarding.counters.taken == 4)


async def test_an_access_log_stream_to_a_peer_is_as_good_as_one_to_us():
    async with pair() as (a, b):
        b.exchange.forwarding.access_log_streams(2)
        await until(lambda: a.service.streams == 1)
        assert b.service.streams == 2
        b.exchange.forwarding.access_log_streams(0)
        await until(lambda: a.service.streams == b.service.streams == 0)


async def test_a_peer_that_dies_fades_and_one_that_is_back_is_heard_again():
    async with Replica("a") as a:
        ports = [a.port]
        async with Replica("b", ports) as b, Replica("c", [b.port]) as c:
            b.send()
            await until(lambda: c.told() == 1)
            port = b.port
            await b.exchange.server.server.stop(0)
            b.exchange.serves.close()
            await until(lambda: not c.exchange.links[0].connected)
            await until(lambda: c.told() == 0)
            assert any("is lost" in line for line in c.said)
            async with Replica("b", ports, port=port) as again:
                again.send()
                await until(lambda: c.told() == 1)
        assert sum("load is exchanged" in line for line in c.said) == 2


async def test_its_own_address_among_the_others_is_recognised():
    port, other = free_port(), free_port()
    found = [Member(f"127.0.0.1:{p}") for p in (port, other)]
    async with (
        Replica("a", port=port, sources=[StaticDiscovery(found)]) as a,
        Replica("b", port=other) as b,
    ):
        a.send()
        b.send()
        await until(lambda: a.told() == 1)
        await until(lambda: a.exchange.addresses == (f"127.0.0.1:{other}",))
        assert [status.name for status in a.exchange.status().peers] == ["b"]
        assert a.told() == 1


async def test_two_replicas_of_one_name_are_told_so():
    async with Replica("a") as one, Replica("a", [one.port]) as two:
        await until(lambda: any("has our own name 'a'" in line for line in two.said))
        one.send()
        assert two.told() == 0


async def test_a_namesake_that_gets_a_name_of_its_own_is_a_peer():
    async with Replica("a") as one, Replica("a", [one.port]) as two:
        await until(lambda: any("has our own name" in line for line in two.said))
        assert two.exchange.addresses == ()
        await one.exchange.__aexit__(None, None, None)
        async with Replica("b", port=one.port) as other:
            other.send()
            await until(lambda: two.told() == 1)
            assert [status.name for status in two.exchange.status().peers] == ["b"]
            assert any("load is exchanged" in line for line in two.said)


async def test_who_answers_later_where_we_found_ourselves_is_a_peer(monkeypatch):
    monkeypatch.setattr(peer_exchange, "_AGAIN_S", 0.05)
    port = free_port()
    async with TcpProxy(f"127.0.0.1:{port}") as wire, Replica("b") as b:
        found = [Member(wire.endpoint)]
        async with Replica("a", port=port, sources=[StaticDiscovery(found)]) as a:
            await until(lambda: a.exchange._links[wire.endpoint].namesake)
            first = a.exchange._links[wire.endpoint].link
            await until(lambda: a.told() == 0 and first not in a.exchange._running)
            await until(lambda: a.told() == 0 and a.exchange._links[wire.endpoint].link is not first)
            assert a.exchange.addresses == ()
            await wire.cut()
            wire._target_port = b.port
            await wire.open()
            b.send()
            await until(lambda: a.told() == 1)
            assert a.exchange.addresses == (wire.endpoint,)
            assert "has our own name" not in str(a.said)
        assert not a.exchange._running


async def test_a_link_that_is_not_needed_is_ended_however_often_it_takes(monkeypatch):
    monkeypatch.setattr(peer_link, "_CANCEL_S", 0.01)
    cancelled = []

    async def run(link):
        while cancelled.count(link) < 3:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                cancelled.append(link)

    monkeypatch.setattr(peer_exchange.PeerLink, "run", run)
    async with Replica("a", [1, 2]) as a:
        await asyncio.sleep(0)
        gone, kept = a.exchange.links
        gone.send(FirstBody("o.1"))
        a.exchange._follow([kept.address])
        gone._take(gone, PeerNews("late", 1, 1, whole=True))
        await until(lambda: cancelled.count(gone) == 3)
        await until(lambda: list(a.exchange._running) == [kept])
        assert a.exchange.status().dropped == 1  # what it had not delivered
        assert len(a.router.peers) == 0  # nobody listens to it
        a.exchange._follow([])
    assert cancelled.count(kept) == 3
    assert not a.exchange._running


async def test_what_was_counted_of_links_that_ended_stays_counted():
    async with Replica("b") as b, Replica("a", [b.port]) as a:
        await connected(a)
        a.exchange.links[0].counters.dropped = 3
        a.exchange.links[0].counters.refused = 2
        a.exchange._follow([])
        await until(lambda: not a.exchange._running)
        status = a.exchange.status()
        assert (status.peers, status.dropped, status.refused["update"]) == ((), 3, 2)


async def test_news_take_the_address_where_the_replica_is_heard():
    async with (
        Replica("b") as b,
        TcpProxy(f"127.0.0.1:{b.port}") as wire,
        Replica("a", [wire.endpoint.rpartition(":")[2], b.port]) as a,
    ):
        await connected(a)
        await wire.cut()
        await until(lambda: not a.exchange.links[0].connected)
        lease = b.send().lease_id
        a.exchange.forwarding.completed(lease, DONE)
        await until(lambda: len(b.router.ledger) == 0)
        assert a.exchange.links[0].waiting == 0


async def test_what_is_refused_is_counted_where_an_operator_looks():
    async with Replica("a", security=PeerSecurity("secret")) as a, Replica("b", [a.port]):
        await until(lambda: a.exchange.status().refused["call"])
        a.router.peers.refused, a.router.peer_prefixes.left_out = 2, 3
        a.exchange.serves.counters.implausible = 4
        refused = dict(a.exchange.status().refused)
        assert refused.pop("call") > 0
        assert refused == {"update": 0, "signal": 4, "replica": 2, "block": 3}


async def test_without_the_token_nothing_is_told():
    async with (
        Replica("a", security=PeerSecurity("secret")) as a,
        Replica("b", [a.port], security=PeerSecurity("guess")) as b,
        Replica("c", [a.port], security=PeerSecurity("secret")) as c,
    ):
        a.send()
        await until(lambda: c.told() == 1)
        await until(lambda: b.exchange.links[0].error is not None)
        assert "token" in b.exchange.links[0].error
        assert b.told() == 0
        assert b.exchange.status().peers[0].connected is False


async def test_status_tells_who_is_there():
    async with pair() as (a, b):
        a.send()
        await until(lambda: b.told() == 1)
        (status,) = b.exchange.status().peers
        assert (status.name, status.connected, status.sequences, status.weight) == ("a", True, 1, 1.0)
        assert status.silent_s is not None
        assert status.address == f"127.0.0.1:{a.port}"
        assert status.connects == 1
        await until(lambda: a.exchange.status().listeners == 1)


async def test_decisions_go_on_while_peers_are_dead_or_stuck():
    """A peer that accepts and says nothing holds nobody up."""
    held = []
    stuck = await asyncio.start_server(lambda reader, writer: held.append(writer), "127.0.0.1", 0)
    port = stuck.sockets[0].getsockname()[1]
    async with Replica("a", [port, free_port()]) as a:
        leases = [a.send(range(n * 1000, n * 1000 + 300)).lease_id for n in range(20)]
        for lease in leases:
            a.exchange.forwarding.completed(lease, DONE)
        assert len(a.router.ledger) == 0
        assert a.told() == 0
    for writer in held:
        writer.close()
    stuck.close()
