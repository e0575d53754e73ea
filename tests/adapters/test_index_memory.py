"""An index moves from one router to another, with the event stream going on."""

import asyncio
import time
from random import Random

from extproc.adapters import index_memory
from extproc.adapters.index_memory import IndexMemory
from extproc.adapters.kv_stream import KvSource
from extproc.adapters.kv_subscriber import KvSubscriber
from extproc.core.candidates import PoolFacts
from extproc.core.policies.token_load import TokenLoad
from extproc.core.router import Router
from extproc.core.types import Member, WorkerId
from extproc.protocol.index_snapshot import read
from extproc.protocol.kv_sequence_types import (
    SequenceLimits,
)
from tests.support.core import COSTS, NAMESPACE
from tests.support.kv_publisher import VllmPublisher, stored
from tests.support.waiting import until

W = WorkerId("w:1")
SIZE = 4


class Side:
    """A router and its subscriptions, as the application wires them."""

    def __init__(self, publisher, given=None, revision=NAMESPACE.model_revision):
        self.said = []
        self.router = Router(
            TokenLoad(COSTS),
            Random(1),
            new_lease_id=lambda: "l",
            pools={"default": PoolFacts(revision, NAMESPACE.tokenizer_revision)},
        )
        self.router.on_membership([Member(W.endpoint)], time.monotonic())
        self.memory = IndexMemory(self.router, time.monotonic, self.said.append)
        self.memory.give(given or {})
        router = self.router
        self.subscriber = KvSubscriber(
            lambda worker, events: router.on_kv_events(worker, events, time.monotonic()),
            router.on_kv_reset,
            lambda worker, trusted, cause: router.on_kv_trust(worker, cause, trusted=trusted),
            time.monotonic,
            SequenceLimits(reply_timeout_s=0.2, check_interval_s=0.3),
            lambda worker, suspended: router.on_kv_suspended(worker, suspended=suspended),
            recall=self.memory.recall,
        )
        self.subscriber.set_sources([KvSource(W, publisher.endpoint, publisher.replay_endpoint)])

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        await self.subscriber.close()

    @property
    def state(self):
        return self.router.table.get(W)

    def blocks(self):
        return self.router.index.resident_blocks(W)

    async def known(self):
        return read([piece async for piece in self.memory.pieces(self.subscriber)])


def publish(publisher, start, count):
    for n in range(start, start + count):
        tokens = list(range(n * SIZE, n * SIZE + SIZE))
        publisher.publish(stored(n, None if n == 0 else n - 1, tokens))


async def test_a_new_router_has_at_once_what_can_no_longer_be_replayed():
    async with VllmPublisher(keep=10) as publisher, Side(publisher) as old:
        await until(lambda: old.state.kv_cause != "no KV events yet")
        publish(publisher, 0, 50)
        await until(lambda: old.blocks() == 50)
        await until(lambda: old.state.kv_trusted)
        given = await old.known()
        publish(publisher, 50, 5)  # while the new one starts
        async with Side(publisher, given) as new:
            assert (new.blocks(), new.state.kv_suspended) == (50, True)
            assert new.memory.recalled == 1
            await until(lambda: new.blocks() == 55 and not new.state.kv_suspended)
            await until(lambda: new.state.kv_trusted)
            assert new.router.doubts.blocks(W) == 0
            assert new.subscriber.streams()[W].resets == 0
            publish(publisher, 55, 1)
            await until(lambda: new.blocks() == 56)
        async with Side(publisher) as cold:
            await until(lambda: cold.blocks() > 0 or cold.router.index.stats(W).orphans > 0)
            assert cold.blocks() < 50


async def test_who_was_followed_at_the_wrong_address_begins_with_what_was_given_all_the_same():
    async with VllmPublisher(keep=10) as publisher, VllmPublisher() as nobody, Side(publisher) as old:
        await until(lambda: old.state.kv_cause != "no KV events yet")
        publish(publisher, 0, 50)
        await until(lambda: old.blocks() == 50)
        await until(lambda: old.state.kv_trusted)
        given = await old.known()
        async with Side(nobody, given) as new:
            assert (new.blocks(), new.memory.recalled) == (50, 1)
            new.memory.give_again(W)
            new.subscriber.set_sources([KvSource(W, publisher.endpoint, publisher.replay_endpoint)])
            assert (new.blocks(), new.memory.recalled) == (50, 1)
            await until(lambda: new.state.kv_trusted)
            publish(publisher, 50, 5)
            await until(lambda: new.blocks() == 55)
            new.memory.give_again(WorkerId("another"))
            assert new.memory.recalled == 1


async def test_what_is_known_of_an_engine_that_restarted_is_forgotten():
    async with VllmPublisher() as publisher, Side(publisher) as old:
        publish(publisher, 0, 20)
        await until(lambda: old.blocks() == 20)
        given = await old.known()
    async with VllmPublisher() as another:
        publish(another, 0, 3)
        async with Side(another, given) as new:
            assert (new.blocks(), new.state.kv_suspended) == (20, True)
            await until(lambda: new.blocks() == 3 and not new.state.kv_suspended)


async def test_what_is_of_another_revision_waits_until_the_worker_serves_it():
    async with VllmPublisher() as publisher, Side(publisher) as old:
        publish(publisher, 0, 20)
        await until(lambda: old.blocks() == 20)
        given = await old.known()
        async with Side(publisher, given, revision="another") as new:
            assert new.memory.recalled == 0
            await until(lambda: new.blocks() == 20)  # by replay
            assert new.router.index.match(list(old.router.index.confirmed(W))) == []


async def test_what_is_known_of_workers_that_do_not_come_is_not_kept_for_ever(monkeypatch):
    monkeypatch.setattr(index_memory, "KEEP_S", 0.0)
    async with VllmPublisher() as publisher, Side(publisher) as old:
        publish(publisher, 0, 20)
        await until(lambda: old.blocks() == 20)
        given = await old.known()
        async with Side(publisher, given, revision="another") as new:
            assert given
            await until(lambda: not new.memory._given)


async def test_what_was_taken_late_is_not_kept_for_ever_either(monkeypatch):
    monkeypatch.setattr(index_memory, "TAKEN_S", 0.0)
    async with VllmPublisher() as publisher, Side(publisher) as old:
        publish(publisher, 0, 20)
        await until(lambda: old.blocks() == 20)
        given = await old.known()
        async with Side(publisher, given, revision="another") as new:
            await asyncio.sleep(0.01)  # longer than what is taken is kept
            new.router.table.get(W).revision = NAMESPACE.model_revision
            assert new.memory.recall(W) is not None
            assert new.memory._taken
            await until(lambda: not new.memory._taken)


async def test_damage_means_to_begin_cold():
    async with VllmPublisher() as publisher, Side(publisher) as old:
        publish(publisher, 0, 20)
        await until(lambda: old.blocks() == 20)
        given = await old.known()
        given[W].parts.append(given[W].parts[0])
        async with Side(publisher, given) as new:
            assert "is damaged" in new.said[0]
            assert new.blocks() == 0
            await until(lambda: new.blocks() == 20)


async def test_what_may_be_of_another_engine_is_not_told():
    async with VllmPublisher() as publisher, Side(publisher) as old:
        publish(publisher, 0, 20)
        await until(lambda: old.blocks() == 20)
        old.router.on_kv_suspended(W, suspended=True)
        assert await old.known() == {}
