from dataclasses import replace
from zlib import crc32

import pytest

from extproc.core.saturation import RoomSettings
from extproc.core.types import BlockStored
from extproc.sim.holding_router import HOLDING
from extproc.sim.hosted_router import OURS
from extproc.sim.oracle import Oracle
from extproc.sim.routing import HELD, FleetFacts, HoldFacts, SimRequest
from extproc.sim.several_routers import SNAPSHOT_S, SeveralRouters, several
from tests.support.fleet import BLOCK, ENGINE, turn

FACTS = FleetFacts(3, ENGINE)


def made(exchange_s, count=2, seed=0):
    return several(OURS["token-load"], count, exchange_s)(FACTS, seed)


def ask(name, prompt=3000, shared=()):
    truth = turn(prompt, 5, shared, crc32(name.encode()) & 0xFFFF)
    prefix = tuple(truth.blocks[: (prompt - 1) // BLOCK])
    return SimRequest(name, name, "", "", 0, prompt, BLOCK, prefix, None, truth)


def told(router):
    return [sum(one.router.peers.sequences(worker) for worker in one._workers) for one in router._routers]


def test_one_router_is_left_as_it_is():
    assert several(Oracle, 1, 0.05) is Oracle


def test_each_request_is_one_routers_and_its_news_go_there():
    router = made(None)
    for n in range(40):
        router.route(ask(f"r{n}"), 0.001 * n)
    counts = [len(one.router.ledger) for one in router._routers]
    assert sum(counts) == 40
    assert min(counts) > 5
    for n in range(40):
        router.on_first_token(f"r{n}", 1.0)
        router.on_finished(f"r{n}", 0, 5, 2.0)
    assert [len(one.router.ledger) for one in router._routers] == [0, 0]
    assert told(router) == [0, 0]


def test_what_one_has_sent_the_other_knows_after_the_exchange():
    router = made(0.05)
    for n in range(10):
        router.route(ask(f"r{n}"), 0.01)
    assert told(router) == [0, 0]
    router.on_kv_events(0, (), 0.1)
    own = [len(one.router.ledger) for one in router._routers]
    assert told(router) == own[::-1]
    for n in range(10):
        router.on_finished(f"r{n}", 0, 5, 0.2)
    router.on_kv_events(0, (), 0.2 + SNAPSHOT_S)
    assert told(router) == [0, 0]


def test_events_reach_all():
    router = made(0.05)
    router.on_kv_events(2, (BlockStored(tuple(range(10)), None, (), BLOCK, chained=True),), 0.0)
    held = [[one.router.index.resident_blocks(w) for w in one._workers] for one in router._routers]
    assert held == [[0, 0, 10], [0, 0, 10]]


def test_the_same_seed_gives_the_same_run():
    runs = []
    for _ in range(2):
        router = made(0.05, count=3, seed=4)
        runs.append([router.route(ask(f"r{n}"), 0.02 * n) for n in range(60)])
    assert runs[0] == runs[1]


@pytest.mark.parametrize("exchange_s", [None, 0.05])
def test_routers_that_are_not_ours_work_side_by_side(exchange_s):
    router = SeveralRouters(OURS["round-robin"], 2, exchange_s, FACTS, 1)
    assert router.name == "round-robin x2"
    assert {router.route(ask(f"r{n}"), 0.1 * n) for n in range(30)} == {0, 1, 2}
    router.close()


def test_each_holds_what_it_cannot_place():
    facts = replace(FACTS, hold=HoldFacts(room=RoomSettings(None, None, max_requests=1)))
    router = several(HOLDING["token-load+admission"], 2, None)(facts, 0)
    places = {f"r{n}": router.route(ask(f"r{n}"), 0.0) for n in range(12)}
    held = [name for name, place in places.items() if place == HELD]
    placed = [name for name, place in places.items() if place != HELD]
    assert len(placed) == 6  # each of them sees its own only
    assert list(router.released(0.1)) == []
    for name in placed:
        router.on_finished(name, 0, 5, 1.0)
    released = list(router.released(1.0))
    assert 0 < len(released) <= 6
    for name, place in released:
        assert place in {0, 1, 2}
        router.on_finished(name, 0, 5, 2.0)
    left = set(held) - {name for name, _ in released}
    assert left
    assert set(router.released(1e4)) == {(name, None) for name in left}  # they have waited too long
